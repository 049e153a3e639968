//! Causal Energy Minimization on the command line: compared, continued, measured, looked into.

mod common;

use common::{Scratch, exists, fail, json, succeed};
use serde_json::Value;

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

#[test]
fn a_comparison_then_other_steps_and_a_look_inside() {
    let dir = Scratch::new();
    let out = dir.path("run");
    let models = "llama,cem-mlp-t1,cem-t2-r2";
    let said = succeed(&["compare", "cem", "--preset", "nano", "--models", models, "--out", &out]);
    for word in ["llama", "cem-mlp-t1", "cem-t2-r2", "perplexity", "MACs"] {
        assert!(said.out.contains(word), "no {word} in {}", said.out);
    }
    assert!(!said.err.contains("parameters where"), "CEM is smaller on purpose: {}", said.err);
    let results = json(&dir.path("run/results.json"));
    let params = |i: usize| results["rows"][i]["params"].as_u64().unwrap();
    assert!(params(2) < params(1) && params(1) < params(0), "{results}");

    let checkpoint = dir.path("run/cem-t2-r2");
    let eval = |more: &[&str]| {
        let base = ["eval", "--checkpoint", &checkpoint, "--data", "math", "--tokens", "1024", "--json"];
        parsed(&succeed(&[&base[..], more].concat()).out)
    };
    let (own, two, five) = (eval(&[]), eval(&["--steps", "2"]), eval(&["--steps", "5"]));
    assert_eq!((&own["nll"], &own["mean_steps"]), (&two["nll"], &Value::Null));
    assert!(own["nll"] != five["nll"] && two["mean_steps"] == 2.0 && five["mean_steps"] == 5.0);
    let soon = eval(&["--steps", "5", "--energy-tol", "1e9"]);
    assert_eq!((&soon["mean_steps"], &soon["nll"]), (&Value::from(1.0), &eval(&["--steps", "1"])["nll"]));
    let said =
        succeed(&["generate", "--checkpoint", &checkpoint, "--prompt", "1 + 1", "--tokens", "9", "--steps", "3"]);
    assert!(said.out.starts_with("1 + 1") && said.err.contains("3.000 steps of a token"), "{}{}", said.out, said.err);
    let more = ["--tokens", "9", "--energy-tol", "0.01", "--steps", "6"];
    succeed(&[&["generate", "--checkpoint", &checkpoint, "--prompt", "1 + 1"], &more[..]].concat());

    let svg = dir.path("energy.svg");
    let args = ["cem", "energy", "--checkpoint", &checkpoint, "--steps", "3", "--tokens", "512", "--out", &svg];
    let table = succeed(&args).out;
    assert!(table.contains("attention") && table.contains("mlp") && table.contains("after 1 step"), "{table}");
    let rows = parsed(&succeed(&[&args[..], &["--json"]].concat()).out);
    let rows = rows["energies"].as_array().unwrap();
    assert_eq!(rows.len(), 4, "two layers, two halves");
    assert!(rows.iter().all(|row| row["energies"].as_array().unwrap().len() == 4));
    assert!(exists(&svg));

    let svg = dir.path("steps.svg");
    let args = ["cem", "steps", "--checkpoint", &checkpoint, "--most", "3", "--tokens", "512", "--out", &svg];
    let found = parsed(&succeed(&[&args[..], &["--energy-tol", "1e9,0.001", "--json"]].concat()).out);
    let losses = found["losses"].as_array().unwrap();
    assert_eq!(losses.len(), 5);
    assert_eq!(losses[0]["nll"], losses[3]["nll"], "a tolerance that nothing reaches leaves one step");
    assert!(losses.iter().all(|one| one["mean_steps"].as_f64().unwrap() <= 3.0));
    let said = succeed(&[&args[..], &["--energy-tol", "1e300"]].concat()).out;
    assert!(exists(&svg) && said.contains("\n1 step ") && said.contains("\n3 steps "), "{said}");
    assert!(said.contains("at most 3, tolerance 1e300 "), "{said}");

    // Other steps than Llama has.
    let llama = dir.path("run/llama");
    fail(1, &["eval", "--checkpoint", &llama, "--data", "math", "--steps", "2"], &["no layer that descends"]);
    fail(1, &["cem", "energy", "--checkpoint", &llama, "--out", &svg], &["no layer that descends"]);
}

#[test]
fn layers_that_differ_are_trained_and_loaded() {
    let dir = Scratch::new();
    let out = dir.path("run");
    let kinds = ["--cem-attention", "plain,cem", "--cem-mlp", "cem,plain"];
    succeed(&[&["train", "--preset", "nano", "--model", "cem-t2", "--steps", "2", "--out", &out], &kinds[..]].concat());
    let (text, svg) = (dir.file("book.txt", "There and back again. ".repeat(400)), dir.path("x.svg"));
    let args = ["cem", "energy", "--checkpoint", &format!("{out}/cem-t2"), "--data", &text, "--json", "--out", &svg];
    let rows = parsed(&succeed(&args).out);
    let halves: Vec<(u64, &str)> = (rows["energies"].as_array().unwrap().iter())
        .map(|row| (row["layer"].as_u64().unwrap(), row["half"].as_str().unwrap()))
        .collect();
    assert_eq!(halves, [(1, "attention"), (0, "mlp")]);
}

#[test]
fn the_suite_is_counted_and_a_step_timed() {
    let rows = parsed(&succeed(&["macs", "--suite", "cem", "--json"]).out);
    let rows = rows.as_array().unwrap();
    let of = |name: &str, key: &str| {
        rows.iter().find(|row| row["model"] == name).unwrap_or_else(|| panic!("{name}"))[key].as_f64().unwrap()
    };
    assert_eq!(of("llama", "params"), 84_953_088.0);
    assert!((of("cem-t2-none", "params_attention") / of("llama", "params_attention") - 0.5).abs() < 1e-3);
    assert!((of("cem-t2-none", "params_mlp") / of("llama", "params_mlp") - 2.0 / 3.0).abs() < 1e-3);
    assert_eq!(of("cem-t2-none", "macs_pair"), 2.0 * of("llama", "macs_pair"));
    let sizes = ["--d-model", "16", "--heads", "2", "--head-dim", "8", "--seq", "32", "--batch", "2", "--steps", "1"];
    let args = ["bench", "step", "--model", "cem", "--params", "20000"];
    let row = parsed(&succeed(&[&args[..], &sizes].concat()).out);
    assert!(row["step_ms"].as_f64().unwrap() > 0.0 && row["params"].as_f64().unwrap() < 22_000.0, "{row}");
}

#[test]
fn what_is_wrong_is_a_sentence() {
    let dir = Scratch::new();
    let out = dir.path("run");
    let train = |model: &str, more: &[&str], code: i32, phrase: &str| {
        let base = ["train", "--preset", "nano", "--model", model, "--out", &out];
        fail(code, &[&base[..], more].concat(), &[phrase]);
        assert!(!exists(&out));
    };
    train("cem-t1-r33", &[], 1, "the preconditioner's rank must be from 1 to d_model=32, found 33");
    train("cem-t1-r0", &[], 2, "model `cem-t1-r0`: the preconditioner's rank must be from 1");
    train("cem-t0", &[], 2, "model `cem-t0`: steps must be from 1 to 1024, found 0");
    train("cem-t1-eta0", &[], 2, "model `cem-t1-eta0`: eta must be from 0.000001 to 1000, found 0");
    train("cem-t1-eta1e-3", &[], 2, "did you mean `cem-t1-eta0.001`?");
    let plain = ["--cem-attention", "plain", "--cem-mlp", "plain"];
    train("cem-t2", &plain, 1, "no layer descends: cem_attention is `plain`, cem_mlp is `plain`; that is `llama`");
    for model in ["tango", "llama", "cem-mlp-t1"] {
        train(model, &["--cem-attention", "rubbish"], 1, "cem_attention must be a list of `cem` and `plain`");
    }
    train("cem-t2-shared", &[], 2, "did you mean `cem-t2`?");
    train("cem-t1", &["--cem-mlp", "cem,cem,cem"], 1, "mlp must name one kind for all layers or 2, found 3");
    train("cem-t1", &["--cem-mlp", "swiglu"], 1, "cem_mlp must be a list of `cem` and `plain`, found `swiglu`");
    train("cem-t1", &["--cem-width", "lama"], 2, "possible values: llama, own");
    train("llama", &["--transformer-heads", "3"], 1, "transformer_heads must divide d_model=32");
    let svg = dir.path("x.svg");
    let energy = |more: &[&str], code: i32, phrase: &str| {
        fail(code, &[&["cem", "energy", "--out", &svg], more].concat(), &[phrase]);
    };
    energy(&[], 2, "<--checkpoint <DIR>|--model <NAME>>");
    energy(&["--checkpoint", "x", "--model", "cem-t1"], 2, "cannot be used with");
    energy(
        &["--checkpoint", "x", "--preset", "tiny"],
        2,
        "the argument '--checkpoint <DIR>' cannot be used with '--preset <PRESET>'",
    );
    energy(&["--model", "cem-t1", "--steps", "0"], 1, "--steps must be from 1 to 1024, found 0");
    energy(&["--model", "cem-t1", "--tokens", "0"], 1, "--tokens must be at least 1");
    energy(&["--model", "tango"], 1, "no layer that descends");
    let steps = |more: &[&str], phrase: &str| {
        let base = ["cem", "steps", "--model", "cem-t1", "--tokens", "64", "--out", &svg];
        let said = fail(1, &[&base[..], more].concat(), &[phrase]);
        assert_eq!(said.lines().count(), 1, "nothing may be measured before: {said}");
    };
    steps(&["--most", "0"], "--most must be from 1 to 1024, found 0");
    steps(&["--most", "1", "--energy-tol", "-1"], "--energy-tol must be a number from 0, found -1");
    steps(&["--most", "1", "--energy-tol", "nan"], "found NaN");
    assert!(!exists(&svg));
}
