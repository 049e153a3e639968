//! Where settings come from: the preset, the configuration file, the options, and the run that is gone on with.
//!
//! What counts, last first: an option, the file, the run or else the preset. Every value knows where it is from, which
//! `kumiki config show` says.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use kumiki_train::run::Plan;
use kumiki_train::settings::{PRESETS, Settings};
use kumiki_train::suggest::unknown;
use kumiki_train::zoo::{self, Suite};
use kumiki_train::{Error, Result};
use serde_json::{Map, Value};

use crate::setting_options::SettingOptions;

/// What settings are made of.
#[derive(clap::Args)]
pub struct Sources {
    /// Sizes and budget to start from [default: tiny]
    ///
    /// nano: seconds; tiny: minutes on two cores; small: hours; paper: the paper's sizes, weeks.
    #[arg(long, value_parser = PossibleValuesParser::new(PRESETS), hide_possible_values = false)]
    pub preset: Option<String>,
    /// A text file, a folder of texts (.txt .md .lean) or of tokens (`data prepare`), or `math`, which is generated [default: math]
    ///
    /// A folder with subfolders train* and interpolate whose files are all named AREA__MODULE.txt is DeepMind Mathematics:
    /// trained on the former, validated on the latter.
    #[arg(long, value_name = "PATH|math")]
    pub data: Option<String>,
    /// A TOML file with settings, named as the options below with `_` for `-`
    #[arg(long, value_name = "FILE.toml")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    settings: SettingOptions,
}

/// What options and file together ask for.
pub struct Resolved {
    /// Name of the preset.
    pub preset: String,
    /// Paths or `math`.
    pub corpora: Vec<String>,
    /// One or more.
    pub seeds: Vec<u64>,
    /// Names of models from the file.
    pub models: Option<Vec<String>>,
    /// Everything else; its seed is the first.
    pub settings: Settings,
    /// Where each is from, by the names of settings and of the fields above.
    pub origins: Origins,
}

/// Where values are from.
pub type Origins = BTreeMap<String, Origin>;

/// Where a value is from.
#[derive(Clone, Debug)]
pub enum Origin {
    /// Nobody said anything.
    Default,
    /// This preset, that was asked for or is the first.
    Preset(String),
    /// This configuration file.
    File(PathBuf),
    /// This option, without its hyphens.
    Option(String),
    /// The run in this folder, that is gone on with.
    Run(PathBuf),
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::Preset(name) => write!(f, "preset {name}"),
            Origin::File(path) => write!(f, "{}", path.display()),
            Origin::Option(name) => write!(f, "--{name}"),
            Origin::Run(folder) => write!(f, "run folder {}", folder.display()),
        }
    }
}

/// The options for several corpora and seeds.
#[derive(clap::Args)]
pub struct Several {
    /// Several corpora, separated by commas, each as for --data (with a comma in its name: in --config)
    #[arg(long, value_name = "A,B", value_delimiter = ',', conflicts_with = "data")]
    corpora: Option<Vec<String>>,
    /// Several seeds, separated by commas: every model is trained on every corpus with each
    #[arg(long, value_name = "N,M", value_delimiter = ',', allow_negative_numbers = true, conflicts_with = "seed")]
    seeds: Option<Vec<u64>>,
}

impl Sources {
    /// Reads the file, if any, and puts everything in its order. `models_keys` are what the file may call the models; `several`
    /// are the options of a command that takes several corpora and seeds; `suite` says whose presets are meant, given the
    /// first model that the file names. Of the run in a folder that is gone on with, `old`, comes what neither names.
    pub fn resolve(
        &self,
        models_keys: &[&str],
        several: Option<&Several>,
        old: Option<(&Path, &Plan)>,
        suite: impl Fn(Option<&str>) -> Suite,
    ) -> Result<Resolved> {
        let mut keys = [&["preset", "data"], models_keys].concat();
        if several.is_some() {
            keys.extend(["corpora", "seeds"]);
        }
        let path = self.config.as_deref();
        let mut file = match path {
            Some(path) => read_config(path, &keys)?,
            None => Map::new(),
        };
        for (one, many) in [("data", "corpora"), ("seed", "seeds"), ("model", "models")] {
            if file.contains_key(one) && file.contains_key(many) {
                return Err(in_file(path, &format!("`{one}` and `{many}` are both given; expected one of them")));
            }
        }
        let preset = text(&mut file, "preset", path)?;
        let data = text(&mut file, "data", path)?;
        let corpora = list(&mut file, "corpora", path, "texts in quotes", |value| value.as_str().map(str::to_owned))?;
        let seeds = list(&mut file, "seeds", path, "whole numbers from 0", Value::as_u64)?;
        let mut named = None;
        for key in models_keys {
            named = models(&mut file, key, path)?.or(named);
        }
        let blamed = |e| if self.preset.is_none() && preset.is_some() { in_file(path, &e) } else { e };
        let suite = suite(named.as_deref().and_then(<[String]>::first).map(String::as_str));

        let from_file = || path.map_or(Origin::Default, |path| Origin::File(path.to_owned()));
        let from_old = || old.map_or(Origin::Default, |(folder, _)| Origin::Run(folder.to_owned()));
        let option = |name: &str| Origin::Option(name.replace('_', "-"));
        let mut origins = Origins::new();
        let (asked, origin) = match (&self.preset, &preset) {
            (Some(name), _) => (Some(name.clone()), option("preset")),
            (None, Some(name)) => (Some(name.clone()), from_file()),
            (None, None) => (None, from_old()),
        };
        origins.insert("preset".to_owned(), origin);
        let (preset, mut settings, base) = match old {
            Some((folder, old)) => {
                if let Some(asked) = asked.filter(|asked| *asked != old.preset) {
                    return Err(blamed(Error::new(format!(
                        "the run in `{}` started from the preset `{}`, now it is `{asked}`; --resume needs the same, --out \
                         another folder",
                        folder.display(),
                        old.preset
                    ))));
                }
                (old.preset.clone(), old.settings.clone(), from_old())
            }
            None => {
                let preset = asked.unwrap_or_else(|| "tiny".to_owned());
                let settings = Settings::for_suite(suite, &preset).map_err(blamed)?;
                let base = Origin::Preset(preset.clone());
                (preset, settings, base)
            }
        };
        origins.extend(Settings::keys().into_iter().map(|key| (key, base.clone())));
        let mut without = settings.clone();
        let seeded = file.contains_key("seed");
        for (key, value) in file {
            settings.set(&key, value).map_err(|e| in_file(path, &e))?;
            origins.insert(key, from_file());
        }
        for (key, value) in self.settings.given()? {
            settings.set(&key, value.clone())?;
            without.set(&key, value)?;
            origins.insert(key.clone(), option(&key));
        }
        // What would be right without the file is the file's mistake.
        settings.check().map_err(|e| if without.check().is_ok() { in_file(path, &e) } else { e })?;

        let one = |name: String| vec![name];
        let old = old.map(|(_, old)| old);
        let (corpora, origin) = first([
            (self.data.clone().map(one), option("data")),
            (several.and_then(|several| several.corpora.clone()), option("corpora")),
            (data.map(one).or(corpora), from_file()),
            (old.map(|old| old.corpora.clone()), from_old()),
        ])
        .unwrap_or_else(|| (one("math".to_owned()), Origin::Default));
        origins.insert("corpora".to_owned(), origin);
        let (seeds, origin) = first([
            (self.settings.seed.map(|seed| vec![seed]), option("seed")),
            (several.and_then(|several| several.seeds.clone()), option("seeds")),
            (seeds.or_else(|| seeded.then(|| vec![settings.seed])), from_file()),
            (old.map(|old| old.seeds.clone()), from_old()),
        ])
        .unwrap_or_else(|| (vec![settings.seed], base));
        origins.insert("seeds".to_owned(), origin);
        settings.seed = seeds.first().copied().unwrap_or(settings.seed);
        let found = first([(named, from_file()), (old.map(|old| old.models.clone()), from_old())]);
        let models = found.map(|(models, origin)| {
            origins.insert("models".to_owned(), origin);
            models
        });
        Ok(Resolved { preset, corpora, seeds, models, settings, origins })
    }
}

/// The first of these values that there is, with where it is from.
fn first<T>(all: impl IntoIterator<Item = (Option<T>, Origin)>) -> Option<(T, Origin)> {
    all.into_iter().find_map(|(value, origin)| Some((value?, origin)))
}

fn in_file(path: Option<&Path>, error: &dyn std::fmt::Display) -> Error {
    Error::new(format!("`{}`: {error}", path.unwrap_or(Path::new("")).display()))
}

fn read_config(path: &Path, keys: &[&str]) -> Result<Map<String, Value>> {
    let meta = std::fs::metadata(path).map_err(|e| Error::io("read the configuration", path, e))?;
    // A pipe would be waited for, a device read, for ever.
    if !meta.is_file() {
        let path = path.display();
        return Err(Error::new(format!("`{path}` is no regular file; expected a configuration in TOML")));
    }
    let source = std::fs::read_to_string(path).map_err(|e| Error::io("read the configuration", path, e))?;
    let table: toml::Table = toml::from_str(&source).map_err(|e| {
        let at = e.span().map_or(0, |span| span.start.min(source.len()));
        let line = source.as_bytes()[..at].iter().filter(|&&b| b == b'\n').count() + 1;
        in_file(Some(path), &format!("line {line} is not valid TOML: {}", e.message().replace('\n', ", ")))
    })?;
    let settings = Settings::keys();
    let known: Vec<&str> = keys.iter().copied().chain(settings.iter().map(String::as_str)).collect();
    if let Some(key) = table.keys().find(|key| !known.contains(&key.as_str())) {
        return Err(in_file(Some(path), &unknown("setting", key, &known)));
    }
    match serde_json::to_value(table) {
        Ok(Value::Object(map)) => Ok(map),
        other => Err(in_file(Some(path), &format!("expected settings, found {other:?}"))),
    }
}

/// Takes the text under `key` out of the file's settings.
fn text(file: &mut Map<String, Value>, key: &str, path: Option<&Path>) -> Result<Option<String>> {
    match file.remove(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(in_file(path, &format!("`{key}` must be a text in quotes, found {other}"))),
    }
}

/// Takes the list under `key` out; it holds at least one item, and `item` reads one.
fn list<T>(
    file: &mut Map<String, Value>,
    key: &str,
    path: Option<&Path>,
    items: &str,
    item: impl Fn(&Value) -> Option<T>,
) -> Result<Option<Vec<T>>> {
    let Some(found) = file.remove(key) else { return Ok(None) };
    let all = found.as_array().and_then(|values| values.iter().map(item).collect::<Option<Vec<T>>>());
    match all.filter(|items| !items.is_empty()) {
        Some(all) => Ok(Some(all)),
        None => Err(in_file(path, &format!("`{key}` must be a list of {items}, at least one, found {found}"))),
    }
}

/// Takes the names of models out: one name, or a list of them.
fn models(file: &mut Map<String, Value>, key: &str, path: Option<&Path>) -> Result<Option<Vec<String>>> {
    let name = |value: &Value| value.as_str().map(str::to_owned);
    let names: (Option<Vec<String>>, Value) = match file.remove(key) {
        None => return Ok(None),
        Some(Value::Array(values)) if key == "models" => {
            (values.iter().map(name).collect::<Option<_>>(), Value::Array(values))
        }
        Some(value) => (name(&value).map(|name| vec![name]), value),
    };
    match names {
        (Some(names), _) => {
            names.iter().map(|name| zoo::checked(name)).collect::<Result<_>>().map(Some).map_err(|e| in_file(path, &e))
        }
        (None, found) => {
            Err(in_file(path, &format!("`{key}` must be a name in quotes or a list of them, found {found}")))
        }
    }
}
