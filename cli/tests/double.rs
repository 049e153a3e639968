//! Double decoders and encoder-decoders on the command line: compared, resumed, counted, measured, written with.

mod common;

use std::fs;

use common::{Scratch, exists, fail, json, succeed};
use serde_json::Value;

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

#[test]
fn a_comparison_then_losses_and_texts_of_every_kind() {
    let dir = Scratch::new();
    let out = dir.path("run");
    let args = ["compare", "double", "--preset", "nano", "--out", &out];
    let said = succeed(&args);
    for word in ["decoder", "double", "encoder-decoder", "2nd half NLL", "order here, by the second half"] {
        assert!(said.out.contains(word), "no {word} in {}", said.out);
    }
    let rows = json(&dir.path("run/results.json"))["rows"].clone();
    let of = |model: &str| rows.as_array().unwrap().iter().find(|row| row["model"] == model).unwrap().clone();
    for model in ["decoder", "double"] {
        assert!(of(model)["val_nll"].is_f64() && of(model)["gap_nll"].is_null(), "{model}");
    }
    assert!(of("encoder-decoder")["val_nll"].is_null() && of("encoder-decoder")["gap_nll"].is_f64());
    assert_eq!(of("decoder")["params"], of("double")["params"]);

    for model in ["decoder", "double", "encoder-decoder"] {
        let checkpoint = dir.path(&format!("run/{model}"));
        let eval = ["eval", "--checkpoint", &checkpoint, "--data", "math", "--tokens", "2048", "--json"];
        let found = parsed(&succeed(&eval).out);
        let row = of(model);
        // The run evaluates as many tokens.
        for (key, own) in [("nll", "val_nll"), ("second_half_nll", "second_half_nll"), ("gap_nll", "gap_nll")] {
            assert_eq!(found[key], row[own], "{model}: {key}");
        }
        let generate = |prompts: &[&str], block_len: &str| {
            let mut args = vec!["generate", "--checkpoint", &checkpoint, "--tokens", "20", "--block-len", block_len];
            prompts.iter().for_each(|prompt| args.extend(["--prompt", prompt]));
            succeed(&args).out
        };
        let alone = generate(&["What is 1 + 1?"], "7");
        assert!(alone.starts_with("What is 1 + 1?"), "{alone}");
        let all = generate(&["What is 1 + 1?", "x"], "7");
        assert!(all.contains("--- 1 of 2 ---") && all.contains(alone.trim_end()), "{all}\n{alone}");
        fail(1, &["generate", "--checkpoint", &checkpoint, "--prompt", "a", "--prompt", ""], &["prompt 2 is empty"]);
    }

    let double = dir.path("run/double");
    fail(
        1,
        &["generate", "--checkpoint", &double, "--prompt", "a", "--block-len", "0"],
        &["--block-len must be at least 1 token, found 0"],
    );
    fail(
        1,
        &["generate", "--checkpoint", &double, "--prompt", "a", "--tokens", "9999999"],
        &["together they may have"],
    );
    fail(1, &["cem", "energy", "--checkpoint", &double], &["no layer that descends"]);
    fail(1, &[&args[..], &["--resume", "--batch", "4"]].concat(), &["batch 8, now it is 4"]);
    let resumed =
        succeed(&[&args[..], &["--resume", "--models", "decoder,double,encoder-decoder,double-logspace"]].concat());
    assert!(resumed.err.contains("3 of 4 models are done"), "{}", resumed.err);
}

#[test]
fn prompts_as_they_are_met_come_from_a_file() {
    let dir = Scratch::new();
    let out = dir.path("run");
    let base = ["train", "--model", "double-prompt_style", "--preset", "nano", "--steps", "2", "--out", &out];
    fail(1, &base, &["`double-prompt_style`", "need a file of prompt lengths"]);
    assert!(!exists(&out), "nothing was begun");
    let lengths = dir.file("lengths.txt", "12 x");
    let with = |file: &str| {
        [&base[..], &["--prompt-lengths", file]].concat().iter().map(|s| s.to_string()).collect::<Vec<_>>()
    };
    let args = with(&lengths);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    fail(1, &args, &["lengths.txt`, line 1", "found `x`"]);
    fs::write(&lengths, "12 40 9").unwrap();
    succeed(&args);
    let resumed = [&args[..], &["--resume"]].concat();
    succeed(&resumed);
    fs::write(&lengths, "12 40").unwrap();
    fail(1, &resumed, &["lengths.txt` have changed since models were trained with them"]);
}

#[test]
fn a_prefix_is_read_once_and_refused_by_others() {
    let dir = Scratch::new();
    let train = |name: &str, model: &str, seed: &str| {
        let out = dir.path(name);
        succeed(&["train", "--model", model, "--preset", "nano", "--steps", "2", "--seed", seed, "--out", &out]);
        out
    };
    let (ours, theirs, decoder) = (train("a", "double", "0"), train("b", "double", "1"), train("c", "decoder", "0"));
    let (file, text) = (dir.path("text.prefix"), dir.file("text.txt", "Let k be 12. "));
    let save = |source: &[&str]| {
        [&["prefix", "save", "--checkpoint", &ours, "--out", &file], source]
            .concat()
            .iter()
            .map(|s| s.to_string())
            .collect::<Vec<_>>()
    };
    let run = |args: &[String]| succeed(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(run(&save(&["--file", &text])).out.contains("13 tokens"));
    let from_file = fs::read(&file).unwrap();
    run(&save(&["--prompt", "Let k be 12. "]));
    assert!(fs::read(&file).unwrap() == from_file);

    let using = |checkpoint: &str, prompts: &[&str]| {
        let mut args = vec!["prefix", "use", "--checkpoint", checkpoint, "--prefix", &file, "--tokens", "12"];
        prompts.iter().for_each(|prompt| args.extend(["--prompt", prompt]));
        args.iter().map(|s| s.to_string()).collect::<Vec<_>>()
    };
    let alone = run(&using(&ours, &["W"])).out;
    // What a prompt that ends with the same byte writes: its context is the same text.
    let whole = succeed(&["generate", "--checkpoint", &ours, "--prompt", "Let k be 12. W", "--tokens", "12"]).out;
    assert_eq!(format!("Let k be 12. {alone}"), whole);
    let both = run(&using(&ours, &["W", "What"])).out;
    assert!(both.contains(alone.trim_end()), "{both}");

    let refused =
        |args: &[String], phrases: &[&str]| fail(1, &args.iter().map(String::as_str).collect::<Vec<_>>(), phrases);
    refused(&using(&theirs, &["W"]), &["text.prefix", "another model has made it"]);
    refused(&using(&decoder, &["W"]), &["(language model); only a double decoder"]);
    refused(&using(&ours, &[""]), &["the prompt is empty"]);
    let mut damaged = from_file.clone();
    let at = damaged.len() - 9;
    damaged[at] ^= 4;
    fs::write(&file, damaged).unwrap();
    refused(&using(&ours, &["W"]), &["it is damaged"]);
    fs::write(&text, "").unwrap();
    refused(&save(&["--file", &text]), &["the text cannot be read: it is empty"]);
    refused(&save(&["--file", &dir.path("none")]), &["cannot read the text"]);
}

#[test]
fn two_stacks_save_two_thirds_by_formula_and_by_measure() {
    let rows = parsed(&succeed(&["macs", "--suite", "double", "--json"]).out);
    let of = |model: &str, d: u64| {
        rows.as_array().unwrap().iter().find(|row| row["model"] == model && row["d_model"] == d).unwrap().clone()
    };
    let number = |row: &Value, key: &str| row[key].as_f64().unwrap();
    let (double, decoder) = (of("double", 448), of("decoder", 448));
    let more = number(&double, "training_flops") / number(&decoder, "training_flops") - 1.0;
    assert!((more - 0.025).abs() < 0.001, "{more}");
    assert!((number(&double, "state_bytes") / number(&decoder, "state_bytes") - 1.0 / 3.0).abs() < 1e-9);
    let table = succeed(&["macs", "--suite", "double", "--preset", "tiny"]).out;
    assert!(table.contains("(0.333)") && table.contains("training FLOPs/token"), "{table}");

    let dir = Scratch::new();
    let svg = dir.path("decoding.svg");
    let args = ["inference", "--suite", "double", "--preset", "nano", "--seq", "1,40", "--tokens", "3", "--out", &svg];
    let found = parsed(&succeed(&[&args[..], &["--json"]].concat()).out);
    let bytes = |model: &str| {
        let rows = found["rows"].as_array().unwrap().clone();
        rows.iter().find(|row| row["model"] == model && row["seq"] == 40).unwrap()["state_bytes"].as_f64().unwrap()
    };
    assert_eq!(3.0 * bytes("double"), bytes("decoder"));
    assert!(exists(&svg) && succeed(&args).out.contains("to the decoder-only model"));
}

#[test]
fn a_grid_is_priced_trained_and_continued() {
    let dir = Scratch::new();
    let out = dir.path("grid");
    let priced = parsed(&succeed(&["scaling", "run", "--dry-run", "--json"]).out);
    assert_eq!(priced["cells"].as_array().unwrap().len(), 36);
    assert!(priced["matrix_flops_per_second"].as_f64().unwrap() > 1e8);
    let small =
        ["--seq", "32", "--batch", "4", "--eval-tokens", "512", "--models", "decoder,double", "--bootstrap", "100"];
    let base = [&["scaling", "run", "--out", &out], &small[..]].concat();
    let one = succeed(&[&base[..], &["--sizes", "16/1/1", "--budgets", "2000"]].concat());
    assert!(one.out.contains("no law for double, second half") && one.out.contains("2nd half NLL"), "{}", one.out);
    let grid = ["--sizes", "16/1/1,24/1/1,32/1/1", "--budgets", "1000,2000,4000", "--resume"];
    let all = succeed(&[&base[..], &grid].concat());
    assert!(all.err.contains("16 of 18 cells to train"), "{}", all.err);
    let results = json(&dir.path("grid/results.json"));
    assert_eq!((results["finished"].as_bool(), results["rows"].as_array().unwrap().len()), (Some(true), 18));
    assert_eq!(results["laws"].as_array().unwrap().len(), 4);
    let fitted = succeed(&["scaling", "fit", &dir.path("grid/results.json"), "--bootstrap", "100"]);
    assert!(fitted.out.contains("double"), "{}", fitted.out);
    fail(1, &[&base[..], &["--sizes", "16/1/1", "--budgets", "2000"]].concat(), &["never overwritten"]);
    fail(2, &["scaling", "run", "--sizes", "16/1"], &["as 192/10/5; found `16/1`"]);
    fail(2, &["scaling", "run", "--budgets", "-5"], &["--budgets", "expected a whole number from 0"]);
    fail(1, &["scaling", "run", "--models", "tango", "--dry-run"], &["`tango` has no size by layers"]);
    fail(1, &["scaling", "run", "--budgets", "5", "--dry-run"], &["less than half of one step"]);
}
