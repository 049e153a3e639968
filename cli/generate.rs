//! `kumiki generate`.

use std::io::{self, BufRead, Read as _};
use std::path::{Path, PathBuf};

use kumiki::models::Model;
use kumiki::tensor::DType;
use kumiki_train::checkpoint::{self, Checkpoint};
use kumiki_train::sample::{LONGEST, generate};
use kumiki_train::tokenizer::Tokenizer;
use kumiki_train::{Error, Result, cem};

use crate::eval::StepOptions;
use crate::output;
use crate::writing::{Shown, Texts, WritingOptions};

/// Continue a text with a trained model
///
/// The text is shown as it comes, whole characters only. The same seed gives the same text. Several prompts are continued at
/// once, and shown one after the other at the end.
///
/// With --stdin every line is a prompt, answered before the next is read: `--- N ---`, N from 1, then the text as it comes.
/// What is written is the same as with --prompt alone. Lines without text are passed over.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki generate --checkpoint runs/compare-tango-tiny-0/tango --prompt 'What is 12 + 30?'
  kumiki generate --checkpoint runs/book --prompt 'Once ' --temperature 1 --top-p 0.95
  kumiki generate --checkpoint runs/book --prompt 'Once ' --prompt 'Then, at last, '
  kumiki generate --checkpoint runs/book --prompt 'Once ' --temperature 0   the likeliest bytes
  kumiki generate --checkpoint runs/book --prompt 'Once ' --repetition-penalty 1.2
  kumiki generate --checkpoint runs/book --stdin --json < prompts.txt > texts.jsonl")]
pub struct Args {
    /// A folder with a trained model, or the file in it
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// The text to continue; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, action = clap::ArgAction::Append)]
    #[arg(required_unless_present = "stdin", conflicts_with = "stdin")]
    prompt: Vec<String>,
    /// Continue every line of standard input, one after the other, as they come
    #[arg(long)]
    stdin: bool,
    /// Print an object with `prompt`, `text`, `tokens` and `ended` for every prompt, one a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    writing: WritingOptions,
    #[command(flatten)]
    steps: StepOptions,
}

impl Args {
    pub fn run(self) -> Result<()> {
        // What is wrong whatever the model's tokens, and the lines, are.
        let any = [String::from("a")];
        let known = if self.stdin { &any[..] } else { &self.prompt };
        self.writing.request(known, &Tokenizer::bytes())?.check(0)?;
        output::in_pool(|| {
            let Checkpoint { mut model, tokenizer, .. } = checkpoint::load(&self.checkpoint, DType::F32)?;
            let trace = self.steps.apply(&mut model)?;
            let done = match self.stdin {
                true => self.lines(&model, &tokenizer, &mut io::stdin().lock()),
                false => {
                    let shown = if self.json { Shown::Json } else { Shown::Plain };
                    self.answer(&model, &tokenizer, &self.prompt, shown)
                }
            };
            if let Some(mean) = trace.and_then(|trace| cem::mean_steps(&trace.take())) {
                output::remark(&format!("{mean:.3} steps of a token in a descent, on average"));
            }
            done
        })
    }

    fn answer(&self, model: &Model, tokenizer: &Tokenizer, prompts: &[String], shown: Shown) -> Result<()> {
        let request = self.writing.request(prompts, tokenizer)?;
        let mut texts = Texts::new(prompts, tokenizer, shown)?;
        let done = generate(model, &request, |row, id| texts.push(row, id));
        texts.end(done)
    }

    fn lines(&self, model: &Model, tokenizer: &Tokenizer, from: &mut impl BufRead) -> Result<()> {
        let mut answered = 0;
        for number in 1.. {
            let Some(prompt) = line(from, number)? else { break };
            if prompt.is_empty() {
                continue;
            }
            answered += 1;
            let shown = if self.json { Shown::Json } else { Shown::Numbered(answered) };
            let done = self.answer(model, tokenizer, &[prompt], shown);
            done.map_err(|e| e.context(&format!("line {number} of standard input")))?;
        }
        if answered == 0 {
            return Err(Error::new("standard input has no line with text; expected a prompt on every line"));
        }
        Ok(())
    }
}

/// The next line without its end; nothing when there are no more.
fn line(from: &mut impl BufRead, number: u64) -> Result<Option<String>> {
    // A line of as many bytes as a text may have tokens: a file without line ends must not fill the memory.
    let mut bytes = Vec::new();
    let read = from.take(LONGEST as u64 + 1).read_until(b'\n', &mut bytes);
    let read = read.map_err(|e| Error::io("read", Path::new("standard input"), e))?;
    if read > LONGEST {
        return Err(Error::new(format!("line {number} of standard input: expected at most {LONGEST} bytes")));
    }
    if read == 0 {
        return Ok(None);
    }
    let bytes = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
    let bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(Some(text.to_owned())),
        Err(e) => {
            let at = e.valid_up_to();
            Err(Error::new(format!("line {number} of standard input is no UTF-8 at its byte {at}")))
        }
    }
}
