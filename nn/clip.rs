//! Global-norm clipping, which is also where non-finite gradients are caught.
//!
//! Source: Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural networks, arXiv 1211.5063.

use kumiki_autograd::{Gradients, Param};
use kumiki_tensor::{Error, Result, Tensor, dispatch, threads};

/// Elements whose squares one task sums; fixed, so that the norm does not depend on the number of threads.
const CHUNK: usize = 1 << 15;
/// Sums of a task side by side.
const LANES: usize = 16;

/// Scales all gradients by `max_norm / (norm + 1e-6)` when their common Euclidean norm exceeds `max_norm` (infinity:
/// only measure), and returns the norm before that. The norm is summed in f64.
///
/// # Errors
/// When `max_norm` is not positive, or a gradient is NaN or infinite: the parameter and the element are named, and
/// no gradient has been changed.
pub fn clip_global_norm(params: &[(String, &mut Param)], grads: &mut Gradients, max_norm: f64) -> Result<f64> {
    // NaN is not greater than 0 either.
    if max_norm.partial_cmp(&0.0) != Some(std::cmp::Ordering::Greater) {
        return Err(Error::new(format!("the largest gradient norm must be positive, found {max_norm}")));
    }
    let mut total = 0.0;
    for (name, param) in params {
        let Some(grad) = grads.of(param) else { continue };
        let sum = sum_of_squares(grad);
        if !sum.is_finite() {
            return Err(not_finite(name, grad));
        }
        total += sum;
    }
    let norm = total.sqrt();
    if norm > max_norm {
        grads.scale(max_norm / (norm + 1e-6));
    }
    Ok(norm)
}

fn sum_of_squares(grad: &Tensor) -> f64 {
    let rows = grad.contiguous();
    dispatch!(grad.dtype(), E => {
        let x = rows.as_slice::<E>();
        let square = |x: &E| kumiki_tensor::Element::to_f64(*x).powi(2);
        let part = |i: usize| -> f64 {
            let (lines, rest) = x[i * CHUNK..((i + 1) * CHUNK).min(x.len())].as_chunks::<LANES>();
            // Sums that do not wait for one another.
            let mut sums = [0.0; LANES];
            for line in lines {
                sums.iter_mut().zip(line).for_each(|(sum, x)| *sum += square(x));
            }
            sums.iter().sum::<f64>() + rest.iter().map(square).sum::<f64>()
        };
        threads::parallel_map(x.len().div_ceil(CHUNK), CHUNK, part).iter().sum()
    })
}

fn not_finite(name: &str, grad: &Tensor) -> Error {
    let values = grad.to_f64_vec();
    let count = values.iter().filter(|x| !x.is_finite()).count();
    match values.iter().position(|x| !x.is_finite()) {
        Some(i) => Error::new(format!(
            "the gradient of `{name}` {:?} is not finite: {} at element {i}, {count} such elements",
            grad.shape(),
            values[i]
        )),
        None => Error::new(format!(
            "the gradient of `{name}` {:?} is too large: the sum of its squares overflows",
            grad.shape()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup(values: &[&[f64]]) -> (Vec<Param>, Gradients) {
        let params: Vec<Param> = values.iter().map(|v| Param::new(Tensor::from_slice(v, &[v.len()]))).collect();
        let mut grads = Gradients::new();
        params.iter().for_each(|p| grads.set(p, p.value().clone()));
        (params, grads)
    }

    fn clip(params: &mut [Param], grads: &mut Gradients, max: f64) -> Result<f64> {
        let named: Vec<(String, &mut Param)> =
            params.iter_mut().enumerate().map(|(i, p)| (format!("p{i}"), p)).collect();
        clip_global_norm(&named, grads, max)
    }

    #[test]
    fn case_32_the_norm_is_global() {
        let (mut params, mut grads) = setup(&[&[3.0], &[4.0]]);
        assert_eq!(clip(&mut params, &mut grads, 1.0).unwrap(), 5.0);
        let after: Vec<f64> = params.iter().map(|p| grads.of(p).unwrap().item()).collect();
        assert!((after[0] - 0.6).abs() < 1e-6 && (after[1] - 0.8).abs() < 1e-6, "{after:?}");
        let (mut params, mut grads) = setup(&[&[3.0], &[4.0]]);
        assert_eq!(clip(&mut params, &mut grads, 5.0).unwrap(), 5.0);
        assert_eq!(grads.of(&params[0]).unwrap().item(), 3.0, "a norm at the limit is left alone");
    }

    #[test]
    fn case_32_bad_limits_and_gradients_are_rejected() {
        for bad in [-1.0, 0.0, f64::NAN] {
            let (mut params, mut grads) = setup(&[&[3.0]]);
            assert!(clip(&mut params, &mut grads, bad).unwrap_err().to_string().contains("must be positive"));
        }
        for bad in [f64::NAN, f64::INFINITY] {
            let (mut params, mut grads) = setup(&[&[3.0], &[1.0, bad]]);
            let error = clip(&mut params, &mut grads, 1.0).unwrap_err().to_string();
            assert!(error.contains("`p1` [2] is not finite") && error.contains("at element 1"), "{error}");
            assert_eq!(grads.of(&params[0]).unwrap().item(), 3.0);
        }
    }
}
