//! `kumiki data`, and what takes prepared data.

mod common;

use common::{Scratch, exists, fail, json, succeed};

fn book(dir: &Scratch) -> String {
    let lines = (0..4000).map(|n| format!("Line {n}: it's {} o'clock, and the caf\u{e9} is open \u{1f980}.\n", n % 12));
    dir.file("book.txt", lines.collect::<String>())
}

#[test]
fn case_41_prepare_train_evaluate_and_write_with_an_end_of_text() {
    let dir = Scratch::new();
    let (book, out, run) = (book(&dir), dir.path("tokens"), dir.path("run"));
    let said = succeed(&["data", "prepare", &book, "--out", &out, "--val-fraction", "0.1"]);
    assert!(said.out.contains("held out") && said.out.contains("with `byte-eot`"), "{}", said.out);
    let meta = json(&format!("{out}/meta.json"));
    assert_eq!((&meta["vocab"], &meta["train"]["documents"]), (&257.into(), &1.into()));
    let shown = succeed(&["data", "show", &out, "--tokens", "20"]);
    assert!(shown.out.contains("Line 0: it's 0 o'clo"), "{}", shown.out);
    succeed(&["train", "--model", "tango", "--preset", "nano", "--steps", "4", "--data", &out, "--out", &run]);
    let found = succeed(&["eval", "--checkpoint", &run, "--data", &out, "--tokens", "256", "--json"]);
    let found: serde_json::Value = serde_json::from_str(&found.out).unwrap();
    assert_eq!(
        (&found["tokenizer"], &found["tokens"], &found["bytes"]),
        (&"byte-eot".into(), &256.into(), &256.0.into())
    );
    succeed(&["generate", "--checkpoint", &run, "--prompt", "Line", "--tokens", "8"]);
    fail(1, &["eval", "--checkpoint", &run, "--data", &book], &["`byte-eot` (257 tokens)", "`byte` (256 tokens)"]);
}

#[cfg(feature = "hugging-face")]
#[test]
fn a_vocabulary_of_ones_own_from_learning_to_writing() {
    let dir = Scratch::new();
    let (book, out, run, file) = (book(&dir), dir.path("tokens"), dir.path("run"), dir.path("own.json"));
    succeed(&["data", "train-tokenizer", &book, "--vocab", "300", "--out", &file]);
    let args = ["data", "prepare", &book, "--tokenizer", &file, "--out", &out, "--val-fraction", "0.1"];
    succeed(&args);
    assert!(exists(&format!("{out}/tokenizer.json")));
    fail(1, &args, &["has prepared data already", "--replace"]);
    succeed(&[&args[..], &["--replace"]].concat());
    succeed(&["train", "--model", "tango", "--preset", "nano", "--steps", "4", "--data", &out, "--out", &run]);
    let found = succeed(&["eval", "--checkpoint", &run, "--data", &out, "--tokens", "256", "--json"]);
    let found: serde_json::Value = serde_json::from_str(&found.out).unwrap();
    let of = |key: &str| found[key].as_f64().unwrap();
    assert!(of("bytes") > 1.5 * of("tokens"), "{found}");
    let bits = of("nll") / std::f64::consts::LN_2 * of("tokens") / of("bytes");
    assert!((bits - of("bits_per_byte")).abs() < 1e-9, "{found}");
    let said = succeed(&["generate", "--checkpoint", &run, "--prompt", "caf\u{e9} \u{1f980}", "--tokens", "12"]);
    assert!(said.out.starts_with("caf\u{e9} \u{1f980}"), "{}", said.out);
    // Without its tokenizer a model's numbers mean nothing.
    let model = walk(std::path::Path::new(&run)).into_iter().find(|p| p.ends_with("model.safetensors")).unwrap();
    let kept = model.with_file_name("tokenizer.json");
    std::fs::remove_file(&kept).unwrap();
    let folder = model.parent().unwrap().to_str().unwrap().to_owned();
    fail(1, &["generate", "--checkpoint", &folder, "--prompt", "a"], &["its tokenizer is `own@", "tokenizer.json"]);
}

#[cfg(feature = "hugging-face")]
fn walk(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}

#[test]
fn what_is_wrong_is_said_and_nothing_is_left() {
    let dir = Scratch::new();
    let (out, lines) = (dir.path("out"), dir.file("a.jsonl", "{\"text\": \"good text\"}\n{\"text\": 5}\n"));
    let first = ["data", "prepare", lines.as_str(), "--out", out.as_str()];
    let prepare = |more: &[&'static str]| [&first[..], more].concat();
    fail(1, &prepare(&[]), &["a.jsonl`, line 2", "--skip-bad"]);
    assert!(!exists(&out));
    let said = succeed(&prepare(&["--skip-bad", "1"]));
    assert!(said.err.contains("passed over: ") && said.err.contains("line 2"), "{}", said.err);
    let shard = format!("{out}/train-00000.tokens");
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    let sizes = [format!("{} bytes", bytes.len() - 1), bytes.len().to_string()];
    for args in [&["data", "show", &out][..], &["train", "--model", "tango", "--preset", "nano", "--data", &out]] {
        fail(1, args, &["train-00000.tokens", &sizes[0], &sizes[1]]);
    }
    fail(1, &["data", "prepare", &dir.path("gone"), "--out", &out, "--replace"], &["gone"]);
    fail(1, &["data", "show", &dir.path("")], &["meta.json"]);
    fail(1, &prepare(&["--tokenizer", "nothing.json"]), &["nothing.json"]);
    fail(1, &prepare(&["--val-fraction", "1", "--replace"]), &["validation fraction is 1"]);
}

#[test]
fn case_36_too_little_text() {
    let dir = Scratch::new();
    for (text, what) in [("", "empty"), ("x", "1 tokens in 1 documents")] {
        let file = dir.file("a.txt", text);
        fail(1, &["data", "prepare", &file, "--out", &dir.path("out")], &["a.txt", what]);
    }
    // With the end of the text: T tokens, and one more, for sequences of T = 32.
    for bytes in [31, 32] {
        let (file, out, run) = (dir.file("b.txt", "x".repeat(bytes)), dir.path("tokens"), dir.path("run"));
        succeed(&["data", "prepare", &file, "--out", &out, "--val-fraction", "0", "--replace"]);
        let quick = ["train", "--model", "tango", "--preset", "nano", "--steps", "1", "--seq", "32"];
        let train = [&quick[..], &["--val-fraction", "0", "--data", &out, "--out", &run]].concat();
        if bytes == 31 {
            fail(1, &train, &["32 tokens to train on found, 33 needed"]);
            assert!(!exists(&run), "nothing may be left of a run that could not start");
        } else {
            succeed(&train);
            assert_eq!(json(&format!("{run}/results.json"))["finished"], true);
        }
    }
}
