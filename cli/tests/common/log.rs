//! For the tests that read a run's log.

use serde_json::Value;

/// The steps of a run's log, without the time that they took.
pub fn log(out: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(format!("{out}/log.jsonl")).unwrap();
    let without = |line: &str| {
        let mut record: Value = serde_json::from_str(line).unwrap();
        record.as_object_mut().unwrap().remove("tok_s");
        record
    };
    text.lines().map(without).collect()
}
