//! `kumiki prefix`.

use std::path::{Path, PathBuf};

use clap::{ArgGroup, Subcommand};
use kumiki::models::{DoubleDecoder, Model};
use kumiki::tensor::DType;
use kumiki_train::prefix::Prefix;
use kumiki_train::tokenizer::Tokenizer;
use kumiki_train::{Error, Result, checkpoint};

use crate::output;
use crate::table::{short, thousands};
use crate::writing::{Shown, Texts, WritingOptions};

/// Read a text once, and go on from it as often as wanted (double decoders)
#[derive(Subcommand)]
pub enum Command {
    Save(Save),
    Use(Use),
}

impl Command {
    pub fn run(self) -> Result<()> {
        output::in_pool(|| match self {
            Command::Save(args) => args.run(),
            Command::Use(args) => args.run(),
        })
    }
}

fn double(path: &Path) -> Result<(DoubleDecoder, Tokenizer)> {
    let found = checkpoint::load(path, DType::F32)?;
    match found.model {
        Model::Double(model) => Ok((model, found.tokenizer)),
        other => Err(Error::new(format!(
            "`{}` holds another kind of model ({}); only a double decoder reads a text apart from what follows",
            path.display(),
            other.config().kind()
        ))),
    }
}

/// Read a text with the context stack and keep what it found in a file
///
/// What is kept are the latents of every token, D numbers in f32. They are of use to this very model only.
#[derive(clap::Args)]
#[command(group = ArgGroup::new("text").required(true).args(["prompt", "file"]))]
#[command(after_help = "\
Examples:
  kumiki prefix save --checkpoint runs/book/double --file chapter.txt --out chapter.prefix
  kumiki prefix save --checkpoint runs/book/double --prompt 'It was dark. ' --out dark.prefix")]
pub struct Save {
    /// A folder with a trained double decoder, or the file in it
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// The text
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// A file with the text
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Where to keep it
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

impl Save {
    fn run(self) -> Result<()> {
        Prefix::check_place(&self.out)?;
        let (model, tokenizer) = double(&self.checkpoint)?;
        let text = match (&self.file, self.prompt) {
            (Some(path), _) => read(path)?,
            (None, prompt) => prompt.unwrap_or_default().into_bytes(),
        };
        let ids: Vec<i64> = tokenizer.encode(&text)?.into_iter().map(i64::from).collect();
        let prefix = Prefix::read(&model, &ids)?;
        prefix.save(&self.out, &model)?;
        let (tokens, bytes) = (prefix.tokens.len(), prefix.latents.byte_len());
        output::line(&format!(
            "{} tokens, {}B of latents, in `{}`",
            thousands(tokens as u64),
            short(bytes as f64),
            self.out.display()
        ))
    }
}

/// The most bytes of a text that is read into memory as a whole.
const LARGEST_TEXT: u64 = kumiki_train::sample::LONGEST as u64;

fn read(path: &Path) -> Result<Vec<u8>> {
    let meta = std::fs::metadata(path).map_err(|e| Error::io("read the text", path, e))?;
    // A pipe would be waited for, a device read, for ever.
    if !meta.is_file() || meta.len() > LARGEST_TEXT {
        let found = if meta.is_file() { format!("{} bytes", meta.len()) } else { "no regular file".to_owned() };
        let name = path.display();
        return Err(Error::new(format!("`{name}`: expected a file of at most {LARGEST_TEXT} bytes, found {found}")));
    }
    std::fs::read(path).map_err(|e| Error::io("read the text", path, e))
}

/// Go on from a text that `prefix save` has read
///
/// Prompts follow the text in blocks of their own; several are continued at once. Prompts and what is written are shown.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki prefix use --checkpoint runs/book --prefix chapter.prefix --prompt 'Then '
  kumiki prefix use --checkpoint runs/book --prefix a.prefix --prompt 'Then ' --prompt 'But '")]
pub struct Use {
    /// The same double decoder
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// The file
    #[arg(long, value_name = "FILE")]
    prefix: PathBuf,
    /// What follows the text, to be continued; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, required = true, action = clap::ArgAction::Append)]
    prompt: Vec<String>,
    #[command(flatten)]
    writing: WritingOptions,
}

impl Use {
    fn run(self) -> Result<()> {
        // What is wrong whatever the model's tokens are.
        self.writing.request(&self.prompt, &Tokenizer::bytes())?.check(0)?;
        let (model, tokenizer) = double(&self.checkpoint)?;
        let request = self.writing.request(&self.prompt, &tokenizer)?;
        let prefix = Prefix::load(&self.prefix, &model)?;
        let mut texts = Texts::new(&self.prompt, &tokenizer, Shown::Plain)?;
        let done = prefix.generate(&model, &request, |row, id| texts.push(row, id));
        texts.end(done)
    }
}
