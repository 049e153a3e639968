//! Comparisons over several corpora and seeds, interrupted and extended.

mod common;

use common::{Scratch, exists, fail, json, kumiki, run, succeed};
use serde_json::Value;

const QUICK: [&str; 10] = ["--preset", "nano", "--steps", "2", "--seq", "32", "--batch", "2", "--eval-tokens", "256"];

fn compare<'a>(more: &[&'a str]) -> Vec<&'a str> {
    ["compare", "tango"].iter().chain(&QUICK).chain(more).copied().collect()
}

/// A row, or a record of the log, without what the clock says.
fn timeless(value: &Value) -> Value {
    let mut value = value.clone();
    for key in ["tok_s", "seconds", "peak_bytes"] {
        value.as_object_mut().unwrap().remove(key);
    }
    value
}

fn rows(results: &Value) -> Vec<Value> {
    results["rows"].as_array().unwrap().iter().map(timeless).collect()
}

fn log(path: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| timeless(&serde_json::from_str(line).unwrap())).collect()
}

const LEAN: &str = "/-- About a. -/\ntheorem a (h : 1 = 1 := rfl) : 2 = 2 := by\n  simp -- yes\n\ndef b := 3\n";

#[test]
fn several_corpora_and_seeds_in_one_run() {
    let dir = Scratch::new();
    let out = dir.path("out");
    let prose = dir.file("book.txt", "A sentence stands here. ".repeat(200));
    dir.file("lib/One.lean", LEAN.repeat(60));
    dir.file("lib/deep/Two.lean", LEAN.repeat(60));
    for folder in ["train-easy", "interpolate"] {
        dir.file(&format!("dm/{folder}/numbers__gcd.txt"), "What is the gcd of 4 and 6?\n2\n".repeat(100));
    }
    let (lean, dm) = (dir.path("lib"), dir.path("dm"));
    let corpora = [prose.as_str(), &lean, &dm, "math"].join(",");
    let said = succeed(&compare(&[
        "--corpora",
        &corpora,
        "--seeds",
        "0,7",
        "--models",
        "tango,wango",
        "--val-fraction",
        "0.3",
        "--out",
        &out,
    ]));
    assert!(said.err.contains("training on train-easy; validation on interpolate"), "{}", said.err);
    assert!(said.err.contains("on `math` with seed 7:"), "{}", said.err);
    for phrase in ["proof NLL", "source NLL", "answer NLL", " ± ", "order here, by val NLL: "] {
        assert!(said.out.contains(phrase), "{phrase}: {}", said.out);
    }
    for phrase in [
        "(FineWeb-Edu): tango 3.293 < wango 3.355",
        "(Lean): tango 1.719 < wango 2.271",
        "(Mathematics): tango 0.473 < wango 0.487",
    ] {
        assert!(said.out.contains(phrase), "{phrase}: {}", said.out);
    }
    let results = json(&dir.path("out/results.json"));
    let kinds: Vec<&str> = results["data"].as_array().unwrap().iter().map(|d| d["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["prose", "lean", "mathematics", "mathematics"]);
    let rows = results["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 16);
    for row in rows {
        let corpus = row["corpus"].as_str().unwrap();
        assert_eq!(row["proof_nll"].is_f64() && row["source_nll"].is_f64(), corpus == lean, "{row}");
        assert_eq!(row["answer_nll"].is_f64(), corpus == dm || corpus == "math", "{row}");
        assert!(exists(&format!("{out}/{}/model.safetensors", row["folder"].as_str().unwrap())), "{row}");
    }
    assert_eq!((rows[3]["folder"].as_str(), rows[3]["seed"].as_u64()), (Some("book.txt/seed-7/wango"), Some(7)));
    assert_ne!(rows[0]["train_loss"], rows[2]["train_loss"], "another seed is another run");
    let summary = &results["summary"][0];
    let values = [0, 2].map(|i| rows[i]["val_nll"].as_f64().unwrap());
    assert_eq!((summary["model"].as_str(), summary["seeds"].as_u64()), (Some("tango"), Some(2)));
    assert!((summary["val_nll"]["mean"].as_f64().unwrap() - (values[0] + values[1]) / 2.0).abs() < 1e-12);
    assert!((summary["val_nll"]["se"].as_f64().unwrap() - (values[0] - values[1]).abs() / 2.0).abs() < 1e-12);
    for picture in ["curves-book.txt.svg", "curves-lib.svg", "curves-dm.svg", "curves-math.svg"] {
        assert!(exists(&dir.path(&format!("out/{picture}"))), "{picture}");
    }
    assert!(!exists(&dir.path("out/curves.svg")));

    // The same numbers as a run of its own, and as an evaluation afterwards.
    let alone = dir.path("alone");
    let args = ["--data", &lean, "--seed", "7", "--models", "wango", "--val-fraction", "0.3", "--out", &alone];
    succeed(&compare(&args));
    let mut row = timeless(&json(&dir.path("alone/results.json"))["rows"][0]);
    assert_eq!(row["folder"], "wango");
    row["folder"] = rows[7]["folder"].clone();
    assert_eq!(row, timeless(&rows[7]));
    let checkpoint = dir.path("out/lib/seed-7/wango");
    let eval: Value =
        serde_json::from_str(&succeed(&["eval", "--checkpoint", &checkpoint, "--data", &lean, "--json"]).out).unwrap();
    for (key, in_row) in [("nll", "val_nll"), ("proof_nll", "proof_nll"), ("source_nll", "source_nll")] {
        assert!((eval[key].as_f64().unwrap() - row[in_row].as_f64().unwrap()).abs() < 1e-6, "{key}");
    }
    let text = succeed(&["eval", "--checkpoint", &checkpoint, "--data", &lean]).out;
    assert!(text.contains("proof NLL      ") && text.contains("source NLL     "), "{text}");
    fail(1, &["eval", "--checkpoint", &out, "--data", &lean], &["holds 16 models; choose one", "and 9 more"]);
}

#[test]
fn a_killed_run_is_resumed_as_if_nothing_had_happened() {
    let dir = Scratch::new();
    let text = dir.file("book.txt", "A sentence stands here. ".repeat(200));
    let corpora = format!("{text},math");
    let (whole, killed) = (dir.path("whole"), dir.path("killed"));
    let args = |out: &'static str| -> Vec<String> {
        let line = "compare tango --preset nano --steps 60 --models tango,recurrent --seeds 1,2 --corpora";
        let out = dir.path(out);
        line.split(' ').map(str::to_owned).chain([corpora.clone(), "--out".into(), out]).collect()
    };
    let strs = |args: &[String]| kumiki(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(strs(&args("whole")).output().unwrap().status.success());
    let mut child = strs(&args("killed")).stderr(std::process::Stdio::null()).spawn().unwrap();
    let log_of = |out: &str| std::fs::read_to_string(format!("{out}/log.jsonl")).unwrap_or_default();
    // In the middle of the fourth of eight models.
    while log_of(&killed).lines().count() < 200 {
        assert!(child.try_wait().unwrap().is_none(), "too quick to be killed");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let before = json(&format!("{killed}/results.json"));
    assert!(rows(&before).len() < 8 && before["finished"] == false);
    let said = common::said(strs(&args("killed")).output().unwrap());
    assert!(
        said.code == 1 && said.err.contains("continue it with --resume, replace it with --restart"),
        "{}",
        said.err
    );
    let said = common::said(strs(&args("killed")).arg("--resume").output().unwrap());
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(said.err.contains("of 8 models are done"), "{}", said.err);

    let (one, other) = (json(&format!("{whole}/results.json")), json(&format!("{killed}/results.json")));
    assert_eq!(rows(&one), rows(&other));
    assert_eq!(rows(&before), rows(&other)[..rows(&before).len()], "what was done was not done again");
    assert_eq!(other["rows"][0]["seconds"], before["rows"][0]["seconds"]);
    for key in ["summary", "settings", "data", "corpora", "seeds", "models", "finished"] {
        assert_eq!(one[key], other[key], "{key}");
    }
    assert_eq!(log(&format!("{whole}/log.jsonl")), log(&format!("{killed}/log.jsonl")));
    for file in ["math/seed-2/recurrent/model.safetensors", "book.txt/seed-1/tango/model.safetensors"] {
        assert!(
            std::fs::read(format!("{whole}/{file}")).unwrap() == std::fs::read(format!("{killed}/{file}")).unwrap()
        );
    }
    // Nothing is left to do: the tables are printed again.
    let again = common::said(strs(&args("killed")).arg("--resume").output().unwrap());
    assert!(again.code == 0 && again.err.contains("8 of 8 models are done"), "{}", again.err);
    assert_eq!(rows(&json(&format!("{killed}/results.json"))), rows(&other));
}

#[test]
fn a_finished_run_is_extended() {
    let dir = Scratch::new();
    let out = dir.path("out");
    let text = dir.file("book.txt", "A sentence stands here. ".repeat(200));
    succeed(&compare(&["--models", "recurrent", "--out", &out]));
    fail(1, &compare(&["--models", "recurrent", "--out", &out]), &["extend it with --resume"]);
    let model = std::fs::read(dir.path("out/recurrent/model.safetensors")).unwrap();
    let said = succeed(&compare(&["--models", "tango,recurrent", "--out", &out, "--resume"]));
    assert!(said.err.contains("1 of 2 models are done") && !said.err.contains("recurrent  "), "{}", said.err);
    assert!(exists(&dir.path("out/curves.svg")));
    let corpora = format!("math,{text}");
    let more = ["--models", "tango,recurrent", "--corpora", &corpora, "--seeds", "0,1", "--out", &out, "--resume"];
    let said = succeed(&compare(&more));
    assert!(said.out.contains("tango/ recurrent/ <corpus>/seed-<n>/<model>/"), "{}", said.out);
    let results = json(&dir.path("out/results.json"));
    let folders: Vec<&str> =
        results["rows"].as_array().unwrap().iter().map(|r| r["folder"].as_str().unwrap()).collect();
    assert_eq!(folders[..4], ["tango", "recurrent", "math/seed-1/tango", "math/seed-1/recurrent"]);
    assert_eq!(std::fs::read(dir.path("out/recurrent/model.safetensors")).unwrap(), model);
    assert!(!exists(&dir.path("out/curves.svg")) && exists(&dir.path("out/curves-math.svg")));
    // Whoever asks for less would leave something out; whoever asks for something else, mix it.
    let less = compare(&["--models", "tango", "--out", &out, "--resume"]);
    fail(1, &less, &["finished, which is not asked for", "leave nothing out"]);
    let other = [&compare(&more)[..], &["--lr", "1e-3"]].concat();
    fail(1, &other, &["had lr 0.003, now it is 0.001", "--out another folder"]);
    fail(2, &[&compare(&more)[..], &["--restart"]].concat(), &["--resume", "cannot be used with", "--restart"]);
}

#[test]
fn train_can_be_resumed_too() {
    let dir = Scratch::new();
    let out = dir.path("out");
    let args = |steps| ["train", "--model", "untied", "--preset", "nano", "--steps", steps, "--out", &out, "--resume"];
    let mut child = kumiki(&args("100000")).stderr(std::process::Stdio::null()).spawn().unwrap();
    while !exists(&dir.path("out/untied/step-0")) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    fail(1, &args("100000"), &["another run is working in"]);
    child.kill().unwrap();
    child.wait().unwrap();
    fail(1, &args("2"), &["had steps 100000, now it is 2"]);
    let restart = ["train", "--model", "untied", "--preset", "nano", "--steps", "2", "--out", &out, "--restart"];
    succeed(&restart);
    assert!(succeed(&args("2")).err.contains("1 of 1 models are done"));
}

#[test]
fn corpora_and_seeds_that_make_no_sense_are_sentences() {
    let dir = Scratch::new();
    let out = dir.path("out");
    let text = dir.file("a/book.txt", "A sentence stands here. ".repeat(20));
    let same = dir.file("b/BOOK.txt", "A sentence stands here. ".repeat(20));
    let reserved = dir.file("log.jsonl", "A sentence stands here. ".repeat(20));
    let says =
        |code, more: &[&str], phrases: &[&str]| fail(code, &[&compare(more)[..], &["--out", &out]].concat(), phrases);
    says(2, &["--data", "math", "--corpora", "math"], &["cannot be used with", "--corpora"]);
    says(2, &["--seed", "1", "--seeds", "1,2"], &["cannot be used with", "--seeds"]);
    says(2, &["--seeds", "1,x"], &["invalid value 'x'"]);
    says(2, &["--seeds", "-1"], &["invalid value '-1'"]);
    says(2, &["--seeds", "1,,2"], &["invalid value ''"]);
    says(1, &["--seeds", "1,2,1"], &["seed 1 is named twice"]);
    says(1, &["--corpora", "math,math"], &["corpus `math` is named twice"]);
    says(1, &["--corpora", "math,"], &["the name of a corpus is empty"]);
    says(1, &["--corpora", &format!("{text},{same}")], &["have the same last name `book.txt`", "rename one"]);
    says(1, &["--corpora", &format!("{text},{reserved}")], &["has the name of a file that the run writes"]);
    says(1, &["--corpora", &format!("math,{}", dir.path("none"))], &["cannot open the text", "none"]);
    says(2, &["--resume", "--restart"], &["cannot be used with"]);
    assert_eq!(run(&["train", "--model", "tango", "--corpora", "math"]).code, 2, "train takes one");
    let config = |text: &str, phrases: &[&str]| says(1, &["--config", &dir.file("c.toml", text)], phrases);
    config("data = \"math\"\ncorpora = [\"math\"]", &["c.toml`: `data` and `corpora` are both given"]);
    config("seed = 1\nseeds = [1]", &["c.toml`: `seed` and `seeds` are both given"]);
    config("seeds = [1, -1]", &["c.toml`: `seeds` must be a list of whole numbers from 0, at least one, found [1,-1]"]);
    config("seeds = 3", &["c.toml`: `seeds` must be a list"]);
    config("corpora = []", &["c.toml`: `corpora` must be a list of texts in quotes, at least one, found []"]);
    config("corpora = [3]", &["c.toml`: `corpora` must be a list of texts"]);
    config("corpra = [\"math\"]", &["unknown setting `corpra`; did you mean `corpora`?"]);
    assert!(!exists(&out), "nothing may be left of a run that could not start");

    let file = dir.file("c.toml", format!("corpora = [\"math\", {text:?}]\nseeds = [4, 2]\nmodels = \"untied\""));
    succeed(&compare(&["--config", &file, "--out", &out]));
    let results = json(&dir.path("out/results.json"));
    assert_eq!((results["seeds"].clone(), results["settings"]["seed"].as_u64()), (serde_json::json!([4, 2]), Some(4)));
    assert_eq!(rows(&results).len(), 4);
    // An option counts more than the file, whichever form it has.
    let over = dir.path("over");
    succeed(&compare(&["--config", &file, "--data", "math", "--seed", "9", "--out", &over]));
    let results = json(&dir.path("over/results.json"));
    assert_eq!((results["rows"][0]["seed"].as_u64(), rows(&results).len()), (Some(9), 1));
}
