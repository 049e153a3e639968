//! [`Profile`]: the time of every operator, forward and backward.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What one operator took on all tapes with a profile.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// How often it was recorded.
    pub calls: usize,
    /// From the operator before it to its own place on the tape: what lies between, such as views, counts as its own.
    pub forward: Duration,
    /// Its backward, without the sums of gradients that meet.
    pub backward: Duration,
    /// Bytes that it kept for its backward, such as several operators keep counted for each.
    pub saved: usize,
}

/// Collects the costs of a tape's operators by name: see [`Tape::with_profile`](crate::Tape::with_profile).
#[derive(Debug)]
pub struct Profile {
    costs: RefCell<BTreeMap<&'static str, Cost>>,
    since: Cell<Instant>,
}

impl Default for Profile {
    fn default() -> Profile {
        Profile { costs: RefCell::default(), since: Cell::new(Instant::now()) }
    }
}

impl Profile {
    /// From now on until the next operator is that operator's time.
    pub fn begin(&self) {
        self.since.set(Instant::now());
    }

    pub(crate) fn forward(&self, name: &'static str, saved: usize) {
        let now = Instant::now();
        let mut costs = self.costs.borrow_mut();
        let cost = costs.entry(name).or_default();
        cost.calls += 1;
        cost.forward += now - self.since.replace(now);
        cost.saved += saved;
    }

    pub(crate) fn backward(&self, name: &'static str, took: Duration) {
        self.costs.borrow_mut().entry(name).or_default().backward += took;
        self.begin();
    }

    /// Every operator that was recorded, the one that took longest first.
    pub fn costs(&self) -> Vec<(&'static str, Cost)> {
        let mut costs: Vec<_> = self.costs.borrow().iter().map(|(&name, &cost)| (name, cost)).collect();
        costs.sort_by_key(|(_, cost)| std::cmp::Reverse(cost.forward + cost.backward));
        costs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backward, Tape, Var};
    use kumiki_tensor::{DType, Tensor};
    use std::rc::Rc;

    struct Slow(Tensor);

    impl Backward for Slow {
        fn name(&self) -> &'static str {
            "slow"
        }
        fn saved(&self) -> Vec<(&'static str, &Tensor)> {
            vec![("x", &self.0)]
        }
        fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
            std::thread::sleep(Duration::from_millis(4));
            vec![Some(dout)]
        }
    }

    #[test]
    fn operators_are_timed_both_ways() {
        let profile = Rc::new(Profile::default());
        let tape = Tape::new().with_profile(profile.clone());
        let mut x = tape.leaf(Tensor::ones(DType::F64, &[1]));
        for _ in 0..2 {
            std::thread::sleep(Duration::from_millis(2));
            let value = x.value().copy();
            x = Var::from_op(value.clone(), &[&x], || Slow(value));
        }
        tape.backward(&x);
        let [("slow", cost)] = profile.costs()[..] else { panic!("{:?}", profile.costs()) };
        assert_eq!((cost.calls, cost.saved), (2, 16));
        assert!(cost.forward >= Duration::from_millis(4) && cost.backward >= Duration::from_millis(8), "{cost:?}");
    }
}
