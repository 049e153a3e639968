//! A trained model in a folder: `model.safetensors`, with what is needed to build the model again in its header.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kumiki_models::{LanguageModelConfig, Model, ModelConfig, SequenceRegressor, SequenceRegressorConfig};
use kumiki_nn::Module;
use kumiki_tensor::{DType, Tensor, safetensors};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::tokenizer::Tokenizer;
use crate::{Error, Result, saves};

/// What files say that this program can read.
const LANGUAGE_MODEL: &str = "kumiki language model, version ";
const DOUBLE_DECODER: &str = "kumiki double decoder, version ";
const ENCODER_DECODER: &str = "kumiki encoder-decoder, version ";
const REGRESSOR: &str = "kumiki sequence regressor, version ";
const VERSION: u64 = 1;

/// The file inside of the folder.
pub const MODEL_FILE: &str = "model.safetensors";

/// What a file held.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The model.
    pub model: Model,
    /// What its ids mean.
    pub tokenizer: Tokenizer,
    /// What was noted when it was saved.
    pub notes: BTreeMap<String, String>,
}

/// The file meant by `path`: itself, the model in that folder, that of the newest save in it (see [`crate::saves`]), or the
/// only model that a run has put below that folder.
///
/// # Errors
/// When there is none, or several: then they are named.
pub fn find(path: &Path) -> Result<PathBuf> {
    let meta = std::fs::metadata(path).map_err(|e| Error::io("open the checkpoint", path, e))?;
    // A pipe would be waited for, a device read, for ever.
    let regular = |file: PathBuf| match file.is_file() {
        true => Ok(file),
        false => Err(Error::new(format!("`{}` is no regular file; expected a trained model", file.display()))),
    };
    if !meta.is_dir() {
        return regular(path.to_owned());
    }
    if let Some(here) = model_in(path) {
        return regular(here);
    }
    let below = models_below(path)?;
    match below.as_slice() {
        [] => Err(Error::new(format!("`{}` has no {MODEL_FILE}, nor has a folder in it", path.display()))),
        [one] => regular(model_in(one).unwrap_or_else(|| one.join(MODEL_FILE))),
        several => {
            let mut names: Vec<String> = several.iter().map(|folder| format!("`{}`", folder.display())).collect();
            if names.len() > 8 {
                names.truncate(7);
                names.push(format!("and {} more", several.len() - 7));
            }
            Err(Error::new(format!(
                "`{}` holds {} models; choose one: {}",
                path.display(),
                several.len(),
                names.join(", ")
            )))
        }
    }
}

/// The model directly in a folder: a finished one, or that of its newest save.
fn model_in(folder: &Path) -> Option<PathBuf> {
    let saves = saves::all(folder).into_iter().rev().map(|(_, save)| save.join(MODEL_FILE));
    std::iter::once(folder.join(MODEL_FILE)).chain(saves).find(|file| file.exists())
}

/// The folders with models in a run's folder, a corpus' or a seed's: `*`, `seed-*/*` and `*/seed-*/*`, sorted.
fn models_below(path: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(path).map_err(|e| Error::io("read the folder", path, e))?;
    // What cannot be read further down holds nothing for us.
    let below =
        |folder: &PathBuf| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect();
    let folders: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    let deeper: Vec<PathBuf> = folders.iter().flat_map(|folder| -> Vec<PathBuf> { below(folder) }).collect();
    let seeds = folders.iter().chain(&deeper).filter(|folder| is_seed(folder));
    let in_seeds = seeds.flat_map(|folder| -> Vec<PathBuf> { below(folder) });
    let mut found: Vec<PathBuf> =
        folders.iter().cloned().chain(in_seeds).filter(|folder| model_in(folder).is_some()).collect();
    found.sort();
    found.dedup();
    Ok(found)
}

/// Whether a folder is named `seed-` and a number.
pub(crate) fn is_seed(folder: &Path) -> bool {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.strip_prefix("seed-").is_some_and(|seed| seed.parse::<u64>().is_ok())
}

/// The note of what logits are multiplied by, where that is not 1.
const LOGIT_SCALE: &str = "logit_scale";

/// Writes the model to `folder` (made if need be), whole or not at all. `notes` go into the header, for people.
///
/// # Errors
/// When the folder cannot be made or written; a checkpoint that was there before stays as it was.
pub fn save(folder: &Path, model: &Model, notes: &BTreeMap<String, String>) -> Result<()> {
    let mut notes = notes.clone();
    if model.logit_scale() != 1.0 {
        notes.insert(LOGIT_SCALE.into(), model.logit_scale().to_string());
    }
    let notes = &notes;
    match model {
        Model::Language(m) => write(folder, LANGUAGE_MODEL, &m.config, m, notes),
        Model::Double(m) => write(folder, DOUBLE_DECODER, &m.config, m, notes),
        Model::EncoderDecoder(m) => write(folder, ENCODER_DECODER, &m.config, m, notes),
    }
}

/// As [`save`], for a regressor.
///
/// # Errors
/// As [`save`].
pub fn save_regressor(folder: &Path, model: &SequenceRegressor, notes: &BTreeMap<String, String>) -> Result<()> {
    write(folder, REGRESSOR, &model.config, model, notes)
}

fn write(
    folder: &Path,
    format: &str,
    config: &impl Serialize,
    model: &impl Module,
    notes: &BTreeMap<String, String>,
) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| Error::io("create the folder", folder, e))?;
    let config =
        serde_json::to_string(config).map_err(|e| Error::new(format!("cannot write the configuration: {e}")))?;
    let mut metadata = notes.clone();
    metadata.insert("format".into(), format!("{format}{VERSION}"));
    metadata.insert("config".into(), config);
    let params = model.params();
    let tensors: Vec<(&str, &Tensor)> = params.iter().map(|(name, param)| (name.as_str(), param.value())).collect();
    safetensors::save(&folder.join(MODEL_FILE), tensors, &metadata).map_err(|e| Error::new(e.to_string()))
}

/// What is wrong with what a header says beside the model, if anything. Absent notes are not wrong.
fn check_notes(notes: &BTreeMap<String, String>, expected: &str) -> std::result::Result<(), String> {
    if let Some(format) = notes.get("format") {
        match format.strip_prefix(expected).and_then(|version| version.parse::<u64>().ok()) {
            Some(VERSION) => {}
            Some(version) if version > VERSION => {
                return Err(format!("its format is version {version}, this program reads version {VERSION} only"));
            }
            _ => return Err(format!("its format is `{format}`; expected `{expected}{VERSION}`")),
        }
    }
    if let Some(step) = notes.get("step").filter(|step| step.parse::<u64>().is_err()) {
        return Err(format!("its step must be a number, found `{step}`"));
    }
    Ok(())
}

/// Reads a model back, with parameters of `dtype`. `path` is the file or a folder, as for [`find`].
///
/// # Errors
/// When there is no such file, it is damaged, it does not say which model it holds, tensors and model do not fit, or the
/// model needs something that this program does not have: another tokenizer, a newer format.
pub fn load(path: &Path, dtype: DType) -> Result<Checkpoint> {
    let file = find(path)?;
    let failed = |why: String| unusable(&file, &why);
    let mut contents = safetensors::load(&file).map_err(|e| Error::new(e.to_string()))?;
    let is = |format: &str| contents.metadata.get("format").is_some_and(|found| found.starts_with(format));
    let config = if is(DOUBLE_DECODER) {
        ModelConfig::Double(config_of(&file, DOUBLE_DECODER, &contents)?)
    } else if is(ENCODER_DECODER) {
        ModelConfig::EncoderDecoder(config_of(&file, ENCODER_DECODER, &contents)?)
    } else {
        ModelConfig::Language(config_of(&file, LANGUAGE_MODEL, &contents)?)
    };
    let tokenizer = Tokenizer::of_notes(&file, &contents.metadata)?;
    if config.text_ids() != tokenizer.vocab() {
        let (ids, name, found) = (tokenizer.vocab(), tokenizer.name(), config.text_ids());
        return Err(failed(format!("its n_vocab must be {ids}, the tokens of its tokenizer `{name}`, found {found}")));
    }
    // First of all: what follows counts with these sizes.
    config.check().map_err(|e| failed(e.to_string()))?;
    check_size(&config, &contents).map_err(failed)?;
    let mut model = Model::new(&config, 0, dtype).map_err(|e| failed(e.to_string()))?;
    model.load(|name| contents.tensors.get(name)).map_err(|e| failed(e.to_string()))?;
    if let Some(scale) = contents.metadata.get(LOGIT_SCALE) {
        let number = scale.parse().ok().filter(|x: &f64| x.is_finite() && *x > 0.0);
        let wrong = || failed(format!("its {LOGIT_SCALE} must be a positive number, found `{scale}`"));
        model.set_logit_scale(number.ok_or_else(wrong)?);
    }
    contents.metadata.remove("config");
    Ok(Checkpoint { model, tokenizer, notes: contents.metadata })
}

/// As [`load`], for a regressor.
///
/// # Errors
/// As [`load`].
pub fn load_regressor(path: &Path, dtype: DType) -> Result<SequenceRegressor> {
    let file = find(path)?;
    let failed = |why: String| unusable(&file, &why);
    let contents = safetensors::load(&file).map_err(|e| Error::new(e.to_string()))?;
    let config: SequenceRegressorConfig = config_of(&file, REGRESSOR, &contents)?;
    config.check().map_err(|e| failed(e.to_string()))?;
    let SequenceRegressorConfig { inputs, architecture } = config.clone();
    // A table of one row more has as many numbers as the two maps.
    let n_vocab = inputs.saturating_add(1);
    let as_large = ModelConfig::Language(LanguageModelConfig { n_vocab, architecture });
    check_size(&as_large, &contents).map_err(failed)?;
    let mut model = SequenceRegressor::new(&config, 0, dtype).map_err(|e| failed(e.to_string()))?;
    model.load(|name| contents.tensors.get(name)).map_err(|e| failed(e.to_string()))?;
    Ok(model)
}

fn unusable(file: &Path, why: &str) -> Error {
    Error::new(format!("cannot load `{}`: {why}", file.display()))
}

/// The configuration in a file of this format.
fn config_of<C: DeserializeOwned>(file: &Path, format: &str, contents: &safetensors::Contents) -> Result<C> {
    let failed = |why: String| unusable(file, &why);
    check_notes(&contents.metadata, format).map_err(failed)?;
    let config = (contents.metadata.get("config"))
        .ok_or_else(|| failed("its header has no `config`, so it was not written by kumiki".into()))?;
    serde_json::from_str(config).map_err(|e| failed(format!("its configuration cannot be read: {e}")))
}

/// The sizes come from a file: a model that the file cannot hold must not be allocated.
fn check_size(config: &ModelConfig, contents: &safetensors::Contents) -> std::result::Result<(), String> {
    let wanted = config.checked_total_params().ok_or("its sizes are absurd")?;
    let held: usize = contents.tensors.values().map(Tensor::len).sum();
    if wanted != held {
        return Err(format!("its configuration asks for {wanted} parameters, the tensors hold {held}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use crate::settings::Settings;

    fn notes(key: &str, value: &str) -> BTreeMap<String, String> {
        [(key.to_owned(), value.to_owned())].into()
    }

    /// A small model's file whose header has `key` set to `value`.
    fn changed(dir: &Scratch, key: &str, value: &str) -> PathBuf {
        let config = Settings::preset("nano").unwrap().model("tango", 256).unwrap();
        let model = Model::new(&config, 0, DType::F32).unwrap();
        save(dir.path(), &model, &BTreeMap::new()).unwrap();
        let file = dir.path().join(MODEL_FILE);
        let mut contents = safetensors::load(&file).unwrap();
        contents.metadata.insert(key.to_owned(), value.to_owned());
        safetensors::save(&file, contents.tensors.iter().map(|(n, t)| (n.as_str(), t)), &contents.metadata).unwrap();
        file
    }

    #[test]
    fn what_cannot_be_used_is_refused_with_the_files_name() {
        let dir = Scratch::new();
        let load = |file: &Path| load(file, DType::F32).map(drop);
        load(&changed(&dir, "step", "12")).unwrap();
        let config = Settings::preset("nano").unwrap();
        let with = |vocab: usize, base: f64| {
            let ModelConfig::Language(mut config) = config.model("tango", vocab).unwrap() else { panic!() };
            if let kumiki_models::Architecture::Tango(c) = &mut config.architecture {
                c.rope_base = base;
            }
            serde_json::to_string(&config).unwrap()
        };
        for (key, value, phrase) in [
            ("step", "many", "its step must be a number, found `many`"),
            #[cfg(feature = "bpe")]
            ("tokenizer", "bpe", "its tokenizer is `bpe`, and cannot read the tokenizer"),
            #[cfg(not(feature = "bpe"))]
            ("tokenizer", "bpe", "its tokenizer is `bpe`, and "),
            ("logit_scale", "0", "its logit_scale must be a positive number, found `0`"),
            ("logit_scale", "nan", "its logit_scale must be a positive number, found `nan`"),
            ("format", "kumiki language model, version 2", "version 2, this program reads version 1 only"),
            ("format", "something", "its format is `something`"),
            ("config", &with(100, 1e4), "its n_vocab must be 256, the tokens of its tokenizer `byte`, found 100"),
            ("config", &with(256, 0.0), "rope_base must be a positive number, found 0"),
            ("config", &with(256, -1.0), "rope_base must be a positive number, found -1"),
        ] {
            let file = changed(&dir, key, value);
            let error = load(&file).unwrap_err().to_string();
            assert!(error.contains(&format!("`{}`", file.display())) && error.contains(phrase), "{error}");
        }
        assert!(check_notes(&notes("step", "-1"), LANGUAGE_MODEL).is_err());
    }

    #[test]
    fn regressors_come_back_and_are_no_language_models() {
        let dir = Scratch::new();
        let config = crate::gp::settings::Settings::preset("nano").unwrap().model("transformer").unwrap();
        let model = SequenceRegressor::new(&config, 5, DType::F32).unwrap();
        save_regressor(dir.path(), &model, &BTreeMap::new()).unwrap();
        let back = load_regressor(dir.path(), DType::F32).unwrap();
        assert_eq!(back.config, config);
        let values = |m: &SequenceRegressor| m.params().iter().map(|(_, p)| p.value().to_f64_vec()).collect::<Vec<_>>();
        assert_eq!(values(&back), values(&model));
        let error = load(dir.path(), DType::F32).unwrap_err().to_string();
        assert!(
            error.contains("its format is `kumiki sequence regressor, version 1`; expected `kumiki lang"),
            "{error}"
        );
        changed(&dir, "step", "1");
        let error = load_regressor(dir.path(), DType::F32).unwrap_err().to_string();
        assert!(error.contains("expected `kumiki sequence regressor, version 1`"), "{error}");
    }

    #[test]
    fn models_of_two_stacks_come_back() {
        let dir = Scratch::new();
        let settings = Settings::for_suite(crate::zoo::Suite::Double, "nano").unwrap();
        for name in ["double-separate-loops2", "encoder-decoder"] {
            let mut model = Model::new(&settings.model(name, 256).unwrap(), 3, DType::F32).unwrap();
            model.set_logit_scale(1.0 / 3.0);
            save(dir.path(), &model, &BTreeMap::new()).unwrap();
            let back = load(dir.path(), DType::F32).unwrap().model;
            let values = |m: &Model| m.params().iter().map(|(_, p)| p.value().to_f64_vec()).collect::<Vec<_>>();
            assert_eq!((back.config(), values(&back)), (model.config(), values(&model)));
            assert_eq!(back.logit_scale(), 1.0 / 3.0);
        }
        let file = dir.path().join(MODEL_FILE);
        let contents = safetensors::load(&file).unwrap();
        for (from, to, phrase) in [
            (
                "\"sentinels\":4",
                "\"sentinels\":400",
                "its n_vocab must be 256, the tokens of its tokenizer `byte`, found 0",
            ),
            ("\"d_model\":32", "\"d_model\":33000000", "its sizes are absurd"),
            ("\"decoder_layers\":1", "\"decoder_layers\":2", "parameters, the tensors hold"),
            ("\"heads\":2", "\"heads\":3", "heads must divide"),
        ] {
            let mut metadata = contents.metadata.clone();
            let config = metadata["config"].replace(from, to);
            assert_ne!(config, metadata["config"], "{config}");
            metadata.insert("config".into(), config);
            safetensors::save(&file, contents.tensors.iter().map(|(n, t)| (n.as_str(), t)), &metadata).unwrap();
            let error = load(dir.path(), DType::F32).unwrap_err().to_string();
            assert!(error.contains(phrase), "{error}");
        }
    }

    #[test]
    fn sizes_of_a_file_are_checked_before_anything_is_counted_with_them() {
        let dir = Scratch::new();
        let settings = Settings::preset("nano").unwrap();
        let huge = "\"heads\":9223372036854775808";
        let changed = |from: &str, to: &str| {
            let file = dir.path().join(MODEL_FILE);
            let mut contents = safetensors::load(&file).unwrap();
            let config = contents.metadata["config"].replace(from, to);
            assert_ne!(config, contents.metadata["config"], "{from}");
            contents.metadata.insert("config".into(), config);
            let tensors = contents.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
            safetensors::save(&file, tensors, &contents.metadata).unwrap();
        };
        for (name, from, to, phrase) in [
            (
                "cem-t2",
                "\"attention\":[\"cem\"]",
                "\"attention\":[]",
                "attention must name one kind for all layers or 2, found 0",
            ),
            ("cem-t2", "\"mlp\":[\"cem\"]", "\"mlp\":[]", "mlp must name one kind for all layers or 2, found 0"),
            ("cem-t2", "\"heads\":2", huge, "its sizes are absurd"),
            ("cem-t2", "\"steps\":2", "\"steps\":0", "steps must be from 1 to 1024, found 0"),
            ("untied", "\"heads\":2", huge, "heads must divide"),
            ("decoder", "\"heads\":2", "\"heads\":0", "heads must be positive, found 0"),
            ("decoder", "\"heads\":2", huge, "heads must divide"),
            ("double", "\"context_layers\":1", "\"context_layers\":18446744073709551615", "its sizes are absurd"),
            (
                "encoder-decoder",
                "\"encoder_layers\":1",
                "\"encoder_layers\":18446744073709551615",
                "its sizes are absurd",
            ),
            ("wango", "\"heads\":2", "\"heads\":0", "heads must be positive, found 0"),
            ("flash", "\"chunk\":16", "\"chunk\":0", "chunk must be positive, found 0"),
        ] {
            let model = Model::new(&settings.model(name, 256).unwrap(), 0, DType::F32).unwrap();
            save(dir.path(), &model, &BTreeMap::new()).unwrap();
            changed(from, to);
            let error = load(dir.path(), DType::F32).unwrap_err().to_string();
            assert!(error.contains("model.safetensors`: ") && error.contains(phrase), "{name} {to}: {error}");
        }
        let config = crate::gp::settings::Settings::preset("nano").unwrap().model("cem-t2").unwrap();
        let model = SequenceRegressor::new(&config, 0, DType::F32).unwrap();
        save_regressor(dir.path(), &model, &BTreeMap::new()).unwrap();
        changed("\"attention\":[\"cem\"]", "\"attention\":[]");
        let error = load_regressor(dir.path(), DType::F32).unwrap_err().to_string();
        assert!(error.contains("attention must name one kind for all layers or 2, found 0"), "{error}");
    }

    #[test]
    fn a_model_of_many_blocks_comes_back() {
        let dir = Scratch::new();
        let settings = Settings { blocks: 1024, ..Settings::preset("nano").unwrap() };
        let model = Model::new(&settings.model("tango", 256).unwrap(), 0, DType::F32).unwrap();
        save(dir.path(), &model, &BTreeMap::new()).unwrap();
        load(dir.path(), DType::F32).unwrap();
    }

    #[test]
    fn the_only_model_of_a_run_is_found_and_several_are_named() {
        let dir = Scratch::new();
        let file = dir.file("book.txt/seed-3/tango/model.safetensors", "");
        for folder in ["", "book.txt", "book.txt/seed-3", "book.txt/seed-3/tango"] {
            assert_eq!(find(&dir.path().join(folder)).unwrap(), file, "{folder}");
        }
        dir.file("book.txt/other/tango/model.safetensors", "");
        assert_eq!(find(dir.path()).unwrap(), file, "that is no run's");
        dir.file("tango/model.safetensors", "");
        let e = find(dir.path()).unwrap_err().to_string();
        assert!(e.contains("holds 2 models") && e.contains("book.txt/seed-3/tango`"), "{e}");
        for seed in 0..9 {
            dir.file(&format!("math/seed-{seed}/wango/model.safetensors"), "");
        }
        let e = find(dir.path()).unwrap_err().to_string();
        assert!(e.contains("holds 11 models") && e.ends_with("and 4 more"), "{e}");
    }

    #[cfg(unix)]
    #[test]
    fn devices_are_no_models() {
        let error = find(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(error.contains("`/dev/zero` is no regular file"), "{error}");
    }
}
