//! What shows a run: its picture as pixels, its log for other programs, its page.

#![cfg(feature = "report")]

mod common;

use common::{Scratch, exists, fail, json, run, succeed};

#[test]
fn a_run_is_exported_and_shown() {
    let dir = Scratch::new();
    let text = dir.file("a&b.txt", "The quick brown fox jumps over the lazy dog. ".repeat(400));
    let out = dir.path("run");
    let corpora = format!("math,{text}");
    let base = ["compare", "tango", "--preset", "nano", "--models", "tango,gau", "--steps", "6", "--eval-every", "3"];
    succeed(&[&base[..], &["--corpora", &corpora, "--out", &out]].concat());
    let png = std::fs::read(dir.path("run/curves-math.png")).unwrap();
    assert!(png.starts_with(b"\x89PNG") && png.len() > 5_000 && exists(&dir.path("run/curves-a&b.txt.png")));

    assert_eq!(json(&dir.path("run/results.json"))["rows"].as_array().unwrap().len(), 4);

    let (csv, events) = (dir.path("log.csv"), dir.path("events"));
    let said = succeed(&["export", &out, "--csv", &csv, "--tensorboard", &events]);
    assert!(said.out.contains("24 steps in `") && said.out.contains("24 steps of 4 trainings in `"), "{}", said.out);
    let table = std::fs::read_to_string(&csv).unwrap();
    assert_eq!(table.lines().count(), 25);
    assert!(table.starts_with("corpus,seed,model,step,loss,lr,grad_norm,tokens,tok_s,val_loss\nmath,0,tango,1,"));
    assert_eq!(table.lines().filter(|line| !line.ends_with(',')).count(), 1 + 2 * 4, "header and validations");
    for training in ["math/seed-0/tango", "a_b.txt/seed-0/gau"] {
        let file = format!("{events}/{training}/events.out.tfevents.0.kumiki");
        assert!(std::fs::metadata(&file).unwrap().len() > 500, "{file}");
    }
    // A table on standard output is that and nothing else.
    let said = succeed(&["export", &format!("{out}/log.jsonl"), "--csv", "-", "--tensorboard", &events]);
    assert_eq!((said.out, said.err.contains("4 trainings")), (table, true));

    let page = dir.path("page.html");
    succeed(&["report", &out, &out, "--out", &page, "--title", "Two <same>"]);
    let html = std::fs::read_to_string(&page).unwrap();
    for phrase in ["<title>Two &lt;same&gt;</title>", "on a&amp;b.txt", "bits/byte", "answer NLL", "finished</span>"] {
        assert!(html.contains(phrase), "no {phrase}");
    }
    assert!(!html.contains(&text), "paths are nobody's business");

    fail(2, &["export", &out], &["--csv <FILE>"]);
    fail(2, &["report"], &["<RUN>"]);
    fail(1, &["export", &dir.path("none"), "--csv", "-"], &["there is no `", "expected the folder of a run"]);
    fail(1, &["export", &events, "--csv", "-"], &["holds no run: expected `log.jsonl`"]);
    fail(1, &["export", &out, "--tensorboard", &csv], &["cannot create the folder", "log.csv/"]);
    fail(1, &["report", &events, "--out", &page], &["holds no run: expected `results.json`"]);
    fail(1, &["report", &out, "--out", &csv], &["is there already and is no page"]);
    assert_eq!(run(&["report", &out, "--out", &dir.path("no/page.html")]).code, 1);
}

/// The event files below a folder, with their names.
fn events(folder: &str) -> Vec<(String, Vec<u8>)> {
    fn below(folder: &std::path::Path, found: &mut Vec<std::path::PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { below(&path, found) } else { found.push(path) }
        }
    }
    let mut found = vec![];
    below(std::path::Path::new(folder), &mut found);
    found.sort();
    let name = |path: &std::path::PathBuf| path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
    found.iter().map(|path| (name(path), std::fs::read(path).unwrap())).collect()
}

#[test]
fn event_files_are_written_as_a_run_goes_and_nothing_is_there_twice() {
    let dir = Scratch::new();
    let out = dir.path("run");
    let base = ["compare", "tango", "--preset", "nano", "--models", "tango,gau", "--steps", "6", "--eval-every", "2"];
    let run = |more: &[&str]| succeed(&[&base[..], &["--out", &out], more].concat());
    let exported = || {
        let folder = dir.path("exported");
        let _ = std::fs::remove_dir_all(&folder);
        succeed(&["export", &out, "--tensorboard", &folder]);
        events(&folder)
    };
    let live = || events(&format!("{out}/events"));
    let names = |all: &[(String, Vec<u8>)]| all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    run(&["--tensorboard", "--stop-after", "3"]);
    assert_eq!(names(&live()), ["tango/events.out.tfevents.0.kumiki"]);
    assert!(live() == exported());
    // A line that a killed process wrote after its save, and an event that it did not come to.
    let log = format!("{out}/log.jsonl");
    let text = std::fs::read_to_string(&log).unwrap();
    let line = text.lines().last().unwrap().replace("\"step\":3", "\"step\":4");
    std::fs::write(&log, format!("{text}{line}\n")).unwrap();
    // It goes on with them though nobody asks again.
    let said = run(&["--resume"]);
    assert!(said.out.contains("curves.svg curves.png events/ tango/"), "{}", said.out);
    assert_eq!(names(&live()).len(), 2);
    assert!(live() == exported(), "what is written live is what is exported");
    let tango = live().remove(1).1;
    run(&["--resume", "--seeds", "0,1"]);
    assert_eq!(names(&live()).len(), 4);
    let seeds =
        ["gau", "tango"].map(|model| [0, 1].map(|n| format!("math/seed-{n}/{model}/events.out.tfevents.0.kumiki")));
    assert!(seeds.iter().flatten().all(|name| names(&live()).contains(name)), "{:?}", names(&live()));
    assert!(live() == exported() && live().iter().any(|(_, bytes)| *bytes == tango));

    // An unfinished run is replaced with all that it has; what is somebody else's stays.
    let other = dir.path("other");
    let begin = |model: &str| {
        let base =
            ["train", "--model", model, "--preset", "nano", "--out", &other, "--tensorboard", "--stop-after", "1"];
        base.map(str::to_owned)
    };
    let tango = begin("tango");
    succeed(&tango.each_ref().map(String::as_str));
    let gau = begin("gau");
    let args = [&gau.each_ref().map(String::as_str)[..], &["--restart"]].concat();
    succeed(&args);
    assert_eq!(names(&events(&format!("{other}/events"))), ["gau/events.out.tfevents.0.kumiki"]);
    let mine = dir.file("other/events/mine.txt", "");
    succeed(&args);
    assert!(exists(&mine));
    // Without the option there are none.
    let plain = dir.path("plain");
    succeed(&[&base[..], &["--out", &plain, "--steps", "1"]].concat());
    assert!(!exists(&format!("{plain}/events")));
}
