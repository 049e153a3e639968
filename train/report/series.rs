//! The curves of the page: the logs of all runs, one series for each training, thinned so that the page stays small.
//!
//! A log of more steps than a series may have points is cut into stretches of equally many steps. A point then stands for a
//! stretch: its mean, its lowest and its highest value, at its last step. Values that are no numbers are left out and counted; a
//! stretch of nothing else is a gap.

use serde::Serialize;

use super::read::RunData;
use crate::log::Record;

/// The most points of all series of a page, and the least and most of one.
const POINTS: usize = 48_000;
const OF_ONE: (usize, usize) = (100, 2000);

/// What `charts.js` draws.
#[derive(Serialize)]
pub(super) struct Curves {
    /// Names of corpora.
    pub corpora: Vec<String>,
    /// Models of runs: each has one colour.
    pub models: Vec<Model>,
    pub series: Vec<Series>,
}

#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Model {
    pub run: String,
    pub model: String,
}

/// One training.
#[derive(Serialize)]
pub(super) struct Series {
    /// Of [`Curves::models`].
    pub model: usize,
    /// Of [`Curves::corpora`].
    pub corpus: usize,
    pub seed: Option<u64>,
    /// How many steps a point stands for.
    pub stretch: usize,
    pub step: Vec<u64>,
    pub tokens: Vec<u64>,
    /// Of training, evaluations not counted.
    pub seconds: Vec<f64>,
    pub loss: Values,
    pub tok_s: Values,
    pub grad_norm: Values,
    pub lr: Values,
    /// Validation losses: step, tokens, seconds, value.
    pub val: Vec<(u64, u64, f64, f64)>,
}

/// One quantity. What is no number becomes `null`.
#[derive(Serialize)]
pub(super) struct Values {
    pub mean: Vec<f64>,
    /// Empty where a point is a single step.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub low: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub high: Vec<f64>,
    /// Steps whose value was no number.
    pub lost: usize,
}

/// `x` to five digits: more cannot be seen.
fn rounded(x: f64) -> f64 {
    if x.is_finite() { format!("{x:.4e}").parse().unwrap_or(x) } else { f64::NAN }
}

impl Values {
    fn of(records: &[&Record], stretch: usize, what: impl Fn(&Record) -> f64) -> Values {
        let mut out = Values { mean: vec![], low: vec![], high: vec![], lost: 0 };
        for records in records.chunks(stretch) {
            let found: Vec<f64> = records.iter().map(|r| what(r)).filter(|y| y.is_finite()).collect();
            out.lost += records.len() - found.len();
            out.mean.push(rounded(found.iter().sum::<f64>() / found.len() as f64));
            if stretch > 1 {
                out.low.push(rounded(found.iter().copied().fold(f64::NAN, f64::min)));
                out.high.push(rounded(found.iter().copied().fold(f64::NAN, f64::max)));
            }
        }
        out
    }
}

impl Series {
    fn new(records: &[&Record], most: usize, model: usize, corpus: usize) -> Series {
        let (mut seconds, mut before) = (vec![0.0], 0);
        for record in records {
            let took = record.tokens.saturating_sub(before) as f64 / record.tok_s;
            seconds.push(seconds[seconds.len() - 1] + if took.is_finite() { took } else { 0.0 });
            before = record.tokens;
        }
        let stretch = records.len().div_ceil(most).max(1);
        let lasts = || (0..records.len()).filter(|n| (n + 1) % stretch == 0 || n + 1 == records.len());
        let at = |n: usize| rounded(seconds[n + 1]);
        let val = records.iter().enumerate().filter_map(|(n, r)| {
            let loss = r.val_loss.filter(|loss| loss.is_finite())?;
            Some((r.step, r.tokens, at(n), rounded(loss)))
        });
        let val: Vec<_> = val.collect();
        let thin = val.len().div_ceil(most).max(1);
        Series {
            model,
            corpus,
            seed: records.first().and_then(|r| r.seed),
            stretch,
            step: lasts().map(|n| records[n].step).collect(),
            tokens: lasts().map(|n| records[n].tokens).collect(),
            seconds: lasts().map(at).collect(),
            loss: Values::of(records, stretch, |r| r.loss),
            tok_s: Values::of(records, stretch, |r| r.tok_s),
            grad_norm: Values::of(records, stretch, |r| r.grad_norm),
            lr: Values::of(records, stretch, |r| r.lr),
            // From the last one backwards: that one is what counts.
            val: val.into_iter().rev().step_by(thin).collect::<Vec<_>>().into_iter().rev().collect(),
        }
    }
}

/// The place of `item` in `all`, where it is put if need be.
pub(super) fn place<T: PartialEq>(all: &mut Vec<T>, item: T) -> usize {
    all.iter().position(|other| *other == item).unwrap_or_else(|| {
        all.push(item);
        all.len() - 1
    })
}

/// A training: model, corpus, seed.
type Key = (usize, usize, Option<u64>);

/// The curves of these runs.
pub(super) fn curves(runs: &[RunData]) -> Curves {
    let (mut corpora, mut models) = (vec![], vec![]);
    let mut trainings: Vec<(Key, Vec<&Record>)> = vec![];
    for run in runs {
        for record in &run.records {
            let corpus = place(&mut corpora, run.corpus(record.corpus.as_deref().unwrap_or_default()));
            let model = record.model.clone().unwrap_or_else(|| "model".to_owned());
            let model = place(&mut models, Model { run: run.name.clone(), model });
            let key = (model, corpus, record.seed);
            // Logs are written training by training: the last one is almost always meant.
            match trainings.iter_mut().rev().find(|training| training.0 == key) {
                Some(training) => training.1.push(record),
                None => trainings.push((key, vec![record])),
            }
        }
    }
    let most = (POINTS / trainings.len().max(1)).clamp(OF_ONE.0, OF_ONE.1);
    let series = trainings.iter().map(|((model, corpus, _), records)| Series::new(records, most, *model, *corpus));
    let series = series.collect();
    Curves { corpora: names(&corpora), models, series }
}

/// The names of corpora, told apart where texts of one name differ.
pub(super) fn names(corpora: &[(String, String)]) -> Vec<String> {
    let name = |(n, (name, _)): (usize, &(String, String))| {
        let earlier = corpora[..n].iter().filter(|other| other.0 == *name).count();
        if earlier > 0 { format!("{name} ({})", earlier + 1) } else { name.clone() }
    };
    corpora.iter().enumerate().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64) -> Record {
        let loss = if step.is_multiple_of(1000) { f64::NAN } else { 1.0 + 1.0 / step as f64 };
        Record {
            model: Some("tango".into()),
            corpus: Some("dir/a".into()),
            seed: Some(0),
            step,
            loss: if step == 777 { 50.0 } else { loss },
            lr: 1e-3,
            grad_norm: f64::NAN,
            tokens: 100 * step,
            tok_s: 50.0,
            val_loss: step.is_multiple_of(10).then_some(2.0 / step as f64),
        }
    }

    #[test]
    fn long_logs_are_thinned_and_lose_no_peak() {
        let records: Vec<Record> = (1..=100_001).map(record).collect();
        let results = serde_json::json!({"data": [{"name": "dir/a", "fingerprint": "x"}]});
        let found = curves(&[RunData { name: "r".into(), results, records }]);
        assert_eq!((found.corpora, found.models.len(), found.series.len()), (vec!["a".to_owned()], 1, 1));
        let series = &found.series[0];
        assert_eq!((series.stretch, series.step.len(), series.step[0]), (51, 1961, 51));
        assert_eq!((series.step[1960], series.tokens[1960], series.seconds[1960]), (100_001, 10_000_100, 200_000.0));
        assert_eq!((series.loss.high[15], series.loss.lost, series.grad_norm.lost), (50.0, 100, 100_001));
        assert!((series.loss.mean[1000] - 1.0).abs() < 1e-3 && series.loss.low[15] < series.loss.mean[15]);
        assert!(series.grad_norm.mean.iter().all(|y| y.is_nan()) && series.tok_s.mean.iter().all(|y| *y == 50.0));
        assert!(series.val.len() <= 2000 && series.val.last().unwrap().0 == 100_000);
        let lengths = [&series.loss, &series.lr].map(|v| (v.mean.len(), v.low.len(), v.high.len()));
        assert_eq!(lengths, [(1961, 1961, 1961); 2]);
        let text = serde_json::to_string(&found.series).unwrap();
        assert!(text.len() < 300_000 && text.contains("[null,null") && !text.contains("NaN"), "{}", text.len());
    }

    #[test]
    fn short_logs_stay_as_they_are() {
        let run = |name: &str, print: &str, records: Vec<Record>| RunData {
            name: name.into(),
            results: serde_json::json!({"data": [{"name": "dir/a", "fingerprint": print}]}),
            records,
        };
        let seeded = (1..=3).map(|step| Record { seed: Some(1), ..record(step) });
        let found = curves(&[
            run("r", "x", (1..=20).map(record).chain(seeded).collect()),
            run("s", "y", vec![record(1)]),
            run("t", "x", vec![Record { corpus: None, model: None, ..record(1) }]),
        ]);
        assert_eq!(found.corpora, ["a", "a (2)", ""]);
        assert_eq!(found.models.iter().map(|m| m.run.as_str()).collect::<Vec<_>>(), ["r", "s", "t"]);
        let sizes: Vec<_> = found.series.iter().map(|s| (s.model, s.corpus, s.seed, s.step.len())).collect();
        assert_eq!(sizes, [(0, 0, Some(0), 20), (0, 0, Some(1), 3), (1, 1, Some(0), 1), (2, 2, Some(0), 1)]);
        assert!(found.series.iter().all(|s| s.stretch == 1 && s.loss.low.is_empty()));
        assert_eq!(found.series[0].val, [(10, 1000, 20.0, 0.2), (20, 2000, 40.0, 0.1)]);
        assert_eq!((rounded(1.234_567), rounded(-0.000_123_456), rounded(0.0)), (1.2346, -0.000_123_46, 0.0));
        assert!(rounded(f64::INFINITY).is_nan());
    }
}
