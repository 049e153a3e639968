//! [`KvCache`]: the keys and values of the tokens before, so that decoding computes only the new ones.

use kumiki_tensor::Tensor;

/// Two growing tensors `[B, T, H, K]` and `[B, T, H, G]`.
#[derive(Clone, Debug, Default)]
pub struct KvCache {
    parts: Option<(Tensor, Tensor)>,
    len: usize,
}

impl KvCache {
    /// No tokens yet.
    pub fn new() -> KvCache {
        KvCache::default()
    }

    /// The number of tokens held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of the tokens held (not of the room kept for more).
    pub fn byte_len(&self) -> usize {
        self.view().map_or(0, |(k, v)| k.byte_len() + v.byte_len())
    }

    fn view(&self) -> Option<(Tensor, Tensor)> {
        self.parts.as_ref().map(|(k, v)| (k.narrow(1, 0, self.len), v.narrow(1, 0, self.len)))
    }

    /// Appends the keys and values of new tokens and gives those of all tokens.
    ///
    /// # Panics
    /// When batch, heads, widths or dtype differ from those held.
    #[track_caller]
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> (Tensor, Tensor) {
        let new = k.dim(1);
        assert!(v.dim(1) == new, "kv cache: {new} keys but {} values", v.dim(1));
        let (keys, values) = self.parts.take().unwrap_or_else(|| (k.narrow(1, 0, 0), v.narrow(1, 0, 0)));
        let parts = (extend(keys, self.len, k), extend(values, self.len, v));
        self.len += new;
        self.parts = Some(parts);
        self.view().expect("just set")
    }
}

/// `held`, of which the first `len` tokens count, with the tokens of `new` behind them; room doubles when it is spent.
#[track_caller]
fn extend(mut held: Tensor, len: usize, new: &Tensor) -> Tensor {
    let fits = held.rank() == 4 && new.rank() == 4 && (0..4).all(|a| a == 1 || held.dim(a) == new.dim(a));
    assert!(fits && held.dtype() == new.dtype(), "kv cache: {:?} does not continue {:?}", new.shape(), held.shape());
    let (wanted, mut shape) = (len + new.dim(1), held.shape().to_vec());
    if wanted > held.dim(1) {
        shape[1] = wanted.max(2 * held.dim(1)).max(16);
        let mut larger = held.new_full(held.dtype(), &shape, 0.0);
        larger.put(1, 0, &held.narrow(1, 0, len));
        held = larger;
    }
    held.put(1, len, new);
    held
}

#[cfg(test)]
mod tests {
    use super::*;
    use kumiki_tensor::{DType, Rng, concat};

    #[test]
    fn what_is_appended_in_pieces_is_what_was_there() {
        let (k, v) = (
            Rng::new(1).normal(DType::F32, &[2, 50, 3, 4], 0.0, 1.0),
            Rng::new(2).normal(DType::F32, &[2, 50, 3, 5], 0.0, 1.0),
        );
        let mut cache = KvCache::new();
        let (mut at, mut last) = (0, None);
        for piece in [1, 1, 20, 3, 25] {
            last = Some(cache.append(&k.narrow(1, at, piece), &v.narrow(1, at, piece)));
            at += piece;
        }
        let (keys, values) = last.unwrap();
        assert_eq!((keys.to_f64_vec(), values.to_f64_vec()), (k.to_f64_vec(), v.to_f64_vec()));
        assert_eq!(cache.byte_len(), k.byte_len() + v.byte_len());
        assert_eq!(concat(&[&keys, &keys], 1).dim(1), 2 * cache.len());
    }
}
