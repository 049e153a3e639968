//! Faults that other software had, by number, as whoever types a command would meet them.

mod common;
#[path = "common/log.rs"]
mod log;

use common::{Scratch, exists, fail, json, kumiki, said, succeed};
use log::log;

/// A training of a tiny model, with more options.
fn train<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let line = "train --model tango --preset nano --seq 32 --batch 2 --eval-every 0 --eval-tokens 64";
    line.split(' ').chain(["--out", out]).chain(more.iter().copied()).collect()
}

#[test]
fn case_31_rates_of_short_trainings_are_positive_and_reach_their_peak() {
    let dir = Scratch::new();
    for schedule in ["cosine", "linear", "constant"] {
        for (steps, warmup) in [(1, 0), (1, 1), (4, 0), (4, 2), (4, 4)] {
            let out = dir.path(&format!("{schedule}-{steps}-{warmup}"));
            let (n, w) = (steps.to_string(), warmup.to_string());
            succeed(&train(&out, &["--lr", "0.01", "--schedule", schedule, "--steps", &n, "--warmup", &w]));
            let rates: Vec<f64> = log(&out).iter().map(|record| record["lr"].as_f64().unwrap()).collect();
            assert_eq!(rates.len(), steps);
            let near = |lr: f64, expected: f64| (lr / expected - 1.0).abs() < 1e-12;
            assert!(rates.iter().all(|&lr| lr > 0.0 && (lr < 0.01 || near(lr, 0.01))), "{out}: {rates:?}");
            assert!(near(rates[warmup.max(1) - 1], 0.01), "{out}: {rates:?}");
            assert!(near(rates[0], 0.01 / warmup.max(1) as f64), "{out}: {rates:?}");
        }
    }
    fail(1, &train(&dir.path("none"), &["--steps", "0"]), &["steps must be from 1"]);
}

#[test]
fn case_32_a_largest_norm_below_zero_is_rejected() {
    let dir = Scratch::new();
    let out = dir.path("out");
    for (value, phrase) in [("-1", "clip must be a positive number, found -1"), ("0", "found 0"), ("nan", "found NaN")]
    {
        fail(1, &train(&out, &["--clip", value]), &[phrase]);
        assert!(!exists(&out), "nothing may be left of a run that could not start");
    }
    succeed(&train(&out, &["--clip", "1e-3", "--steps", "2"]));
    assert_eq!(json(&format!("{out}/results.json"))["settings"]["clip"], 1e-3);
}

/// A file of a header, its length, and so many zeros.
fn tensors(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn case_38_a_checkpoint_s_header_is_not_trusted() {
    let dir = Scratch::new();
    let one = |name: &str, shape: &str, offsets: &str| {
        format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}"#)
    };
    let x = |shape: &str, offsets: &str| format!("{{{}}}", one("x", shape, offsets));
    let two = |offsets: &str| format!("{{{},{}}}", one("x", "[1]", "[0,4]"), one("y", "[1]", offsets));
    let twice = format!("{{{0},{0}}}", one("x", "[1]", "[0,4]"));
    for (bytes, phrase) in [
        (u64::MAX.to_le_bytes().to_vec(), "its header is said to have 18446744073709551615 bytes"),
        (tensors(&x("[1]", "[]"), 4), "data_offsets []; expected a first byte and an end"),
        (tensors(&x("[1]", "[8,4]"), 8), "ends at byte 4, before it starts at byte 8"),
        (tensors(&two("[2,6]"), 6), "`y` starts at byte 2, inside of `x`"),
        (tensors(&two("[8,12]"), 12), "bytes 4..8, before tensor `y`, are no tensor's"),
        (tensors(&twice, 4), "its header names `x` twice"),
        (tensors(&x("[1000,1000]", "[0,4]"), 4), "needs 4000000 bytes; its data_offsets have 4"),
        (tensors(&x("[8589934592,8589934592]", "[0,4]"), 4), "more bytes than can be counted"),
        (
            tensors(&x("[1099511627776]", "[0,4398046511104]"), 4),
            "need 4398046511104 bytes of data, of which there are 4",
        ),
    ] {
        let file = dir.file("bad/model.safetensors", bytes);
        let commands = [
            &["eval", "--checkpoint", &file, "--data", "math"][..],
            &["generate", "--checkpoint", &file, "--prompt", "a"],
            &["checkpoint", "show", &file],
        ];
        for command in commands {
            fail(1, command, &[phrase, "bad/model.safetensors"]);
        }
        // Nothing is allocated for what is only said to be there: less than a gigabyte of addresses is enough.
        #[cfg(target_os = "linux")]
        {
            let line = format!("ulimit -v 1000000; exec {} checkpoint show {file}", env!("CARGO_BIN_EXE_kumiki"));
            let mut shell = std::process::Command::new("sh");
            let said = said(shell.args(["-c", &line]).env("KUMIKI_THREADS", "2").output().unwrap());
            assert!(said.code == 1 && said.err.contains(phrase), "{}: {}", said.code, said.err);
        }
    }
}

#[test]
fn case_40_no_temperature_no_limit_and_one_above_the_vocabulary() {
    let dir = Scratch::new();
    let out = dir.path("out");
    succeed(&train(&out, &["--steps", "30", "--lr", "0.01"]));
    let write = |more: &[&str]| {
        let base = ["generate", "--checkpoint", &out, "--prompt", "What is 1 + 1?", "--tokens", "60"];
        succeed(&[&base[..], more].concat()).out
    };
    let greedy = write(&["--temperature", "0"]);
    for same in [&["--temperature", "0", "--seed", "7"][..], &["--temperature", "0", "--top-k", "0"], &["--top-k", "1"]]
    {
        assert_eq!(write(same), greedy, "{same:?}");
    }
    let free = write(&["--temperature", "1", "--top-k", "0"]);
    assert_ne!(free, greedy);
    for same in ["256", "257", "1000000"] {
        assert_eq!(write(&["--temperature", "1", "--top-k", same]), free, "--top-k {same}");
    }
}

#[test]
fn case_43_the_number_of_threads_changes_neither_log_nor_model() {
    let dir = Scratch::new();
    let run = |threads: &str| {
        let out = dir.path(threads);
        // Long enough rows that work is cut into tasks.
        let more = ["--seed", "1", "--steps", "10", "--seq", "160", "--batch", "4", "--dropout", "0.1"];
        let output = kumiki(&train(&out, &more)).env("KUMIKI_THREADS", threads).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", said(output).err);
        (log(&out), std::fs::read(format!("{out}/tango/model.safetensors")).unwrap())
    };
    let alone = run("1");
    assert_eq!(alone.0.len(), 10);
    for threads in ["2", "8"] {
        let together = run(threads);
        assert_eq!(together.0, alone.0, "{threads} threads");
        assert!(together.1 == alone.1, "{threads} threads");
    }
}
