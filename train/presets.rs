//! The presets: files of `presets/`, in the form that `--config` takes, within the program.
//!
//! A file says from which preset it starts (`preset = …`) and what is otherwise; `tiny` starts from none and names every
//! setting. Where the models of a suite are of other sizes, a file `<suite>-<preset>.toml` comes first.

use serde_json::{Map, Value};

use crate::settings::Settings;
use crate::suggest::unknown;
use crate::zoo::Suite;
use crate::{Error, Result};

/// The presets, by name, from seconds to weeks.
pub const PRESETS: [&str; 4] = ["nano", "tiny", "small", "paper"];

/// The one that everything starts from.
pub const FIRST: &str = "tiny";

macro_rules! files {
    ($($name:literal),*) => {
        /// Names and texts of the files.
        const FILES: &[(&str, &str)] = &[$(($name, include_str!(concat!("presets/", $name, ".toml")))),*];
    };
}
files!("nano", "tiny", "small", "paper", "cem-paper", "double-nano", "double-tiny", "double-small", "double-paper");

/// The file of a preset as it is, for the models of a suite.
///
/// # Errors
/// Names the nearest preset when there is none of that name.
#[expect(clippy::missing_panics_doc, reason = "a test reads every preset")]
pub fn text(suite: Suite, name: &str) -> Result<&'static str> {
    if !PRESETS.contains(&name) {
        return Err(Error::new(unknown("preset", name, &PRESETS)));
    }
    let own = format!("{}-{name}", suite.name());
    let of = |wanted: &str| FILES.iter().find(|(file, _)| *file == wanted).map(|(_, text)| *text);
    Ok(of(&own).or_else(|| of(name)).unwrap_or_else(|| panic!("no file of the preset `{name}`")))
}

/// The settings of a preset for the models of a suite.
pub(crate) fn settings(suite: Suite, name: &str) -> Result<Settings> {
    let mut all = Map::new();
    let (mut text, mut file) = (text(suite, name)?, name.to_owned());
    loop {
        let mut base = None;
        for (key, value) in lines(text) {
            match value {
                Value::String(name) if key == "preset" => base = Some(name),
                // What a file says counts more than what it starts from.
                value => drop(all.entry(key).or_insert(value)),
            }
        }
        let Some(name) = base else { break };
        (text, file) = (self::text(Suite::Tango, &name)?, name);
    }
    // Not by way of the public `Deserialize`, which begins with these.
    Settings::deserialize(Value::Object(all)).map_err(|e| Error::new(format!("the preset `{file}`: {e}")))
}

/// The settings in the order in which people read them.
pub(crate) fn keys() -> Vec<String> {
    lines(text(Suite::Tango, FIRST).unwrap_or_default()).into_iter().map(|(key, _)| key).collect()
}

/// The lines of a file. Ours have one key a line, and values that TOML and JSON write alike: no need of a reader of TOML in a
/// library that should stay small. That both read the same is tested beside `--config`, which takes all of TOML.
fn lines(text: &str) -> Vec<(String, Value)> {
    let said = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    said.map(|line| {
        let parts = line.split_once('=').map(|(key, value)| (key.trim(), serde_json::from_str(value.trim())));
        let Some((key, Ok(value))) = parts else { panic!("a line of a preset must be `key = value`, found `{line}`") };
        (key.to_owned(), value)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_hold_what_they_say_and_nothing_twice() {
        let all = Settings::keys();
        for (name, text) in FILES {
            let mut keys: Vec<String> = lines(text).into_iter().map(|(key, _)| key).collect();
            let base = keys.first().is_some_and(|key| key == "preset");
            assert_eq!(base, *name != FIRST, "{name}");
            keys.retain(|key| key != "preset");
            assert!(keys.iter().all(|key| all.contains(key)), "{name}: {keys:?}");
            keys.sort();
            keys.dedup();
            assert_eq!(keys.len() + usize::from(base), lines(text).len(), "{name} has a key twice");
        }
    }

    #[test]
    fn suites_have_their_own_sizes() {
        let of = |suite, name| settings(suite, name).unwrap();
        assert_eq!(of(Suite::Cem, "tiny"), of(Suite::Tango, "tiny"));
        assert_eq!(of(Suite::Cem, "paper").lr, of(Suite::Tango, "paper").lr);
        assert_eq!((of(Suite::Cem, "paper").blocks, of(Suite::Tango, "paper").blocks), (12, 4));
        for name in PRESETS {
            let double = of(Suite::Double, name);
            assert_eq!(double, double.clone().with_layers(double.lr), "{name}");
        }
        let e = settings(Suite::Cem, "tinny").unwrap_err().to_string();
        assert!(e.starts_with("unknown preset `tinny`; did you mean `tiny`?"), "{e}");
    }
}
