//! `kumiki data`.

use std::path::PathBuf;
use std::time::Instant;

use clap::Subcommand;
use kumiki::tensor::files;
use kumiki_train::corpus::VAL_FRACTION;
use kumiki_train::prepare::{self, Existing, Options, PartMeta, Prepared, SHARD_TOKENS};
use kumiki_train::shards::Tokens;
use kumiki_train::tokenizer::Tokenizer;
use kumiki_train::{Error, Result};
use serde_json::json;

use crate::data_progress::{ByteProgress, peak_memory};
use crate::interrupt;
use crate::output::{self, line, remark};
use crate::table::{duration, short, table, thousands};

/// Prepare texts as tokens, learn vocabularies
#[derive(Subcommand)]
pub enum Command {
    Prepare(Prepare),
    Show(Show),
    TrainTokenizer(TrainTokenizer),
}

impl Command {
    pub fn run(self) -> Result<()> {
        match self {
            Command::Prepare(args) => args.run(),
            Command::Show(args) => output::in_pool(|| args.run()),
            Command::TrainTokenizer(args) => output::in_pool(|| args.run()),
        }
    }
}

/// Turn texts into a folder of tokens that every command takes as --data
///
/// Takes files, folders and patterns: plain text (.txt .md .lean), JSON lines with a `text` (.jsonl), each also as .gz or
/// .zst, Parquet with a column `text`, and questions and answers (files all named AREA__MODULE.txt). Every document ends in
/// a token of its own. What is held out is chosen by document, with the seed; of a folder train* and interpolate, as these
/// say. Tokens of answers and Lean proofs are marked. The result does not depend on the number of threads.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki data prepare books/ --out books-bytes
  kumiki data prepare pile/*.jsonl.zst --tokenizer gpt2 --out pile-gpt2 --skip-bad 10
  kumiki data prepare mathlib/ --tokenizer mathlib.json --out mathlib-tokens
  kumiki train --model wango --data books-bytes")]
pub struct Prepare {
    /// Files, folders, patterns with * ? and **
    #[arg(value_name = "INPUT", required = true)]
    inputs: Vec<String>,
    /// `byte`, `gpt2`, or a tokenizer.json, a vocab.bpe with encoder.json beside it, a folder with either
    #[arg(long, value_name = "byte|gpt2|FILE", default_value = "byte")]
    tokenizer: String,
    /// The folder to make
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Replace prepared data in that folder
    #[arg(long)]
    replace: bool,
    /// Part that is held out
    #[arg(long, value_name = "X", default_value_t = VAL_FRACTION, allow_hyphen_values = true)]
    val_fraction: f64,
    /// What chooses the documents that are held out
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    seed: u64,
    /// Records that may be passed over because they cannot be used: broken lines, questions without answers
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    skip_bad: u64,
    /// Put U+FFFD where a text is no UTF-8 and the tokenizer is not `byte`
    #[arg(long)]
    replace_invalid: bool,
    /// The token that ends a document, where a file has none of the usual
    #[arg(long, value_name = "TOKEN", allow_hyphen_values = true)]
    end_token: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Prepare {
    fn run(self) -> Result<()> {
        let started = Instant::now();
        let options = Options {
            tokenizer: Tokenizer::open(&self.tokenizer, self.end_token.as_deref())?,
            inputs: self.inputs,
            out: self.out,
            existing: if self.replace { Existing::Replace } else { Existing::Refuse },
            val_fraction: self.val_fraction,
            seed: self.seed,
            skip_bad: self.skip_bad,
            replace_invalid: self.replace_invalid,
            shard_tokens: SHARD_TOKENS,
            stop: interrupt::stop_saying("stopping, and removing what is half written")?,
            threads: None,
        };
        let mut progress = ByteProgress::new("preparing");
        let done = prepare::prepare(&options, |at| progress.show(at));
        progress.clear();
        let prepare::Report { meta, notes, bad } = match done {
            // Asked for, so no failure: the exit code tells.
            Err(e) if interrupt::is_asked() => {
                interrupt::stopped();
                remark(&e.to_string());
                return Ok(());
            }
            done => done?,
        };
        for what in &bad {
            remark(&format!("passed over: {what}"));
        }
        for note in &notes {
            remark(&format!("note: {note}"));
        }
        let seconds = started.elapsed().as_secs_f64();
        let speed = meta.file_bytes as f64 / seconds;
        let peak = peak_memory();
        if self.json {
            return output::json(&json!({
                "out": options.out, "meta": meta, "seconds": seconds, "bytes_per_second": speed, "peak_memory": peak,
            }));
        }
        line(&parts([&meta.train, &meta.val]))?;
        line(&format!(
            "{} of {} with `{}` in {}, {}B/s{}",
            count(meta.files, "file"),
            bytes(meta.file_bytes),
            meta.tokenizer,
            duration(seconds),
            short(speed),
            peak.map_or(String::new(), |peak| format!(", peak memory {}", bytes(peak))),
        ))?;
        line(&format!("in `{}`", options.out.display()))
    }
}

fn count(n: u64, what: &str) -> String {
    crate::table::count(n, what)
}

/// `1234567` as `1.23 MB`.
fn bytes(n: u64) -> String {
    let text = short(n as f64);
    if n < 1000 { format!("{text} B") } else { format!("{text}B") }
}

/// The parts of prepared data side by side.
fn parts(both: [&PartMeta; 2]) -> String {
    let marked = both.iter().any(|part| part.answer_tokens.is_some());
    let rows = both.iter().zip(["train", "held out"]).map(|(part, name)| {
        let per_token = if part.tokens == 0 { "–".to_owned() } else { format!("{:.3}", part.bytes_per_token()) };
        let mut row = vec![
            name.to_owned(),
            thousands(part.documents),
            thousands(part.tokens),
            thousands(part.bytes),
            per_token,
            part.shards.len().to_string(),
        ];
        if marked {
            let classes = [part.answer_tokens, part.proof_tokens, part.source_tokens];
            row.extend(classes.map(|n| n.filter(|&n| n > 0).map_or("–".to_owned(), thousands)));
        }
        row
    });
    let mut header = vec!["part", "documents", "tokens", "bytes", "bytes/token", "shards"];
    if marked {
        header.extend(["answers", "proofs", "source"]);
    }
    table(&header, &rows.collect::<Vec<_>>())
}

/// Say what is in a folder of prepared tokens, after checking all of it
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki data show books-bytes
  kumiki data show pile-gpt2 --tokens 200")]
pub struct Show {
    /// The folder
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Tokens of each part to show as text
    #[arg(long, value_name = "N", default_value_t = 64, allow_negative_numbers = true)]
    tokens: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Show {
    fn run(self) -> Result<()> {
        let Prepared { meta, tokenizer, train, val } = Prepared::open(&self.folder)?;
        let start = |tokens: &Tokens| -> Result<String> {
            let ids = tokens.ids(0..self.tokens.min(tokens.len()));
            let mut decoder = tokenizer.decoder();
            let mut text = String::new();
            for id in ids {
                text += &decoder.push(id)?;
                if Some(id) == tokenizer.end().map(i64::from) {
                    text += "\u{23f9}\n";
                }
            }
            Ok(text + &decoder.flush())
        };
        let starts = [start(&train)?, start(&val)?];
        if self.json {
            return output::json(&json!({"meta": meta, "train": starts[0], "val": starts[1]}));
        }
        line(&format!(
            "`{}`: {} and tokenizer `{}`, {} tokens of which {} ends a document",
            self.folder.display(),
            count(meta.files, "file"),
            output::plain(&meta.tokenizer),
            thousands(meta.vocab as u64),
            meta.end,
        ))?;
        line(&parts([&meta.train, &meta.val]))?;
        for (name, text) in ["train", "held out"].iter().zip(&starts).filter(|(_, text)| !text.is_empty()) {
            line(&format!("--- first tokens, {name} (\u{23f9} ends a document) ---"))?;
            line(&output::plain(text))?;
        }
        Ok(())
    }
}

/// Learn a byte-level vocabulary from texts, GPT-2's way
///
/// Takes what `prepare` takes. The file is a Hugging Face tokenizer.json; its token 0 ends a document.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki data train-tokenizer mathlib/ --vocab 8192 --out mathlib.json
  kumiki data prepare mathlib/ --tokenizer mathlib.json --out mathlib-tokens")]
pub struct TrainTokenizer {
    /// Files, folders, patterns with * ? and **
    #[arg(value_name = "INPUT", required = true)]
    inputs: Vec<String>,
    /// Tokens to have in the end, the 256 bytes and the end of a document among them
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    vocab: usize,
    /// The file to write
    #[arg(long, value_name = "FILE.json")]
    out: PathBuf,
    /// Records that may be passed over because they cannot be used
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    skip_bad: u64,
}

impl TrainTokenizer {
    fn run(self) -> Result<()> {
        let started = Instant::now();
        // Asked before the work, not after it.
        if files::is_special(&self.out) {
            return Err(Error::new(format!("`{}` is no regular file; expected a file to write", self.out.display())));
        }
        // Only a tokenizer is replaced: a slip of the pen must not cost the text.
        if self.out.exists() && Tokenizer::open(&self.out.to_string_lossy(), None).is_err() {
            let out = self.out.display();
            return Err(Error::new(format!("`{out}` is there already and is no tokenizer; choose another --out")));
        }
        let mut progress = ByteProgress::new("counting words");
        let learned = prepare::learn(&self.inputs, self.vocab, self.skip_bad, |at| progress.show(at));
        progress.clear();
        let learned = learned?;
        let file = learned.file().unwrap_or_default();
        files::replace(&self.out, &[&file]).map_err(|e| Error::io("write the tokenizer", &self.out, e))?;
        let (vocab, seconds) = (thousands(learned.vocab() as u64), started.elapsed().as_secs_f64());
        line(&format!("{vocab} tokens in `{}`, learned in {}", self.out.display(), duration(seconds)))
    }
}
