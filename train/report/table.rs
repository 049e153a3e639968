//! The tables of the page: one for every corpus, a row for every model of every run, means over seeds.

use serde_json::Value;

use super::read::RunData;
use super::series::{names, place};
use crate::summary::Stat;

/// Which of a column's values is the best.
#[derive(Clone, Copy, PartialEq)]
enum Best {
    Low,
    High,
    /// A condition, not an outcome.
    None,
}

#[derive(Clone, Copy)]
enum Form {
    /// `1,234`
    Whole,
    /// `1.23 M`
    Short,
    /// `1.234 ± 0.012`
    Loss,
    /// `1.2`
    Tenth,
    /// `12.3 MiB`
    Bytes,
}

/// A column: the key in a row of results, what is written above it, what that means.
struct Column(&'static str, &'static str, &'static str, Best, Form);

const COLUMNS: [Column; 14] = [
    Column("params", "parameters", "distinct parameters without the token table", Best::None, Form::Whole),
    Column("params_total", "in all", "distinct parameters, token table included", Best::None, Form::Whole),
    Column("macs", "MACs", "multiply-accumulates of a forward pass over one sequence", Best::Low, Form::Short),
    Column("val_nll", "val NLL", "validation loss, nats per token", Best::Low, Form::Loss),
    Column("bits_per_byte", "bits/byte", "validation loss, bits per byte", Best::Low, Form::Loss),
    Column("answer_nll", "answer NLL", "the same over answers, nats per token", Best::Low, Form::Loss),
    Column("proof_nll", "proof NLL", "the same over proofs, nats per token", Best::Low, Form::Loss),
    Column("source_nll", "source NLL", "the same over all but proofs, nats per token", Best::Low, Form::Loss),
    Column("second_half_nll", "2nd half NLL", "the second half of every window given the first", Best::Low, Form::Loss),
    Column("gap_nll", "gap NLL", "validation loss on gaps, nats per token", Best::Low, Form::Loss),
    Column("rmse", "RMSE", "root mean squared error over all predictions", Best::Low, Form::Loss),
    Column("tok_s", "tok/s", "training tokens per second, evaluations not counted", Best::High, Form::Short),
    Column("peak_bytes", "peak memory", "the most memory that tensors held at once", Best::Low, Form::Bytes),
    Column("seconds", "seconds", "of training and evaluations", Best::Low, Form::Tenth),
];

/// A table.
pub(super) struct Table {
    /// The corpus; empty where a run has none.
    pub corpus: String,
    pub columns: Vec<(&'static str, &'static str)>,
    pub rows: Vec<Row>,
    /// Sentences below it.
    pub notes: Vec<String>,
}

pub(super) struct Row {
    pub run: String,
    pub model: String,
    pub seeds: usize,
    pub cells: Vec<Cell>,
}

#[derive(Clone, Default)]
pub(super) struct Cell {
    pub text: String,
    /// To sort by.
    pub value: Option<f64>,
    pub best: bool,
}

/// `1234567` as `1,234,567`.
pub(super) fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let start = digits.len() % 3;
    let groups = digits.as_bytes()[start..].chunks(3).map(|group| String::from_utf8_lossy(group).into_owned());
    let first = (start > 0).then(|| digits[..start].to_owned());
    first.into_iter().chain(groups).collect::<Vec<_>>().join(",")
}

/// Three digits and a unit.
fn scaled(x: f64, step: f64, units: &[&str]) -> String {
    let n = (1..units.len()).take_while(|&n| x >= step.powi(n as i32)).last().unwrap_or(0);
    let value = x / step.powi(n as i32);
    let digits = if n == 0 || value >= 100.0 { 0 } else { 1 + usize::from(value < 10.0) };
    format!("{value:.digits$} {}", units[n]).trim_end().to_owned()
}

fn written(form: Form, Stat { mean, se }: Stat) -> String {
    if !mean.is_finite() {
        return "not finite".to_owned();
    }
    match (form, se) {
        (Form::Whole, _) => thousands(mean as u64),
        (Form::Short, _) => scaled(mean, 1e3, &["", "k", "M", "G", "T", "P"]),
        (Form::Bytes, _) => scaled(mean, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"]),
        (Form::Tenth, _) => format!("{mean:.1}"),
        (Form::Loss, Some(se)) => format!("{mean:.3} ± {se:.3}"),
        (Form::Loss, None) => format!("{mean:.3}"),
    }
}

/// The rows of one model of a run on a corpus.
struct Group<'a> {
    corpus: usize,
    run: &'a RunData,
    model: &'a str,
    rows: Vec<&'a Value>,
}

/// One table for every corpus of these runs.
pub(super) fn tables(runs: &[RunData]) -> Vec<Table> {
    let (mut corpora, mut groups) = (vec![], Vec::<Group>::new());
    for run in runs {
        for row in run.rows() {
            let corpus = place(&mut corpora, run.corpus(row["corpus"].as_str().unwrap_or_default()));
            let model = row["model"].as_str().unwrap_or_default();
            let same = |g: &&mut Group| (g.corpus, g.model) == (corpus, model) && std::ptr::eq(g.run, run);
            match groups.iter_mut().find(same) {
                Some(group) => group.rows.push(row),
                None => groups.push(Group { corpus, run, model, rows: vec![row] }),
            }
        }
    }
    let named = names(&corpora).into_iter().enumerate();
    named.map(|(n, name)| table(name, groups.iter().filter(|group| group.corpus == n).collect())).collect()
}

fn table(corpus: String, groups: Vec<&Group>) -> Table {
    let number = |row: &Value, key: &str| row[key].as_f64();
    let known = |column: &&Column| groups.iter().any(|g| g.rows.iter().any(|row| number(row, column.0).is_some()));
    let columns: Vec<&Column> = COLUMNS.iter().filter(known).collect();
    let mut rows: Vec<Row> = vec![];
    for group in &groups {
        let cell = |column: &&Column| {
            let stat = Stat::of(group.rows.iter().filter_map(|row| number(row, column.0)));
            let text = stat.map_or_else(|| "–".to_owned(), |stat| written(column.4, stat));
            Cell { text, value: stat.map(|stat| stat.mean), best: false }
        };
        let cells = columns.iter().map(cell).collect();
        rows.push(Row { run: group.run.name.clone(), model: group.model.to_owned(), seeds: group.rows.len(), cells });
    }
    for (n, column) in columns.iter().enumerate() {
        let values = || rows.iter().filter_map(|row| row.cells[n].value).filter(|x| x.is_finite());
        let best = match column.3 {
            Best::Low => values().min_by(f64::total_cmp),
            Best::High => values().max_by(f64::total_cmp),
            Best::None => None,
        };
        // Alone nobody is the best.
        if values().count() > 1 {
            rows.iter_mut().for_each(|row| row.cells[n].best = best.is_some() && row.cells[n].value == best);
        }
    }
    let columns = columns.iter().map(|column| (column.1, column.2)).collect();
    Table { notes: notes(&groups), corpus, columns, rows }
}

/// What losses are to be compared with.
fn notes(groups: &[&Group]) -> Vec<String> {
    let mut notes = vec![];
    for group in groups {
        let corpus = &group.rows[0]["corpus"];
        let facts = group.run.data().iter().find(|facts| facts["name"] == *corpus);
        if let Some(entropy) = facts.and_then(|facts| facts["unigram_nll"].as_f64()) {
            // Earlier versions did not note it.
            let tokenizer = facts.and_then(|facts| facts["tokenizer"].as_str()).unwrap_or_default();
            let unit = if ["byte", ""].contains(&tokenizer) { "bytes" } else { "tokens" };
            place(&mut notes, format!("Entropy of single {unit} of the held-out text: {entropy:.3} nats."));
        }
        if let Some(rmse) = group.run.results["floor"]["rmse"].as_f64() {
            place(&mut notes, format!("RMSE of the exact posterior, below which none can fall: {rmse:.3}."));
        }
    }
    if groups.iter().any(|group| group.rows.len() > 1) {
        notes.push("Mean ± standard error over the seeds; other columns are means.".to_owned());
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_are_short() {
        let short = |x| scaled(x, 1e3, &["", "k", "M", "G", "T", "P"]);
        assert_eq!(
            [7.0, 999.0, 1234.0, 156_004.9, 4.86e6, 1e19].map(short),
            ["7", "999", "1.23 k", "156 k", "4.86 M", "10000 P"]
        );
        assert_eq!(scaled(3.5 * 1024.0 * 1024.0, 1024.0, &["B", "KiB", "MiB"]), "3.50 MiB");
        assert_eq!([0, 12, 123, 1234, 1_234_567].map(thousands), ["0", "12", "123", "1,234", "1,234,567"]);
    }

    #[test]
    fn rows_are_means_over_seeds_and_the_best_are_marked() {
        let row = |model: &str, corpus: &str, nll: f64, tok_s: f64| json!({"model": model, "corpus": corpus, "val_nll": nll, "tok_s": tok_s, "params": 5});
        let results = json!({
            "data": [{"name": "a/x", "unigram_nll": 3.0}],
            "rows": [row("m", "a/x", 1.0, 10.0), row("n", "a/x", 3.0, 5.0), row("m", "a/x", 2.0, 20.0), row("m", "y", 9.0, 1.0)],
        });
        let peak = json!({"rows": [{"model": "m", "corpus": "a/x", "peak_bytes": 2048, "val_nll": null}]});
        let run = |name: &str, results| RunData { name: name.into(), results, records: vec![] };
        let found = tables(&[run("r", results), run("s", peak)]);
        assert_eq!(found.iter().map(|t| (t.corpus.as_str(), t.rows.len())).collect::<Vec<_>>(), [("x", 3), ("y", 1)]);
        let table = &found[0];
        assert_eq!(
            table.columns.iter().map(|c| c.0).collect::<Vec<_>>(),
            ["parameters", "val NLL", "tok/s", "peak memory"]
        );
        let texts = |n: usize| table.rows[n].cells.iter().map(|cell| cell.text.as_str()).collect::<Vec<_>>();
        assert_eq!(texts(0), ["5", "1.500 ± 0.500", "15", "–"]);
        assert_eq!(texts(2), ["–", "–", "–", "2.00 KiB"]);
        assert_eq!((table.rows[0].seeds, table.rows[1].seeds, table.rows[2].run.as_str()), (2, 1, "s"));
        let best = |n: usize| table.rows[n].cells.iter().map(|cell| cell.best).collect::<Vec<_>>();
        assert_eq!([best(0), best(1)], [vec![false, true, true, false], vec![false; 4]]);
        assert!(found[1].rows[0].cells.iter().all(|cell| !cell.best), "alone nobody is the best");
        assert_eq!(table.notes[0], "Entropy of single bytes of the held-out text: 3.000 nats.");
        assert_eq!((table.notes.len(), found[1].notes.len()), (2, 0));
    }
}
