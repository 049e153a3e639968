//! What commands that write text have in common: how tokens are chosen, and how one or several texts are shown.

use kumiki::tensor::Rng;
use kumiki_train::Result;
use kumiki_train::sample::{BLOCK_LEN, Request, Sampling};
use kumiki_train::tokenizer::{ByteTokenizer, StreamDecoder};

use crate::output;

/// How much is written, and how.
#[derive(clap::Args)]
pub struct WritingOptions {
    /// Bytes to add
    #[arg(long, value_name = "N", default_value_t = 300, allow_negative_numbers = true)]
    tokens: usize,
    /// Bytes of a block that a double decoder writes before it becomes context
    #[arg(long, value_name = "N", default_value_t = BLOCK_LEN, allow_negative_numbers = true)]
    block_len: usize,
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
}

impl WritingOptions {
    /// To go on with these texts.
    pub fn request(&self, prompts: &[String]) -> Result<Request> {
        let sampling = Sampling { temperature: self.temperature, top_k: self.top_k, top_p: self.top_p };
        sampling.check()?;
        let prompts = prompts.iter().map(|prompt| ByteTokenizer.encode(prompt.as_bytes())).collect();
        let WritingOptions { tokens: count, block_len, seed, .. } = *self;
        Ok(Request { prompts, count, block_len, sampling, rng: Rng::new(seed) })
    }
}

/// Shows texts that are written at once: a single one as it comes, several one after the other when they are done.
pub struct Texts {
    prompts: Vec<String>,
    decoders: Vec<StreamDecoder>,
    written: Vec<String>,
}

impl Texts {
    /// Of these prompts; a single one is shown.
    pub fn new(prompts: &[String]) -> Result<Texts> {
        let mut texts = Texts {
            prompts: prompts.to_vec(),
            decoders: vec![StreamDecoder::default(); prompts.len()],
            written: vec![String::new(); prompts.len()],
        };
        for (row, prompt) in prompts.iter().enumerate() {
            let whole = texts.decoders[row].push_bytes(prompt.as_bytes());
            texts.add(row, &whole)?;
        }
        Ok(texts)
    }

    /// One more token of a text.
    pub fn push(&mut self, row: usize, id: i64) -> Result<bool> {
        let text = self.decoders[row].push_id(id)?;
        self.add(row, &text)?;
        Ok(true)
    }

    fn add(&mut self, row: usize, text: &str) -> Result<()> {
        if self.prompts.len() == 1 {
            return output::text(text);
        }
        self.written[row] += text;
        Ok(())
    }

    /// Ends all texts, also after an error: its sentence must not go on with one of them.
    pub fn end(mut self) -> Result<()> {
        let [prompt] = self.prompts.as_slice() else {
            for (n, (text, decoder)) in self.written.iter_mut().zip(&mut self.decoders).enumerate() {
                *text += &decoder.flush();
                output::line(&format!("--- {} of {} ---", n + 1, self.prompts.len()))?;
                output::line(text)?;
            }
            return Ok(());
        };
        if prompt.is_empty() { Ok(()) } else { output::line(&self.decoders[0].flush()) }
    }
}
