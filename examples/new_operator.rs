//! A new operator in your own crate: compute the output, say what is saved, derive the backward, check it.
//! Run: `cargo run --release --example new_operator`
use kumiki::autograd::{Backward, Var, gradcheck};
use kumiki::tensor::{DType, Rng, Tensor};

/// `y = sin(x)`, elementwise. Backward: `dx = dout · cos(x)`; saves `x`.
fn sin(x: &Var) -> Var {
    let values = x.value().to_f64_vec();
    let y = Tensor::from_fn::<f64>(x.shape(), |i| values[i].sin()).cast(x.dtype());
    Var::from_op(y, &[x], || SinBackward { x: x.value().clone() })
}

struct SinBackward {
    x: Tensor,
}

impl Backward for SinBackward {
    fn name(&self) -> &'static str {
        "sin"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("x", &self.x)]
    }
    fn backward(self: Box<Self>, dout: Tensor, _needs: &[bool]) -> Vec<Option<Tensor>> {
        let (x, g) = (self.x.to_f64_vec(), dout.to_f64_vec());
        vec![Some(Tensor::from_fn::<f64>(dout.shape(), |i| g[i] * x[i].cos()).cast(dout.dtype()))]
    }
}

fn main() {
    let x = Rng::new(0).normal(DType::F64, &[3, 5], 0.0, 2.0);
    let report = gradcheck(&[("x", x)], &[], |_, inputs| sin(&inputs[0]));
    println!("{report}");
    report.assert_below(1e-9);
}
