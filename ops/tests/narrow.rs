//! Mixed precision: operators on narrow variables follow those on wide ones, within what BF16 factors can hold.

use kumiki_autograd::{Param, Tape, Var};
use kumiki_ops::simd::{Level, with_level};
use kumiki_ops::{
    BenchCase, BlockStarts, DualAttention, DualSees, MixedChunk, WindowedPrefix, bench_cases, dual_attention,
    mixed_chunk_attention_mul, windowed_prefix_mul,
};
use kumiki_tensor::{DType, Device, Rng, Tensor, cuda};

/// Result and gradients on inputs that are parameters of a tape, narrow or not; those that are named are stored in BF16, and
/// what is computed from them with it.
fn run(case: &BenchCase, stored: &[&str], narrow: bool, device: &Device) -> Vec<Vec<f64>> {
    let mut rng = Rng::new(3).fork(case.name);
    let there = |x: Tensor| x.to(device).expect("memory");
    let mut draw = |(name, shape): &(&str, Vec<usize>)| {
        let mut x = rng.normal(DType::F32, shape, 0.0, 0.25);
        if name.starts_with("phi") {
            // Features are positive, or sums of weights could be anything.
            x.make_mut::<f32>().iter_mut().for_each(|x| *x = x.exp());
        }
        Param::new(there(x.cast(if stored.contains(name) { DType::BF16 } else { DType::F32 })))
    };
    let params: Vec<Param> = case.inputs.iter().map(&mut draw).collect();
    let tape = Tape::new().with_narrow_products(narrow);
    let inputs: Vec<_> = params.iter().map(|param| tape.param(param)).collect();
    let y = (case.forward)(&tape, &inputs);
    let dtype = if stored.is_empty() { DType::F32 } else { DType::BF16 };
    assert_eq!(y.dtype(), dtype, "{}: the result is stored like its values", case.name);
    let dout = there(rng.normal(DType::F32, y.shape(), 0.0, 1.0).cast(dtype));
    let grads = tape.backward_from(&[(&y, dout)]);
    let value = y.value().to_f64_vec();
    let gradients = params.iter().map(|param| {
        let grad = grads.of(param);
        assert!(grad.is_none_or(|grad| grad.dtype() == param.dtype()));
        grad.map_or(vec![], Tensor::to_f64_vec)
    });
    std::iter::once(value).chain(gradients).collect()
}

/// How far b is from a, beside a.
fn off(a: &[f64], b: &[f64]) -> f64 {
    let off: f64 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
    (off / a.iter().map(|a| a.powi(2)).sum::<f64>()).sqrt()
}

/// Values, gates and hidden activations in BF16 beside scores in F32, on all levels.
#[test]
fn operands_may_be_stored_in_bf16() {
    let cases: [(&str, &[&str]); 6] = [
        ("gate_aggregate_mul", &["g", "v"]),
        ("windowed_prefix_mul", &["g", "v"]),
        ("gau_attention_mul", &["v", "u"]),
        ("mixed_chunk_attention_mul", &["v", "u"]),
        ("causal_attention", &["v"]),
        ("swiglu", &["gate", "up"]),
    ];
    for level in Level::available() {
        for (name, stored) in cases {
            let inputs: Vec<_> = bench(name).inputs.iter().map(|(name, _)| *name).collect();
            let (wide, stored) = with_level(level, || {
                (run(&bench(name), &[], false, &Device::Cpu), run(&bench(name), stored, true, &Device::Cpu))
            });
            for (i, (wide, stored)) in wide.iter().zip(&stored).enumerate() {
                let (off, what) = (off(wide, stored), if i == 0 { "result" } else { inputs[i - 1] });
                println!("{name} at {level}, {what}: {off:.1e}");
                // Of weights that hardly differ, as here, the slope is what `d·g` and `d·ḡ` leave, ten times as large as it;
                // what is stored is rounded by a part in 512.
                let left_over = name == "windowed_prefix_mul" && (what == "tau" || what == "phi_q");
                let most = if left_over { 10.0 / 256.0 } else { 0.01 };
                assert!(off < most, "{name} at {level}, {what}: off by {off}");
            }
        }
    }
}

/// A projection into a layer is stored in BF16 where its weight is narrow, one out of it is not.
#[test]
fn hidden_activations_are_stored_in_bf16() {
    let mut rng = Rng::new(5);
    let mut normal = |shape: &[usize]| rng.normal(DType::F32, shape, 0.0, 0.25);
    let (x, up, down) = (Param::new(normal(&[70, 40])), Param::new(normal(&[100, 40])), Param::new(normal(&[40, 100])));
    let dout = normal(&[70, 40]);
    let run = |narrow: bool| {
        let tape = Tape::new().with_narrow_products(narrow);
        let hidden = kumiki_ops::silu(&kumiki_ops::linear_to_hidden(&tape.param(&x), &tape.param(&up)));
        assert_eq!(hidden.dtype(), if narrow { DType::BF16 } else { DType::F32 });
        let y = kumiki_ops::linear(&hidden, &tape.param(&down));
        assert_eq!(y.dtype(), DType::F32);
        let grads = tape.backward_from(&[(&y, dout.clone())]);
        let of = |param: &Param| grads.of(param).expect("a gradient").to_f64_vec();
        [y.value().to_f64_vec(), of(&x), of(&up), of(&down)]
    };
    for level in Level::available() {
        let (wide, narrow) = with_level(level, || (run(false), run(true)));
        for (wide, narrow) in wide.iter().zip(&narrow) {
            let off = off(wide, narrow);
            assert!(off > 1e-4 && off < 0.02, "{level}: off by {off}");
        }
    }
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
            let [wide, narrow] =
                with_level(level, || [false, true].map(|narrow| run(&bench(name), &[], narrow, &Device::Cpu)));
            for (i, (wide, narrow)) in wide.iter().zip(&narrow).enumerate() {
                let (off, what) = (off(wide, narrow), if i == 0 { "result" } else { inputs[i - 1] });
                println!("{name} at {level}, {what}: {off:.1e}");
                assert!(wide.is_empty() || off < 0.02, "{name} at {level}, {what}: off by {off}");
            }
            // Where nothing is faster in BF16, tiles of attention are left as they are.
            assert!(level != Level::Amx || wide != narrow, "{name}: nothing is narrow");
        }
    }
}

/// Of one tile and a bit, in three dimensions.
fn small(name: &'static str) -> BenchCase {
    let (b, t, h, k, g) = (2, 70, 2, 20, 72);
    let (heads, gates) = (|| vec![b, t, h, k], || vec![b, t, h, g]);
    let inputs = match name {
        "causal_attention" => vec![("q", heads()), ("k", heads()), ("v", gates())],
        "gate_aggregate_mul" => {
            vec![("q", heads()), ("k", heads()), ("g", gates()), ("tau", vec![h]), ("v", vec![b, t, h * g])]
        }
        "gau_attention_mul" => {
            vec![("q", vec![b, t, k]), ("k", vec![b, t, k]), ("v", vec![b, t, g]), ("u", vec![b, t, g])]
        }
        "windowed_prefix_mul" => {
            let features = || vec![b, t, h, 2 * k];
            let qk = [("q", heads()), ("k", heads()), ("phi_q", features()), ("phi_k", features())];
            let rest = [("g", gates()), ("tau", vec![h]), ("v", vec![b, t, h * g])];
            let forward = |_: &Tape, x: &[Var]| {
                let [q, k, phi_q, phi_k, g, tau] = [0, 1, 2, 3, 4, 5].map(|i| &x[i]);
                windowed_prefix_mul(WindowedPrefix { q, k, phi_q, phi_k, g, tau, window: 5 }, &x[6])
            };
            let inputs = qk.into_iter().chain(rest).collect();
            return BenchCase { inputs, forward: Box::new(forward), ..bench(name) };
        }
        "mixed_chunk_attention_mul" => {
            let widths = [("q", k), ("k", k), ("linear_q", k + 1), ("linear_k", k + 1), ("v", g), ("u", g)];
            let forward = |_: &Tape, x: &[Var]| {
                let all = MixedChunk { q: &x[0], k: &x[1], linear_q: &x[2], linear_k: &x[3], v: &x[4], chunk: 32 };
                mixed_chunk_attention_mul(all, &x[5])
            };
            let inputs = widths.map(|(name, width)| (name, vec![b, t, width])).into();
            return BenchCase { inputs, forward: Box::new(forward), ..bench(name) };
        }
        "dual_attention" => {
            let names = ["q", "k_self", "v_self", "k_context", "v_context"];
            let forward = move |_: &Tape, x: &[Var]| {
                let all = DualAttention { q: &x[0], k_self: &x[1], v_self: &x[2], k_context: &x[3], v_context: &x[4] };
                dual_attention(all, DualSees::Blocks(&BlockStarts::equal(3, t)))
            };
            let inputs = names.map(|name| (name, heads())).into();
            return BenchCase { inputs, forward: Box::new(forward), ..bench(name) };
        }
        "cem_attention (per head)" => {
            let rows = || vec![b, t, g];
            vec![("x", rows()), ("wq", vec![h, k, g]), ("k", heads()), ("history", rows()), ("d", vec![h, g])]
        }
        _ => unreachable!("no small {name}"),
    };
    BenchCase { inputs, ..bench(name) }
}

#[test]
fn narrow_operators_on_cuda_follow_wide_ones_on_the_cpu() {
    let cases: [(&str, &[&str]); 7] = [
        ("causal_attention", &["v"]),
        ("windowed_prefix_mul", &["g", "v"]),
        ("gate_aggregate_mul", &["g", "v"]),
        ("gau_attention_mul", &["v", "u"]),
        ("mixed_chunk_attention_mul", &["v", "u"]),
        ("dual_attention", &[]),
        ("cem_attention (per head)", &[]),
    ];
    for device in cuda::Device::for_tests().into_iter().map(Device::Cuda) {
        for (name, stored) in cases {
            let case = small(name);
            let reference = run(&case, &[], false, &Device::Cpu);
            let kinds: [(&[&str], bool, f64); 4] =
                [(&[], false, 1e-5), (&[], true, 0.02), (stored, false, 0.02), (stored, true, 0.02)];
            for (stored, narrow, most) in kinds.into_iter().take(if stored.is_empty() { 2 } else { 4 }) {
                let there = run(&case, stored, narrow, &device);
                for (i, (here, there)) in reference.iter().zip(&there).enumerate() {
                    let off = off(here, there);
                    let what = format!("{name}, stored {stored:?}, narrow {narrow}, {i}: off by {off:.1e}");
                    println!("{what}");
                    // As where both are on the CPU: what is left of larger numbers that cancel.
                    let left_over = name == "windowed_prefix_mul" && (i == 3 || i == 6) && !stored.is_empty();
                    let most = if left_over { 10.0 / 256.0 } else { most };
                    assert!(off < most && (off > 1e-5 || !narrow && stored.is_empty()), "{what}");
                }
            }
        }
    }
}
