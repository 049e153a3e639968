//! The page as text. That it works in a browser is `tests/report.sh`'s business.

use serde_json::{Value, json};

use super::*;
use crate::log::Writer;
use crate::scratch::Scratch;

const EVIL: &str = "</script><script>alert('x')</script><img src=x onerror=alert(1)>\"&";

fn record(corpus: &str, model: &str, seed: u64, step: u64) -> crate::log::Record {
    crate::log::Record {
        model: Some(model.into()),
        corpus: Some(corpus.into()),
        seed: Some(seed),
        step,
        loss: if step == 3 { f64::NAN } else { 5.0 / step as f64 },
        lr: 1e-3,
        grad_norm: 1.0,
        tokens: 512 * step,
        tok_s: 1000.0,
        val_loss: (step == 4).then_some(2.0),
    }
}

fn results(corpus: &str) -> Value {
    json!({
        "kumiki": "0.1.0", "finished": false, "experiment": "compare tango", "preset": "nano",
        "settings": {"lr": 0.003, "steps": 9, "prior": {"points": 16}, "dtype": "f32"},
        "corpora": [corpus], "seeds": [0], "models": ["tango", "gau"],
        "data": [{"name": corpus, "kind": "prose", "fingerprint": "f", "unigram_nll": 3.1, "train_tokens": null}],
        "machine": {"simd": "avx2", "threads": 2},
        "rows": [{"corpus": corpus, "seed": 0, "model": "tango", "params": 12345, "val_nll": 2.0, "machine": {"simd": "avx2", "threads": 2}}],
        "failed": {"model": "gau", "error": "it broke"}
    })
}

/// A run on disk.
fn run(dir: &Scratch, name: &str, results: &Value, corpus: &str) -> std::path::PathBuf {
    dir.file(&format!("{name}/results.json"), results.to_string());
    let folder = dir.path().join(name);
    let mut log = Writer::create(folder.join("log.jsonl")).unwrap();
    for (model, steps) in [("tango", 9), ("gau", 4)] {
        (1..=steps).for_each(|step| log.write(&record(corpus, model, 0, step)).unwrap());
    }
    folder
}

#[test]
fn a_page_says_what_the_runs_say_and_loads_nothing() {
    let dir = Scratch::new();
    let mut other = results("dir/text.txt");
    other["settings"]["lr"] = json!(0.001);
    other["finished"] = json!(true);
    other["failed"] = Value::Null;
    let folders = [run(&dir, "a", &results("dir/text.txt"), "dir/text.txt"), run(&dir, "b", &other, "dir/text.txt")];
    let runs = RunData::read(&folders).unwrap();
    let page = html(&runs, None);
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("<html lang=\"en\">"));
    for phrase in [
        "<title>kumiki: a, b</title>",
        ">failed</span>",
        ">finished</span>",
        "12,345",
        "gau on text.txt with seed 0: step 4 of 9, loss 1.250",
        "prior.points",
        "<tr class=\"differs\"><th scope=\"row\"><span title=\"differs\">≠ </span>lr</th><td>0.003</td><td>0.001</td>",
        "<tr><th scope=\"row\">dtype</th>",
        "machine: simd",
        "Entropy of single bytes of the held-out text: 3.100 nats.",
    ] {
        assert!(page.contains(phrase), "no {phrase}");
    }
    assert!(!page.contains("dir/text.txt"), "paths are nobody's business");
    // Nothing that could be loaded, and if there were, the browser would be told not to.
    assert!(page.contains("Content-Security-Policy") && page.contains("default-src 'none'"));
    for word in
        ["http:", "https:", "//cdn", "src=", "@import", "fetch(", "XMLHttp", "import(", "sendBeacon", "WebSocket"]
    {
        assert!(!page.contains(word), "{word}");
    }
    assert_eq!((page.matches("href=").count(), page.matches("href=\"data:,\"").count()), (1, 1));
    assert!(page.matches("url(").count() == page.matches("url(#clip-").count());
    assert!(html(&runs, Some("My <title>")).contains("<title>My &lt;title&gt;</title>"));
    assert!(page.len() < 80_000, "{}", page.len());
}

#[test]
fn text_of_runs_stays_text() {
    let dir = Scratch::new();
    let mut results = results(EVIL);
    results["models"] = json!([EVIL]);
    results["rows"][0]["model"] = json!(EVIL);
    results["settings"][EVIL] = json!(EVIL);
    results["experiment"] = json!(EVIL);
    results["failed"]["error"] = json!(EVIL);
    results["machine"][EVIL] = json!(EVIL);
    let folder = run(&dir, "a", &results, EVIL);
    let mut runs = RunData::read(&[folder]).unwrap();
    runs[0].name = EVIL.to_owned();
    let page = html(&runs, Some(EVIL));
    assert_eq!(page.matches("<script").count(), 2, "the numbers and the script");
    assert_eq!(page.matches("</script").count(), 2);
    assert!(!page.contains("<img") && page.contains("&lt;img"));
    let opening = "<script id=\"data\" type=\"application/json\">";
    let start = page.find(opening).unwrap() + opening.len();
    let json: Value = serde_json::from_str(&page[start..start + page[start..].find("</script>").unwrap()]).unwrap();
    assert_eq!(json["models"][0]["run"], EVIL);
    // Its last part, as that of a path.
    assert_eq!(json["corpora"][0], EVIL.rsplit('/').next().unwrap());
    assert_eq!((&json["series"][0]["loss"]["mean"][2], &json["series"][0]["loss"]["lost"]), (&Value::Null, &json!(1)));
}

#[test]
fn what_is_no_run_is_named() {
    let dir = Scratch::new();
    let says = |folder: &Path, phrases: &[&str]| {
        let e = RunData::read(&[folder.to_owned()]).unwrap_err().to_string();
        phrases.iter().for_each(|phrase| assert!(e.contains(phrase), "{phrase}: {e}"));
    };
    says(&dir.path().join("none"), &["none` is no folder"]);
    says(dir.path(), &["holds no run", "results.json"]);
    dir.file("bad/results.json", "{");
    says(&dir.path().join("bad"), &["bad/results.json` is damaged", "not JSON"]);
    dir.file("other/results.json", "{}");
    says(&dir.path().join("other"), &["other/results.json` is damaged", "what was run"]);
    dir.file("grid/results.json", r#"{"finished": true, "experiment": "scaling"}"#);
    dir.file("grid/cells/x/log.jsonl", "");
    says(&dir.path().join("grid"), &["holds a grid", "grid/cells/"]);
    let folder = run(&dir, "torn", &results("math"), "math");
    dir.file("torn/log.jsonl", "{}\n");
    says(&folder, &["log.jsonl` line 1"]);
    // A run that was killed as it began.
    dir.file("young/results.json", r#"{"finished": false, "experiment": "compare tango"}"#);
    let page = html(&RunData::read(&[dir.path().join("young")]).unwrap(), None);
    assert!(page.contains("There are no steps yet.") && page.contains("No model is done yet."));
}

#[test]
fn runs_have_names_that_differ() {
    let dir = Scratch::new();
    for name in ["x/a", "y/a", "b"] {
        run(&dir, name, &results("math"), "math");
    }
    let names = |folders: &[&str]| {
        let folders: Vec<_> = folders.iter().map(|folder| dir.path().join(folder)).collect();
        RunData::read(&folders).unwrap().into_iter().map(|run| run.name).collect::<Vec<_>>()
    };
    assert_eq!(names(&["x/a", "b"]), ["a", "b"]);
    assert_eq!(names(&["x/a", "y/a"]), ["x/a", "y/a"]);
    let twice = names(&["b", "b/../b"]);
    assert!(twice[0].ends_with("/b") && twice[1] == format!("{} (2)", twice[0]), "{twice:?}");
}

#[test]
fn only_pages_are_replaced() {
    let dir = Scratch::new();
    let runs = RunData::read(&[run(&dir, "a", &results("math"), "math")]).unwrap();
    let path = dir.path().join("report.html");
    for _ in 0..2 {
        write(&path, &runs, None).unwrap();
    }
    let log = dir.path().join("a/log.jsonl");
    assert!(write(&log, &runs, None).unwrap_err().to_string().contains("is there already and is no page"));
    assert!(write(dir.path(), &runs, None).unwrap_err().to_string().contains("is no regular file"));
    assert!(
        write(&dir.path().join("no/x.html"), &runs, None).unwrap_err().to_string().contains("cannot write the page")
    );
}

/// The page and the pictures show a model in the same colours.
#[cfg(feature = "plots")]
#[test]
fn colours_are_those_of_the_pictures() {
    let style = include_str!("style.css");
    for n in 0..7 {
        let plotters::style::RGBColor(r, g, b) = crate::looks::Look::of(n).colour;
        let line = format!("--c{n}: light-dark(#{r:02x}{g:02x}{b:02x},");
        assert!(style.contains(&line), "{line}");
    }
}
