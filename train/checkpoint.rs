//! A trained model in a folder: `model.safetensors`, with what is needed to build the model again in its header.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kumiki_models::{LanguageModel, LanguageModelConfig};
use kumiki_nn::Module;
use kumiki_tensor::{DType, Tensor, safetensors};

use crate::{Error, Result};

/// The file inside of the folder.
pub const MODEL_FILE: &str = "model.safetensors";

/// What a file held.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The model.
    pub model: LanguageModel,
    /// What was noted when it was saved.
    pub notes: BTreeMap<String, String>,
}

/// The file meant by `path`: itself, the model in that folder, or the only model in a folder of that folder.
///
/// # Errors
/// When there is none, or several: then they are named.
pub fn find(path: &Path) -> Result<PathBuf> {
    let meta = std::fs::metadata(path).map_err(|e| Error::io("open the checkpoint", path, e))?;
    if !meta.is_dir() {
        return Ok(path.to_owned());
    }
    let here = path.join(MODEL_FILE);
    if here.exists() {
        return Ok(here);
    }
    let entries = std::fs::read_dir(path).map_err(|e| Error::io("read the folder", path, e))?;
    let mut below: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|folder| folder.join(MODEL_FILE).exists()).collect();
    below.sort();
    match below.as_slice() {
        [] => Err(Error::new(format!("`{}` has no {MODEL_FILE}, nor has a folder in it", path.display()))),
        [one] => Ok(one.join(MODEL_FILE)),
        several => {
            let names: Vec<String> = several.iter().map(|folder| format!("`{}`", folder.display())).collect();
            Err(Error::new(format!(
                "`{}` holds {} models; choose one: {}",
                path.display(),
                several.len(),
                names.join(", ")
            )))
        }
    }
}

/// Writes the model to `folder` (made if need be), whole or not at all. `notes` go into the header, for people.
///
/// # Errors
/// When the folder cannot be made or written; a checkpoint that was there before stays as it was.
pub fn save(folder: &Path, model: &LanguageModel, notes: &BTreeMap<String, String>) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| Error::io("create the folder", folder, e))?;
    let config =
        serde_json::to_string(&model.config).map_err(|e| Error::new(format!("cannot write the configuration: {e}")))?;
    let mut metadata = notes.clone();
    metadata.insert("format".into(), "kumiki language model, version 1".into());
    metadata.insert("config".into(), config);
    let params = model.params();
    let tensors: Vec<(&str, &Tensor)> = params.iter().map(|(name, param)| (name.as_str(), param.value())).collect();
    safetensors::save(&folder.join(MODEL_FILE), tensors, &metadata).map_err(|e| Error::new(e.to_string()))
}

/// Reads a model back, with parameters of `dtype`. `path` is the file or a folder, as for [`find`].
///
/// # Errors
/// When there is no such file, it is damaged, it does not say which model it holds, or tensors and model do not fit.
pub fn load(path: &Path, dtype: DType) -> Result<Checkpoint> {
    let file = find(path)?;
    let mut contents = safetensors::load(&file).map_err(|e| Error::new(e.to_string()))?;
    let failed = |why: String| Error::new(format!("cannot load {}: {why}", file.display()));
    let config = (contents.metadata.get("config"))
        .ok_or_else(|| failed("its header has no `config`, so it was not written by kumiki".into()))?;
    let config: LanguageModelConfig =
        serde_json::from_str(config).map_err(|e| failed(format!("its configuration cannot be read: {e}")))?;
    // The sizes come from a file: a model that the file cannot hold must not be allocated.
    let wanted = kumiki_models::accounting::checked_total_params(&config)
        .ok_or_else(|| failed("its sizes are absurd".into()))?;
    let held: usize = contents.tensors.values().map(Tensor::len).sum();
    if wanted != held {
        return Err(failed(format!("its configuration asks for {wanted} parameters, the tensors hold {held}")));
    }
    let mut model = LanguageModel::new(&config, 0, dtype).map_err(|e| failed(e.to_string()))?;
    model.load(|name| contents.tensors.get(name)).map_err(|e| failed(e.to_string()))?;
    contents.metadata.remove("config");
    Ok(Checkpoint { model, notes: contents.metadata })
}
