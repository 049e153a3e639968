//! What commands that write text have in common: how tokens are chosen, and how one or several texts are shown.

use kumiki::tensor::Rng;
use kumiki_train::Result;
use kumiki_train::sample::{BLOCK_LEN, Request, Sampling};
use kumiki_train::tokenizer::{TokenDecoder, Tokenizer};
use serde::Serialize;

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
    /// Divide positive logits of tokens that the text has already by this, multiply negative ones; 1 for none (CTRL, Keskar et
    /// al. 2019)
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_hyphen_values = true, help_heading = "Sampling")]
    repetition_penalty: f64,
    /// Seed of the choices
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, help_heading = "Sampling")]
    seed: u64,
}

impl WritingOptions {
    /// To go on with these texts, in the tokens of a model.
    pub fn request(&self, prompts: &[String], tokenizer: &Tokenizer) -> Result<Request> {
        let WritingOptions { temperature, top_k, top_p, repetition_penalty, .. } = *self;
        let sampling = Sampling { temperature, top_k, top_p, repetition_penalty };
        sampling.check()?;
        let encode = |prompt: &String| -> Result<Vec<i64>> {
            Ok(tokenizer.encode(prompt.as_bytes())?.into_iter().map(i64::from).collect())
        };
        let prompts = prompts.iter().map(encode).collect::<Result<_>>()?;
        let WritingOptions { tokens: count, block_len, seed, .. } = *self;
        Ok(Request { prompts, count, block_len, sampling, rng: Rng::new(seed) })
    }
}

/// How texts are shown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// A single one as it comes, several one after the other when they are done, each below its number.
    Plain,
    /// As it comes, below this number.
    Numbered(u64),
    /// As JSON, an object a line, when it is done.
    Json,
}

/// A text that is written.
#[derive(Serialize)]
struct Written<'a> {
    prompt: &'a str,
    /// What follows the prompt.
    text: &'a str,
    /// How many that took, the one that ends a text included.
    tokens: u64,
    /// Whether the model has ended the text.
    ended: bool,
}

/// Texts that are written at once.
pub struct Texts {
    prompts: Vec<String>,
    decoders: Vec<TokenDecoder>,
    written: Vec<String>,
    /// Bytes of these that are the prompt's.
    starts: Vec<usize>,
    tokens: Vec<u64>,
    end: Option<i64>,
    /// Whether the model has ended a text.
    ended: Vec<bool>,
    shown: Shown,
}

impl Texts {
    /// Of these prompts, to go on in the tokens of a model; what is shown as it comes begins with its prompt.
    pub fn new(prompts: &[String], tokenizer: &Tokenizer, shown: Shown) -> Result<Texts> {
        let mut texts = Texts {
            prompts: prompts.to_vec(),
            decoders: vec![tokenizer.decoder(); prompts.len()],
            written: vec![String::new(); prompts.len()],
            starts: vec![0; prompts.len()],
            tokens: vec![0; prompts.len()],
            end: tokenizer.end().map(i64::from),
            ended: vec![false; prompts.len()],
            shown,
        };
        if let Shown::Numbered(number) = shown {
            output::line(&format!("--- {number} ---"))?;
        }
        for (row, prompt) in prompts.iter().enumerate() {
            // Its tokens, too: the text of the first that is written may depend on the last of them.
            let mut again = String::new();
            for id in tokenizer.encode(prompt.as_bytes())? {
                again += &texts.decoders[row].push(id.into())?;
            }
            texts.add(row, &again)?;
            texts.starts[row] = again.len();
        }
        Ok(texts)
    }

    /// One more token of a text; whether to go on. What follows the end of a text is not shown.
    pub fn push(&mut self, row: usize, id: i64) -> Result<bool> {
        self.tokens[row] += u64::from(!self.ended[row]);
        self.ended[row] |= self.end == Some(id);
        if !self.ended[row] {
            let text = self.decoders[row].push(id)?;
            self.add(row, &text)?;
        }
        Ok(!self.ended.iter().all(|&ended| ended))
    }

    /// Whether the only one is shown as it comes.
    fn streams(&self) -> bool {
        self.prompts.len() == 1 && self.shown != Shown::Json
    }

    fn add(&mut self, row: usize, text: &str) -> Result<()> {
        if self.streams() {
            return output::text(text);
        }
        self.written[row] += text;
        Ok(())
    }

    /// Ends all texts. What is for people to read is shown also after an error, whose sentence must not go on with one of
    /// them; JSON is for programs, which would take it for whole.
    pub fn end(mut self, done: Result<()>) -> Result<()> {
        let streams = self.streams();
        let rests: Vec<String> = self.decoders.iter_mut().map(TokenDecoder::flush).collect();
        if streams {
            let shown = if self.prompts[0].is_empty() { Ok(()) } else { output::line(&rests[0]) };
            return done.and(shown);
        }
        if self.shown == Shown::Json && done.is_err() {
            return done;
        }
        for (n, rest) in rests.iter().enumerate() {
            self.written[n] += rest;
            let (prompt, text) = (&self.prompts[n], &self.written[n]);
            if self.shown == Shown::Json {
                let (text, tokens, ended) = (&text[self.starts[n]..], self.tokens[n], self.ended[n]);
                output::json(&Written { prompt, text, tokens, ended })?;
            } else {
                output::line(&format!("--- {} of {} ---", n + 1, self.prompts.len()))?;
                output::line(text)?;
            }
        }
        done
    }
}
