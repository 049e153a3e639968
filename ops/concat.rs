//! `concat`: tensors side by side along one axis.
//!
//! Forward: one copy of every part. Backward: each part's gradient is the view of `dout` at its place. Saves sizes only.

use kumiki_autograd::{Backward, Var};
use kumiki_tensor::{self as tensor, Tensor};

use crate::registry::OpCase;

/// Joins `parts` along `axis`: all have the same dtype and, but for that axis, the same shape.
///
/// # Panics
/// Without parts, or when dtypes or other axes differ.
#[track_caller]
pub fn concat(parts: &[&Var], axis: usize) -> Var {
    let values: Vec<&Tensor> = parts.iter().map(|part| part.value()).collect();
    let out = tensor::concat(&values, axis);
    Var::from_op(out, parts, || ConcatBackward { axis, sizes: values.iter().map(|x| x.dim(axis)).collect() })
}

struct ConcatBackward {
    axis: usize,
    sizes: Vec<usize>,
}

impl Backward for ConcatBackward {
    fn name(&self) -> &'static str {
        "concat"
    }
    fn saved(&self) -> Vec<(&'static str, &Tensor)> {
        vec![]
    }
    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>> {
        let mut start = 0;
        let mut part = |&size: &usize| {
            start += size;
            dout.narrow(self.axis, start - size, size)
        };
        self.sizes.iter().map(&mut part).zip(needs).map(|(dpart, &need)| need.then_some(dpart)).collect()
    }
}

pub(crate) fn cases() -> Vec<OpCase> {
    vec![
        OpCase::new("concat", "last axis", &[("a", &[2, 3]), ("b", &[2, 1])], |_, v| concat(&[&v[0], &v[1]], 1)),
        OpCase::new("concat", "with itself", &[("a", &[2, 3])], |_, v| concat(&[&v[0], &v[0]], 0)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Chain;
    use kumiki_tensor::DType;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn passes_the_chain(
            seed in any::<u64>(), [outer, inner] in proptest::array::uniform2(0usize..4),
            [a, b, c] in proptest::array::uniform3(0usize..5),
        ) {
            let shapes = [a, b, c].map(|n| [outer, n, inner]);
            let inputs: [(&str, &[usize]); 3] = [("a", &shapes[0]), ("b", &shapes[1]), ("c", &shapes[2])];
            let chain = Chain { f32_tolerance: 1e-6, bf16_tolerance: Some(4e-3), ..Chain::new("concat", seed, &inputs) };
            chain.run(|_, v| concat(&[&v[0], &v[1], &v[2]], 1), |x| {
                let mut y = vec![];
                for i in 0..outer {
                    for (part, n) in x.iter().zip([a, b, c]) {
                        for j in 0..n * inner {
                            y.push(part[i * n * inner + j]);
                        }
                    }
                }
                y
            });
        }
    }

    #[test]
    #[should_panic(expected = "concat: along axis 0, [2, 4] f32 does not fit [2, 3] f32")]
    fn misfits_are_named() {
        let x = |shape: &[usize]| Var::constant(Tensor::zeros(DType::F32, shape));
        concat(&[&x(&[2, 3]), &x(&[2, 4])], 0);
    }
}
