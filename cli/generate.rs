//! `kumiki generate`.

use std::path::PathBuf;

use kumiki::tensor::DType;
use kumiki_train::checkpoint::{self, Checkpoint};
use kumiki_train::sample::generate;
use kumiki_train::tokenizer::Tokenizer;
use kumiki_train::{Result, cem};

use crate::eval::StepOptions;
use crate::output;
use crate::writing::{Texts, WritingOptions};

/// Continue a text with a trained model
///
/// The text is shown as it comes, whole characters only. The same seed gives the same text. Several prompts are continued at
/// once, and shown one after the other at the end.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki generate --checkpoint runs/compare-tango-tiny-0/tango --prompt 'What is 12 + 30?'
  kumiki generate --checkpoint runs/book --prompt 'Once ' --temperature 1 --top-p 0.95
  kumiki generate --checkpoint runs/book --prompt 'Once ' --prompt 'Then, at last, '
  kumiki generate --checkpoint runs/book --prompt 'Once ' --temperature 0   the likeliest bytes")]
pub struct Args {
    /// A folder with a trained model, or the file in it
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// The text to continue; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, required = true, action = clap::ArgAction::Append)]
    prompt: Vec<String>,
    #[command(flatten)]
    writing: WritingOptions,
    #[command(flatten)]
    steps: StepOptions,
}

impl Args {
    pub fn run(self) -> Result<()> {
        // What is wrong whatever the model's tokens are.
        self.writing.request(&self.prompt, &Tokenizer::bytes())?.check(0)?;
        output::in_pool(|| {
            let Checkpoint { mut model, tokenizer, .. } = checkpoint::load(&self.checkpoint, DType::F32)?;
            let request = self.writing.request(&self.prompt, &tokenizer)?;
            let trace = self.steps.apply(&mut model)?;
            let mut texts = Texts::new(&self.prompt, &tokenizer)?;
            let done = generate(&model, &request, |row, id| texts.push(row, id));
            let ended = texts.end();
            if let Some(mean) = trace.and_then(|trace| cem::mean_steps(&trace.take())) {
                output::remark(&format!("{mean:.3} steps of a token in a descent, on average"));
            }
            done.and(ended)
        })
    }
}
