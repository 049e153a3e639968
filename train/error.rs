//! The error of everything that comes from outside: one sentence that a person can act on.

use std::fmt;
use std::path::Path;

/// A failure of data, files or settings. `Display` is a whole sentence which names the thing, what was expected and
/// what was found; `source` keeps the system's error for programs that want its kind.
#[derive(Debug)]
pub struct Error {
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error that says `message`.
    pub fn new(message: impl Into<String>) -> Error {
        Error { message: message.into(), source: None }
    }

    /// `cannot <action> `path`: <cause>`, keeping the cause as source.
    pub fn io(action: &str, path: &Path, cause: std::io::Error) -> Error {
        let message = format!("cannot {action} `{}`: {cause}", path.display());
        Error { message, source: Some(Box::new(cause)) }
    }

    /// The same with what was being done put before it.
    pub fn context(self, what: &str) -> Error {
        Error { message: format!("{what}: {}", self.message), ..self }
    }
}

/// The cause alone: for code that puts before it what was being done.
impl From<std::io::Error> for Error {
    fn from(cause: std::io::Error) -> Error {
        Error { message: cause.to_string(), source: Some(Box::new(cause)) }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| &**e as _)
    }
}
