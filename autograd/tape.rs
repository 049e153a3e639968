//! [`Tape`]: the operators of a forward pass in order of creation, and the one reverse loop over them.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;
use std::time::Instant;

use kumiki_tensor::shape::{Dims, broadcast};
use kumiki_tensor::{DType, Rng, Tensor};

use crate::gradients::Gradients;
use crate::param::{Param, ParamId};
use crate::profile::Profile;
use crate::var::Var;

/// How an operator turns the gradient of its output into those of its inputs. Depends on its fields only.
pub trait Backward: 'static {
    /// The operator's name, as its public function is called.
    fn name(&self) -> &'static str;

    /// The tensors that are kept for the backward, with their names.
    fn saved(&self) -> Vec<(&'static str, &Tensor)>;

    /// The gradient of each input, in the order of [`Var::from_op`]'s inputs: `Some` at least where `needs` is true.
    /// A gradient may have the shape of the output where the input was broadcast; the walker sums it back.
    fn backward(self: Box<Self>, dout: Tensor, needs: &[bool]) -> Vec<Option<Tensor>>;
}

struct Node {
    /// Position on the tape of each input; `None` for constants.
    inputs: Vec<Option<usize>>,
    shape: Dims,
    dtype: DType,
    /// `None` for leaves, and once the walker has been here.
    backward: Option<Box<dyn Backward>>,
    param: Option<ParamId>,
}

#[derive(Default)]
struct State {
    nodes: Vec<Node>,
    /// Place (`None` when not recording) and value of every parameter that has been used. Not a `Var`: a tape that held
    /// a handle of itself would never be freed.
    params: HashMap<ParamId, (Option<usize>, Tensor)>,
    used: Vec<Param>,
    walked: bool,
}

pub(crate) struct Inner {
    state: RefCell<State>,
    recording: bool,
    rng: RefCell<Option<Rng>>,
    substitutes: Rc<HashMap<ParamId, Tensor>>,
    narrow: bool,
    profile: Option<Rc<Profile>>,
}

/// A forward pass. Cloning gives another handle of the same tape; when the last handle and the last [`Var`] on it are
/// dropped, everything that was saved is freed.
#[derive(Clone)]
pub struct Tape(Rc<Inner>);

impl Default for Tape {
    fn default() -> Tape {
        Tape::new()
    }
}

thread_local! {
    static NO_GRAD: Cell<usize> = const { Cell::new(0) };
}

pub(crate) fn grad_enabled() -> bool {
    NO_GRAD.get() == 0
}

/// Runs `f` without recording: every result in it is a constant.
pub fn no_grad<R>(f: impl FnOnce() -> R) -> R {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            NO_GRAD.set(NO_GRAD.get() - 1);
        }
    }
    NO_GRAD.set(NO_GRAD.get() + 1);
    let _leave = Leave; // also when `f` panics
    f()
}

/// One line of [`Tape::summary`].
#[derive(Clone, Debug, PartialEq)]
pub struct NodeSummary {
    /// The operator, or `leaf` or `param`.
    pub name: &'static str,
    /// The shape of the output.
    pub shape: Vec<usize>,
    /// The dtype of the output.
    pub dtype: DType,
    /// The inputs' positions on the tape; `None` for constants.
    pub inputs: Vec<Option<usize>>,
    /// Name and bytes of every tensor kept for the backward.
    pub saved: Vec<(&'static str, usize)>,
}

/// What [`Tape::summary`] gives; `Display` prints it as a table.
pub struct Summary(pub Vec<NodeSummary>);

impl Tape {
    fn with(recording: bool, rng: Option<Rng>, substitutes: Rc<HashMap<ParamId, Tensor>>) -> Tape {
        let (state, rng) = (RefCell::default(), RefCell::new(rng));
        Tape(Rc::new(Inner { state, recording, rng, substitutes, narrow: false, profile: None }))
    }

    /// A tape that records. Models with dropout need [`Tape::training`].
    pub fn new() -> Tape {
        Tape::with(true, None, Rc::default())
    }

    /// A tape that records, with a generator for dropout masks.
    pub fn training(rng: Rng) -> Tape {
        Tape::with(true, Some(rng), Rc::default())
    }

    /// A tape that records nothing: parameters come out as constants and dropout does nothing.
    pub fn inference() -> Tape {
        Tape::with(false, None, Rc::default())
    }

    /// A fresh tape on which F32 numbers are multiplied in BF16, if `narrow`, as mixed precision does: see [`Var::is_narrow`].
    ///
    /// # Panics
    /// When the tape is in use already.
    #[must_use]
    pub fn with_narrow_products(self, narrow: bool) -> Tape {
        let inner = Rc::into_inner(self.0).expect("with_narrow_products: the tape is in use already");
        Tape(Rc::new(Inner { narrow, ..inner }))
    }

    /// A fresh tape whose operators are timed.
    ///
    /// # Panics
    /// When the tape is in use already.
    #[must_use]
    pub fn with_profile(self, profile: Rc<Profile>) -> Tape {
        let inner = Rc::into_inner(self.0).expect("with_profile: the tape is in use already");
        profile.begin();
        Tape(Rc::new(Inner { profile: Some(profile), ..inner }))
    }

    /// As this tape, empty, with or without recording, from generator `rng`: for checkpoints.
    pub(crate) fn similar(&self, recording: bool, rng: Option<Rng>) -> Tape {
        let tape = Tape::with(recording, rng, self.0.substitutes.clone()).with_narrow_products(self.0.narrow);
        match self.0.profile.clone() {
            Some(profile) => tape.with_profile(profile),
            None => tape,
        }
    }

    /// A tape on which the given parameters have other values: for central differences.
    pub(crate) fn substituting(recording: bool, rng: Option<Rng>, values: HashMap<ParamId, Tensor>) -> Tape {
        Tape::with(recording, rng, Rc::new(values))
    }

    pub(crate) fn is(&self, other: &Tape) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Whether operators on this tape are recorded.
    pub fn is_recording(&self) -> bool {
        self.0.recording && grad_enabled()
    }

    /// The generator of dropout masks, moved past `values` values; `None` on a tape without one.
    /// A recomputation ([`crate::checkpoint`]) sees the same generator at the same place.
    pub fn take_rng(&self, label: &str) -> Option<Rng> {
        let mut rng = self.0.rng.borrow_mut();
        rng.as_mut().map(|rng| {
            let count = rng.next_u64();
            rng.fork(&format!("{label} {count}"))
        })
    }

    /// Whether it has a generator, so that masks are drawn: in training, and not where a model is used.
    pub fn has_rng(&self) -> bool {
        self.0.rng.borrow().is_some()
    }

    pub(crate) fn rng(&self) -> Option<Rng> {
        self.0.rng.borrow().clone()
    }

    pub(crate) fn set_rng(&self, rng: Option<Rng>) {
        *self.0.rng.borrow_mut() = rng;
    }

    pub(crate) fn push(&self, inputs: Vec<Option<usize>>, output: &Tensor, backward: Box<dyn Backward>) -> usize {
        if let Some(profile) = &self.0.profile {
            profile.forward(backward.name(), backward.saved().iter().map(|(_, tensor)| tensor.byte_len()).sum());
        }
        self.push_node(inputs, output, Some(backward), None)
    }

    #[track_caller]
    fn push_node(
        &self,
        inputs: Vec<Option<usize>>,
        output: &Tensor,
        backward: Option<Box<dyn Backward>>,
        param: Option<ParamId>,
    ) -> usize {
        let mut state = self.0.state.borrow_mut();
        assert!(!state.walked, "this tape has been walked by `backward`; start a new one for the next forward pass");
        state.nodes.push(Node { inputs, shape: Dims::new(output.shape()), dtype: output.dtype(), backward, param });
        state.nodes.len() - 1
    }

    /// A value whose gradient is wanted. On a tape that does not record: a constant.
    ///
    /// # Panics
    /// When the value is not of a float dtype.
    #[track_caller]
    pub fn leaf(&self, value: Tensor) -> Var {
        assert!(
            value.dtype().is_float(),
            "a leaf must be of a float dtype to have a gradient, found {}",
            value.dtype()
        );
        if !self.is_recording() {
            return Var::constant(value);
        }
        let node = self.push_node(vec![], &value, None, None);
        Var::on_tape(value, self.clone(), node)
    }

    /// A parameter on this tape: the same variable however often it is asked for, so that the gradients of all its
    /// uses (tied weights) sum up in one place.
    ///
    /// # Panics
    /// When the parameter has been written since its first use on this tape.
    #[track_caller]
    pub fn param(&self, param: &Param) -> Var {
        let value = self.0.substitutes.get(&param.id()).unwrap_or(param.value()).clone();
        let known = self.0.state.borrow().params.get(&param.id()).cloned();
        let node = match known.clone() {
            // One that was first used under `no_grad` gets its place with its first use outside.
            Some((node, first)) if node.is_some() || !self.is_recording() => {
                assert!(
                    first.shares_storage_with(&value),
                    "a parameter of shape {:?} was changed between two uses on one tape",
                    param.shape()
                );
                node
            }
            _ => {
                let node = self.is_recording().then(|| self.push_node(vec![], &value, None, Some(param.id())));
                let mut state = self.0.state.borrow_mut();
                if known.is_none() {
                    state.used.push(param.clone());
                }
                state.params.insert(param.id(), (node, value.clone()));
                node
            }
        };
        let var = match node {
            Some(node) => Var::on_tape(value, self.clone(), node),
            None => Var::constant(value),
        };
        if self.0.narrow { var.narrowed() } else { var }
    }

    /// The parameters that have been used, in order of first use.
    pub(crate) fn used_params(&self) -> Vec<Param> {
        self.0.state.borrow().used.clone()
    }

    /// The number of nodes, leaves included.
    pub fn len(&self) -> usize {
        self.0.state.borrow().nodes.len()
    }

    /// Whether nothing has been recorded.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every node in order of creation, with operator, shape and saved bytes.
    pub fn summary(&self) -> Summary {
        let state = self.0.state.borrow();
        let line = |node: &Node| NodeSummary {
            name: match (&node.backward, node.param) {
                (Some(backward), _) => backward.name(),
                (None, Some(_)) => "param",
                (None, None) => "leaf",
            },
            shape: node.shape.to_vec(),
            dtype: node.dtype,
            inputs: node.inputs.clone(),
            saved: node.backward.iter().flat_map(|b| b.saved()).map(|(n, t)| (n, t.byte_len())).collect(),
        };
        Summary(state.nodes.iter().map(line).collect())
    }

    /// Bytes of the storages that are kept for the backward, each once however many operators keep a view of it; leaves
    /// and parameters included where one does.
    pub fn saved_bytes(&self) -> usize {
        let state = self.0.state.borrow();
        let mut storages = HashMap::new();
        for (_, tensor) in state.nodes.iter().flat_map(|node| &node.backward).flat_map(|b| b.saved()) {
            let (address, bytes) = tensor.storage_extent();
            storages.insert(address, bytes);
        }
        storages.values().sum()
    }

    /// The gradients of a loss with one element with respect to every leaf and parameter. Frees what was saved as it
    /// goes; the tape cannot be used again.
    ///
    /// # Panics
    /// When the loss has more than one element or is not on this tape, or when the tape has been walked before.
    #[track_caller]
    pub fn backward(&self, loss: &Var) -> Gradients {
        assert!(
            loss.value().len() == 1,
            "backward: the loss must have one element, found shape {:?}; for others give upstream gradients to `backward_from`",
            loss.shape()
        );
        self.backward_from(&[(loss, loss.value().new_full(loss.dtype(), loss.shape(), 1.0))])
    }

    /// As [`Tape::backward`], from several outputs with their upstream gradients.
    ///
    /// # Panics
    /// When an output is not on this tape or its gradient has another shape or dtype.
    #[track_caller]
    pub fn backward_from(&self, outputs: &[(&Var, Tensor)]) -> Gradients {
        // Taken out of the cell: a checkpoint's backward must be free to use other tapes, and this loop to be the only user.
        let (mut nodes, used) = {
            let mut state = self.0.state.borrow_mut();
            assert!(!state.walked, "this tape has been walked by `backward` already");
            state.walked = true;
            state.params.clear();
            (std::mem::take(&mut state.nodes), state.used.len())
        };
        let mut grads: Vec<Option<Tensor>> = Vec::new();
        grads.resize_with(nodes.len(), || None);
        for (output, dout) in outputs {
            let node = output.node_on(self).expect("backward: the output is a constant or lies on another tape");
            check("backward", &nodes[node], dout);
            accumulate(&mut grads[node], dout.clone());
        }
        let mut out =
            Gradients { tape: Some(self.clone()), leaves: HashMap::new(), params: HashMap::with_capacity(used) };
        for i in (0..nodes.len()).rev() {
            // Dropped at the end of the turn even when no gradient arrives: its saved tensors are of no further use.
            let node = nodes.pop().expect("one node per turn");
            let Some(dout) = grads[i].take() else { continue };
            let Some(backward) = node.backward else {
                match node.param {
                    Some(id) => out.params.insert(id, dout),
                    None => out.leaves.insert(i, dout),
                };
                continue;
            };
            let name = backward.name();
            let needs: Vec<bool> = node.inputs.iter().map(Option::is_some).collect();
            let started = self.0.profile.as_ref().map(|_| Instant::now());
            let dinputs = backward.backward(dout, &needs);
            if let (Some(profile), Some(started)) = (&self.0.profile, started) {
                profile.backward(name, started.elapsed());
            }
            assert!(dinputs.len() == needs.len(), "{name}: {} gradients for {} inputs", dinputs.len(), needs.len());
            for (k, (input, dinput)) in node.inputs.iter().zip(dinputs).enumerate() {
                let Some(input) = *input else { continue };
                let dinput = dinput
                    .unwrap_or_else(|| panic!("{name}: the backward gives no gradient for input {k}, which needs one"));
                let dinput = unbroadcast(name, k, dinput, &nodes[input].shape);
                check(name, &nodes[input], &dinput);
                accumulate(&mut grads[input], dinput);
            }
        }
        out
    }
}

#[track_caller]
fn check(name: &str, node: &Node, grad: &Tensor) {
    assert!(
        grad.shape() == &*node.shape && grad.dtype() == node.dtype,
        "{name}: a gradient of {:?} {} for a value of {:?} {}",
        grad.shape(),
        grad.dtype(),
        node.shape,
        node.dtype
    );
}

/// Sums a gradient of the output's shape back to an input that was broadcast.
fn unbroadcast(name: &str, input: usize, grad: Tensor, shape: &[usize]) -> Tensor {
    if grad.shape() == shape {
        return grad;
    }
    assert!(
        broadcast(grad.shape(), shape).is_some_and(|out| *out == *grad.shape()),
        "{name}: a gradient of {:?} cannot be summed to {shape:?}, the shape of input {input}",
        grad.shape()
    );
    grad.sum_to(shape)
}

/// The first gradient is moved in; later ones are added to it.
fn accumulate(sum: &mut Option<Tensor>, grad: Tensor) {
    match sum {
        Some(sum) => sum.add_assign(&grad),
        None => *sum = Some(grad),
    }
}

impl Summary {
    /// Bytes of all saved tensors, one that is saved by several operators counted each time.
    pub fn saved_bytes(&self) -> usize {
        self.0.iter().flat_map(|node| &node.saved).map(|&(_, bytes)| bytes).sum()
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(
            f,
            "{:>5}  {:<24} {:<20} {:<5} {:>12}  inputs; saved",
            "node", "operator", "shape", "dtype", "saved bytes"
        )?;
        for (i, node) in self.0.iter().enumerate() {
            let inputs: Vec<String> = node.inputs.iter().map(|n| n.map_or("-".into(), |n| format!("#{n}"))).collect();
            let saved: Vec<String> = node.saved.iter().map(|(name, bytes)| format!("{name} {bytes}")).collect();
            let bytes: usize = node.saved.iter().map(|&(_, bytes)| bytes).sum();
            writeln!(
                f,
                "{i:>5}  {:<24} {:<20} {:<5} {bytes:>12}  [{}]; {}",
                node.name,
                format!("{:?}", node.shape),
                node.dtype,
                inputs.join(" "),
                saved.join(", ")
            )?;
        }
        write!(f, "{} nodes, {} bytes saved", self.0.len(), self.saved_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `a * b` on equal or broadcast shapes: a toy operator, since this crate has none.
    struct MulBackward {
        a: Tensor,
        b: Tensor,
    }

    fn zip(a: &Tensor, b: &Tensor, f: impl Fn(f64, f64) -> f64) -> Tensor {
        let shape = broadcast(a.shape(), b.shape()).unwrap();
        let (a, b) = (a.expand(&shape).to_f64_vec(), b.expand(&shape).to_f64_vec());
        Tensor::from_fn::<f64>(&shape, |i| f(a[i], b[i]))
    }

    impl Backward for MulBackward {
        fn name(&self) -> &'static str {
            "mul"
        }
        fn saved(&self) -> Vec<(&'static str, &Tensor)> {
            vec![("a", &self.a), ("b", &self.b)]
        }
        fn backward(self: Box<Self>, dout: Tensor, _: &[bool]) -> Vec<Option<Tensor>> {
            vec![Some(zip(&dout, &self.b, |g, y| g * y)), Some(zip(&dout, &self.a, |g, x| g * x))]
        }
    }

    fn mul(a: &Var, b: &Var) -> Var {
        let out = zip(a.value(), b.value(), |x, y| x * y);
        Var::from_op(out, &[a, b], || MulBackward { a: a.value().clone(), b: b.value().clone() })
    }

    fn vector(values: &[f64]) -> Tensor {
        Tensor::from_slice(values, &[values.len()])
    }

    #[test]
    fn gradients_of_all_uses_sum_up() {
        let w = Param::new(vector(&[2.0]));
        let tape = Tape::new();
        let x = tape.leaf(vector(&[5.0]));
        let y = mul(&mul(&tape.param(&w), &x), &mul(&tape.param(&w), &x)); // w² x²
        assert_eq!(tape.len(), 5);
        let grads = tape.backward(&y);
        assert_eq!(grads.of(&w).unwrap().item(), 2.0 * 2.0 * 25.0);
        assert_eq!(grads.get(&x).unwrap().item(), 2.0 * 5.0 * 4.0);
    }

    #[test]
    fn case_03_the_walker_sums_broadcast_axes_back() {
        for (a, b) in [(vec![1], vec![5, 4]), (vec![4, 1], vec![1, 4]), (vec![2, 1], vec![1, 3]), (vec![], vec![3])] {
            let tape = Tape::new();
            let (x, y) = (tape.leaf(Tensor::ones(DType::F64, &a)), tape.leaf(Tensor::ones(DType::F64, &b)));
            let out = mul(&x, &y);
            let grads = tape.backward_from(&[(&out, Tensor::ones(DType::F64, out.shape()))]);
            for (leaf, shape) in [(&x, &a), (&y, &b)] {
                let grad = grads.get(leaf).unwrap();
                assert_eq!(grad.shape(), shape);
                let repeats = (out.value().len() / leaf.value().len()) as f64;
                assert!(grad.to_f64_vec().iter().all(|&g| g == repeats));
            }
        }
    }

    #[test]
    fn constants_and_no_grad_are_not_recorded() {
        let tape = Tape::new();
        let x = tape.leaf(vector(&[1.0]));
        assert!(!no_grad(|| mul(&x, &x)).requires_grad());
        assert!(!mul(&x.detach(), &x.detach()).requires_grad());
        assert!(!Tape::inference().param(&Param::new(vector(&[1.0]))).requires_grad());
        assert_eq!(tape.len(), 1);
        let y = mul(&x, &no_grad(|| mul(&x, &x)));
        assert_eq!(tape.backward(&y).get(&x).unwrap().item(), 1.0);
    }

    #[test]
    fn an_unused_leaf_has_no_gradient() {
        let tape = Tape::new();
        let (x, unused) = (tape.leaf(vector(&[1.0])), tape.leaf(vector(&[1.0])));
        let grads = tape.backward(&mul(&x, &x));
        assert!(grads.get(&unused).is_none() && grads.get(&x).is_some());
    }

    #[test]
    fn summary_names_operators_shapes_and_bytes() {
        let tape = Tape::new();
        let x = tape.leaf(Tensor::ones(DType::F64, &[2, 3]));
        mul(&x, &Var::constant(vector(&[1.0, 2.0, 3.0])));
        let summary = tape.summary();
        assert_eq!(summary.0[1].name, "mul");
        assert_eq!(summary.0[1].shape, [2, 3]);
        assert_eq!(summary.0[1].inputs, [Some(0), None]);
        assert_eq!(summary.0[1].saved, [("a", 48), ("b", 24)]);
        assert_eq!(summary.saved_bytes(), 72);
        assert!(summary.to_string().contains("mul                      [2, 3]"));
    }

    #[test]
    #[should_panic(expected = "walked by `backward` already")]
    fn a_second_walk_is_refused() {
        let tape = Tape::new();
        let x = tape.leaf(vector(&[1.0]));
        let y = mul(&x, &x);
        tape.backward(&y);
        tape.backward(&y);
    }

    #[test]
    #[should_panic(expected = "lie on different tapes")]
    fn tapes_do_not_mix() {
        let (a, b) = (Tape::new(), Tape::new());
        mul(&a.leaf(vector(&[1.0])), &b.leaf(vector(&[1.0])));
    }

    #[test]
    #[should_panic(expected = "was changed between two uses")]
    fn a_parameter_written_in_the_middle_is_noticed() {
        let tape = Tape::new();
        let mut w = Param::new(vector(&[1.0]));
        tape.param(&w);
        w.value_mut().make_mut::<f64>()[0] = 2.0;
        tape.param(&w);
    }
}
