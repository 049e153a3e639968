//! Trainings that are stopped, killed or out of space, and gone on with.

mod common;
#[path = "common/log.rs"]
mod log;

use common::{Scratch, exists, fail, json, kumiki, run, succeed};
use log::log;

/// Two epochs and more of a short text, with masks that are drawn.
fn training<'a>(data: &'a str, out: &'a str) -> Vec<&'a str> {
    let line = "train --model untied --preset nano --steps 20 --dropout 0.1 --eval-every 6 --val-fraction 0.1 --data";
    line.split(' ').chain([data, "--out", out]).collect()
}

fn text(dir: &Scratch) -> String {
    let words = (0..900).map(|i: u32| format!("{} ", i.wrapping_mul(2_654_435_761) >> 20)).collect::<String>();
    dir.file("book.txt", words)
}

/// Everything that a finished run leaves, but for times.
#[track_caller]
fn same(one: &str, other: &str) {
    assert_eq!(log(one), log(other));
    for file in ["model.safetensors", "step-20/model.safetensors", "step-20/optimizer.safetensors"] {
        let [one, other] = [one, other].map(|out| std::fs::read(format!("{out}/untied/{file}")).unwrap());
        assert!(one == other, "{file} differs");
    }
    let row = |out: &str| {
        let mut row = json(&format!("{out}/results.json"))["rows"][0].clone();
        ["tok_s", "seconds", "peak_bytes"].iter().for_each(|key| drop(row.as_object_mut().unwrap().remove(*key)));
        row
    };
    assert_eq!(row(one), row(other));
}

#[test]
fn a_stopped_comparison_says_how_it_goes_on() {
    let dir = Scratch::new();
    let out = dir.path("run");
    let said = succeed(&[
        "compare",
        "tango",
        "--models",
        "tango",
        "--preset",
        "nano",
        "--steps",
        "4",
        "--stop-after",
        "2",
        "--out",
        &out,
    ]);
    assert!(said.err.contains(&format!("compare tango --resume {out}")), "{}", said.err);
    succeed(&["compare", "tango", "--resume", &out]);
}

#[test]
fn twenty_steps_are_thirteen_and_seven() {
    let dir = Scratch::new();
    let (data, whole) = (text(&dir), dir.path("whole"));
    succeed(&training(&data, &whole));
    let epochs = log(&whole)[19]["tokens"].as_f64().unwrap() / std::fs::metadata(&data).unwrap().len() as f64;
    assert!(epochs > 2.0, "{epochs}");
    for stop in ["1", "6", "13", "19"] {
        let out = dir.path(&format!("cut-{stop}"));
        let said = succeed(&[&training(&data, &out)[..], &["--stop-after", stop]].concat());
        assert!(said.err.contains(&format!("is saved after step {stop} of 20. Go on with: ")), "{}", said.err);
        assert!(said.err.contains(&format!("train --resume {out}")) && said.out.is_empty(), "{}", said.err);
        // A model that is not finished can be used, too.
        succeed(&["eval", "--checkpoint", &out, "--data", &data, "--tokens", "128"]);
        let said = succeed(&["train", "--resume", &out]);
        assert!(said.err.contains(&format!("goes on after step {stop}")), "{}", said.err);
        same(&whole, &out);
    }
    // Without dropout it is another training.
    let out = dir.path("plain");
    succeed(&[&training(&data, &out)[..], &["--dropout", "0"]].concat());
    assert_ne!(log(&whole), log(&out));
    // Again and again, and with more saves than are kept.
    let out = dir.path("often");
    let often = ["--stop-after", "4", "--save-every", "1", "--keep", "3"];
    succeed(&[&training(&data, &out)[..], &often].concat());
    let saves = || {
        let names = std::fs::read_dir(dir.path("often/untied")).unwrap();
        let mut names: Vec<_> = names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(saves(), ["step-2", "step-3", "step-4"]);
    for stop in ["5", "9", "12", "20"] {
        succeed(&["train", "--resume", &out, "--stop-after", stop, "--keep", "2"]);
    }
    assert_eq!(saves(), ["model.safetensors", "step-18", "step-20"]);
    same(&whole, &out);
}

/// `KUMIKI_KILLS` times; a few without it.
#[test]
fn case_34_a_training_that_is_killed_at_any_moment_goes_on_to_the_same_end() {
    let dir = Scratch::new();
    let (data, whole) = (text(&dir), dir.path("whole"));
    succeed(&training(&data, &whole));
    let kills = std::env::var("KUMIKI_KILLS").map_or(8, |n| n.parse().unwrap());
    let (mut random, mut unfinished) = (0x9e37_79b9_7f4a_7c15u64, 0);
    for _ in 0..kills {
        let out = dir.path("killed");
        let _ = std::fs::remove_dir_all(&out);
        let args = [&training(&data, &out)[..], &["--save-every", "2"]].concat();
        let mut done = false;
        while !done {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let started = exists(&format!("{out}/results.json"));
            let args = if started { vec!["train", "--resume", &out, "--save-every", "2"] } else { args.clone() };
            // What was killed before its results were there is not known to be anybody's: it is begun again.
            let _ = if started { Ok(()) } else { std::fs::remove_dir_all(&out) };
            let mut command = kumiki(&args);
            command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
            let mut child = command.spawn().unwrap();
            std::thread::sleep(std::time::Duration::from_micros(random >> 47));
            done = child.try_wait().unwrap().is_some();
            child.kill().unwrap();
            let said = common::said(child.wait_with_output().unwrap());
            assert!(!done || said.code == 0, "{}", said.err);
            unfinished += u32::from(!done);
        }
        same(&whole, &out);
    }
    assert!(unfinished >= kills, "only {unfinished} were killed before their end");
}

#[test]
fn case_34_saves_that_are_damaged_are_named() {
    let dir = Scratch::new();
    let (data, out) = (text(&dir), dir.path("out"));
    succeed(&[&training(&data, &out)[..], &["--stop-after", "7", "--save-every", "1", "--keep", "2"]].concat());
    let save = |name: &str| dir.path(&format!("out/untied/step-7/{name}"));
    let resume = ["train", "--resume", &out];
    let whole: Vec<(String, Vec<u8>)> = ["model.safetensors", "optimizer.safetensors", "state.json"]
        .map(|name| (save(name), std::fs::read(save(name)).unwrap()))
        .into();
    let older = dir.path("out/untied/step-6");
    let kept = dir.path("kept");
    std::fs::rename(&older, &kept).unwrap();
    for (path, bytes) in &whole {
        std::fs::write(path, &bytes[..bytes.len() - 2]).unwrap();
        fail(1, &resume, &[path, "no save is of use"]);
        std::fs::remove_file(path).unwrap();
        fail(1, &resume, &[path, "no save is of use"]);
        std::fs::write(path, bytes).unwrap();
    }
    std::fs::remove_file(save("optimizer.safetensors")).unwrap();
    fail(1, &resume, &["optimizer.safetensors", "there is no such file", "--init-from"]);
    // Of two saves the older is as good.
    std::fs::rename(&kept, &older).unwrap();
    let said = succeed(&resume);
    assert!(said.err.contains("optimizer.safetensors") && said.err.contains("going on from step 6"), "{}", said.err);
    let whole = dir.path("whole");
    succeed(&training(&data, &whole));
    same(&whole, &out);
    // Weights alone begin another training.
    let next = dir.path("next");
    let said = run(&[&training(&data, &next)[..], &["--init-from", &out]].concat());
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(log(&next)[0]["loss"].as_f64().unwrap() < log(&whole)[0]["loss"].as_f64().unwrap());
    fail(
        1,
        &[&training(&data, &dir.path("x"))[..], &["--init-from", &out, "--blocks", "3"]].concat(),
        &["another model"],
    );
    fail(1, &[&training(&data, &dir.path("y"))[..], &["--init-from", "nowhere"]].concat(), &["nowhere"]);
}

#[test]
fn what_is_resumed_must_be_what_it_was() {
    let dir = Scratch::new();
    let (data, out) = (text(&dir), dir.path("out"));
    succeed(&[&training(&data, &out)[..], &["--stop-after", "3"]].concat());
    let resume = ["train", "--resume", &out];
    fail(1, &[&resume[..], &["--steps", "30"]].concat(), &["had steps 20, now it is 30", "--out another folder"]);
    fail(1, &[&resume[..], &["--out", "elsewhere"]].concat(), &["name two folders"]);
    let none = dir.path("none");
    fail(
        1,
        &["train", "--resume", &none],
        &[&format!("there is no run in `{none}` to resume; without --resume one begins")],
    );
    dir.file("mine/thesis.txt", "");
    fail(1, &["train", "--resume", &dir.path("mine")], &["holds no run of kumiki's to resume (it has `thesis.txt`)"]);
    // What it goes on with is said when it is known to be of use.
    let state = dir.path("out/untied/step-3/state.json");
    let good = std::fs::read_to_string(&state).unwrap();
    std::fs::write(&state, good.replace("\"next_batch\"", "\"next_batsh\"")).unwrap();
    let said = fail(1, &resume, &["step-3/state.json`: missing field `next_batch` at line "]);
    assert!(!said.contains("goes on after"), "{said}");
    std::fs::write(&state, good).unwrap();
    let results = dir.path("out/results.json");
    let good = std::fs::read_to_string(&results).unwrap();
    std::fs::write(&results, good.replace("\"machine\"", "\"machina\"")).unwrap();
    fail(1, &resume, &["results.json` cannot be resumed from: missing field `machine` at line "]);
    std::fs::write(&results, good).unwrap();
    fail(1, &["compare", "tango", "--resume", &out], &["its experiment must be `compare tango`, found `train untied`"]);
    fail(1, &[&resume[..], &["--stop-after", "0"]].concat(), &["--stop-after must be at least 1"]);
    fail(2, &[&resume[..], &["--keep", "0"]].concat(), &["--keep"]);
    std::fs::write(&data, "another text, and as long as it need be. ".repeat(200)).unwrap();
    fail(1, &resume, &["has changed since models were trained on it"]);
}

/// A file may not become longer than it is allowed: as on a disk that is full.
#[cfg(target_os = "linux")]
#[test]
fn case_34_a_disk_that_fills_up_leaves_the_save_before() {
    let dir = Scratch::new();
    let (data, out) = (text(&dir), dir.path("out"));
    succeed(&[&training(&data, &out)[..], &["--stop-after", "7"]].concat());
    // Blocks of 512 bytes: enough for the log, not for a model.
    let command = format!("trap '' XFSZ; ulimit -f 64; exec {} train --resume {out}", env!("CARGO_BIN_EXE_kumiki"));
    let said = common::said(std::process::Command::new("sh").args(["-c", &command]).output().unwrap());
    assert_eq!(said.code, 1, "{}", said.err);
    assert!(said.err.contains("cannot save step 12 in `") && said.err.contains("cannot write "), "{}", said.err);
    assert!(said.err.contains(" bytes to `"), "how much was needed: {}", said.err);
    let names: Vec<_> = std::fs::read_dir(dir.path("out/untied")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["step-7"]);
    succeed(&["train", "--resume", &out]);
    let whole = dir.path("whole");
    succeed(&training(&data, &whole));
    same(&whole, &out);
}

#[cfg(unix)]
#[test]
fn ctrl_c_saves_and_a_second_one_stops_at_once() {
    let dir = Scratch::new();
    let (data, out) = (text(&dir), dir.path("out"));
    let endless = [&training(&data, &out)[..], &["--steps", "2000", "--eval-every", "0"]].concat();
    let mut child = kumiki(&endless).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let interrupt = |pid: u32| {
        let status = std::process::Command::new("kill").args(["-INT", &pid.to_string()]).status().unwrap();
        assert!(status.success());
    };
    let wait_for = |lines: usize| {
        let log = dir.path("out/log.jsonl");
        while !std::fs::read_to_string(&log).is_ok_and(|log| log.lines().count() > lines) {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    };
    wait_for(3);
    interrupt(child.id());
    let said = common::said(child.wait_with_output().unwrap());
    assert_eq!(said.code, 130, "{}", said.err);
    assert!(said.err.contains("stopping after this step") && said.err.contains("Go on with: "), "{}", said.err);
    let lines = log(&out).len();
    let steps: Vec<u64> = log(&out).iter().map(|record| record["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=lines as u64).collect::<Vec<_>>());
    // A second time it goes on, and two at once end it without harm.
    child = kumiki(&["train", "--resume", &out]).stderr(std::process::Stdio::piped()).spawn().unwrap();
    wait_for(lines + 3);
    interrupt(child.id());
    interrupt(child.id());
    let said = common::said(child.wait_with_output().unwrap());
    assert_eq!(said.code, 130, "{}", said.err);
    succeed(&["train", "--resume", &out, "--stop-after", "1"]);
}

/// A file under `folder` with a text in it replaced.
fn edit(path: &str, from: &str, to: &str) {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{path} has no {from}");
    std::fs::write(path, text.replace(from, to)).unwrap();
}

#[test]
fn what_a_save_says_is_compared_with_what_it_must_be() {
    let dir = Scratch::new();
    let (data, out, seed) = (text(&dir), dir.path("out"), dir.path("seed"));
    succeed(&[&training(&data, &out)[..], &["--stop-after", "8"]].concat());
    succeed(&[&training(&data, &seed)[..], &["--stop-after", "8", "--seed", "7"]].concat());
    let (resume, state) = (["train", "--resume", &out], dir.path("out/untied/step-8/state.json"));
    let good = std::fs::read_to_string(&state).unwrap();
    for (from, to, phrase) in [
        ("\"model\": \"untied\",\n  \"corpus\"", "\"model\": \"wango\",\n  \"corpus\"", "its model must be `untied`"),
        ("\"lr\": 0.003", "\"lr\": 0.1", "its setting lr must be 0.003, found 0.1"),
        ("\"next_batch\": 8", "\"next_batch\": 9", "its next batch must be 8, found 9"),
        ("\"step\": 8,\n    \"loss\"", "\"step\": 9,\n    \"loss\"", "its record's step must be 8, found 9"),
        ("\"tokens\": 4096,\n  \"next", "\"tokens\": 7,\n  \"next", "its tokens must be 4096, found 7"),
        ("\"seconds\": ", "\"seconds\": -1", "its seconds must be a time"),
    ] {
        edit(&state, from, to);
        fail(1, &resume, &["state.json`", phrase]);
        std::fs::write(&state, &good).unwrap();
    }
    std::fs::rename(dir.path("out/untied/step-8"), dir.path("mine")).unwrap();
    std::fs::rename(dir.path("seed/untied/step-8"), dir.path("out/untied/step-8")).unwrap();
    fail(1, &resume, &["its seed must be 0, found 7"]);
    std::fs::remove_dir_all(dir.path("out/untied/step-8")).unwrap();
    std::fs::rename(dir.path("mine"), dir.path("out/untied/step-8")).unwrap();
    // Lines that are gone are no training's log.
    let log_path = dir.path("out/log.jsonl");
    let lines = std::fs::read_to_string(&log_path).unwrap();
    std::fs::write(&log_path, lines.lines().skip(2).map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    fail(1, &resume, &["the log has 5 of the 7 steps of `untied` before the save"]);
    std::fs::write(&log_path, lines).unwrap();
    // Leaving out what is begun would lose it.
    let narrow = dir.path("narrow");
    let compare =
        ["compare", "tango", "--preset", "nano", "--models", "tango,untied", "--data", &data, "--out", &narrow];
    succeed(&[&compare[..], &["--stop-after", "2"]].concat());
    fail(1, &["compare", "tango", "--resume", &narrow, "--models", "untied"], &["begun, which is not asked for"]);
    // A useless save is never taken for the last one, and files of others stay.
    let whole = dir.path("whole");
    succeed(&training(&data, &whole));
    for step in ["12", "20", "25"] {
        let fake = dir.path(&format!("out/untied/step-{step}"));
        std::fs::create_dir_all(&fake).unwrap();
        std::fs::write(format!("{fake}/model.safetensors"), "cut").unwrap();
    }
    let thesis = dir.file("out/untied/step-8/thesis.txt", "mine");
    let said = succeed(&resume);
    assert!(said.err.contains("going on from step 8 instead"), "{}", said.err);
    same(&whole, &out);
    assert!(exists(&thesis) && !exists(&dir.path("out/untied/step-25")));
}

#[test]
fn moments_that_cannot_be_and_pipes_are_no_saves() {
    use kumiki::tensor::{Tensor, safetensors};
    let dir = Scratch::new();
    let (data, out) = (text(&dir), dir.path("out"));
    succeed(&[&training(&data, &out)[..], &["--stop-after", "8"]].concat());
    let path = dir.path("out/untied/step-8/optimizer.safetensors");
    let contents = safetensors::load(std::path::Path::new(&path)).unwrap();
    for (name, value) in [("v.norm_out", -1.0f32), ("v.norm_out", f32::NAN), ("m.norm_out", f32::INFINITY)] {
        let bad = Tensor::from_slice(&[value; 32], &[32]);
        let with = contents.tensors.iter().map(|(n, t)| (n.as_str(), if n == name { &bad } else { t }));
        safetensors::save(std::path::Path::new(&path), with, &contents.metadata).unwrap();
        fail(1, &["train", "--resume", &out], &["optimizer.safetensors`", &format!("all values of `{name}` must be")]);
    }
    #[cfg(unix)]
    {
        std::fs::remove_file(&path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        fail(1, &["train", "--resume", &out], &["optimizer.safetensors` is no regular file"]);
    }
}

#[test]
fn tables_and_tokenizers_replace_nothing_else() {
    let dir = Scratch::new();
    let (data, out) = (text(&dir), dir.path("out"));
    succeed(&training(&data, &out));
    let (log, table) = (dir.path("out/log.jsonl"), dir.path("table.csv"));
    fail(1, &["export", &out, "--csv", &log], &["is there already and is no table of a log"]);
    (0..2).for_each(|_| drop(succeed(&["export", &out, "--csv", &table])));
    let before = std::fs::read(&data).unwrap();
    fail(1, &["data", "train-tokenizer", &data, "--vocab", "260", "--out", &data], &["is no tokenizer"]);
    assert_eq!(std::fs::read(&data).unwrap(), before);
    let tokenizer = dir.path("t.json");
    (0..2).for_each(|_| drop(succeed(&["data", "train-tokenizer", &data, "--vocab", "260", "--out", &tokenizer])));
}
