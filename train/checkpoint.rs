//! A trained model in a folder: `model.safetensors`, with what is needed to build the model again in its header.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kumiki_models::{LanguageModel, LanguageModelConfig};
use kumiki_nn::Module;
use kumiki_tensor::{DType, Tensor, safetensors};

use crate::{Error, Result};

/// The file inside of the folder.
pub const MODEL_FILE: &str = "model.safetensors";

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

/// Reads a model back, with parameters of `dtype`. `path` is the folder or the file in it.
///
/// # Errors
/// When there is no such file, it is damaged, it does not say which model it holds, or tensors and model do not fit.
pub fn load(path: &Path, dtype: DType) -> Result<LanguageModel> {
    let file: PathBuf = if path.is_dir() { path.join(MODEL_FILE) } else { path.to_owned() };
    let contents = safetensors::load(&file).map_err(|e| Error::new(e.to_string()))?;
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
    Ok(model)
}
