//! [`Init`]: starting values, drawn for every parameter from a generator of its own.

use kumiki_autograd::Param;
use kumiki_tensor::{DType, Rng, Tensor};

/// Where starting values come from, and of which dtype they are. Each parameter's generator is named by its path, so
/// that its values depend on neither the order of creation nor the other parameters.
#[derive(Clone, Debug)]
pub struct Init {
    rng: Rng,
    dtype: DType,
}

impl Init {
    /// Values of `dtype` from the generator of `seed`.
    pub fn new(seed: u64, dtype: DType) -> Init {
        Init { rng: Rng::new(seed).fork("init"), dtype }
    }

    /// The source for a part named `name`.
    pub fn of(&self, name: impl std::fmt::Display) -> Init {
        Init { rng: self.rng.fork(&name.to_string()), dtype: self.dtype }
    }

    /// Independent normal values with mean 0. The values of F32 and F64 parameters agree up to rounding.
    pub fn normal(&self, shape: &[usize], std: f64) -> Param {
        Param::new(self.rng.clone().normal(self.dtype, shape, 0.0, std))
    }

    /// The same value everywhere.
    pub fn full(&self, shape: &[usize], value: f64) -> Param {
        Param::new(Tensor::full(self.dtype, shape, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_give_different_values_and_the_same_again() {
        let init = Init::new(1, DType::F64);
        let draw = |name: &str| init.of(name).normal(&[4], 1.0).value().to_f64_vec();
        assert_ne!(draw("a"), draw("b"));
        assert_eq!(draw("a"), draw("a"));
        let single = Init::new(1, DType::F32).of("a").normal(&[4], 1.0).value().to_f64_vec();
        assert!(single.iter().zip(draw("a")).all(|(x, y)| (x - y).abs() < 1e-6));
    }
}
