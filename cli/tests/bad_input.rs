//! What goes wrong must be told in one sentence, with a non-zero exit.

mod common;

use common::{Scratch, exists, fail, json, run, succeed};

/// A run of a few steps; the tests add what they are about.
const QUICK: [&str; 10] = ["--preset", "nano", "--steps", "2", "--seq", "32", "--batch", "2", "--eval-tokens", "64"];

fn compare<'a>(more: &[&'a str]) -> Vec<&'a str> {
    ["compare", "tango"].iter().chain(&QUICK).chain(more).copied().collect()
}

#[test]
fn misspelt_words_are_answered_with_the_nearest() {
    for (args, hint) in [
        (vec!["comprae", "tango"], "compare"),
        (vec!["compare", "tangoo"], "tango"),
        (vec!["compare", "tango", "--stpes", "3"], "--steps"),
        (vec!["compare", "tango", "--preset", "tinny"], "tiny"),
        (vec!["compare", "tango", "--schedule", "cosin"], "cosine"),
        (vec!["eval", "--checkpiont", "x"], "--checkpoint"),
        (vec!["bench", "opps"], "ops"),
        (vec!["--device", "cudda", "gradcheck"], "cuda"),
    ] {
        fail(2, &args, &["similar", &format!("'{hint}'")]);
    }
    // Models have more names than a list can hold.
    fail(
        2,
        &["compare", "tango", "--models", "tango,recurent"],
        &["unknown model `recurent`; did you mean `recurrent`?"],
    );
    fail(2, &["train", "--model", "untid"], &["unknown model `untid`; did you mean `untied`?"]);
    fail(2, &["compare", "tango", "--steps", "many"], &["invalid value 'many'", "--steps"]);
    fail(
        2,
        &["gp", "--points", "-1"],
        &["error: invalid value '-1' for '--points <N>': expected a whole number from 0 to 18446744073709551615"],
    );
    fail(2, &["compare", "tango", "--checkpoint-activations", "maybe"], &["possible values: true, false"]);
    fail(
        1,
        &["gradcheck", "--filter", "rms_nrom"],
        &["unknown operator or model `rms_nrom`; did you mean `rms_norm`?"],
    );
    fail(1, &["bench", "step", "--model", "tangoo"], &["unknown model `tangoo`; did you mean `tango`?"]);
    fail(1, &["bench", "step", "--model", "cem", "--params", "9"], &["--params 9 is too few"]);
    fail(1, &["bench", "step", "--dtype", "bf61"], &["unknown dtype `bf61`; did you mean `bf16`?"]);
    fail(1, &["bench", "gemm", "0", "1", "1"], &["m, n and k must be at least 1", "found 0, 1 and 1"]);
    fail(1, &["bench", "gemm", "2", "2", "2", "--dtype", "f64"], &["unknown dtype `f64`. Known: f32, bf16"]);
    fail(1, &["bench", "gemm", "2", "2", "2", "--threads", "0"], &["--threads must be from 1 to"]);
    let large = ["bench", "gemm", "1048576", "1048576", "1"];
    fail(
        1,
        &large,
        &["multiplying `1048576 x 1 by 1 x 1048576` needs at least 4096.0 GiB of memory", "lower M, N or K"],
    );
    fail(1, &["bench", "step", "--params", "10"], &["--params 10 is too few"]);
}

#[test]
fn case_36_too_little_text_is_named_with_the_counts() {
    let dir = Scratch::new();
    let out = dir.path("out");
    let data = |n: usize| dir.file(&format!("{n}.txt"), &"abcdefgh".repeat(5).as_bytes()[..n]);
    fail(1, &compare(&["--data", &data(0), "--out", &out]), &["0.txt` is empty (0 bytes)"]);
    fail(1, &compare(&["--data", &data(32), "--out", &out]), &["32 tokens found, 33 needed"]);
    assert!(!exists(&out), "nothing may be left of a run that could not start");
    let said = succeed(&compare(&["--data", &data(33), "--out", &out]));
    assert!(said.err.contains("no validation loss will be reported"), "{}", said.err);
    let results = json(&dir.path("out/results.json"));
    assert_eq!(results["finished"], true);
    assert!(results["rows"][0]["val_nll"].is_null() && results["rows"][0]["train_loss"].is_f64());
    let checkpoint = dir.path("out/tango");
    fail(1, &["eval", "--checkpoint", &checkpoint, "--data", &data(33)], &["33 tokens to train on and 0 held out"]);
    succeed(&["eval", "--checkpoint", &checkpoint, "--data", &data(33), "--split", "train"]);
}

#[test]
fn data_that_cannot_be_read_is_named() {
    let dir = Scratch::new();
    let out = dir.path("out");
    dir.file("pictures/a.png", b"x");
    dir.file("nothing/a.txt", b"");
    let missing = dir.path("missing.txt");
    fail(1, &compare(&["--data", &missing, "--out", &out]), &["cannot open the text", "missing.txt", "No such file"]);
    fail(
        1,
        &compare(&["--data", &dir.path("pictures"), "--out", &out]),
        &["pictures` has no text", ".txt, .md, .lean"],
    );
    fail(
        1,
        &compare(&["--data", &dir.path("nothing"), "--out", &out]),
        &["nothing` is empty (all 1 text files are empty)"],
    );
    fail(1, &compare(&["--data", "/dev/null", "--out", &out]), &["/dev/null"]);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let locked = dir.file("locked.txt", b"some text");
        std::fs::set_permissions(&locked, std::fs::Permissions::from_mode(0o000)).unwrap();
        // Root may read anything.
        if std::fs::read(&locked).is_err() {
            fail(1, &compare(&["--data", &locked, "--out", &out]), &["cannot", "locked.txt", "Permission denied"]);
        }
    }
    assert!(!exists(&out));
}

#[test]
fn numbers_out_of_range_are_named() {
    let dir = Scratch::new();
    let out = dir.path("out");
    for (option, value, phrase) in [
        ("--lr", "0", "lr must be a positive number, found 0"),
        ("--lr", "inf", "--lr must be a finite number, found inf"),
        ("--clip", "NaN", "--clip must be a finite number, found NaN"),
        ("--steps", "0", "steps must be from 1 to 1000000000000, found 0"),
        ("--batch", "0", "batch must be from 1"),
        ("--seq", "0", "seq must be from 1"),
        ("--accumulate", "0", "accumulate must be from 1"),
        ("--blocks", "0", "blocks must be from 1"),
        ("--d-model", "99999999999", "d_model must be from 1"),
        ("--head-dim", "7", "head_dim must be even"),
        ("--transformer-heads", "3", "found 3 heads"),
        ("--params", "100", "out of reach"),
        ("--lr-floor", "2", "lr_floor must be between 0 and 1, found 2"),
        ("--val-fraction", "1.5", "the validation fraction is 1.5"),
        ("--val-fraction", "-1", "the validation fraction is -1"),
        ("--lr", "-1", "lr must be a positive number, found -1"),
        ("--lr", "-1e-3", "lr must be a positive number, found -0.001"),
        ("--clip", "-inf", "--clip must be a finite number, found -inf"),
        ("--eval-tokens", "0", "eval_tokens must be from 1 to 4294967296, found 0"),
        ("--blocks", "1025", "blocks must be from 1 to 1024"),
        ("--batch", "65537", "batch must be from 1 to 65536"),
        ("--accumulate", "65537", "accumulate must be from 1 to 65536"),
        ("--params", "1099511627776", "needs at least"),
    ] {
        let text = dir.file("text.txt", "some text. ".repeat(50));
        let args = ["compare", "tango", "--preset", "nano", "--data", &text, "--out", &out, option, value];
        fail(1, &args, &[phrase]);
    }
    fail(1, &compare(&["--models", "tango,tango", "--out", &out]), &["model `tango` is named twice"]);
    for fraction in ["-1", "1e308"] {
        fail(1, &compare(&["--val-fraction", fraction, "--out", &out]), &["expected 0 <= fraction < 1"]);
    }
    let huge = compare(&["--batch", "65536", "--seq", "1048576", "--out", &out]);
    fail(1, &huge, &["training `tango` needs at least", "GiB are available; lower --batch, --seq or --params"]);
    for (params, phrase) in [
        ("1e12", "needs at least"),
        ("inf", "--params must be a number from 1 to 1099511627776, found inf"),
        ("NaN", "found NaN"),
        ("1e300", "--params must be a number from 1 to 1099511627776, found 1e300"),
        ("-1", "found -1"),
    ] {
        fail(1, &["bench", "step", "--params", params], &[phrase]);
    }
    assert!(!exists(&out));
}

#[test]
fn case_42_the_file_and_the_options() {
    let dir = Scratch::new();
    let out = dir.path("out");
    let config = |text: &str| dir.file("c.toml", text);
    let with = |text: &str, phrases: &[&str]| fail(1, &compare(&["--config", &config(text), "--out", &out]), phrases);
    with("stepz = 3", &["c.toml`: unknown setting `stepz`; did you mean `steps`?"]);
    with("modles = [\"tango\"]", &["c.toml`: unknown setting `modles`; did you mean `models`?"]);
    with("warmup = \"soon\"", &["c.toml`: setting `warmup`: invalid type: string \"soon\""]);
    with("steps = -1", &["c.toml`: setting `steps` must be a whole number from 0, found -1"]);
    with("cem_width = \"lama\"", &["c.toml`: unknown cem_width `lama`; did you mean `llama`?"]);
    with(
        "cem_attention = \"rubbish\"",
        &["c.toml`: cem_attention must be a list of `cem` and `plain`, found `rubbish`"],
    );
    with(
        "cem_mlp = [\"cem\", \"plain\", \"cem\"]",
        &["c.toml`: cem_mlp must name one kind for all layers or 2, found 3"],
    );
    with("cem_mlp = [1]", &["c.toml`: setting `cem_mlp` must be a text in quotes or a list of them, found [1]"]);
    with("feature_map = \"elu2\"", &["c.toml`: unknown feature map `elu2`"]);
    with("lr = -1.0", &["c.toml`: lr must be a positive number, found -1"]);
    with("blocks = 5000", &["c.toml`: blocks must be from 1 to 1024"]);
    with("models = [\"tangoo\"]", &["c.toml`: unknown model `tangoo`; did you mean `tango`?"]);
    fail(1, &compare(&["--config", &config("lr = 1.0"), "--lr", "0"]), &["kumiki: lr must be a positive number"]);
    #[cfg(unix)]
    fail(1, &compare(&["--config", "/dev/zero"]), &["`/dev/zero` is no regular file"]);
    with("preset = 3", &["c.toml`: `preset` must be a text in quotes, found 3"]);
    with("a = 1\nb = \n", &["c.toml`: line 2 is not valid TOML"]);
    let unknown = config("preset = \"tinny\"");
    fail(
        1,
        &["compare", "tango", "--config", &unknown, "--out", &out],
        &["c.toml`: unknown preset `tinny`; did you mean `tiny`?"],
    );
    fail(1, &compare(&["--config", &dir.path("none.toml")]), &["cannot read the configuration", "none.toml"]);

    let list = config("cem_attention = [\"plain\", \"cem\"]\nmodel = \"cem-t1\"\nsteps = 1");
    let listed = dir.path("listed");
    succeed(&["train", "--preset", "nano", "--config", &list, "--out", &listed]);
    assert_eq!(json(&dir.path("listed/results.json"))["settings"]["cem_attention"], "plain,cem");

    let file = "checkpoint_activations = true\nseed = 5\nmodels = \"untied\"\nlr = 1e-3\n";
    let said = succeed(&compare(&[
        "--config",
        &config(file),
        "--checkpoint-activations",
        "false",
        "--lr",
        "2e-3",
        "--out",
        &out,
    ]));
    assert!(said.out.contains("untied"), "{}", said.out);
    let results = json(&dir.path("out/results.json"));
    assert_eq!(results["settings"]["checkpoint_activations"], false);
    assert_eq!((results["settings"]["seed"].as_u64(), results["settings"]["lr"].as_f64()), (Some(5), Some(2e-3)));
    assert_eq!(results["models"], serde_json::json!(["untied"]));
}

#[test]
fn case_44_cuda_is_answered_plainly() {
    fail(1, &["--device", "cuda", "gradcheck"], &["cuda:0"]);
    fail(1, &["compare", "tango", "--device", "cuda"], &["cuda:0"]);
}

#[test]
fn wrong_environment_is_a_sentence() {
    for (name, value, phrase) in [
        ("KUMIKI_THREADS", "two", "KUMIKI_THREADS must be a positive number of threads, found `two`"),
        ("KUMIKI_THREADS", "1025", "KUMIKI_THREADS must be at most 1024 threads, found 1025"),
        ("KUMIKI_SIMD", "avx9", "KUMIKI_SIMD must be a level that this CPU has"),
    ] {
        let said = common::said(common::kumiki(&["gradcheck", "--filter", "cast"]).env(name, value).output().unwrap());
        assert_eq!((said.code, said.out.as_str()), (1, ""));
        assert!(said.err.starts_with("kumiki: ") && said.err.contains(phrase), "{}", said.err);
    }
}

#[test]
fn folders_in_use_are_left_alone() {
    let dir = Scratch::new();
    let (out, foreign) = (dir.path("out"), dir.path("foreign"));
    let quick = compare(&["--models", "tango", "--out", &out]);
    succeed(&quick);
    let before = std::fs::read(dir.path("out/results.json")).unwrap();
    for more in [vec![], vec!["--restart"]] {
        let again: Vec<&str> = quick.iter().copied().chain(more).collect();
        fail(1, &again, &["holds a finished run", "--out"]);
    }
    assert_eq!(std::fs::read(dir.path("out/results.json")).unwrap(), before);

    dir.file(
        "out/results.json",
        String::from_utf8(before).unwrap().replace("\"finished\": true", "\"finished\": false"),
    );
    fail(1, &quick, &["holds an unfinished run", "--restart", "--out"]);
    dir.file("out/mine.txt", "kept");
    let restarted: Vec<&str> = quick.iter().copied().chain(["--restart"]).collect();
    succeed(&restarted);
    assert_eq!(json(&dir.path("out/results.json"))["finished"], true);
    assert!(exists(&dir.path("out/mine.txt")), "only the run's own files may be removed");

    dir.file("foreign/thesis.txt", "precious");
    fail(1, &compare(&["--out", &foreign]), &["is not empty and holds no run", "thesis.txt", "--out"]);
    let file = dir.file("file", "x");
    fail(1, &compare(&["--out", &file]), &["is a file"]);
    std::fs::create_dir_all(dir.path("folder/results.json")).unwrap();
    for more in [&[][..], &["--resume"], &["--restart"]] {
        let folder = dir.path("folder");
        let args = [&compare(&["--out", &folder])[..], more].concat();
        fail(1, &args, &["folder/results.json` is damaged, or no run of kumiki's wrote it: it is a folder; remove it"]);
    }
}

/// A rename would put a file in the place of a pipe or of a link.
#[cfg(unix)]
#[test]
fn pictures_and_prefixes_take_no_other_places_than_files() {
    let dir = Scratch::new();
    let (pipe, link) = (dir.path("pipe.svg"), dir.path("link.svg"));
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let says = "pipe.svg` is no regular file; expected a place for a picture";
    let quick = ["inference", "--preset", "nano", "--models", "gau", "--seq", "8", "--tokens", "1"];
    let energy = ["cem", "energy", "--model", "cem-t1", "--tokens", "64"];
    let steps = ["cem", "steps", "--model", "cem-t1", "--tokens", "64", "--most", "1"];
    let scaling = ["bench", "scaling", "--preset", "nano", "--models", "gau", "--seq", "8", "--rounds", "1"];
    for command in [&quick[..], &energy, &steps, &scaling] {
        let said = fail(1, &[command, &["--out", &pipe]].concat(), &[says]);
        assert_eq!(said.lines().count(), 1, "nothing may be measured before: {said}");
    }
    let double = ["train", "--model", "double", "--preset", "nano", "--steps", "1", "--out"];
    succeed(&[&double[..], &[&dir.path("run")]].concat());
    let checkpoint = dir.path("run/double");
    let prefix = ["prefix", "save", "--checkpoint", &checkpoint, "--prompt", "a", "--out"];
    fail(1, &[&prefix[..], &[&pipe]].concat(), &["pipe.svg` is there already and is no prefix"]);
    use std::os::unix::fs::FileTypeExt as _;
    assert!(std::fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());

    // Nor is a file of another kind lost.
    let table = dir.file("table.csv", "params,tokens,loss\n");
    fail(1, &[&quick[..], &["--out", &table]].concat(), &["table.csv` is there already and is no picture"]);
    let model = dir.path("run/double/model.safetensors");
    fail(1, &[&prefix[..], &[&model]].concat(), &["model.safetensors` is there already and is no prefix"]);

    std::os::unix::fs::symlink("target.svg", &link).unwrap();
    let mine = dir.file("target.svg.partial", "mine");
    for _ in 0..2 {
        succeed(&[&energy[..], &["--out", &link]].concat());
    }
    assert!(std::path::Path::new(&link).is_symlink());
    assert!(std::fs::read_to_string(dir.path("target.svg")).unwrap().starts_with("<svg"));
    assert_eq!(std::fs::read_to_string(mine).unwrap(), "mine");
}

#[test]
fn a_loss_that_is_no_number_stops_the_run_and_keeps_what_is_good() {
    let dir = Scratch::new();
    let out = dir.path("out");
    let args = compare(&["--lr", "1e30", "--warmup", "0", "--steps", "20", "--out", &out]);
    fail(1, &args, &["model `tango`", "step 2", "last good checkpoint, after step 0", "out/tango"]);
    let results = json(&dir.path("out/results.json"));
    assert_eq!((&results["finished"], &results["failed"]["model"]), (&false.into(), &"tango".into()));
    succeed(&["generate", "--checkpoint", &dir.path("out/tango"), "--prompt", "a", "--tokens", "3"]);
}

#[test]
fn checkpoints_that_are_none_are_named() {
    let dir = Scratch::new();
    let junk = dir.file("junk/model.safetensors", b"this is no safetensors file");
    dir.file("empty/readme.txt", b"");
    for path in [dir.path("nowhere"), dir.path("empty"), junk.clone(), dir.path("junk")] {
        fail(1, &["generate", "--checkpoint", &path, "--prompt", "a"], &[path.as_str()]);
        fail(1, &["eval", "--checkpoint", &path, "--data", "math"], &[path.as_str()]);
    }
    dir.file("two/a/model.safetensors", b"");
    dir.file("two/b/model.safetensors", b"");
    fail(
        1,
        &["generate", "--checkpoint", &dir.path("two"), "--prompt", "a"],
        &["holds 2 models; choose one", "two/a`"],
    );
    assert_eq!(run(&["generate", "--checkpoint", &junk]).code, 2, "a prompt is needed");
}

/// A text that is long enough for the quick runs.
fn text(dir: &Scratch) -> String {
    dir.file("text.txt", "some text. ".repeat(50))
}

#[test]
fn a_model_that_has_diverged_is_never_saved_nor_measured() {
    let dir = Scratch::new();
    let (out, data) = (dir.path("out"), text(&dir));
    let args = |lr| ["train", "--model", "tango", "--steps", "1", "--val-fraction", "0", "--lr", lr];
    let train = |lr| [&args(lr)[..], &["--preset", "nano", "--data", &data, "--out", &out, "--restart"]].concat();
    for lr in ["1e9", "1e30", "1e300"] {
        fail(1, &train(lr), &["diverged after step 1", "last good checkpoint, after step 0", "out/tango"]);
        assert_eq!(json(&dir.path("out/results.json"))["finished"], false);
        succeed(&["eval", "--checkpoint", &out, "--data", &data, "--split", "train", "--tokens", "64"]);
    }
    let file = dir.path("out/tango/step-0/model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    let said = run(&["generate", "--checkpoint", &out, "--prompt", "abc", "--tokens", "9"]);
    assert_eq!((said.code, said.out.as_str()), (1, "abc\n"), "{}", said.err);
    for more in [&[][..], &["--json"]] {
        let args = [&["eval", "--checkpoint", &out, "--data", "math", "--tokens", "64"], more].concat();
        fail(1, &args, &["has diverged", "NaN", "out`"]);
        assert_eq!(run(&args).out, "");
    }
}

#[test]
fn a_folder_belongs_to_one_run_at_a_time() {
    let dir = Scratch::new();
    let out = dir.path("out");
    let endless = ["train", "--model", "tango", "--preset", "nano", "--steps", "1000000", "--out", &out];
    let mut first = common::kumiki(&endless).stderr(std::process::Stdio::null()).spawn().unwrap();
    while !exists(&dir.path("out/tango/step-0")) {
        assert!(first.try_wait().unwrap().is_none());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let quick = compare(&["--models", "tango", "--out", &out]);
    let restart = [&quick[..], &["--restart"]].concat();
    fail(1, &quick, &["another run is working in `", "out`"]);
    fail(1, &restart, &["another run is working in `", "out`"]);
    assert!(first.try_wait().unwrap().is_none());
    first.kill().unwrap();
    first.wait().unwrap();
    fail(1, &quick, &["holds an unfinished run", "--restart"]);
    // As if it had been killed before its results were there.
    std::fs::rename(dir.path("out/results.json"), dir.path("out/results.json.partial")).unwrap();
    fail(1, &quick, &["holds an unfinished run", "--restart"]);
    succeed(&restart);
    assert!(!exists(&dir.path("out/results.json.partial")) && !exists(&dir.path("out/run.lock")));
}

#[cfg(unix)]
#[test]
fn a_folder_that_is_removed_during_the_run_comes_back() {
    let dir = Scratch::new();
    let out = dir.path("out");
    let args = ["train", "--model", "tango", "--preset", "nano", "--steps", "300", "--eval-every", "0", "--out", &out];
    let child = common::kumiki(&args).stdout(std::process::Stdio::piped()).spawn().unwrap();
    while !std::fs::read_to_string(dir.path("out/log.jsonl")).is_ok_and(|log| log.lines().count() > 5) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // A file that is being written may make the first try fail.
    while std::fs::remove_dir_all(&out).is_err() {}
    let said = common::said(child.wait_with_output().unwrap());
    assert!(said.code == 0 && said.out.contains("val NLL"), "{}", said.out);
    assert_eq!(json(&dir.path("out/results.json"))["finished"], true);
    assert_eq!(std::fs::read_to_string(dir.path("out/log.jsonl")).unwrap().lines().count(), 300);
    assert!(exists(&dir.path("out/tango/model.safetensors")));
}

/// A crowd of threads needs more address space than it gets here.
#[cfg(target_os = "linux")]
#[test]
fn threads_that_cannot_be_started_are_a_sentence() {
    for args in ["gradcheck --filter cast", "bench step --threads 1024"] {
        let command = format!("ulimit -v 1000000; exec {} {args}", env!("CARGO_BIN_EXE_kumiki"));
        let output = std::process::Command::new("sh").args(["-c", &command]).env("KUMIKI_THREADS", "1024").output();
        let said = common::said(output.unwrap());
        assert_eq!(said.code, 1, "{}", said.err);
        assert!(said.err.contains("kumiki: the system refused to start 1024 threads"), "{}", said.err);
    }
}

#[test]
fn what_a_checkpoint_says_is_checked_and_cannot_steer_the_terminal() {
    use kumiki::tensor::safetensors;
    let dir = Scratch::new();
    let out = dir.path("out");
    let said = succeed(&compare(&["--models", "tango", "--steps", "1", "--out", &out]));
    assert!(said.err.contains("1 step of") && said.err.contains("1 step in"), "{}", said.err);
    assert_eq!(said.err.matches("step 1/1").count(), 1, "{}", said.err);
    let file = std::path::PathBuf::from(dir.path("out/tango/model.safetensors"));
    let contents = safetensors::load(&file).unwrap();
    let with = |key: &str, value: &str| {
        let mut metadata = contents.metadata.clone();
        metadata.insert(key.into(), value.into());
        safetensors::save(&file, contents.tensors.iter().map(|(name, t)| (name.as_str(), t)), &metadata).unwrap();
        run(&["eval", "--checkpoint", &out, "--data", "math", "--tokens", "64"])
    };
    let settings = contents.metadata["settings"].clone();
    let no_rows = settings.replace("\"batch\":2", "\"batch\":0");
    assert_ne!(settings, no_rows);
    for (key, value, phrase) in [
        ("step", "soon\u{1b}[2J", "its step must be a number, found `soon\\u{1b}[2J`"),
        ("tokenizer", "bpe", "its tokenizer is `bpe`"),
        ("format", "kumiki language model, version 9", "its format is version 9"),
        ("settings", &no_rows, "batch must be from 1"),
        ("config", &contents.metadata["config"].replace("10000.0", "-1.0"), "rope_base must be a positive number"),
        ("config", &contents.metadata["config"].replace("256", "100"), "its n_vocab must be 256"),
    ] {
        let said = with(key, value);
        assert!(said.code == 1 && said.err.contains(phrase) && said.err.contains("out"), "{key}: {}", said.err);
        assert!(!said.err.contains(['\u{1b}', '\r']) && !said.err.contains("panicked"), "{}", said.err);
    }
    let said = with("model", "\u{1b}[31mred");
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(said.out.starts_with("\\u{1b}[31mred, step 1"), "{}", said.out);
    // Numbers of a file decide neither about memory nor about time.
    let wide = settings.replace("\"batch\":2", "\"batch\":65536").replace("\"seq\":32", "\"seq\":1024");
    assert_eq!(with("settings", &wide).code, 0);
    fail(1, &["eval", "--checkpoint", &out, "--data", "math", "--tokens", "0"], &["--tokens must be at least 1"]);
    #[cfg(unix)]
    fail(1, &["eval", "--checkpoint", "/dev/zero", "--data", "math"], &["`/dev/zero` is no regular file"]);
}

#[test]
fn the_same_run_gives_the_same_bytes() {
    let dir = Scratch::new();
    let model = |name: &str| {
        succeed(&compare(&["--models", "tango", "--out", &dir.path(name)]));
        std::fs::read(dir.path(&format!("{name}/tango/model.safetensors"))).unwrap()
    };
    assert!(model("a") == model("b"));
}
