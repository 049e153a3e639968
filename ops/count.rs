//! How many multiply-accumulates operators do, counted as they run: what formulas of cost are checked against.
//!
//! An operator counts the terms that its mathematics ask for on the operands at hand (visible pairs, keys that are far,
//! rows of a product), not what its tiles round up to. Elementwise work is not counted, nor is any backward.

use std::cell::Cell;

/// Multiply-accumulates by what they are spent on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MacCount {
    /// Products with weight matrices: `linear`.
    pub projection: u64,
    /// Scores and weighted sums over token pairs.
    pub pair: u64,
    /// Additions to running sums over earlier tokens, and reads of them.
    pub prefix: u64,
    /// The output head: `cross_entropy_from_hidden`.
    pub head: u64,
}

thread_local! {
    static COUNT: Cell<Option<MacCount>> = const { Cell::new(None) };
}

/// Runs `f` and gives what the operators that this thread called in it have counted.
pub fn count_macs<R>(f: impl FnOnce() -> R) -> (R, MacCount) {
    struct Restore(Option<MacCount>);
    impl Drop for Restore {
        fn drop(&mut self) {
            COUNT.set(self.0);
        }
    }
    let _restore = Restore(COUNT.replace(Some(MacCount::default()))); // also when `f` panics
    let out = f();
    (out, COUNT.get().unwrap_or_default())
}

/// For operators: adds what `f` says, when somebody counts.
pub(crate) fn count(f: impl FnOnce(&mut MacCount)) {
    if let Some(mut counted) = COUNT.get() {
        f(&mut counted);
        COUNT.set(Some(counted));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionOptions, attention, causal_attention, linear};
    use kumiki_autograd::Var;
    use kumiki_tensor::{DType, Tensor};

    #[test]
    fn only_what_is_asked_for_is_counted() {
        let x = |shape: &[usize]| Var::constant(Tensor::zeros(DType::F32, shape));
        linear(&x(&[2, 3]), &x(&[4, 3]));
        let ((), counted) = count_macs(|| {
            linear(&x(&[2, 5, 3]), &x(&[4, 3]));
            let ((), inner) = count_macs(|| drop(linear(&x(&[1, 3]), &x(&[4, 3]))));
            assert_eq!(inner.projection, 12);
            causal_attention(&x(&[2, 3, 2, 4]), &x(&[2, 5, 2, 4]), &x(&[2, 5, 2, 6]));
            let options = AttentionOptions::default().with_key_lengths(&[1], 5);
            attention(&x(&[1, 3, 1, 4]), &x(&[1, 5, 1, 4]), &x(&[1, 5, 1, 6]), &options);
        });
        // Queries 3, 4 and 5 of 5 see 3, 4 and 5 keys; with a length of 1 three queries see 1.
        assert_eq!(counted, MacCount { projection: 10 * 12, pair: (4 * 12 + 3) * 10, ..MacCount::default() });
    }
}
