//! Mixed precision: operators on narrow variables follow those on wide ones, within what BF16 factors can hold.

use kumiki_autograd::{Param, Tape};
use kumiki_ops::simd::{Level, with_level};
use kumiki_ops::{BenchCase, bench_cases};
use kumiki_tensor::{DType, Rng, Tensor};

/// Result and gradients on inputs that are parameters of a tape, narrow or not.
fn run(case: &BenchCase, narrow: bool) -> Vec<Vec<f64>> {
    let mut rng = Rng::new(3).fork(case.name);
    let mut draw = |(name, shape): &(&str, Vec<usize>)| {
        let mut x = rng.normal(DType::F32, shape, 0.0, 0.25);
        if name.starts_with("phi") {
            // Features are positive, or sums of weights could be anything.
            x.make_mut::<f32>().iter_mut().for_each(|x| *x = x.exp());
        }
        Param::new(x)
    };
    let params: Vec<Param> = case.inputs.iter().map(&mut draw).collect();
    let tape = Tape::new().with_narrow_products(narrow);
    let inputs: Vec<_> = params.iter().map(|param| tape.param(param)).collect();
    let y = (case.forward)(&tape, &inputs);
    let dout = rng.normal(DType::F32, y.shape(), 0.0, 1.0);
    let grads = tape.backward_from(&[(&y, dout)]);
    let value = y.value().to_f64_vec();
    let gradients = params.iter().map(|param| grads.of(param).map_or(vec![], Tensor::to_f64_vec));
    std::iter::once(value).chain(gradients).collect()
}

/// The smallest bench of an operator: large enough for tiles that are worth rounding.
fn bench(name: &str) -> BenchCase {
    let size = |case: &BenchCase| case.inputs.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>();
    let of = bench_cases().into_iter().filter(|case| case.name == name);
    of.min_by_key(size).unwrap_or_else(|| panic!("no bench of {name}"))
}

#[test]
fn narrow_operators_follow_wide_ones() {
    let names = [
        "linear",
        "cross_entropy_from_hidden",
        "causal_attention",
        "gate_aggregate_mul",
        "windowed_prefix_mul",
        "gau_attention_mul",
        "mixed_chunk_attention_mul",
        "dual_attention",
        "cem_mlp",
        "cem_attention",
    ];
    for level in Level::available() {
        for name in names {
            let inputs: Vec<_> = bench(name).inputs.iter().map(|(name, _)| *name).collect();
            let (wide, narrow) = with_level(level, || (run(&bench(name), false), run(&bench(name), true)));
            for (i, (wide, narrow)) in wide.iter().zip(&narrow).enumerate() {
                let off: f64 = wide.iter().zip(narrow).map(|(a, b)| (a - b).powi(2)).sum();
                let whole: f64 = wide.iter().map(|a| a.powi(2)).sum();
                let (off, what) = ((off / whole).sqrt(), if i == 0 { "result" } else { inputs[i - 1] });
                println!("{name} at {level}, {what}: {off:.1e}");
                assert!(wide.is_empty() || off < 0.02, "{name} at {level}, {what}: off by {off}");
            }
            // Where nothing is faster in BF16, tiles of attention are left as they are.
            assert!(level != Level::Amx || wide != narrow, "{name}: nothing is narrow");
        }
    }
}
