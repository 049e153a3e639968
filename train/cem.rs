//! What the descents of a CEM model do on a text: how its energies fall, and what more or fewer steps are worth.

use kumiki_autograd::Tape;
use kumiki_models::Model;
use kumiki_nn::{Call, Descent, Trace};
use kumiki_tensor::Tensor;
use serde::Serialize;

use crate::trainer::{Evaluation, evaluate};
use crate::validation::Validation;
use crate::{Error, Result};

/// How a model's descents are run, where that differs from its training.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Steps {
    /// Steps of every descent, at most.
    pub steps: Option<usize>,
    /// A token stops once its energy falls by less than this in a step.
    pub tolerance: Option<f64>,
}

impl Steps {
    /// Changes the model's descents, and gives a trace of the steps that they take from now on; `None` when nothing is
    /// asked for.
    ///
    /// # Errors
    /// When the model has no descents, or a number is out of its range.
    pub fn apply(&self, model: &mut Model) -> Result<Option<Trace>> {
        if *self == Steps::default() {
            return Ok(None);
        }
        self.check()?;
        let trace = Trace::of_steps();
        for (_, descent) in with_descents(model)? {
            descent.steps = self.steps.unwrap_or(descent.steps);
            descent.tolerance = self.tolerance;
            descent.trace = Some(trace.clone());
        }
        Ok(Some(trace))
    }

    /// # Errors
    /// When a number is out of its range.
    fn check(&self) -> Result<()> {
        let most = kumiki_models::MAX_DESCENT_STEPS;
        if let Some(steps) = self.steps.filter(|steps| !(1..=most).contains(steps)) {
            return Err(Error::new(format!("--steps must be from 1 to {most}, found {steps}")));
        }
        if let Some(tolerance) = self.tolerance.filter(|x| !(x.is_finite() && *x >= 0.0)) {
            return Err(Error::new(format!("--energy-tol must be a number from 0, found {}", short(tolerance))));
        }
        Ok(())
    }
}

/// A number of any size in a few letters: `0.01`, `1e300`.
pub fn short(x: f64) -> String {
    format!("{x:?}").trim_end_matches(".0").to_owned()
}

/// # Errors
/// When there are none.
fn with_descents(model: &mut Model) -> Result<Vec<(String, &mut Descent)>> {
    let found = model.descents_mut();
    if found.is_empty() {
        return Err(Error::new(
            "the model has no layer that descends on an energy, so that there are no steps to choose; those of \
             `kumiki train --model cem-t2` do",
        ));
    }
    Ok(found)
}

/// Steps that a token took on average, of what a trace has noted; `None` of nothing.
pub fn mean_steps(calls: &[Call]) -> Option<f64> {
    let tokens: usize = calls.iter().map(|call| call.tokens).sum();
    let steps: usize = calls.iter().map(|call| call.steps).sum();
    (tokens > 0).then(|| steps as f64 / tokens as f64)
}

/// The mean energies of one half of one block application.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Energies {
    /// The application, from 0.
    pub layer: usize,
    /// `attention` or `mlp`.
    pub half: String,
    /// Mean over tokens before the first step, after the first, and so on.
    pub energies: Vec<f64>,
}

/// The energies of all halves that have one, over `steps` steps (the model's own if `None`), on `windows`.
///
/// # Errors
/// When the model has none, or an energy is not finite.
#[expect(clippy::missing_panics_doc, reason = "the names are those of the blocks, a number and a half")]
pub fn energies(model: &mut Model, windows: &Validation, steps: Option<usize>) -> Result<Vec<Energies>> {
    Steps { steps, tolerance: None }.apply(model)?;
    let mut traces = Vec::new();
    for (name, descent) in with_descents(model)? {
        let trace = Trace::of_energies();
        descent.trace = Some(trace.clone());
        traces.push((name, trace));
    }
    let Model::Language(model) = model else { unreachable!("no other kind has descents") };
    // Tied blocks are called once for every application.
    let (sets, applications) = (model.blocks.len(), model.config.architecture.applications());
    let mut sums: Vec<Energies> = Vec::new();
    let mut tokens = vec![];
    for batch in windows.batches() {
        let inputs = Tensor::from_slice(&batch.inputs(), &[batch.rows, batch.seq]);
        model.hidden(&Tape::inference(), &inputs, None);
        let mut at = 0;
        for (name, trace) in &traces {
            let (set, half) = name.trim_start_matches("blocks.").split_once('.').expect("block and half");
            let set: usize = set.parse().expect("the block's number");
            for (call, layer) in trace.take().into_iter().zip((set..applications).step_by(sets)) {
                if sums.len() == at {
                    sums.push(Energies { layer, half: half.to_owned(), energies: vec![0.0; call.energies.len()] });
                    tokens.push(0.0);
                }
                let count = call.tokens as f64;
                sums[at].energies.iter_mut().zip(&call.energies).for_each(|(sum, mean)| *sum += count * mean);
                tokens[at] += count;
                at += 1;
            }
        }
    }
    for (row, tokens) in sums.iter_mut().zip(tokens) {
        row.energies.iter_mut().for_each(|sum| *sum /= tokens);
        if row.energies.iter().any(|e| !e.is_finite()) {
            return Err(Error::new(format!("the energy of layer {}'s {} is not finite", row.layer, row.half)));
        }
    }
    sums.sort_by(|a, b| (&a.half, a.layer).cmp(&(&b.half, b.layer)));
    Ok(sums)
}

/// The loss with some steps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Found {
    /// Steps of every descent, at most.
    pub steps: usize,
    /// A token stops once its energy falls by less than this in a step.
    pub tolerance: Option<f64>,
    /// Steps that a token took on average.
    pub mean_steps: f64,
    /// Nats per token.
    pub nll: f64,
}

/// The loss of `model` on `windows` run with `steps` in place of its own, after which it has its own again.
///
/// # Errors
/// As [`Steps::apply`] and [`evaluate`].
pub fn loss_with(model: &mut Model, windows: &Validation, steps: Steps) -> Result<(Evaluation, f64)> {
    let before: Vec<_> = model.descents_mut().into_iter().map(|(_, descent)| descent.clone()).collect();
    let run = |model: &mut Model| {
        let trace = steps.apply(model)?.unwrap_or_default();
        let evaluation = evaluate(model, windows, |_| {})?;
        Ok((evaluation, mean_steps(&trace.take()).unwrap_or(f64::NAN)))
    };
    let found = run(model);
    model.descents_mut().into_iter().zip(before).for_each(|((_, descent), before)| *descent = before);
    found
}

/// The loss with 1 to `most` steps, then with at most so many and each of the tolerances; `show` is called with each as it
/// is found.
///
/// # Errors
/// As [`loss_with`], and those of `show`.
pub fn losses(
    model: &mut Model,
    windows: &Validation,
    most: usize,
    tolerances: &[f64],
    mut show: impl FnMut(&Found) -> Result<()>,
) -> Result<Vec<Found>> {
    let fixed = (1..=most).map(|steps| (steps, None));
    let all: Vec<_> = fixed.chain(tolerances.iter().map(|&tolerance| (most, Some(tolerance)))).collect();
    // Before the first is measured, for that can take long.
    all.iter().try_for_each(|&(steps, tolerance)| Steps { steps: Some(steps), tolerance }.check())?;
    let mut found = Vec::new();
    for (steps, tolerance) in all {
        let (evaluation, mean_steps) = loss_with(model, windows, Steps { steps: Some(steps), tolerance })?;
        let one = Found { steps, tolerance, mean_steps, nll: evaluation.nll };
        show(&one)?;
        found.push(one);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Data;
    use crate::settings::Settings;
    use kumiki_tensor::DType;

    fn model(name: &str) -> Model {
        let config = Settings::preset("nano").unwrap().model(name, 256).unwrap();
        Model::new(&config, 0, DType::F64).unwrap()
    }

    fn windows() -> Validation {
        Data::open("math", 0.0, 32).unwrap().validation(4, 32, Some(256)).unwrap().unwrap()
    }

    #[test]
    fn small_steps_go_downhill_in_every_half() {
        let rows = energies(&mut model("cem-t2-eta0.01"), &windows(), Some(5)).unwrap();
        let halves: Vec<(usize, &str)> = rows.iter().map(|row| (row.layer, row.half.as_str())).collect();
        assert_eq!(halves, [(0, "attention"), (1, "attention"), (0, "mlp"), (1, "mlp")]);
        for row in rows {
            assert_eq!(row.energies.len(), 6);
            assert!(row.energies.windows(2).all(|pair| pair[1] < pair[0]), "{row:?}");
        }
    }

    #[test]
    fn steps_and_tolerances_are_applied_and_taken_back() {
        let (mut model, windows) = (model("cem-t2"), windows());
        let own = evaluate(&model, &windows, |_| {}).unwrap().nll;
        let mut with = |steps, tolerance| {
            let (evaluation, mean) = loss_with(&mut model, &windows, Steps { steps, tolerance }).unwrap();
            (evaluation.nll, mean)
        };
        assert_eq!(with(Some(2), None), (own, 2.0));
        let (nll, mean) = with(Some(4), None);
        assert!(nll != own && mean == 4.0);
        // No fall is enough: every token stops after its first step, which is what one step gives.
        assert_eq!(with(Some(4), Some(1e9)), (with(Some(1), None).0, 1.0));
        let (_, some) = with(Some(8), Some(1e-3));
        assert!(some > 1.0 && some <= 8.0, "{some}");
        assert_eq!(evaluate(&model, &windows, |_| {}).unwrap().nll, own);
    }

    #[test]
    fn what_is_wrong_is_a_sentence() {
        let apply = |name: &str, steps, tolerance| {
            Steps { steps, tolerance }.apply(&mut model(name)).map(drop).unwrap_err().to_string()
        };
        assert!(apply("tango", Some(2), None).contains("no layer that descends"));
        assert!(apply("llama", None, Some(0.1)).contains("no layer that descends"));
        assert!(apply("cem-t1", Some(0), None).contains("--steps must be from 1 to 1024, found 0"));
        assert!(apply("cem-t1", None, Some(f64::NAN)).contains("--energy-tol must be a number from 0, found NaN"));
        assert!(apply("cem-t1", None, Some(-1.0)).ends_with("found -1"));
        assert!(apply("cem-t1", None, Some(-1e300)).ends_with("found -1e300"));
        for wrong in [f64::NAN, -1.0, f64::INFINITY] {
            let found = losses(&mut model("cem-t1"), &windows(), 2, &[0.1, wrong], |_| panic!("nothing is measured"));
            assert!(found.unwrap_err().to_string().contains("--energy-tol must be a number from 0, found"));
        }
        assert!(Steps::default().apply(&mut model("tango")).unwrap().is_none());
    }
}
