//! Matrix products on every SIMD level of this CPU, alternating, so that a busy machine slows all of them alike.
//! Run: `cargo bench --bench gemm`; `KUMIKI_THREADS=1` for one core.
//!
//! The shapes are those of training: projections of a batch, their gradients, squares. `portable` goes through the
//! crate `matrixmultiply`, which chooses instructions itself.

use std::time::Instant;

use kumiki::ops::gemm::{MatMut, MatRef, gemm};
use kumiki::ops::simd::{Level, with_level};
use kumiki::tensor::{DType, Rng, threads};

/// (m, n, k, whether A is read transposed, whether B is).
const SHAPES: [(usize, usize, usize, bool, bool); 9] = [
    (4096, 956, 128, false, true),
    (4096, 128, 956, false, false),
    (956, 128, 4096, true, false),
    (128, 128, 128, false, false),
    (256, 32, 256, false, true),
    (512, 512, 512, false, false),
    (1024, 1024, 1024, false, true),
    (2048, 512, 2048, false, true),
    (2048, 2048, 2048, false, false),
];
const ROUNDS: usize = 7;

fn main() {
    threads::in_pool(|| {
        let levels = Level::available();
        println!("f32, GFLOP/s, median of {ROUNDS} alternating rounds, {} threads", threads::current_threads());
        print!("{:>22}", "m x n x k");
        levels.iter().for_each(|level| print!("{:>12}", level.name()));
        println!("{:>14}", "last / first");
        for (m, n, k, a_transposed, b_transposed) in SHAPES {
            let mut rng = Rng::new(0);
            let mut random = |len: usize| rng.normal(DType::F32, &[len], 0.0, 1.0);
            let (a, b, mut c) = (random(m * k), random(k * n), vec![0f32; m * n]);
            let (a, b) = (a.as_slice::<f32>(), b.as_slice::<f32>());
            let a = if a_transposed { MatRef::new(a, k, m).t() } else { MatRef::new(a, m, k) };
            let b = if b_transposed { MatRef::new(b, n, k).t() } else { MatRef::new(b, k, n) };
            let work = 2.0 * (m * n * k) as f64;
            let repeats = (2e8 / work).ceil() as usize;
            let mut rates = vec![vec![]; levels.len()];
            for _ in 0..=ROUNDS {
                for (level, rates) in levels.iter().zip(&mut rates) {
                    with_level(*level, || {
                        let start = Instant::now();
                        (0..repeats).for_each(|_| gemm(1.0, a, b, 0.0, MatMut::new(&mut c, m, n)));
                        rates.push(work * repeats as f64 / start.elapsed().as_secs_f64() / 1e9);
                    });
                }
            }
            let median = |rates: &[f64]| {
                let mut rates = rates[1..].to_vec(); // the first round warms up
                rates.sort_by(f64::total_cmp);
                rates[rates.len() / 2]
            };
            let medians: Vec<f64> = rates.iter().map(|rates| median(rates)).collect();
            let sides = format!("{}{}", if a_transposed { 'T' } else { 'N' }, if b_transposed { 'T' } else { 'N' });
            print!("{:>22}", format!("{m} x {n} x {k} {sides}"));
            medians.iter().for_each(|rate| print!("{rate:>12.1}"));
            println!("{:>14.2}", medians[medians.len() - 1] / medians[0]);
        }
    });
}
