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

    // What a killed replacement leaves: data on their way out, then the same with nothing in their place.
    let old = dir.path(".tokens.old");
    std::fs::create_dir(&old).unwrap();
    std::fs::write(format!("{old}/train-00000.tokens"), "half removed").unwrap();
    succeed(&[&args[..], &["--replace"]].concat());
    assert!(!std::path::Path::new(&old).exists());
    std::fs::rename(&out, &old).unwrap();
    fail(1, &args, &["has prepared data already", "--replace"]);
    assert!(!std::path::Path::new(&old).exists());
    let train = ["train", "--model", "tango", "--preset", "nano", "--steps", "4", "--data"];
    let said = succeed(&[&train[..], &[&out, "--out", &run]].concat());
    assert!(
        said.out.contains("NLL in nats per token") && said.out.contains("entropy of single tokens"),
        "{}",
        said.out
    );
    let results = json(&format!("{run}/results.json"));
    let tokenizer = results["data"][0]["tokenizer"].as_str().unwrap();
    assert!(tokenizer.starts_with("own@") && results["data"][0]["vocab"] == 300, "{results}");
    // Another vocabulary is no place to begin from, and both are named.
    let (bytes, begun) = (dir.path("bytes"), dir.path("begun"));
    let said = succeed(&[&train[..], &[&book, "--out", &bytes]].concat());
    assert!(said.out.contains("NLL in nats per byte") && said.out.contains("entropy of single bytes"), "{}", said.out);
    let begin = [&train[..], &[&out, "--out", &begun, "--init-from", &bytes]].concat();
    fail(
        1,
        &begin,
        &["has the vocabulary of `byte` (256 tokens), `", &format!("has the vocabulary of `{tokenizer}` (300 tokens)")],
    );
    // What a model costs is counted with its own vocabulary.
    let wide = ["inference", "--models", "tango", "--preset", "nano", "--seq", "8", "--tokens", "2", "--out"];
    succeed(&[&wide[..], &[&dir.path("a.svg"), "--vocab", "300"]].concat());
    fail(
        1,
        &[&wide[..], &[&dir.path("a.svg"), "--vocab", "0"]].concat(),
        &["--vocab must be from 1 to 1048576, found 0"],
    );
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

#[test]
fn what_the_description_counts_is_counted_again() {
    let dir = Scratch::new();
    let text = dir.file("AREA__MODULE.txt", "What is 1 + 1?\n2\n".repeat(40));
    let out = dir.path("out");
    succeed(&["data", "prepare", &text, "--out", &out]);
    succeed(&["data", "show", &out]);
    let path = format!("{out}/meta.json");
    let good = std::fs::read_to_string(&path).unwrap();
    let meta = json(&path);
    for (key, phrase) in [
        ("documents", "documents; its shards have "),
        ("bytes", "bytes of text; its tokens stand for "),
        ("answer_tokens", "tokens of the class answer; its shards have "),
        ("tokens", "tokens; its shards have "),
    ] {
        let mut wrong = meta.clone();
        let number = meta["train"][key].as_u64().unwrap();
        wrong["train"][key] = (number + 1).into();
        std::fs::write(&path, wrong.to_string()).unwrap();
        let said = format!("says {} {phrase}{number}", number + 1);
        fail(1, &["data", "show", &out], &["meta.json` ", &said]);
    }
    // The memory that a run needs is counted with the vocabulary that the description has, before all of it is opened.
    let mut wide = meta.clone();
    wide["vocab"] = (1u64 << 32).into();
    std::fs::write(&path, wide.to_string()).unwrap();
    let train = ["train", "--model", "tango", "--preset", "nano", "--data", &out, "--out", "none"];
    fail(1, &train, &["training `tango` needs at least 2048.0 GiB of memory"]);
    std::fs::write(&path, good.replace("\"documents\"", "\"docs\"")).unwrap();
    fail(1, &["data", "show", &out], &["does not describe prepared data: unknown field `docs`", " at line "]);
}

#[cfg(all(unix, feature = "bpe"))]
#[test]
fn ctrl_c_leaves_nothing_half_written() {
    use std::time::{Duration, Instant};
    let dir = Scratch::new();
    // Words of which none is like another: as slow as can be.
    let words = (0..3_000_000u64).map(|n| format!("{:x} ", n.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect::<String>();
    let (text, small) = (dir.file("big.txt", words), dir.file("small.txt", "a few words ".repeat(20)));
    let out = dir.path("out");
    succeed(&["data", "prepare", &small, "--out", &out]);
    let before = std::fs::read(format!("{out}/meta.json")).unwrap();
    let args = ["data", "prepare", &text, "--tokenizer", "gpt2", "--out", &out, "--replace"];
    let child = common::kumiki(&args).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn();
    let child = child.unwrap();
    let begun = Instant::now();
    // The signal is handled before the folder is made.
    while !exists(&dir.path(".out.partial")) {
        assert!(begun.elapsed() < Duration::from_secs(60), "it never began");
        std::thread::sleep(Duration::from_millis(1));
    }
    let asked = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(asked.success());
    let said = common::said(child.wait_with_output().unwrap());
    assert_eq!(said.code, 130, "{}", said.err);
    assert!(said.err.contains("stopping, and removing what is half written"), "{}", said.err);
    assert!(
        said.err.ends_with(&format!("stopped; nothing was written to `{out}`\n")) && said.out.is_empty(),
        "{}",
        said.err
    );
    assert!(!exists(&dir.path(".out.partial")));
    assert_eq!(std::fs::read(format!("{out}/meta.json")).unwrap(), before, "what was there stays");
}
