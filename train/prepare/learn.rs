//! Learning a vocabulary from texts of all formats that can be prepared.

use std::sync::atomic::AtomicU64;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::encode::json_text;
use super::inputs::{self, Inputs};
use super::read::{Chunk, Draw, Place, Reader};
use super::{Progress, refuse_bad};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Learns a byte-level vocabulary of `vocab` tokens from files, folders and patterns; `skip_bad` records may be passed over
/// because they cannot be used. Bytes that are no UTF-8 teach nothing.
///
/// # Errors
/// What is wrong with an input; as [`Tokenizer::train`].
pub fn learn(
    named: &[String],
    vocab: usize,
    skip_bad: u64,
    mut progress: impl FnMut(Progress) + Send,
) -> Result<Tokenizer> {
    const CHUNKS: usize = 8;
    let Inputs { files, .. } = inputs::find(named, 0.0, 0)?;
    let total = files.iter().map(|input| input.bytes).sum();
    let (free, free_chunks) = sync_channel(CHUNKS);
    let (full, chunks) = sync_channel(CHUNKS);
    for _ in 0..CHUNKS {
        let _ = free.send(Chunk::default());
    }
    let stopped: Mutex<Option<Error>> = Mutex::new(None);
    let files = files.as_slice();
    let trained = thread::scope(|scope| {
        let (draw, done) = (Draw::new(0.0, 0), Arc::new(AtomicU64::new(0)));
        let reader = Reader { inputs: files, free: free_chunks, full, draw, cuts: true, done };
        scope.spawn(move || reader.run());
        let mut skipped = 0;
        let mut texts = move |mut chunk: Chunk| -> Result<Vec<String>> {
            let mut texts = Vec::with_capacity(chunk.items.len());
            let mut bad = std::mem::take(&mut chunk.bad);
            for item in &chunk.items {
                let bytes = &chunk.bytes[item.bytes.clone()];
                match item.place {
                    Place::Json(line) => match json_text(&files[item.input].path, line, bytes) {
                        Ok(text) => texts.push(text.into_owned()),
                        Err(what) => bad.push(what),
                    },
                    _ => texts.push(String::from_utf8_lossy(bytes).into_owned()),
                }
            }
            refuse_bad(&bad, skipped, skip_bad)?;
            skipped += bad.len() as u64;
            progress(Progress { done: chunk.done, total, tokens: 0 });
            chunk.clear();
            let _ = free.send(chunk);
            Ok(texts)
        };
        let stopped = &stopped;
        let all = chunks.into_iter().map_while(move |(_, chunk)| match chunk.and_then(&mut texts) {
            Ok(texts) => Some(texts),
            Err(e) => {
                *stopped.lock().unwrap_or_else(PoisonError::into_inner) = Some(e);
                None
            }
        });
        Tokenizer::train(vocab, all.flatten())
    });
    match stopped.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(e) => Err(e),
        None => trained,
    }
}
