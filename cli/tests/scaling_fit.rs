//! Scaling laws on the command line: fitted, drawn, refused.

mod common;

use common::{Scratch, exists, fail, json, kumiki, said, succeed};
use serde_json::Value;

/// Rows `model,params,tokens,loss` of a law with this α, and some wobble in place of noise.
fn rows(model: &str, alpha: f64) -> String {
    let mut rows = String::new();
    for i in 0..25 {
        let (n, d) = (1e7 * 3f64.powi(i / 5), 2e8 * 3f64.powi(i % 5));
        let wobble = 1.0 + 0.005 * f64::from(7 * i % 11 - 5) / 5.0;
        let loss = (1.69 + 406.0 / n.powf(alpha) + 411.0 / d.powf(0.28)) * wobble;
        rows += &format!("{model},{n},{d},{loss}\n");
    }
    rows
}

#[test]
fn laws_of_two_models_are_fitted_and_drawn() {
    let dir = Scratch::new();
    let text = format!("model,N,D,nll\n{}{}", rows("tango", 0.34), rows("wango", 0.38));
    let (file, svg) = (dir.file("runs.csv", text), dir.path("laws.svg"));
    let args = ["scaling", "fit", &file, "--bootstrap", "100", "--out", &svg];
    let shown = succeed(&args);
    for word in ["tango", "wango", "95 % from", "best N ∝ C^", "tango: 25 points", "R² 0.99"] {
        assert!(shown.out.contains(word), "no {word} in {}", shown.out);
    }
    assert!(exists(&svg) && shown.err.contains("picture: "));
    let parsed = |text: &str| json(&dir.file("out.json", text));
    let with = |more: &[&str]| {
        parsed(&succeed(&[&["scaling", "fit", &file, "--bootstrap", "100", "--json"], more].concat()).out)
    };
    let found = with(&[]);
    assert_eq!(found["failed"], Value::Array(vec![]));
    for (n, (model, alpha)) in [("tango", 0.34), ("wango", 0.38)].into_iter().enumerate() {
        let law = &found["laws"][n];
        assert_eq!((&law["model"], &law["points"]), (&Value::from(model), &Value::from(25)));
        let end = |i: usize| law["a"]["interval"][i].as_f64().unwrap();
        assert!(end(0) < alpha && alpha < end(1), "{law}");
    }
    // Neither threads nor a second time change anything; the seed does, and no refits leave no intervals.
    let mut one = kumiki(&["scaling", "fit", &file, "--bootstrap", "100", "--json"]);
    assert_eq!(parsed(&said(one.env("KUMIKI_THREADS", "1").output().unwrap()).out), found);
    assert_ne!(with(&["--seed", "1"]), found);
    let without = with(&["--bootstrap", "0"]);
    assert_eq!(without["laws"][0]["E"]["value"], found["laws"][0]["E"]["value"]);
    assert_eq!(without["laws"][0]["E"]["interval"], Value::Null);
}

#[test]
fn results_of_a_run_are_a_table() {
    let dir = Scratch::new();
    let rows: Vec<Value> = rows("tango", 0.34).lines().map(|line| {
        let cells: Vec<&str> = line.split(',').collect();
        let number = |i: usize| cells[i].parse::<f64>().unwrap();
        serde_json::json!({"model": cells[0], "corpus": "book", "seed": 0, "params": number(1), "tokens": number(2), "val_nll": number(3)})
    }).collect();
    let file = dir.file("results.json", serde_json::json!({"rows": rows, "finished": true}).to_string());
    let out = succeed(&["scaling", "fit", &file, "--bootstrap", "0"]).out;
    assert!(out.contains("tango: 25 points") && out.contains('–'), "{out}");
}

#[test]
fn what_is_wrong_is_a_sentence() {
    let dir = Scratch::new();
    let file = |name: &str, text: &str| dir.file(name, text);
    let good = file("good.csv", &format!("model,N,D,loss\n{}", rows("tango", 0.34)));
    let fit = |args: &[&str], code: i32, phrase: &str| fail(code, &[&["scaling", "fit"], args].concat(), &[phrase]);
    fit(&[], 2, "FILE");
    fit(&[&good, "--bootstrap", "5"], 1, "must be 0 or from 100 to 100000, found 5");
    fit(&[&good, "--bootstrap", "-5"], 2, "-5");
    fit(&[&good, "--out", &dir.path("no/x.svg")], 1, "cannot write the picture");
    fit(&[&dir.path("absent")], 1, "cannot read the table");
    fit(&[&file("empty.csv", "")], 1, "empty.csv` is empty");
    fit(&[&file("header.csv", "params,loss\n1,2\n")], 1, "expected a column `tokens` or `D`");
    fit(&[&file("bad.csv", "N,D,loss\n1,2,3\n1,2,x\n")], 1, "bad.csv`, line 3, column 3 (`loss`)");
    fit(
        &[&file("one.csv", &format!("N,D,loss\n{}", "1e6,1e7,3.5\n".repeat(9)))],
        1,
        "one cell of N and D makes no fit",
    );
    let few = "model,N,D,loss\na,1e6,1e7,3.5\nb,1e6,1e7,3.5\n";
    fit(&[&file("few.csv", few)], 1, "none of 2 models could be fitted");
    // What can be fitted is, and what is wrong with the rest is said.
    let some = file("some.csv", &format!("model,N,D,loss\nfew,1e6,1e7,3.5\n{}", rows("tango", 0.34)));
    let shown = succeed(&["scaling", "fit", &some, "--bootstrap", "0"]);
    assert!(
        shown.out.contains("tango: 25 points") && shown.err.contains("no law for `few`: one cell"),
        "{}",
        shown.err
    );
}
