//! What a run prints at its end: a table for every corpus, and the order of the models beside the paper's.

use kumiki_train::compare::ModelResult;
use kumiki_train::kinds::Kind;
use kumiki_train::marks::Class;
use kumiki_train::run::{DataFacts, Results};
use kumiki_train::summary::{Stat, Summary, paper, ranking};
use kumiki_train::zoo::{Suite, suite_of};

use crate::output::plain;
use crate::table::{optional, short, table, thousands};

const PAPER: &str = "order in the paper";

/// Everything that is done.
pub fn report(results: &Results) -> String {
    let corpora: Vec<String> = results.data.iter().filter_map(|data| corpus(results, data)).collect();
    let mut text = corpora.join("\n\n");
    // Where corpora differ, what is right of all.
    let unit = if results.data.iter().all(|data| data.unit() == "byte") { "byte" } else { "token" };
    text += &format!("\n\nparameters without the token table; MACs of one sequence forward; NLL in nats per {unit}");
    if text.contains(PAPER) {
        text += "\nthe paper's sizes, budgets and tokens are others than these: only the orders compare";
    }
    if results.plan.seeds.len() > 1 {
        text += "\nmean ± standard error over the seeds; tok/s and seconds are means";
    }
    text
}

/// `1.234`, `1.234 ± 0.012` or a dash.
pub fn stat(found: Option<Stat>) -> String {
    match found {
        Some(Stat { mean, se: Some(se) }) => format!("{mean:.3} ± {se:.3}"),
        other => optional(other.map(|stat| stat.mean), 3),
    }
}

fn corpus(results: &Results, data: &DataFacts) -> Option<String> {
    let summaries: Vec<&Summary> = results.summary.iter().filter(|s| s.corpus == data.name).collect();
    if summaries.is_empty() {
        return None;
    }
    let found = |class: &Class| summaries.iter().any(|s| s.of(*class).is_some());
    // Lean that was held out without a proof in it shows a dash.
    let expected = |class: &Class| data.kind == Kind::Lean && *class != Class::Answer;
    let classes: Vec<Class> = Class::ALL.into_iter().filter(|class| found(class) || expected(class)).collect();
    let names: Vec<String> = classes.iter().map(|class| format!("{} NLL", class.name())).collect();
    let mut header = vec!["model", "parameters", "MACs", "val NLL", "perplexity", "bits/byte"];
    header.extend(names.iter().map(String::as_str));
    // What compares models of two stacks with all others.
    let halves = summaries.iter().any(|s| suite_of(&s.model) == Suite::Double && s.second_half_nll.is_some());
    if halves {
        header.push("2nd half NLL");
    }
    header.extend(["tok/s", "seconds"]);
    let rows: Vec<Vec<String>> = summaries.iter().map(|summary| row(results, summary, &classes, halves)).collect();
    let mut text = String::new();
    if results.plan.corpora.len() > 1 {
        text += &format!("`{}`\n", plain(&data.name));
    }
    text += &table(&header, &rows);
    if let Some(entropy) = data.unigram_nll {
        text += &format!("\nentropy of single {}s of the held-out text: {entropy:.3} nats", data.unit());
    }
    if let Some(order) = ranking(&summaries, |s| s.second_half_nll).filter(|_| halves) {
        text += &format!("\norder here, by the second half of every window given the first: {order}");
    }
    if let Some(ours) = ranking(&summaries, |s| s.val_nll) {
        let models: Vec<String> = summaries.iter().map(|summary| summary.model.clone()).collect();
        let (where_, theirs) = paper(data.kind, results.plan.settings.blocks, &models);
        text += &format!("\norder here, by val NLL: {ours}");
        if let Some(theirs) = theirs {
            text += &format!("\n{PAPER} ({where_}): {theirs}");
        }
    }
    Some(text)
}

fn row(results: &Results, summary: &Summary, classes: &[Class], halves: bool) -> Vec<String> {
    let mine = || {
        let rows = results.rows.iter().filter(|r| r.corpus == summary.corpus && r.result.model == summary.model);
        rows.map(|row| &row.result)
    };
    let mean = |of: fn(&ModelResult) -> f64| Stat::of(mine().map(of)).map_or(f64::NAN, |stat| stat.mean);
    let size = |of: fn(&ModelResult) -> u64| mine().next().map_or(0, of);
    let mut cells = vec![
        summary.model.clone(),
        thousands(size(|r| r.params as u64)),
        short(size(|r| r.macs) as f64),
        stat(summary.val_nll),
        stat(Stat::of(mine().filter_map(|r| r.val_nll.map(f64::exp)))),
        stat(Stat::of(mine().filter_map(|r| r.bits_per_byte))),
    ];
    cells.extend(classes.iter().map(|class| stat(summary.of(*class))));
    if halves {
        cells.push(stat(summary.second_half_nll));
    }
    cells.extend([short(mean(|r| r.tok_s)), format!("{:.1}", mean(|r| r.seconds))]);
    cells
}
