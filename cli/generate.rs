//! `kumiki generate`.

use std::path::PathBuf;

use kumiki::tensor::{DType, Rng};
use kumiki_train::sample::{Sampling, generate};
use kumiki_train::tokenizer::{ByteTokenizer, StreamDecoder};
use kumiki_train::{Result, cem, checkpoint};

use crate::eval::StepOptions;
use crate::output;

/// Continue a text with a trained model
///
/// The text is shown as it comes, whole characters only. The same seed gives the same text.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki generate --checkpoint runs/compare-tango-tiny-0/tango --prompt 'What is 12 + 30?'
  kumiki generate --checkpoint runs/book --prompt 'Once ' --tokens 1000 --temperature 1 --top-p 0.95
  kumiki generate --checkpoint runs/book --prompt 'Once ' --temperature 0      always the likeliest byte")]
pub struct Args {
    /// A folder with a trained model, or the file in it
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// The text to continue
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: String,
    /// Bytes to add
    #[arg(long, value_name = "N", default_value_t = 300, allow_negative_numbers = true)]
    tokens: usize,
    /// Above 1 bolder, below 1 safer, 0 always the likeliest
    #[arg(long, value_name = "X", default_value_t = 0.8, allow_hyphen_values = true, help_heading = "Sampling")]
    temperature: f64,
    /// Only the K likeliest bytes; 0 for all
    #[arg(long, value_name = "K", default_value_t = 0, allow_negative_numbers = true, help_heading = "Sampling")]
    top_k: usize,
    /// Only the likeliest bytes that together reach this probability; 1 for all
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_hyphen_values = true, help_heading = "Sampling")]
    top_p: f64,
    /// Seed of the choices
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, help_heading = "Sampling")]
    seed: u64,
    #[command(flatten)]
    steps: StepOptions,
}

impl Args {
    pub fn run(self) -> Result<()> {
        let sampling = Sampling { temperature: self.temperature, top_k: self.top_k, top_p: self.top_p };
        sampling.check()?;
        output::in_pool(|| {
            let mut model = checkpoint::load(&self.checkpoint, DType::F32)?.model;
            let trace = self.steps.apply(&mut model)?;
            let prompt = ByteTokenizer.encode(self.prompt.as_bytes());
            let mut decoder = StreamDecoder::default();
            output::text(&decoder.push_bytes(self.prompt.as_bytes()))?;
            let mut rng = Rng::new(self.seed);
            let done = generate(&model, &prompt, self.tokens, &sampling, &mut rng, |id| {
                output::text(&decoder.push_id(id)?)?;
                Ok(true)
            });
            // The line ends after an error, too, or its sentence would go on with the text.
            let ended = if prompt.is_empty() { Ok(()) } else { output::line(&decoder.flush()) };
            if let Some(mean) = trace.and_then(|trace| cem::mean_steps(&trace.take())) {
                output::remark(&format!("{mean:.3} steps of a token in a descent, on average"));
            }
            done.and(ended)
        })
    }
}
