//! The engine inside another program: two layers learn `y = sin(3x)`. Run: `cargo run --release --example embed`
use kumiki::autograd::{Tape, Var};
use kumiki::nn::{AdamW, Init, Linear, Module};
use kumiki::tensor::{DType, Error, Tensor};
use kumiki::{module, ops};

struct Net {
    first: Linear,
    second: Linear,
}
module!(Net { first, second });

fn main() -> Result<(), Error> {
    let init = Init::new(0, DType::F32);
    let linear = |name: &str, from, to| Linear::new(from, to, 1.0, &init.of(name));
    let mut net = Net { first: linear("first", 2, 64), second: linear("second", 64, 1) };
    let at = |i: usize| i as f32 / 128.0 - 1.0;
    // The second column is one everywhere: a bias.
    let x = Var::constant(Tensor::from_fn::<f32>(&[256, 2], |i| if i % 2 == 0 { at(i / 2) } else { 1.0 }));
    let y = Var::constant(Tensor::from_fn::<f32>(&[256, 1], |i| (3.0 * at(i)).sin()));
    let mut adam = AdamW::default();
    for step in 0..=300 {
        let tape = Tape::new();
        let hidden = ops::silu(&net.first.forward(&tape, &x));
        let error = ops::sub(&net.second.forward(&tape, &hidden), &y);
        let loss = ops::mean_all(&ops::mul(&error, &error));
        if step % 100 == 0 {
            println!("step {step}: loss {:.6}", loss.item());
        }
        let grads = tape.backward(&loss);
        adam.step(&mut net.params_mut(), &grads, 1e-2)?;
    }
    Ok(())
}
