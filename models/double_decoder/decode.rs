//! Writing with a double decoder: what is complete is read once by the context stack, the open block is written token by
//! token by the generation stack.
//!
//! Of a prompt all tokens but the last are context; the last one opens the first block, for its place is where the next
//! token is predicted. When the open block has `block_len` tokens and another comes, it is complete: the context stack reads
//! the text again, and the latents of the new block join the others (*rollover*). Kept are keys and values of the generation
//! layers, of context and open block, and the ids of the tokens.
//!
//! Sequences of a batch may be of any lengths: products with weights are done for all of them together, attention for each
//! with its own keys.

use kumiki_autograd::{Tape, Var};
use kumiki_nn::KvCache;
use kumiki_ops::{self as ops, DualAttention, DualSees};
use kumiki_tensor::{Error, Result, Tensor, concat};

use super::{DoubleDecoder, DualLayer};
use crate::model::check_prompts;

/// What writing keeps of a batch of sequences.
#[derive(Clone, Debug)]
pub struct DoubleCache {
    rows: Vec<Row>,
    block_len: usize,
}

/// One sequence.
#[derive(Clone, Debug)]
struct Row {
    tokens: Vec<i64>,
    /// Where the open block starts.
    start: usize,
    layers: Vec<RowLayer>,
}

/// Keys and values of one generation layer.
#[derive(Clone, Debug, Default)]
struct RowLayer {
    context: KvCache,
    own: KvCache,
}

impl DoubleCache {
    /// The number of sequences.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The tokens of a sequence so far.
    pub fn tokens(&self, row: usize) -> &[i64] {
        &self.rows[row].tokens
    }

    /// Where the open block of a sequence starts: its tokens before are context.
    pub fn block_start(&self, row: usize) -> usize {
        self.rows[row].start
    }

    /// Bytes of keys and values held.
    pub fn byte_len(&self) -> usize {
        let layers = self.rows.iter().flat_map(|row| &row.layers);
        layers.map(|layer| layer.context.byte_len() + layer.own.byte_len()).sum()
    }
}

impl DoubleDecoder {
    /// The context latents `[1, T, D]` of a text: what [`DoubleDecoder::start_after`] goes on from.
    pub fn read(&self, tokens: &[i64]) -> Tensor {
        self.context_latents(&Tape::inference(), &Tensor::from_slice(tokens, &[1, tokens.len()])).into_value()
    }

    /// Begins to write after prompts, one for every sequence: the cache, and the logits of what comes next, `[B, n_vocab]`.
    ///
    /// # Errors
    /// When there is no prompt, one is empty, a token is out of range, or `block_len` is 0.
    #[expect(clippy::missing_panics_doc, reason = "the prompts were checked to hold a token")]
    pub fn start(&self, prompts: &[Vec<i64>], block_len: usize) -> Result<(DoubleCache, Tensor)> {
        self.check(prompts, block_len)?;
        let mut cache = DoubleCache { rows: vec![], block_len };
        for prompt in prompts {
            let (_, context) = prompt.split_last().expect("checked");
            let latents = (!context.is_empty()).then(|| self.read(context));
            cache.rows.push(self.row(context, latents.as_ref()));
        }
        let last: Vec<i64> = prompts.iter().map(|prompt| *prompt.last().expect("checked")).collect();
        let logits = self.step(&last, &mut cache);
        Ok((cache, logits))
    }

    /// As [`DoubleDecoder::start`] after a text whose latents are known: the prompts are the beginning of the open block.
    ///
    /// # Errors
    /// As [`DoubleDecoder::start`], and when the latents `[1, T, D]` are not of this width or not of these tokens' number.
    #[expect(clippy::missing_panics_doc, reason = "the prompts were checked to hold a token")]
    pub fn start_after(
        &self,
        text: &[i64],
        latents: &Tensor,
        prompts: &[Vec<i64>],
        block_len: usize,
    ) -> Result<(DoubleCache, Tensor)> {
        self.check(prompts, block_len)?;
        let expected = [1, text.len(), self.config.d_model];
        if latents.shape() != expected {
            let found = latents.shape();
            return Err(Error::new(format!("latents of the text must be {expected:?}, found {found:?}")));
        }
        let first = self.row(text, Some(latents));
        let mut logits = Vec::new();
        let mut rows = Vec::new();
        for prompt in prompts {
            let mut cache = DoubleCache { rows: vec![first.clone()], block_len };
            let mut last = None;
            for piece in prompt.chunks(block_len) {
                last = Some(self.write(piece, &mut cache.rows[0], block_len));
            }
            logits.push(last.expect("checked"));
            rows.append(&mut cache.rows);
        }
        Ok((DoubleCache { rows, block_len }, concat(&logits.iter().collect::<Vec<_>>(), 0)))
    }

    fn check(&self, prompts: &[Vec<i64>], block_len: usize) -> Result<()> {
        if block_len == 0 {
            return Err(Error::new("the length of a block must be at least 1, found 0"));
        }
        check_prompts(prompts, self.config.n_vocab)
    }

    /// A sequence with this much context and an open block without tokens.
    fn row(&self, context: &[i64], latents: Option<&Tensor>) -> Row {
        let layers = vec![RowLayer::default(); self.generation.len()];
        let mut row = Row { tokens: context.to_vec(), start: 0, layers };
        if let Some(latents) = latents {
            self.complete(&mut row, latents);
        }
        row
    }

    /// Adds the latents of the tokens from the open block's start on to the context, and opens a new block.
    fn complete(&self, row: &mut Row, latents: &Tensor) {
        let (tape, start) = (Tape::inference(), row.start);
        let latents = Var::constant(latents.clone());
        for (layer, kept) in self.generation.iter().zip(&mut row.layers) {
            let (k, v) = layer.context_keys_and_values(&tape, &latents, start);
            kept.context.append(k.value(), v.value());
            kept.own = KvCache::new();
        }
        row.start = row.tokens.len();
    }

    /// The open block becomes context if it is full.
    fn roll(&self, row: &mut Row, block_len: usize) {
        if row.tokens.len() - row.start >= block_len {
            // The context stack keeps nothing: it reads everything again, to end with the new block.
            let latents = self.read(&row.tokens);
            let new = latents.narrow(1, row.start, row.tokens.len() - row.start);
            self.complete(row, &new);
        }
    }

    /// One more token for every sequence; the logits of what comes next, `[B, n_vocab]`.
    ///
    /// # Panics
    /// When there is not one token for every sequence.
    #[track_caller]
    pub fn step(&self, tokens: &[i64], cache: &mut DoubleCache) -> Tensor {
        let count = cache.rows.len();
        assert!(tokens.len() == count, "double decoder: {} tokens for {count} sequences", tokens.len());
        for row in &mut cache.rows {
            self.roll(row, cache.block_len);
        }
        let positions: Vec<i64> = cache.rows.iter().map(|row| row.tokens.len() as i64).collect();
        let tape = Tape::inference();
        // Sequences lie along the axis of time: their positions differ.
        let mut h = self.embedding.forward(&tape, &Tensor::from_slice(tokens, &[1, count]));
        for (n, layer) in self.generation.iter().enumerate() {
            h = layer.step(&tape, &h, &positions, cache.rows.iter_mut().map(|row| &mut row.layers[n]));
        }
        cache.rows.iter_mut().zip(tokens).for_each(|(row, &token)| row.tokens.push(token));
        self.head(&tape, &h).reshape(&[count, self.config.n_vocab])
    }

    /// The next tokens of one sequence, at most as many as the open block has room for after a rollover; the logits of what
    /// comes next, `[1, n_vocab]`.
    fn write(&self, tokens: &[i64], row: &mut Row, block_len: usize) -> Tensor {
        self.roll(row, block_len);
        let (tape, start) = (Tape::inference(), row.tokens.len());
        let mut h = self.embedding.forward(&tape, &Tensor::from_slice(tokens, &[1, tokens.len()]));
        for (layer, kept) in self.generation.iter().zip(&mut row.layers) {
            let (own, x) = (&layer.layer, layer.layer.norm1.forward(&tape, &h));
            let q = own.attention.queries(&tape, &x, start);
            let (k, v) = own.attention.keys_and_values(&tape, &x, start);
            let attended = kept.attend(&q, &k, &v);
            h = own.feed_forward(&tape, &ops::add(&h, &own.attention.output(&tape, &attended)));
        }
        row.tokens.extend_from_slice(tokens);
        let last = Var::constant(h.value().narrow(1, tokens.len() - 1, 1));
        self.head(&tape, &last).reshape(&[1, self.config.n_vocab])
    }

    fn head(&self, tape: &Tape, h: &Var) -> Tensor {
        ops::linear(&self.read_out(tape, h), &tape.param(&self.embedding.weight)).into_value()
    }
}

impl RowLayer {
    /// Adds keys and values of new tokens of the open block, and attends to them and to all others.
    fn attend(&mut self, q: &Var, k: &Var, v: &Var) -> Var {
        let (k_self, v_self) = self.own.append(k.value(), v.value());
        // Without context: of no tokens.
        let (k_context, v_context) = self.context.append(&k.value().narrow(1, 0, 0), &v.value().narrow(1, 0, 0));
        let [k_self, v_self, k_context, v_context] = [k_self, v_self, k_context, v_context].map(Var::constant);
        let (k_self, v_self, k_context, v_context) = (&k_self, &v_self, &k_context, &v_context);
        let operands = DualAttention { q, k_self, v_self, k_context, v_context };
        ops::dual_attention(operands, DualSees::OpenBlock { self_mask: None, context_mask: None })
    }
}

impl DualLayer {
    /// One token of every sequence, `h [1, B, D]` at `positions [B]`, to the same.
    fn step<'a>(&self, tape: &Tape, h: &Var, positions: &[i64], rows: impl Iterator<Item = &'a mut RowLayer>) -> Var {
        let (attention, x) = (&self.layer.attention, self.layer.norm1.forward(tape, h));
        let heads = |x: Var| ops::reshape(&x, &[1, x.dim(1), attention.heads, x.dim(2) / attention.heads]);
        let rotated = |x: Var| ops::rope_at(&heads(x), attention.rope_base, positions);
        let (q, k) = (rotated(attention.wq.forward(tape, &x)), rotated(attention.wk.forward(tape, &x)));
        let v = heads(attention.wv.forward(tape, &x));
        let attended: Vec<Tensor> = rows
            .enumerate()
            .map(|(i, row)| {
                let [q, k, v] = [&q, &k, &v].map(|x| ops::narrow(x, 1, i, 1));
                row.attend(&q, &k, &v).into_value()
            })
            .collect();
        let attended = Var::constant(concat(&attended.iter().collect::<Vec<_>>(), 1));
        self.layer.feed_forward(tape, &ops::add(h, &attention.output(tape, &attended)))
    }
}
