//! How fast operators are, next to how fast this machine could be: `kumiki bench ops`.
//!
//! Two limits are measured in the same run: the bandwidth of `a = b + s·c` over arrays far larger than the caches, and
//! the rate of a large f32 matrix product. An operator that must move `bytes` and compute `flops` cannot take less than
//! the longer of both; the part of its time that this makes up is its percentage of the roofline.

use std::hint::black_box;
use std::time::{Duration, Instant};

use kumiki_autograd::{Tape, Var};
use kumiki_tensor::{DType, Rng, Tensor, bf16, threads};

use crate::gemm::{MatMut, MatRef, Operand, Output, gemm, gemm_bf16};
use crate::registry::{BenchCase, OpCase};

/// What this machine can do with the threads in use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    /// Bytes per second of the triad.
    pub bandwidth: f64,
    /// Floating-point operations per second of a matrix product, f32.
    pub gemm: f64,
    /// The same of BF16 numbers, summed in F32.
    pub gemm_bf16: f64,
}

impl Roofline {
    /// Measures both limits; about a second.
    pub fn measure() -> Roofline {
        // Three arrays of 64 MiB: several times the caches of most machines.
        const LEN: usize = 16 << 20;
        const CHUNK: usize = 1 << 16;
        let (b, c) = (vec![1f32; LEN], vec![2f32; LEN]);
        let mut a = vec![0f32; LEN];
        let triad = fastest(|| {
            threads::parallel_chunks_mut(&mut a, CHUNK, CHUNK, |i, piece| {
                let (b, c) = (&b[i * CHUNK..][..piece.len()], &c[i * CHUNK..][..piece.len()]);
                piece.iter_mut().zip(b).zip(c).for_each(|((a, b), c)| *a = b + 0.5 * c);
            });
            black_box(&a);
        });
        const N: usize = 2048;
        let rate = |narrow| 2.0 * (N * N * N) as f64 / ProductTiming::measure([N; 3], narrow).least;
        Roofline { bandwidth: (3 * LEN * size_of::<f32>()) as f64 / triad, gemm: rate(false), gemm_bf16: rate(true) }
    }

    /// The least time for so many bytes and operations.
    pub fn least_seconds(&self, bytes: usize, flops: usize) -> f64 {
        (bytes as f64 / self.bandwidth).max(flops as f64 / self.gemm)
    }
}

/// Seconds of a matrix product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProductTiming {
    /// The fastest of several.
    pub least: f64,
    /// Their median.
    pub median: f64,
}

impl ProductTiming {
    /// Times `[m, k]` by `[k, n]` of random numbers: F32, or BF16 summed and written in F32.
    ///
    /// # Panics
    /// When the matrices do not fit into memory.
    #[must_use]
    pub fn measure([m, n, k]: [usize; 3], narrow: bool) -> ProductTiming {
        let mut rng = Rng::new(0);
        let dtype = if narrow { DType::BF16 } else { DType::F32 };
        let [a, b] = [[m, k], [k, n]].map(|shape| rng.normal(DType::F32, &shape, 0.0, 1.0).cast(dtype));
        let mut c = vec![0f32; m * n];
        let times = times(&mut || {
            let to = MatMut::new(&mut c, m, n);
            if narrow {
                let a = Operand::BF16(MatRef::new(a.as_slice::<bf16>(), m, k));
                let b = Operand::BF16(MatRef::new(b.as_slice::<bf16>(), k, n));
                gemm_bf16(a, b, Output::F32(to), false);
            } else {
                let (a, b) = (MatRef::new(a.as_slice::<f32>(), m, k), MatRef::new(b.as_slice::<f32>(), k, n));
                gemm(1.0, a, b, 0.0, to);
            }
            black_box(&c);
        });
        ProductTiming { least: times.iter().copied().fold(f64::INFINITY, f64::min), median: median(times) }
    }
}

/// Seconds of the fastest run: a limit is what the machine can do when nothing disturbs it.
fn fastest(mut f: impl FnMut()) -> f64 {
    times(&mut f).into_iter().fold(f64::INFINITY, f64::min)
}

/// Seconds of several runs, after one that is not counted.
fn times(f: &mut dyn FnMut()) -> Vec<f64> {
    times_in_turn(1, &mut |_| f()).remove(0)
}

/// Seconds of several runs of each of `f(0)`, `f(1)` ... in turn, after one that is not counted: a busy machine slows all alike.
fn times_in_turn(cases: usize, f: &mut dyn FnMut(usize)) -> Vec<Vec<f64>> {
    (0..cases).for_each(&mut *f);
    let (begin, mut times) = (Instant::now(), vec![Vec::new(); cases]);
    let enough = Duration::from_millis(300) * cases as u32;
    for round in 0..1000 {
        if round >= 5 && begin.elapsed() >= enough {
            break;
        }
        for (case, times) in times.iter_mut().enumerate() {
            let started = Instant::now();
            f(case);
            times.push(started.elapsed().as_secs_f64());
        }
    }
    times
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Median seconds of an operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Of constants, so that nothing is saved.
    pub forward: f64,
    /// Recording, and the walk back to all inputs.
    pub both: f64,
}

impl BenchCase {
    /// Runs the operator on random inputs.
    pub fn time(&self) -> Timing {
        BenchCase::time_in_turn(std::slice::from_ref(self)).remove(0)
    }

    /// Runs cases that have the same inputs and results in turn, on the same numbers.
    ///
    /// # Panics
    /// Without cases.
    pub fn time_in_turn(cases: &[BenchCase]) -> Vec<Timing> {
        let first = &cases[0];
        let mut rng = Rng::new(0).fork(first.operator());
        let inputs: Vec<Tensor> =
            first.inputs.iter().map(|(_, shape)| rng.normal(DType::F32, shape, 0.0, 1.0)).collect();
        let constants: Vec<Var> = inputs.iter().cloned().map(Var::constant).collect();
        // A tape for training: on one for inference dropout would do nothing.
        let forward = times_in_turn(cases.len(), &mut |case| {
            black_box((cases[case].forward)(&Tape::training(Rng::new(0)), &constants));
        });
        let shape = (first.forward)(&Tape::inference(), &constants).shape().to_vec();
        let dout = rng.normal(DType::F32, &shape, 0.0, 1.0);
        let both = times_in_turn(cases.len(), &mut |case| {
            let tape = Tape::training(Rng::new(0));
            let leaves: Vec<Var> = inputs.iter().map(|x| tape.leaf(x.clone())).collect();
            let y = (cases[case].forward)(&tape, &leaves);
            black_box(tape.backward_from(&[(&y, dout.clone())]));
        });
        forward.into_iter().zip(both).map(|(f, b)| Timing { forward: median(f), both: median(b) }).collect()
    }

    /// The operator, however it is done here.
    pub fn operator(&self) -> &'static str {
        self.name.split(" (").next().unwrap_or(self.name)
    }

    /// Whether this is what `other` does, done in another way, on inputs of the same shapes.
    pub fn is_beside(&self, other: &BenchCase) -> bool {
        self.name != self.operator() && self.operator() == other.operator() && self.inputs == other.inputs
    }

    /// Why no number may be shown: a gradient check of the operator that fails, or none at all. `checks` are those of
    /// [`crate::op_cases`].
    pub fn refused(&self, checks: &[OpCase]) -> Option<String> {
        let mut found = false;
        for case in checks.iter().filter(|case| case.name == self.operator()) {
            found = true;
            let report = case.check();
            let holds = report.error() < 1e-6 && report.without_gradient.is_empty();
            if !holds {
                return Some(format!("its check `{}` fails: {report}", case.variant));
            }
        }
        (!found).then(|| "it has no gradient check".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(name: &'static str) -> BenchCase {
        let forward = |_: &Tape, v: &[Var]| crate::cast(&v[0], DType::F64);
        BenchCase { name, inputs: vec![("x", vec![100])], forward: Box::new(forward), bytes: 1200, flops: 0 }
    }

    #[test]
    fn numbers_come_out_and_unchecked_operators_are_refused() {
        let checks = crate::op_cases();
        let known = checks[0].name;
        assert_eq!(case(known).refused(&checks), None);
        assert!(case("nothing").refused(&checks).unwrap().contains("no gradient check"));
        let (plain, composed) = (case("cast"), case("cast (composed)"));
        assert!(composed.is_beside(&plain) && !plain.is_beside(&composed) && !plain.is_beside(&plain));
        assert!(!composed.is_beside(&case(known)));
        let mut turns = Vec::new();
        assert!(times_in_turn(2, &mut |case| turns.push(case)).iter().all(|times| times.len() + 1 == turns.len() / 2));
        assert!(turns.chunks(2).all(|turn| turn == [0, 1]));
        let wrong = OpCase::new("wrong", "detached", &[("x", &[2])], |_, v| crate::cast(&v[0].detach(), DType::F64));
        assert!(case("wrong (composed)").refused(&[wrong]).unwrap().contains("its check `detached` fails"));
        let roofline = Roofline { bandwidth: 1e9, gemm: 1e10, gemm_bf16: 1e11 };
        assert_eq!(roofline.least_seconds(1_000_000, 1_000_000), 1e-3);
    }
}
