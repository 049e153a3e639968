//! A tokenizer beside a model: its name in the header of the model's file, and its own file in the same folder.

use std::collections::BTreeMap;
use std::path::Path;

use kumiki_tensor::files;

use super::{TOKENIZER_FILE, Tokenizer};
use crate::{Error, Result};

/// Its name.
const NAME: &str = "tokenizer";
/// Its token that ends a text.
const END: &str = "tokenizer_end";

impl Tokenizer {
    /// What the header of a model's file says of it.
    pub fn notes(&self) -> Vec<(String, String)> {
        let end = self.end().filter(|_| !self.is_bytes()).map(|end| (END.to_owned(), end.to_string()));
        std::iter::once((NAME.to_owned(), self.name().to_owned())).chain(end).collect()
    }

    /// Writes its file into a folder, unless the notes say all.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn keep(&self, folder: &Path) -> Result<()> {
        let Some(file) = self.file() else { return Ok(()) };
        std::fs::create_dir_all(folder).map_err(|e| Error::io("create the folder", folder, e))?;
        let path = folder.join(TOKENIZER_FILE);
        files::replace(&path, &[&file]).map_err(|e| Error::io("write the tokenizer", &path, e))
    }

    /// The tokenizer of the model in the file `model`, given its notes: bytes when they say nothing.
    ///
    /// # Errors
    /// As [`Tokenizer::load`].
    pub fn of_notes(model: &Path, notes: &BTreeMap<String, String>) -> Result<Tokenizer> {
        let failed = |why: String| Error::new(format!("cannot load `{}`: {why}", model.display()));
        let Some(name) = notes.get(NAME) else { return Ok(Tokenizer::bytes()) };
        let end = match notes.get(END) {
            None => None,
            Some(end) => Some(end.parse().map_err(|_| failed(format!("its {END} must be a token, found `{end}`")))?),
        };
        let folder = model.parent().unwrap_or(Path::new(""));
        Tokenizer::load(name, end, folder).map_err(|e| failed(format!("its tokenizer is `{name}`, and {e}")))
    }
}
