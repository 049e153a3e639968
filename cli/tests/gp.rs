//! `kumiki gp`, from small whole runs to what must be refused.

mod common;

use common::{Scratch, exists, fail, json, kumiki, run, said, succeed};
use serde_json::Value;

/// A run of a few steps; the tests add what they are about.
fn gp<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let quick = ["gp", "--preset", "nano", "--steps", "4", "--points", "8", "--batch", "4", "--eval-functions", "10"];
    let quick = [&quick[..], &["--models", "transformer"]].concat();
    quick.into_iter().chain(more.iter().copied()).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// The rows without what is different every time.
fn timeless(results: &Value) -> Vec<Value> {
    let mut rows = results["rows"].as_array().unwrap().clone();
    rows.iter_mut().for_each(|row| drop(["seconds", "machine"].map(|key| row.as_object_mut().unwrap().remove(key))));
    rows
}

#[test]
fn a_nano_run_learns_and_leaves_everything() {
    let dir = Scratch::new();
    let out = dir.path("run");
    let said = succeed(&["gp", "--preset", "nano", "--models", "transformer", "--seeds", "0,1", "--out", &out]);
    for word in
        ["parameters", "RMSE", "exact posterior", "ratio", "after 1", "after 4", "after 15", " ± ", "128 held-out"]
    {
        assert!(said.out.contains(word), "no {word} in {}", said.out);
    }
    assert!(said.err.contains("with seed 1:") && said.err.contains("300 steps in"), "{}", said.err);
    let lines: Vec<&str> = said.err.lines().collect();
    assert!(lines[0].starts_with("in-context regression, preset nano: 300 steps of 256 points each"), "{}", said.err);
    assert_eq!(lines[1], "measuring the exact posterior on 128 held-out functions");
    assert_eq!(lines[lines.len() - 1], "drawing the pictures");
    let results = json(&dir.path("run/results.json"));
    assert_eq!((&results["finished"], &results["experiment"]), (&true.into(), &"gp".into()));
    let floor = &results["floor"];
    let exact = numbers(&floor["by_observed"]);
    assert_eq!((exact.len(), floor["functions"].as_u64()), (16, Some(128)));
    let rows = results["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for row in rows {
        let by = numbers(&row["by_observed"]);
        let rmse = row["rmse"].as_f64().unwrap();
        assert!(floor["rmse"].as_f64().unwrap() < rmse && rmse < 0.95, "worse than the floor, better than 0: {row}");
        let mean = (by.iter().map(|x| x * x).sum::<f64>() / 16.0).sqrt();
        assert!((mean - rmse).abs() < 1e-12 && by[15] < 0.9 * by[0], "{row}");
        assert!(row["seconds"].as_f64().unwrap() > 0.0 && row["params"].as_u64().unwrap() > 5900, "{row}");
    }
    let (summary, of) = (&results["summary"][0], |i: usize| rows[i]["rmse"].as_f64().unwrap());
    assert!((summary["rmse"]["mean"].as_f64().unwrap() - (of(0) + of(1)) / 2.0).abs() < 1e-12);
    assert!((summary["rmse"]["se"].as_f64().unwrap() - (of(0) - of(1)).abs() / 2.0).abs() < 1e-12);
    let log = std::fs::read_to_string(dir.path("run/log.jsonl")).unwrap();
    assert_eq!(log.lines().count(), 600);
    let picture = |name: &str| std::fs::read_to_string(dir.path(&format!("run/{name}"))).unwrap();
    assert!(
        ["transformer", "exact posterior", "observed points"].iter().all(|word| picture("rmse.svg").contains(word))
    );
    let functions = picture("functions.svg");
    assert!(["transformer", "true function", "± 2 sd", "after 15 points"].iter().all(|word| functions.contains(word)));
    assert_eq!(functions.matches("<polygon").count(), 3);

    let checkpoint = dir.path("run/seed-1/transformer");
    let args = ["generate", "--checkpoint", &checkpoint, "--prompt", "a"];
    fail(1, &args, &["its format is `kumiki sequence regressor, version 1`; expected `kumiki language model"]);
}

#[test]
fn all_models_are_trained_when_none_is_named() {
    let dir = Scratch::new();
    let out = dir.path("run");
    succeed(&["gp", "--preset", "nano", "--out", &out]);
    let results = json(&dir.path("run/results.json"));
    let rows = results["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["model"].as_str().unwrap()).collect();
    assert_eq!(names, ["transformer", "cem-t1", "cem-t2", "cem-t4", "cem-t8"]);
    let floor = results["floor"]["rmse"].as_f64().unwrap();
    for row in rows {
        let (rmse, params) = (row["rmse"].as_f64().unwrap(), row["params"].as_f64().unwrap());
        assert!(floor < rmse && rmse < 0.95 && (params / 6000.0 - 1.0).abs() < 0.02, "{row}");
    }
}

#[test]
fn numbers_do_not_depend_on_threads_nor_on_the_order_of_seeds() {
    let dir = Scratch::new();
    let with = |threads: &str, seeds: &str, name: &str| {
        let out = dir.path(name);
        let said = said(
            kumiki(&gp(&["--seeds", seeds, "--json", "--out", &out])).env("KUMIKI_THREADS", threads).output().unwrap(),
        );
        assert_eq!(said.code, 0, "{}", said.err);
        let printed: Value = serde_json::from_str(&said.out).unwrap();
        assert_eq!(printed["rows"], json(&format!("{out}/results.json"))["rows"]);
        timeless(&printed)
    };
    let one = with("1", "7,3", "one");
    let mut two = with("2", "3,7", "two");
    two.reverse();
    assert_eq!(one, two);
    assert_ne!(one[0]["rmse"], one[1]["rmse"]);
}

#[test]
fn what_is_out_of_range_is_named() {
    let dir = Scratch::new();
    let out = dir.path("out");
    for (option, value, phrase) in [
        ("--points", "0", "points must be from 1 to 4096, found 0"),
        ("--points", "4097", "points must be from 1 to 4096, found 4097"),
        ("--x-range", "0", "x_range must be a number from 0.000001 to 1000000, found 0"),
        ("--x-range", "-1e3", "x_range must be a number from 0.000001 to 1000000, found -1000"),
        ("--length-scale-min", "-0.5", "length_scale_min must be a number from"),
        ("--length-scale-min", "2", "length_scale_min must be at most length_scale_max, found 2 and 1"),
        ("--length-scale-max", "inf", "length_scale_max must be a number from 0.000001 to 1000000, found inf"),
        ("--noise", "NaN", "noise must be a number from 0 to 1000000, found NaN"),
        ("--noise", "-1", "noise must be a number from 0 to 1000000, found -1"),
        ("--eval-functions", "0", "eval_functions must be from 1"),
        ("--steps", "0", "steps must be at least 1, found 0"),
        ("--batch", "0", "batch must be from 1 to 65536, found 0"),
        ("--lr", "0", "lr must be a positive number, found 0"),
        ("--lr", "NaN", "lr must be a positive number, found NaN"),
        ("--clip", "-1", "clip must be a positive number, found -1"),
        ("--weight-decay", "-1", "weight_decay must be 0 or more, found -1"),
        ("--heads", "3", "heads must divide d_model=16 into even widths, found 3 heads"),
        ("--d-model", "0", "d_model must be from 1"),
        ("--blocks", "0", "blocks must be from 1 to 1024, found 0"),
        ("--params", "10", "out of reach"),
        ("--params", "1099511627776", "training `transformer` needs at least"),
        ("--seeds", "1,2,1", "seed 1 is named twice"),
        ("--models", "transformer,transformer", "model `transformer` is named twice"),
    ] {
        fail(1, &gp(&["--out", &out, option, value]), &[phrase]);
    }
    for (args, phrase) in [
        (["--models", "transfomer"], "'transformer'"),
        (["--preset", "tinny"], "'tiny'"),
        (["--nois", "1"], "'--noise'"),
        (["--steps", "-1"], "invalid value '-1' for '--steps <N>': expected a whole number from 0"),
        (["--seeds", "x"], "invalid value 'x'"),
        (["--resume", "--restart"], "cannot be used with"),
    ] {
        fail(2, &gp(&args), &[phrase]);
    }
    for models in ["transformer", "cem-t1"] {
        let args = gp(&["--out", &out, "--heads", "3", "--models", models]);
        fail(1, &args, &["heads must divide d_model=16 into even widths, found 3 heads"]);
    }
    let file = dir.file("file", "x");
    fail(1, &gp(&["--out", &file]), &["is a file"]);
    assert!(!exists(&out), "nothing may be left of a run that could not start");
}

#[test]
fn extremes_that_are_allowed_work() {
    let dir = Scratch::new();
    for (n, more) in [
        &["--points", "1"][..],
        &["--points", "2", "--noise", "0"],
        &["--noise", "0", "--length-scale-min", "1", "--points", "40"],
        &["--length-scale-min", "0.3", "--length-scale-max", "0.3", "--x-range", "1e-6"],
        &["--length-scale-min", "1e-6", "--x-range", "1e6"],
        &["--eval-functions", "1", "--batch", "1"],
        &["--params", "1500"],
    ]
    .iter()
    .enumerate()
    {
        let out = dir.path(&n.to_string());
        let said = succeed(&gp(&[&["--out", &out], *more].concat()));
        let note = "note: `transformer` has 2208 parameters where 1500 were asked for";
        assert_eq!(said.err.contains(note), more.contains(&"1500"), "{}", said.err);
        assert!(exists(&format!("{out}/functions.svg")), "{more:?}");
    }
}

#[test]
fn a_run_that_diverges_says_where_and_leaves_no_model() {
    let dir = Scratch::new();
    let out = dir.path("out");
    let args = gp(&["--lr", "1e30", "--warmup", "0", "--steps", "20", "--out", &out]);
    fail(1, &args, &["`transformer` with seed 0", "step 2"]);
    let results = json(&dir.path("out/results.json"));
    assert_eq!((&results["finished"], &results["failed"]["model"]), (&false.into(), &"transformer".into()));
    assert!(!exists(&dir.path("out/seed-0/transformer/model.safetensors")));
    fail(1, &args, &["holds an unfinished run", "--resume", "--restart"]);
    succeed(&gp(&["--restart", "--out", &out]));
}

#[test]
fn runs_are_resumed_extended_and_never_overwritten() {
    let dir = Scratch::new();
    let out = dir.path("out");
    let with = |more: &[&'static str]| -> Vec<String> {
        gp(more).into_iter().map(str::to_owned).chain(["--out".to_owned(), out.clone()]).collect()
    };
    let args = |line: &[String]| run(&line.iter().map(String::as_str).collect::<Vec<_>>());
    let endless = with(&["--steps", "1000000"]);
    let mut child = kumiki(&endless.iter().map(String::as_str).collect::<Vec<_>>())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    while std::fs::read(dir.path("out/log.jsonl")).map_or(0, |log| log.len()) < 1000 {
        assert!(child.try_wait().unwrap().is_none());
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(args(&with(&[])).err.contains("another run is working in"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(args(&with(&[])).err.contains("holds an unfinished run; continue it with --resume"));
    let other = args(&with(&["--resume", "--lr", "1e-3", "--steps", "1000000"]));
    assert!(other.code == 1 && other.err.contains("had lr 0.004, now it is 0.001"), "{}", other.err);
    assert_eq!(args(&with(&["--restart"])).code, 0);

    let finished = json(&dir.path("out/results.json"));
    for more in [&[][..], &["--restart"]] {
        assert!(args(&with(more)).err.contains("holds a finished run, which is never overwritten"));
    }
    assert_eq!(json(&dir.path("out/results.json")), finished);
    let extended = args(&with(&["--resume", "--seeds", "1,0"]));
    assert!(extended.code == 0 && extended.err.contains("1 of 2 models are done"), "{}", extended.err);
    let results = json(&dir.path("out/results.json"));
    assert_eq!((&results["rows"][1], results["rows"][0]["seed"].as_u64()), (&finished["rows"][0], Some(1)));
    let less = args(&with(&["--resume", "--seeds", "1"]));
    assert!(less.code == 1 && less.err.contains("leave nothing out"), "{}", less.err);

    // A folder of another experiment is not gp's to continue, nor the other way round.
    let compare = dir.path("compare");
    let quick = ["compare", "tango", "--preset", "nano", "--steps", "2", "--models", "tango", "--eval-tokens", "64"];
    succeed(&[&quick[..], &["--out", &compare]].concat());
    fail(1, &gp(&["--out", &compare, "--resume"]), &["its experiment must be `gp`, found `compare tango`"]);
    fail(
        1,
        &[&quick[..], &["--out", &out, "--resume"]].concat(),
        &["results.json` cannot be resumed from: its experiment must be `compare tango`, found `gp`"],
    );
}

#[test]
fn help_teaches() {
    let help = succeed(&["gp", "--help"]).out;
    for word in
        ["Examples:", "Presets:", "Models:", "transformer", "--length-scale-min", "exact posterior", "Functions:"]
    {
        assert!(help.contains(word), "{word}: {help}");
    }
}
