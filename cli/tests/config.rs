//! `kumiki config`, and what decides about settings.

mod common;

use std::path::Path;

use common::{Scratch, exists, fail, json, succeed};

/// What `config show` prints, without where it is from.
fn settings(args: &[&str]) -> Vec<String> {
    let said = succeed(&[&["config", "show"][..], args].concat()).out;
    said.lines().map(|line| line.split("  #").next().unwrap().trim_end().to_owned()).collect()
}

/// The line of one setting.
fn of(args: &[&str], key: &str) -> String {
    let said = succeed(&[&["config", "show"][..], args].concat()).out;
    let line = said.lines().find(|line| line.starts_with(&format!("{key} = ")));
    line.unwrap_or_else(|| panic!("no {key} in {said}")).split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn what_is_printed_gives_the_same_settings_again() {
    let dir = Scratch::new();
    let own = dir.file(
        "own.toml",
        "preset = \"nano\"\nlr = 1\ncem_mlp = [\"cem\", \"plain\"]\ncheckpoint_activations = true\nseeds = [3, 1]\n",
    );
    let text = dir.path("a \"b\" \\ c.txt");
    for args in [
        &[][..],
        &["--preset", "paper"],
        &["--suite", "double", "--preset", "small", "--lr", "1e-7", "--seed", "9223372036854775807"],
        &["--config", &own, "--data", &text, "--weight-decay", "0.30000000000000004"],
        &["--config", &own, "--corpora", "math,b", "--dropout", "1e-300"],
    ] {
        let printed = succeed(&[&["config", "show"][..], args].concat()).out;
        let file = dir.file("printed.toml", &printed);
        assert_eq!(settings(args), settings(&["--config", &file]), "{args:?}: {printed}");
        assert!(settings(args).len() > 35, "{printed}");
        let again = succeed(&["config", "show", "--config", &file]).out;
        assert!(again.lines().all(|line| line.ends_with(&format!("# {file}"))), "{again}");
    }
    fail(
        1,
        &["config", "show", "--seed", "18446744073709551615"],
        &["cannot be written as TOML", "give it with --seed"],
    );
}

#[test]
fn presets_are_configurations() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/presets");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let (suite, preset) = name.split_once('-').unwrap_or(("tango", &name));
        let as_file = settings(&["--suite", suite, "--config", path.to_str().unwrap()]);
        let as_preset = settings(&["--suite", suite, "--preset", preset]);
        // The first line is the preset that a file starts from.
        assert_eq!(as_file[1..], as_preset[1..], "{name}");
        files += 1;
    }
    assert_eq!(files, 9);
    let listed = succeed(&["config", "presets"]).out;
    assert!(["nano", "paper (cem)", "small (double)"].iter().all(|name| listed.contains(name)), "{listed}");
}

#[test]
fn every_value_says_where_it_is_from() {
    let dir = Scratch::new();
    let file = dir.file("c.toml", "steps = 7\ncheckpoint_activations = true\nmodels = [\"cem-t1\", \"llama\"]\n");
    let args = ["--config", file.as_str(), "--checkpoint-activations", "false", "--preset", "paper", "--d-model", "96"];
    assert_eq!(of(&args, "checkpoint_activations"), "checkpoint_activations = false # --checkpoint-activations");
    assert_eq!(of(&args, "d_model"), "d_model = 96 # --d-model");
    assert_eq!(of(&args, "steps"), format!("steps = 7 # {file}"));
    assert_eq!(of(&args, "blocks"), "blocks = 12 # preset paper", "the models in the file say whose presets are meant");
    assert_eq!(of(&args, "preset"), "preset = \"paper\" # --preset");
    assert_eq!(of(&args, "models"), format!("models = [\"cem-t1\", \"llama\"] # {file}"));
    assert_eq!(of(&args, "data"), "data = \"math\" # default");
    assert_eq!(of(&[], "preset"), "preset = \"tiny\" # default");
    assert_eq!(of(&[], "seed"), "seed = 0 # preset tiny");
    assert_eq!(of(&["--seeds", "4,2"], "seeds"), "seeds = [4, 2] # --seeds");
    let odd = dir.file("odd\nname.toml", "lr = 0.5");
    assert!(of(&["--config", &odd], "lr").contains("odd\\nname.toml"));
    let wrong = dir.file("wrong.toml", "model = \"tango\"\nmodels = [\"tango\"]");
    fail(1, &["config", "show", "--config", &wrong], &["`model` and `models` are both given"]);
    let wrong = dir.file("wrong.toml", "stepz = 1");
    fail(1, &["config", "show", "--config", &wrong], &["unknown setting `stepz`; did you mean `steps`?"]);
}

#[test]
fn a_run_that_goes_on_keeps_its_settings_though_its_preset_is_named_again() {
    let dir = Scratch::new();
    let run = dir.path("run");
    assert!(!exists(&run));
    let base = ["train", "--model", "tango", "--preset", "nano", "--out", &run];
    succeed(
        &[&base[..], &["--steps", "3", "--seq", "32", "--batch", "2", "--lr", "1e-4", "--stop-after", "1"]].concat(),
    );
    let shown = succeed(&["config", "show", "--resume", &run]).out;
    assert!(shown.contains("model = \"tango\"") && shown.lines().all(|l| l.ends_with(&format!("# run folder {run}"))));
    assert_eq!(of(&["--resume", &run, "--preset", "nano"], "lr"), format!("lr = 0.0001 # run folder {run}"));
    let other = ["started from the preset `nano`, now it is `tiny`", "--resume needs the same"];
    fail(1, &["train", "--resume", &run, "--preset", "tiny"], &other);
    let file = dir.file("c.toml", "preset = \"tiny\"");
    fail(1, &["train", "--resume", &run, "--config", &file], &[&format!("`{file}`: "), other[0]]);
    fail(1, &["train", "--resume", &run, "--preset", "nano", "--lr", "1e-3"], &["had lr 0.0001, now it is 0.001"]);
    succeed(&["train", "--resume", &run, "--preset", "nano"]);
    let results = json(&dir.path("run/results.json"));
    assert_eq!((&results["finished"], &results["settings"]["steps"]), (&true.into(), &3.into()));
    let gp = dir.file("gp/results.json", "{\"finished\": true, \"experiment\": \"gp\"}");
    let gp = gp.strip_suffix("/results.json").unwrap();
    fail(1, &["config", "show", "--resume", gp], &["must be `train`, `compare`, `ablate`, `scaling`, found `gp`"]);
    // What it printed is a configuration of the same run.
    let (printed, again) = (dir.file("printed.toml", shown), dir.path("again"));
    succeed(&["train", "--config", &printed, "--out", &again]);
    let [one, other] = [&run, &again].map(|run| json(&format!("{run}/results.json")));
    assert_eq!((&one["settings"], &one["preset"]), (&other["settings"], &other["preset"]));
    assert_eq!(one["rows"][0]["val_nll"], other["rows"][0]["val_nll"]);
}
