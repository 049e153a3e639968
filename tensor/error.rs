//! The error of everything that comes from outside: files, arguments, devices.

use std::fmt;

/// A sentence that names the thing, what was expected and what was found, with the cause where there is one.
#[derive(Debug)]
pub struct Error {
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// The result of an operation on the outside world.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error with its sentence.
    pub fn new(message: impl Into<String>) -> Error {
        Error { message: message.into(), source: None }
    }

    /// The same error with the cause below it.
    pub fn because(self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        Error { source: Some(source.into()), ..self }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match &self.source {
            Some(source) => write!(f, "{}: {source}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Error {}

impl From<kumiki_gpu::Error> for Error {
    fn from(error: kumiki_gpu::Error) -> Error {
        Error::new(error.to_string())
    }
}
