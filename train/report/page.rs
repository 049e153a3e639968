//! The page itself.

use maud::{DOCTYPE, Markup, PreEscaped, html as markup};
use serde_json::Value;

use super::read::{RunData, plain};
use super::series::{Curves, curves, place};
use super::table::{Cell, Row, Table, tables, thousands};

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("charts.js");
/// Nothing is loaded from anywhere, whatever stands in the page.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; \
                      base-uri 'none'; form-action 'none'";

/// A value as JSON that can stand in a script element: without `<`, which begins its end.
fn embedded(curves: &Curves) -> String {
    // Only numbers, text and lists: that cannot fail.
    serde_json::to_string(curves).unwrap_or_else(|_| "null".to_owned()).replace('<', "\\u003c")
}

pub(super) fn html(runs: &[RunData], title: Option<&str>) -> String {
    let names = runs.iter().map(|run| run.name.as_str()).collect::<Vec<_>>().join(", ");
    let title = title.map_or_else(|| format!("kumiki: {names}"), str::to_owned);
    let curves = curves(runs);
    let page = markup! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="generator" content={ "kumiki " (env!("CARGO_PKG_VERSION")) };
                title { (title) }
                // Browsers ask for one that is not named.
                link rel="icon" href="data:,";
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { (title) }
                    label.theme { "Colours " select #theme {
                        option value="auto" { "as the system" }
                        option value="light" { "light" }
                        option value="dark" { "dark" }
                    } }
                }
                main {
                    section.runs aria-label="Runs" { @for run in runs { (card(run)) } }
                    (charts(&curves))
                    section aria-labelledby="models" {
                        h2 #models { "Models" }
                        @let tables = tables(runs);
                        @if tables.is_empty() { p { "No model is done yet." } }
                        @for table in &tables { (results(table, runs.len() > 1)) }
                        @if !tables.is_empty() { p.note { "A click on the name of a column sorts. ★ marks the best value." } }
                    }
                    (configuration(runs))
                    (environment(runs))
                }
                footer { "Written by kumiki " (env!("CARGO_PKG_VERSION")) ". This page loads nothing; it can be kept and sent as it is." }
                script type="application/json" #data { (PreEscaped(embedded(&curves))) }
                script { (PreEscaped(SCRIPT)) }
            }
        }
    };
    page.into_string()
}

/// What a run is, and how far.
fn card(run: &RunData) -> Markup {
    let text = |value: &Value| plain(value);
    let results = &run.results;
    let finished = results["finished"] == true;
    let error = results["failed"]["error"].as_str();
    let (class, state) = match (finished, error) {
        (true, _) => ("good", "finished"),
        (false, Some(_)) => ("bad", "failed"),
        (false, None) => ("open", "not finished"),
    };
    let corpora: Vec<String> =
        run.data().iter().map(|facts| run.corpus(facts["name"].as_str().unwrap_or("")).0).collect();
    markup! {
        article {
            h2 { (run.name) " " span class={ "state " (class) } { (state) } }
            p {
                (run.text("experiment")) ", preset " (run.text("preset"))
                @if !corpora.is_empty() { ", on " (corpora.join(", ")) }
                ", seed" (if results["seeds"].as_array().is_some_and(|all| all.len() > 1) { "s " } else { " " }) (text(&results["seeds"]))
            }
            @if let Some(error) = error {
                @let model = text(&results["failed"]["model"]);
                p.bad { @if !error.contains(&model) { (model) ": " } (error) }
            }
            @let begun = begun(run);
            @if !begun.is_empty() { ul { @for line in &begun { li { (line) } } } }
        }
    }
}

/// A line for every training that has steps but no row: it is at work, or was interrupted.
fn begun(run: &RunData) -> Vec<String> {
    let done = |r: &crate::log::Record| {
        run.rows().iter().any(|row| {
            row["model"].as_str() == r.model.as_deref()
                && row["seed"].as_u64() == r.seed
                && row["corpus"].as_str().is_none_or(|corpus| Some(corpus) == r.corpus.as_deref())
        })
    };
    let mut last: Vec<(_, String)> = vec![];
    for record in run.records.iter().filter(|r| !done(r)) {
        let key = (record.corpus.clone(), record.seed, record.model.clone());
        let on = record.corpus.as_deref().map_or(String::new(), |c| format!(" on {}", run.corpus(c).0));
        let seed = record.seed.map_or(String::new(), |seed| format!(" with seed {seed}"));
        let of =
            run.results["settings"]["steps"].as_u64().map_or(String::new(), |all| format!(" of {}", thousands(all)));
        let model = record.model.as_deref().unwrap_or("model");
        let line = format!("{model}{on}{seed}: step {}{of}, loss {:.3}", thousands(record.step), record.loss);
        match last.iter_mut().find(|(other, _)| *other == key) {
            Some(found) => found.1 = line,
            None => last.push((key, line)),
        }
    }
    last.into_iter().map(|(_, line)| line).collect()
}

/// Of a chart: its key in the numbers, what is on its y axis, what is written above it.
const CHARTS: [(&str, &str, &str); 4] = [
    ("loss", "nats per token", "Loss: training (lines), validation (dots)"),
    ("tok_s", "tokens per second", "Throughput"),
    ("grad_norm", "norm", "Gradient norm before clipping"),
    ("lr", "learning rate", "Learning rate"),
];

fn charts(curves: &Curves) -> Markup {
    markup! {
        section aria-labelledby="curves" {
            h2 #curves { "Curves" }
            @if curves.series.is_empty() { p { "There are no steps yet." } }
            @else {
                noscript { p { "The charts need JavaScript; the tables below do not." } }
                form.controls {
                    @if curves.corpora.len() > 1 {
                        label { "Corpus " select #corpus {
                            @for (n, name) in curves.corpora.iter().enumerate() { option value=(n) { (name) } }
                        } }
                    }
                    label { "Against " select #x {
                        option value="step" { "steps" }
                        option value="tokens" { "tokens" }
                        option value="seconds" { "seconds of training" }
                    } }
                    label { "Smoothing " input #smooth type="range" min="0" max="0.99" step="0.01" value="0"; output #weight for="smooth" {} }
                    label { input #logx type="checkbox"; " log x" }
                    label { input #peaks type="checkbox"; " whole range of y" }
                    button #unzoom type="button" hidden { "Reset zoom" }
                }
                fieldset #legend { legend { "Shown" } }
                div #charts {
                    @for (key, unit, title) in CHARTS {
                        figure data-key=(key) data-unit=(unit) {
                            figcaption { span { (title) } label { input type="checkbox" checked[key == "grad_norm"]; " log y" } }
                            div.plot {}
                            p.note hidden {}
                        }
                    }
                }
                p.note {
                    "Faint: as measured. Strong: smoothed by an exponential mean over both sides. Drag over a chart to zoom; with a chart in focus the "
                    "arrow keys read it. Unless the whole range of y is shown, the axis leaves out the highest twentieth of a curve."
                    @if let Some(most) = curves.series.iter().map(|s| s.stretch).filter(|n| *n > 1).max() {
                        " Long logs are thinned: a point stands for up to " (thousands(most as u64)) " steps, a line for their means, "
                        "the faint band for their lowest and highest values."
                    }
                }
                // Where the script finds the namespace of pictures.
                svg #nothing hidden {}
            }
        }
    }
}

fn results(table: &Table, several: bool) -> Markup {
    let seeds = table.rows.iter().any(|row| row.seeds > 1);
    let head = |name: &str, title: &str, text: bool| {
        markup! { th class=[text.then_some("left")] scope="col" aria-sort="none" { button type="button" title=[Some(title).filter(|t| !t.is_empty())] { (name) } } }
    };
    let row = |row: &Row| {
        markup! {
            tr {
                @if several { td data-text { (row.run) } }
                th scope="row" { (row.model) }
                @if seeds { td data-value=(row.seeds) { (row.seeds) } }
                @for cell in &row.cells { (value(cell)) }
            }
        }
    };
    markup! {
        // With a place in the order of keys, so that it can be scrolled with them.
        div.wide tabindex="0" role="region" aria-label={ "Models " (table.corpus) } {
            table.sortable {
                @if !table.corpus.is_empty() { caption { "on " (table.corpus) } }
                thead { tr {
                    @if several { (head("run", "", true)) }
                    (head("model", "", true))
                    @if seeds { (head("seeds", "how many are done", false)) }
                    @for (name, title) in &table.columns { (head(name, title, false)) }
                } }
                tbody { @for r in &table.rows { (row(r)) } }
            }
        }
        @for note in &table.notes { p.note { (note) } }
    }
}

fn value(cell: &Cell) -> Markup {
    markup! {
        td class=[cell.best.then_some("best")] data-value=[cell.value] {
            @if cell.best { span.star aria-hidden="true" { "★ " } }
            (cell.text)
            @if cell.best { span.unseen { " (best)" } }
        }
    }
}

/// A table of what runs say under the same keys; a key on which they differ is marked.
fn compared(runs: &[RunData], what: &str, said: &[Vec<(String, String)>], id: &str) -> Markup {
    let mut keys: Vec<&String> = vec![];
    for (key, _) in said.iter().flatten() {
        place(&mut keys, key);
    }
    let of =
        |n: usize, key: &str| said[n].iter().find(|(other, _)| other == key).map_or("–", |(_, value)| value.as_str());
    let differ = |key: &str| (1..said.len()).any(|n| of(n, key) != of(0, key));
    markup! {
        @if runs.len() > 1 {
            p { label { input.differences type="checkbox" data-of=(id); " only what differs" } }
        }
        div.wide tabindex="0" role="region" aria-label=(what) {
            table #(id) {
                thead { tr { th scope="col" { (what) } @for run in runs { th scope="col" { (run.name) } } } }
                tbody { @for key in keys {
                    tr class=[differ(key).then_some("differs")] {
                        th scope="row" { @if differ(key) { span title="differs" { "≠ " } } (key) }
                        @for n in 0..runs.len() { td { (of(n, key)) } }
                    }
                } }
            }
        }
    }
}

fn configuration(runs: &[RunData]) -> Markup {
    let settings = |run: &RunData| {
        let asked = ["experiment", "preset", "models", "seeds"].map(|key| (key.to_owned(), plain(&run.results[key])));
        asked.into_iter().chain(run.settings()).collect()
    };
    let said: Vec<Vec<(String, String)>> = runs.iter().map(settings).collect();
    markup! {
        section aria-labelledby="configuration" {
            h2 #configuration { "Configuration" }
            (compared(runs, "setting", &said, "settings"))
        }
    }
}

/// Data and machines.
fn environment(runs: &[RunData]) -> Markup {
    let said: Vec<Vec<(String, String)>> = runs.iter().map(facts).collect();
    markup! {
        section aria-labelledby="environment" {
            h2 #environment { "Data and machine" }
            (compared(runs, "fact", &said, "facts"))
        }
    }
}

fn facts(run: &RunData) -> Vec<(String, String)> {
    let mut out = vec![("kumiki".to_owned(), plain(&run.results["kumiki"]))];
    let mut machines = vec![];
    place(&mut machines, &run.results["machine"]);
    // Of a run that was continued elsewhere.
    for row in run.rows() {
        place(&mut machines, &row["machine"]);
    }
    machines.retain(|machine| machine.is_object());
    for (n, machine) in machines.iter().enumerate() {
        let number = if n > 0 { format!(" {}", n + 1) } else { String::new() };
        let fields = machine.as_object().into_iter().flatten();
        out.extend(fields.map(|(key, value)| (format!("machine{number}: {key}"), plain(value))));
    }
    for facts in run.data() {
        let name = run.corpus(facts["name"].as_str().unwrap_or_default()).0;
        let fields = facts.as_object().into_iter().flatten().filter(|(key, _)| *key != "name");
        out.extend(fields.map(|(key, value)| {
            let value = value.as_u64().map_or_else(|| plain(value), thousands);
            (format!("{name}: {}", key.replace('_', " ")), value)
        }));
    }
    if let Some(floor) = run.results["floor"].as_object() {
        let scalars = floor.iter().filter(|(_, value)| !value.is_array());
        out.extend(scalars.map(|(key, value)| (format!("held out: {}", key.replace('_', " ")), plain(value))));
    }
    out
}
