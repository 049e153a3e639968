//! [`BlockCache`]: what one block application has to remember of the tokens so far.

use kumiki_nn::KvCache;
use kumiki_ops::{MixedChunkState, WindowedPrefixState};

/// Empty until the first tokens come, then of the kind that the block needs.
#[derive(Clone, Debug, Default)]
#[allow(clippy::large_enum_variant)] // a handful per model
pub enum BlockCache {
    /// No tokens yet.
    #[default]
    Empty,
    /// Keys and values (or gates) of all tokens.
    Kv(KvCache),
    /// A window and running sums, of fixed size.
    Prefix(WindowedPrefixState),
    /// A chunk and running sums, of fixed size.
    Chunks(MixedChunkState),
}

impl BlockCache {
    /// The number of tokens seen.
    pub fn len(&self) -> usize {
        match self {
            BlockCache::Empty => 0,
            BlockCache::Kv(cache) => cache.len(),
            BlockCache::Prefix(state) => state.len(),
            BlockCache::Chunks(state) => state.len(),
        }
    }

    /// Whether no token has been seen.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes held.
    pub fn byte_len(&self) -> usize {
        match self {
            BlockCache::Empty => 0,
            BlockCache::Kv(cache) => cache.byte_len(),
            BlockCache::Prefix(state) => state.byte_len(),
            BlockCache::Chunks(state) => state.byte_len(),
        }
    }

    /// As keys and values.
    ///
    /// # Panics
    /// When it holds tokens of a block that remembers otherwise.
    #[track_caller]
    pub fn kv(&mut self) -> &mut KvCache {
        if self.is_empty() {
            *self = BlockCache::Kv(KvCache::new());
        }
        match self {
            BlockCache::Kv(cache) => cache,
            _ => panic!("decode cache: this block needs keys and values, the cache holds another block's state"),
        }
    }

    /// As the state of a windowed prefix.
    ///
    /// # Panics
    /// When it holds tokens of a block that remembers otherwise.
    #[track_caller]
    pub fn prefix(&mut self, window: usize) -> &mut WindowedPrefixState {
        if self.is_empty() {
            *self = BlockCache::Prefix(WindowedPrefixState::new(window));
        }
        match self {
            BlockCache::Prefix(state) => state,
            _ => panic!("decode cache: this block needs a windowed prefix, the cache holds another block's state"),
        }
    }

    /// As the state of a mixed-chunk attention.
    ///
    /// # Panics
    /// When it holds tokens of a block that remembers otherwise.
    #[track_caller]
    pub fn chunks(&mut self, chunk: usize) -> &mut MixedChunkState {
        if self.is_empty() {
            *self = BlockCache::Chunks(MixedChunkState::new(chunk));
        }
        match self {
            BlockCache::Chunks(state) => state,
            _ => panic!("decode cache: this block needs chunks, the cache holds another block's state"),
        }
    }
}
