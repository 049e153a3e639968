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
