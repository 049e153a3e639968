//! Global-norm clipping, which is also where non-finite gradients are caught.
//!
//! Source: Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural networks, arXiv 1211.5063.

use kumiki_autograd::{Gradients, Param};
use kumiki_tensor::{Error, Result, Tensor, sums_of_squares};

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
    let all: Vec<(&String, &Tensor)> =
        params.iter().filter_map(|(name, param)| Some((name, grads.of(param)?))).collect();
    let sums = sums_of_squares(&all.iter().map(|(_, grad)| *grad).collect::<Vec<_>>());
    if let Some(i) = sums.iter().position(|sum| !sum.is_finite()) {
        return Err(not_finite(all[i].0, all[i].1));
    }
    let total: f64 = sums.iter().sum();
    let norm = total.sqrt();
    if norm > max_norm {
        grads.scale(max_norm / (norm + 1e-6));
    }
    Ok(norm)
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
