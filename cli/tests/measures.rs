//! What counts and measures models without training them for long: macs, inference, scaling, ablations.

mod common;

use common::{Scratch, exists, fail, json, succeed};
use serde_json::Value;

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

#[test]
fn macs_at_the_papers_scale() {
    let rows = parsed(&succeed(&["macs", "--suite", "tango", "--preset", "paper", "--seq", "8192", "--json"]).out);
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 12, "six models, two depths");
    for (model, paper) in [("tango", 9.44e12), ("wango", 1.90e12), ("recurrent", 1.94e12)] {
        let row = rows.iter().find(|row| row["model"] == model && row["blocks"] == 4).unwrap();
        assert!((row["macs"].as_f64().unwrap() / paper - 1.0).abs() < 0.005, "{row}");
    }
    for row in rows {
        let number = |key: &str| row[key].as_u64().unwrap_or_else(|| panic!("{key} in {row}"));
        assert!((number("params") as f64 / 44.3e6 - 1.0).abs() < 0.001, "{row}");
        assert_eq!(number("params_total"), number("params") + 512 * 50_257 + 512);
        let parts = ["macs_projection", "macs_pair", "macs_prefix", "macs_head"].map(number);
        assert_eq!(parts.iter().sum::<u64>(), number("macs"));
        assert_eq!(number("macs_prefix") > 0, row["model"] == "wango" || row["model"] == "flash", "{row}");
        assert!(number("state_bytes") > 1 << 20 && number("blocks").is_multiple_of(4));
    }
    let full = parsed(&succeed(&["macs", "--models", "tango", "--blocks", "4", "--json"]).out);
    let causal = parsed(&succeed(&["macs", "--models", "tango", "--blocks", "4", "--pairs", "causal", "--json"]).out);
    let pair = |rows: &Value| rows[0]["macs_pair"].as_f64().unwrap();
    assert!((pair(&full) / pair(&causal) - 2.0).abs() < 1e-3);
    let text = succeed(&["macs"]).out;
    assert!(["tango", "flash", "9.45 T", "state", "all T·T pairs"].iter().all(|word| text.contains(word)), "{text}");
    // Halves are compared with the Llama of as many layers.
    let table = |blocks| succeed(&["macs", "--suite", "cem", "--models", "llama,cem-t1", "--blocks", blocks]).out;
    let both = table("2,4");
    for blocks in ["2", "4"] {
        let brackets = |text: &str| -> Vec<String> {
            let mine = text.lines().filter(|line| line.split_whitespace().nth(1) == Some(blocks));
            mine.flat_map(|line| line.split_whitespace().filter(|w| w.starts_with('(')).map(str::to_owned)).collect()
        };
        assert_eq!((brackets(&both), brackets(&both).len()), (brackets(&table(blocks)), 4), "{both}");
    }
    for (args, phrase) in [
        (&["--models", "tango,wango,tango"][..], "model `tango` is named twice"),
        (&["--seq", "0"], "--seq must be from 1"),
        (&["--seq", "-1"], "invalid value '-1'"),
        (&["--vocab", "0"], "--vocab must be from 1"),
        (&["--blocks", "0"], "blocks must be from 1"),
        (&["--params", "1000"], "1000 parameters is out of reach: the nearest that these blocks can have is"),
        (&["--models", "tangoo"], "unknown model `tangoo`; did you mean `tango`?"),
        (&["--suite", "cemm"], "possible values: tango, cem"),
    ] {
        let code = if phrase.starts_with(['u', 'i', 'p']) { 2 } else { 1 };
        fail(code, &[&["macs"], args].concat(), &[phrase]);
    }
}

#[test]
fn inference_prints_a_table_and_draws() {
    let dir = Scratch::new();
    assert!(dir.file("inference.svg", "what was there").ends_with("inference.svg"));
    let (out, again) = (dir.path("inference.svg"), dir.path("again.svg"));
    let base = ["inference", "--preset", "nano", "--tokens", "2", "--seq"];
    let said = succeed(&[&base[..], &["40,8,8", "--out", &out]].concat());
    for word in ["tango", "wango", "recurrent", "untied", "gau", "flash", "token ms", "bytes kept", "2 threads"] {
        assert!(said.out.contains(word), "no {word} in {}", said.out);
    }
    let svg = std::fs::read_to_string(&out).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("bytes kept") && svg.contains("flash"));
    let found =
        parsed(&succeed(&[&base[..], &["64,256", "--models", "flash,tango", "--json", "--out", &again]].concat()).out);
    let rows = found["rows"].as_array().unwrap();
    let bytes = |model: &str, seq: u64| {
        rows.iter().find(|row| row["model"] == model && row["seq"] == seq).unwrap()["state_bytes"].as_u64().unwrap()
    };
    assert_eq!(bytes("flash", 64), bytes("flash", 256));
    assert_eq!(4 * bytes("tango", 64), bytes("tango", 256));
    fail(1, &[&base[..], &["0", "--out", &out]].concat(), &["--seq must be from 1 to 1048576, found 0"]);
    fail(1, &["inference", "--tokens", "0", "--out", &out], &["--tokens must be from 1"]);
    for command in [&["inference"][..], &["bench", "scaling"]] {
        let args = [command, &["--models", "gau,gau", "--out", &out]].concat();
        fail(1, &args, &["model `gau` is named twice"]);
    }
    let paper = ["inference", "--preset", "paper", "--models", "tango", "--seq", "1000000", "--out", &out];
    fail(1, &paper, &["inference with `tango` needs at least", "lower --seq"]);
    fail(
        1,
        &[&base[..], &["8", "--out", &dir.path("no/where.svg")]].concat(),
        &["cannot write the picture", "where.svg", "a folder that exists"],
    );
}

#[test]
fn scaling_prints_a_table_and_draws() {
    let dir = Scratch::new();
    let out = dir.path("scaling.svg");
    let base = ["bench", "scaling", "--preset", "nano", "--rounds", "1", "--out", &out];
    let text = succeed(&[&base[..], &["--seq", "32,64"]].concat()).out;
    for word in ["tango", "wango", "ms per token", "bytes per token", "1.00×"] {
        assert!(text.contains(word), "no {word} in {text}");
    }
    assert!(exists(&out));
    let json =
        succeed(&[&base[..], &["--seq", "64", "--models", "gau", "--json", "--checkpoint-activations"]].concat());
    assert!(parsed(&json.out)["rows"][0]["token_bytes"].as_f64().unwrap() > 100.0);
    fail(1, &[&base[..], &["--seq", "2000000"]].concat(), &["--seq must be from 1 to 1048576, found 2000000"]);
    fail(1, &[&base[..], &["--seq", "64", "--rounds", "0"]].concat(), &["--rounds must be at least 1, found 0"]);
    fail(1, &["bench", "scaling", "--preset", "paper", "--seq", "1048576", "--out", &out], &["of memory"]);
}

#[test]
fn ablations_are_runs_like_any_other() {
    let dir = Scratch::new();
    let out = dir.path("maps");
    let base = ["ablate", "feature-map", "--preset", "nano", "--steps", "2", "--eval-tokens", "256", "--out", &out];
    let said = succeed(&[&base[..], &["--windows", "4,16"]].concat());
    let results = json(&dir.path("maps/results.json"));
    let models: Vec<&str> =
        results["rows"].as_array().unwrap().iter().map(|row| row["model"].as_str().unwrap()).collect();
    assert_eq!(models, ["wango-hyperbolic-4", "wango-hyperbolic-16", "wango-elu1-16", "wango-taylor2-16"]);
    assert!(models.iter().all(|model| said.out.contains(model)) && !said.out.contains("in the paper"), "{}", said.out);
    let picture = std::fs::read_to_string(dir.path("maps/ablation.svg")).unwrap();
    assert!(["hyperbolic", "elu1", "taylor2", "window W"].iter().all(|word| picture.contains(word)));
    // More of them are added to what is there.
    fail(1, &[&base[..], &["--windows", "4", "--full"]].concat(), &["finished run"]);
    succeed(&[&base[..], &["--windows", "4", "--full", "--resume"]].concat());
    assert_eq!(json(&dir.path("maps/results.json"))["rows"].as_array().unwrap().len(), 6);
    let checkpoint = dir.path("maps/wango-elu1-4");
    succeed(&["generate", "--checkpoint", &checkpoint, "--prompt", "1 + 1", "--tokens", "3"]);
    fail(1, &[&base[..], &["--windows", "0", "--restart"]].concat(), &["--windows must be from 1 to 1048576, found 0"]);
    fail(2, &["ablate", "feature-maps"], &["feature-map"]);
    fail(2, &[&base[..], &["--maps", "elu2"]].concat(), &["elu1"]);
}

#[test]
fn the_coordinate_check_of_mup() {
    let dir = Scratch::new();
    let out = dir.path("mup.svg");
    let base = ["mup", "check", "--seeds", "1", "--out", &out];
    let text = succeed(&[&base[..], &["--widths", "32,64", "--steps", "1"]].concat()).out;
    assert!(["standard", "μP", "exponent", "block 2", "logits"].iter().all(|word| text.contains(word)), "{text}");
    assert!(exists(&out));
    let found = parsed(&succeed(&[&base[..], &["--widths", "32,64", "--steps", "2", "--json"]].concat()).out);
    // Rates, widths, steps with the one before the first, parts.
    assert_eq!(found["rows"].as_array().unwrap().len(), 2 * 2 * 3 * 4);
    assert_eq!((&found["check"]["base_width"], found["slopes"].as_array().unwrap().len()), (&32.into(), 2 * 4));
    for (args, phrase) in [
        (&["--widths", "32"][..], "widths must be two or more"),
        (&["--widths", "24,32"], "every width must be a multiple of head_dim=16, found 24"),
        (&["--widths", "32,1048592"], "d_model must be from 1 to 1048576, found 1048592"),
        (&["--widths", "32,131072"], "training `untied` needs at least"),
        (&["--seeds", "0"], "--seeds must be from 1 to 1000, found 0"),
        (&["--steps", "0"], "steps must be from 1"),
        (&["--model", "encoder-decoder"], "it is of the kind encoder-decoder"),
    ] {
        fail(1, &[&base[..], args].concat(), &[phrase]);
    }
}
