//! What commands that write text have in common: how tokens are chosen, and how one or several texts are shown.

use kumiki::tensor::Rng;
use kumiki_train::Result;
use kumiki_train::sample::{BLOCK_LEN, Request, Sampling};
use kumiki_train::tokenizer::{TokenDecoder, Tokenizer};

use crate::output;

/// How much is written, and how.
#[derive(clap::Args)]
pub struct WritingOptions {
    /// Tokens to add: bytes, unless the model has another tokenizer
    #[arg(long, value_name = "N", default_value_t = 300, allow_negative_numbers = true)]
    tokens: usize,
    /// Tokens of a block that a double decoder writes before it becomes context
    #[arg(long, value_name = "N", default_value_t = BLOCK_LEN, allow_negative_numbers = true)]
    block_len: usize,
    /// Above 1 bolder, below 1 safer, 0 always the likeliest
    #[arg(long, value_name = "X", default_value_t = 0.8, allow_hyphen_values = true, help_heading = "Sampling")]
    temperature: f64,
    /// Only the K likeliest tokens; 0 for all
    #[arg(long, value_name = "K", default_value_t = 0, allow_negative_numbers = true, help_heading = "Sampling")]
    top_k: usize,
    /// Only the likeliest tokens that together reach this probability; 1 for all
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_hyphen_values = true, help_heading = "Sampling")]
    top_p: f64,
    /// Seed of the choices
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, help_heading = "Sampling")]
    seed: u64,
}

impl WritingOptions {
    /// To go on with these texts, in the tokens of a model.
    pub fn request(&self, prompts: &[String], tokenizer: &Tokenizer) -> Result<Request> {
        let sampling = Sampling { temperature: self.temperature, top_k: self.top_k, top_p: self.top_p };
        sampling.check()?;
        let encode = |prompt: &String| -> Result<Vec<i64>> {
            Ok(tokenizer.encode(prompt.as_bytes())?.into_iter().map(i64::from).collect())
        };
        let prompts = prompts.iter().map(encode).collect::<Result<_>>()?;
        let WritingOptions { tokens: count, block_len, seed, .. } = *self;
        Ok(Request { prompts, count, block_len, sampling, rng: Rng::new(seed) })
    }
}

/// Shows texts that are written at once: a single one as it comes, several one after the other when they are done.
pub struct Texts {
    prompts: Vec<String>,
    decoders: Vec<TokenDecoder>,
    written: Vec<String>,
    end: Option<i64>,
    /// Whether the model has ended a text.
    ended: Vec<bool>,
}

impl Texts {
    /// Of these prompts, to go on in the tokens of a model; a single one is shown.
    pub fn new(prompts: &[String], tokenizer: &Tokenizer) -> Result<Texts> {
        let mut texts = Texts {
            prompts: prompts.to_vec(),
            decoders: vec![tokenizer.decoder(); prompts.len()],
            written: vec![String::new(); prompts.len()],
            end: tokenizer.end().map(i64::from),
            ended: vec![false; prompts.len()],
        };
        for (row, prompt) in prompts.iter().enumerate() {
            // Its tokens, too: the text of the first that is written may depend on the last of them.
            let mut again = String::new();
            for id in tokenizer.encode(prompt.as_bytes())? {
                again += &texts.decoders[row].push(id.into())?;
            }
            texts.add(row, &again)?;
        }
        Ok(texts)
    }

    /// One more token of a text; whether to go on. What follows the end of a text is not shown.
    pub fn push(&mut self, row: usize, id: i64) -> Result<bool> {
        self.ended[row] |= self.end == Some(id);
        if !self.ended[row] {
            let text = self.decoders[row].push(id)?;
            self.add(row, &text)?;
        }
        Ok(!self.ended.iter().all(|&ended| ended))
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
