//! Whole runs of small size, as a user would start them.

mod common;

use std::io::{Read as _, Write as _};
use std::process::Stdio;

use common::{Scratch, exists, fail, json, kumiki, run, succeed};

#[test]
fn compare_on_math_then_evaluate_and_generate() {
    let dir = Scratch::new();
    let out = dir.path("run");
    let said = succeed(&["compare", "tango", "--preset", "nano", "--models", "tango,recurrent,untied", "--out", &out]);
    for word in
        ["parameters", "MACs", "val NLL", "answer NLL", "bits/byte", "tok/s", "seconds", "tango", "recurrent", "untied"]
    {
        assert!(said.out.contains(word), "no {word} in {}", said.out);
    }
    assert!(said.out.contains(&format!("generate --checkpoint {out}/tango --prompt")), "{}", said.out);
    assert!(said.err.contains("step 20/20") && !said.err.contains('\u{1b}'), "plain lines in a pipe: {}", said.err);

    let results = json(&dir.path("run/results.json"));
    assert_eq!((results["finished"].as_bool(), results["preset"].as_str()), (Some(true), Some("nano")));
    assert_eq!((results["data"][0]["name"].as_str(), results["machine"]["threads"].as_u64()), (Some("math"), Some(2)));
    let rows = results["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    let entropy = results["data"][0]["unigram_nll"].as_f64().unwrap();
    assert!((2.0..4.0).contains(&entropy), "{entropy}");
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
        assert!((number("params") / 20_000.0 - 1.0).abs() < 0.03, "{row}");
        assert!(number("val_nll") > 1.0 && number("val_nll") < 5.5 && number("answer_nll") > 0.5, "{row}");
        assert!((number("bits_per_byte") * std::f64::consts::LN_2 - number("val_nll")).abs() < 1e-9, "{row}");
        assert!(number("tok_s") > 0.0 && number("seconds") > 0.0 && number("macs") > 0.0, "{row}");
        assert_eq!(number("tokens"), 20.0 * 8.0 * 64.0);
    }

    let log = std::fs::read_to_string(dir.path("run/log.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> = log.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(lines.len(), 60);
    assert!(["step", "loss", "lr", "grad_norm", "tokens", "tok_s"].iter().all(|key| lines[0][key].is_number()));
    assert_eq!(lines[19]["val_loss"], rows[0]["val_nll"]);
    let curves = std::fs::read_to_string(dir.path("run/curves.svg")).unwrap();
    assert!(curves.starts_with("<svg") && ["tango", "recurrent", "untied"].iter().all(|name| curves.contains(name)));

    let checkpoint = dir.path("run/tango");
    let eval = succeed(&["eval", "--checkpoint", &checkpoint, "--data", "math", "--json"]);
    let eval: serde_json::Value = serde_json::from_str(&eval.out).unwrap();
    let gap = eval["nll"].as_f64().unwrap() - rows[0]["val_nll"].as_f64().unwrap();
    assert!(gap.abs() < 1e-6, "the checkpoint must evaluate as the trained model did: {gap}");
    let text =
        succeed(&["eval", "--checkpoint", &checkpoint, "--data", "math", "--tokens", "256", "--split", "train"]).out;
    assert!(text.contains("bits per byte") && text.contains("perplexity") && text.contains("answer NLL"), "{text}");

    let generate = |more: &[&str]| {
        let base = ["generate", "--checkpoint", &checkpoint, "--prompt", "What is 1 + 1?", "--tokens", "40"];
        succeed(&base.iter().chain(more).copied().collect::<Vec<_>>()).out
    };
    let text = generate(&[]);
    assert!(text.starts_with("What is 1 + 1?") && text.len() > 40, "{text}");
    assert_eq!(text, generate(&["--seed", "0"]));
    assert_ne!(text, generate(&["--seed", "1"]));
    let greedy = generate(&["--temperature", "0"]);
    assert_eq!(greedy, generate(&["--top-k", "1", "--seed", "9"]));
    assert_eq!(generate(&["--top-k", "0"]), generate(&["--top-k", "9999"]), "case 40: off, and clamped");
    fail(
        1,
        &["generate", "--checkpoint", &checkpoint, "--prompt", "a", "--temperature", "-1"],
        &["temperature must be 0"],
    );
    assert_eq!(text, generate(&["--repetition-penalty", "1"]));
    assert_ne!(text, generate(&["--repetition-penalty", "1.5"]));
    let penalty = ["generate", "--checkpoint", &checkpoint, "--prompt", "a", "--repetition-penalty", "0"];
    fail(1, &penalty, &["repetition-penalty must be a finite number above 0 (1 for none), found 0"]);
    lines_are_answered_as_they_come(&checkpoint);
    fail(1, &["generate", "--checkpoint", &checkpoint, "--prompt", "a", "--top-p", "0"], &["top-p must be above 0"]);
    fail(1, &["generate", "--checkpoint", &checkpoint, "--prompt", ""], &["the prompt is empty"]);
    fail(1, &["generate", "--checkpoint", &out, "--prompt", "a"], &["holds 3 models; choose one"]);

    // A reader that goes away is no failure.
    let mut child = kumiki(&["generate", "--checkpoint", &checkpoint, "--prompt", "a", "--tokens", "20000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 1];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let ended = common::said(child.wait_with_output().unwrap());
    assert_eq!((ended.code, ended.err.as_str()), (0, ""));
}

#[test]
fn train_on_a_folder_of_text() {
    let dir = Scratch::new();
    dir.file("texts/one.txt", "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich. ".repeat(60));
    dir.file("texts/deep/two.md", b"\x92 any bytes \xff are text\r\n".repeat(60));
    dir.file("texts/ignored.bin", [0u8; 5000]);
    let (texts, out) = (dir.path("texts"), dir.path("run"));
    let args =
        ["--preset", "nano", "--steps", "4", "--seq", "32", "--data", &texts, "--out", &out, "--accumulate", "2"];
    let said = succeed(&["train", "--model", "recurrent"].into_iter().chain(args).collect::<Vec<_>>());
    assert!(said.out.contains("recurrent") && !said.out.contains("answer NLL"), "{}", said.out);
    assert_eq!(json(&dir.path("run/results.json"))["rows"][0]["tokens"], 4 * 2 * 8 * 32);
    // The folder with its only model in it is as good as the model's own.
    let text = succeed(&["generate", "--checkpoint", &out, "--prompt", "Zw\u{f6}", "--tokens", "50"]).out;
    assert!(text.starts_with("Zw\u{f6}"), "{text}");
    assert!(exists(&dir.path("run/recurrent/model.safetensors")));
    fail(1, &["train", "--preset", "nano"], &["which model?", "tango, wango, recurrent, untied"]);
}

#[test]
fn gradcheck_prints_a_table() {
    let said = succeed(&["gradcheck", "--filter", "tango"]);
    assert!(said.out.contains("tango (tied)") && said.out.contains("tango (untied, recomputed)"), "{}", said.out);
    assert!(said.out.contains("all 4 below 1e-6"), "{}", said.out);
    let rows: serde_json::Value =
        serde_json::from_str(&succeed(&["gradcheck", "--filter", "transformer", "--json"]).out).unwrap();
    assert!(rows.as_array().unwrap().iter().all(|row| row["passed"] == true && row["error"].as_f64().unwrap() < 1e-6));
}

#[test]
fn bench_gemm_prints_a_rate() {
    for dtype in ["f32", "bf16"] {
        let said = succeed(&["bench", "gemm", "70", "50", "300", "--dtype", dtype, "--threads", "1"]).out;
        let row: serde_json::Value = serde_json::from_str(&said).unwrap();
        let (ms, rate) = (row["ms"].as_f64().unwrap(), row["gflop_s"].as_f64().unwrap());
        assert!(ms > 0.0 && (rate * ms * 1e6 / (2.0 * 70.0 * 50.0 * 300.0) - 1.0).abs() < 1e-6, "{said}");
        assert!(row["dtype"] == dtype && row["threads"] == 1, "{said}");
    }
}

#[test]
fn bench_step_prints_the_peers_keys() {
    let small = [
        "--d-model",
        "32",
        "--head-dim",
        "8",
        "--heads",
        "2",
        "--seq",
        "16",
        "--batch",
        "2",
        "--params",
        "1e4",
        "--steps",
        "1",
    ];
    for model in ["tango", "transformer"] {
        let args: Vec<&str> = ["bench", "step", "--model", model].into_iter().chain(small).collect();
        let said = succeed(&args);
        assert_eq!(said.out.lines().count(), 1);
        let row: serde_json::Value = serde_json::from_str(&said.out).unwrap();
        assert_eq!((row["model"].as_str(), row["dtype"].as_str()), (Some(model), Some("f32")));
        assert!(row["engine"].as_str().unwrap().starts_with("kumiki "));
        assert!(
            ["params", "step_ms", "tok_s", "peak_rss_mb", "threads"].iter().all(|key| row[key].is_number()),
            "{row}"
        );
    }
}

#[test]
fn bench_ops_measures_next_to_the_machine() {
    let said = succeed(&["bench", "ops", "--filter", "rms_norm", "--json"]);
    let found: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    assert!(found["triad_gb_s"].as_f64().unwrap() > 0.1 && found["gemm_gflop_s"].as_f64().unwrap() > 0.1);
    let row = &found["operators"][0];
    assert!(
        row["name"].as_str().unwrap().starts_with("rms_norm") && row["forward_ms"].as_f64().unwrap() > 0.0,
        "{row}"
    );
}

#[test]
fn help_teaches() {
    for command in [
        &["--help"][..],
        &["compare", "--help"],
        &["train", "--help"],
        &["eval", "--help"],
        &["generate", "--help"],
        &["gradcheck", "--help"],
        &["bench", "ops", "--help"],
        &["bench", "gemm", "--help"],
        &["bench", "step", "--help"],
    ] {
        let said = succeed(command);
        assert!(said.out.contains("Examples:") && said.out.contains("kumiki "), "{command:?}: {}", said.out);
    }
    let help = succeed(&["compare", "--help"]).out;
    for word in ["nano", "paper", "untied", "--eval-tokens", "Optimiser:", "Model:", "--corpora", "--seeds", "--resume"]
    {
        assert!(help.contains(word), "{word}");
    }
    assert_eq!(run(&[]).code, 2);
    assert!(succeed(&["--version"]).out.starts_with("kumiki "));
}

/// As with `--prompt` alone, each before the next is read.
fn lines_are_answered_as_they_come(checkpoint: &str) {
    let alone =
        |prompt: &str| succeed(&["generate", "--checkpoint", checkpoint, "--prompt", prompt, "--tokens", "12"]).out;
    let start = |more: &[&str]| {
        let base = ["generate", "--checkpoint", checkpoint, "--stdin", "--tokens", "12"];
        let mut command = kumiki(&base.iter().chain(more).copied().collect::<Vec<_>>());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut child = start(&[]);
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut all = String::new();
    for (n, (line, prompt)) in [("What is 1?\n", "What is 1?"), ("\n\r\n1 + 1\r\n", "1 + 1")].iter().enumerate() {
        input.write_all(line.as_bytes()).unwrap();
        // The answer is there though more lines may come: this would wait for ever otherwise.
        let expected = format!("--- {} ---\n{}", n + 1, alone(prompt));
        let mut said = vec![0; expected.len()];
        output.read_exact(&mut said).unwrap();
        assert_eq!(String::from_utf8(said).unwrap(), expected);
        all += &expected;
    }
    input.write_all("last".as_bytes()).unwrap();
    drop(input);
    output.read_to_string(&mut all).unwrap();
    assert!(all.ends_with(&format!("--- 3 ---\n{}", alone("last"))), "{all}");
    assert!(child.wait().unwrap().success());

    let mut child = start(&["--json"]);
    child.stdin.take().unwrap().write_all("What \"is\" 1?\n1 + 1\n".as_bytes()).unwrap();
    let said = common::said(child.wait_with_output().unwrap());
    let objects: Vec<serde_json::Value> = said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(objects.len(), 2, "{}", said.out);
    for (object, prompt) in objects.iter().zip(["What \"is\" 1?", "1 + 1"]) {
        assert_eq!(
            (&object["prompt"], &object["tokens"], &object["ended"]),
            (&prompt.into(), &12.into(), &false.into())
        );
        assert_eq!(format!("{prompt}{}\n", object["text"].as_str().unwrap()), alone(prompt));
    }

    for (lines, phrases) in [
        (&b"\n\n"[..], &["standard input has no line with text"][..]),
        (b"good\n\xff\n", &["line 2 of standard input is no UTF-8 at its byte 0"]),
    ] {
        let mut child = start(&[]);
        child.stdin.take().unwrap().write_all(lines).unwrap();
        let said = common::said(child.wait_with_output().unwrap());
        assert!(said.code == 1 && phrases.iter().all(|phrase| said.err.contains(phrase)), "{}", said.err);
    }
    fail(2, &["generate", "--checkpoint", checkpoint, "--stdin", "--prompt", "a"], &["--stdin"]);
    fail(2, &["generate", "--checkpoint", checkpoint], &["--prompt <TEXT>"]);
}
