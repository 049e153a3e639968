//! What several seeds say together, and in which order that puts the models, beside the paper's order.
//!
//! The standard error of a mean is s / √n with the sample deviation s. Two neighbours in the order count as different
//! when their means are at least two standard errors of their difference apart, √(a² + b²) for errors a and b.

use serde::{Deserialize, Serialize};

use crate::kinds::Kind;
use crate::marks::Class;
use crate::run::{Plan, Row};

/// A mean over seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stat {
    /// The mean.
    pub mean: f64,
    /// Its standard error; absent with one seed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub se: Option<f64>,
}

impl Stat {
    /// Of these values; `None` without any.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Stat> {
        let values: Vec<f64> = values.into_iter().collect();
        let n = values.len() as f64;
        if values.is_empty() {
            return None;
        }
        let mean = values.iter().sum::<f64>() / n;
        let squares: f64 = values.iter().map(|x| (x - mean).powi(2)).sum();
        Some(Stat { mean, se: (values.len() > 1).then(|| (squares / (n - 1.0) / n).sqrt()) })
    }
}

/// One model on one corpus, over its seeds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The corpus.
    pub corpus: String,
    /// The model.
    pub model: String,
    /// How many seeds are done.
    pub seeds: usize,
    /// Validation loss, nats per token.
    pub val_nll: Option<Stat>,
    /// The same over the second half of every window given the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_half_nll: Option<Stat>,
    /// The same over the tokens of answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_nll: Option<Stat>,
    /// The same over the tokens of proofs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof_nll: Option<Stat>,
    /// The same over all other tokens of Lean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_nll: Option<Stat>,
}

impl Summary {
    /// The loss over the tokens of `class`.
    pub fn of(&self, class: Class) -> Option<Stat> {
        match class {
            Class::Answer => self.answer_nll,
            Class::Proof => self.proof_nll,
            Class::Source => self.source_nll,
        }
    }
}

/// One summary for every corpus and model that has a row, in the plan's order.
pub fn summarize(plan: &Plan, rows: &[Row]) -> Vec<Summary> {
    let mut out = Vec::new();
    for corpus in &plan.corpora {
        for model in &plan.models {
            let mine: Vec<&Row> = rows.iter().filter(|r| r.corpus == *corpus && r.result.model == *model).collect();
            if mine.is_empty() {
                continue;
            }
            let of = |class| Stat::of(mine.iter().filter_map(|row| row.result.of(class)));
            out.push(Summary {
                corpus: corpus.clone(),
                model: model.clone(),
                seeds: mine.len(),
                val_nll: Stat::of(mine.iter().filter_map(|row| row.result.val_nll)),
                second_half_nll: Stat::of(mine.iter().filter_map(|row| row.result.second_half_nll)),
                answer_nll: of(Class::Answer),
                proof_nll: of(Class::Proof),
                source_nll: of(Class::Source),
            });
        }
    }
    out
}

/// The models of one corpus in the order of a mean loss, and what the order is worth. `None` for fewer than two.
pub fn ranking(summaries: &[&Summary], loss: impl Fn(&Summary) -> Option<Stat>) -> Option<String> {
    let mut known: Vec<(&str, Stat)> =
        summaries.iter().filter_map(|s| loss(s).map(|stat| (s.model.as_str(), stat))).collect();
    if known.len() < 2 {
        return None;
    }
    known.sort_by(|a, b| a.1.mean.total_cmp(&b.1.mean));
    let mut text = format!("{} {:.3}", known[0].0, known[0].1.mean);
    let (mut close, mut single) = (false, false);
    for pair in known.windows(2) {
        let [(_, better), (name, worse)] = pair else { continue };
        let sign = match better.se.zip(worse.se) {
            Some((a, b)) if worse.mean - better.mean < 2.0 * a.hypot(b) => "≈",
            _ if worse.mean == better.mean => "=",
            _ => "<",
        };
        close |= sign == "≈";
        single |= better.se.is_none() || worse.se.is_none();
        text += &format!(" {sign} {name} {:.3}", worse.mean);
    }
    if close {
        text += " (≈: less than two standard errors apart)";
    }
    if single {
        text += " (one seed cannot tell chance from difference)";
    }
    Some(text)
}

const PROSE: &[(&str, f64)] = &[("tango", 3.293), ("wango", 3.355), ("recurrent", 3.392), ("flash", 3.465)];
const LEAN: &[(&str, f64)] = &[("tango", 1.719), ("wango", 2.271), ("flash", 2.377), ("recurrent", 2.530)];
const LEAN_8: &[(&str, f64)] = &[("wango", 2.231), ("recurrent", 2.364)];
const MATHEMATICS: &[(&str, f64)] = &[("tango", 0.473), ("wango", 0.487), ("recurrent", 0.537), ("untied", 0.556)];

/// The corpus on which the paper compares models for this kind of text, and its losses of those among `models`, from the
/// best on; `None` where it has fewer than two. Its sizes, budgets and tokens are others: only the order can be compared.
pub fn paper(kind: Kind, blocks: usize, models: &[String]) -> (&'static str, Option<String>) {
    let (corpus, numbers) = match (kind, blocks) {
        (Kind::Prose, _) => ("FineWeb-Edu", PROSE),
        (Kind::Lean, 8) => ("Lean, 8 blocks", LEAN_8),
        (Kind::Lean, _) => ("Lean", LEAN),
        (Kind::Mathematics, _) => ("Mathematics", MATHEMATICS),
    };
    let ours = numbers.iter().filter(|(name, _)| models.iter().any(|model| model == name));
    let terms: Vec<String> = ours.map(|(name, nll)| format!("{name} {nll:.3}")).collect();
    (corpus, (terms.len() > 1).then(|| terms.join(" < ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_and_their_errors() {
        assert_eq!(Stat::of([]), None);
        assert_eq!(Stat::of([2.5]), Some(Stat { mean: 2.5, se: None }));
        // s = 2, n = 4.
        let four = Stat::of([1.0, 3.0, 5.0, 3.0 + 2.0 * f64::EPSILON]).unwrap();
        assert!((four.mean - 3.0).abs() < 1e-12 && (four.se.unwrap() - (8.0f64 / 3.0 / 4.0).sqrt()).abs() < 1e-12);
        assert_eq!(Stat::of([1.0, 1.0]).unwrap().se, Some(0.0));
    }

    fn summary(model: &str, values: &[f64]) -> Summary {
        let val_nll = Stat::of(values.iter().copied());
        let (corpus, model) = ("c".to_owned(), model.to_owned());
        let (answer_nll, proof_nll, source_nll) = (None, None, None);
        let second_half_nll = None;
        Summary { corpus, model, seeds: values.len(), val_nll, second_half_nll, answer_nll, proof_nll, source_nll }
    }

    fn ranked(all: &[Summary]) -> Option<String> {
        ranking(&all.iter().collect::<Vec<_>>(), |s| s.val_nll)
    }

    #[test]
    fn the_order_claims_no_more_than_was_measured() {
        let [a, b, c] = [("a", [2.0, 2.2]), ("b", [1.0, 1.2]), ("c", [1.1, 1.3])].map(|(m, v)| summary(m, &v));
        // Errors of 0.1 each: 0.1 apart is near, 0.9 is far, two of their difference are 0.283.
        let text = ranked(&[a.clone(), b.clone(), c]).unwrap();
        assert_eq!(text, "b 1.100 ≈ c 1.200 < a 2.100 (≈: less than two standard errors apart)");
        let edge = |x: f64| ranked(&[summary("a", &[1.0, 1.2]), summary("b", &[x, x + 0.2])]).unwrap();
        assert!(edge(1.28).contains('≈') && edge(1.29).contains('<'), "{} {}", edge(1.28), edge(1.29));
        let one = ranked(&[summary("a", &[2.0]), summary("b", &[1.0])]).unwrap();
        assert_eq!(one, "b 1.000 < a 2.000 (one seed cannot tell chance from difference)");
        assert!(ranked(&[summary("a", &[2.0]), summary("b", &[2.0])]).unwrap().starts_with("a 2.000 = b 2.000"));
        assert!(ranked(&[a.clone(), summary("d", &[1.0])]).unwrap().contains("one seed cannot"));
        assert_eq!(ranked(&[a, summary("d", &[])]), None);
        assert_eq!(ranked(&[b]), None);
    }

    #[test]
    fn the_papers_order_holds_the_models_that_are_there() {
        let models = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let all = models(&["untied", "recurrent", "gau", "flash", "wango", "tango"]);
        let text = |kind, blocks| paper(kind, blocks, &all).1.unwrap();
        assert_eq!(text(Kind::Prose, 4), "tango 3.293 < wango 3.355 < recurrent 3.392 < flash 3.465");
        assert_eq!(text(Kind::Lean, 4), "tango 1.719 < wango 2.271 < flash 2.377 < recurrent 2.530");
        assert_eq!(text(Kind::Lean, 8), "wango 2.231 < recurrent 2.364");
        assert_eq!(text(Kind::Mathematics, 8), "tango 0.473 < wango 0.487 < recurrent 0.537 < untied 0.556");
        assert_eq!(paper(Kind::Prose, 4, &models(&["gau", "untied"])), ("FineWeb-Edu", None));
        for numbers in [PROSE, LEAN, LEAN_8, MATHEMATICS] {
            assert!(numbers.is_sorted_by(|a, b| a.1 < b.1));
        }
    }
}
