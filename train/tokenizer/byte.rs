//! The byte tokenizer: every byte is a token, so any file is text and every round trip is exact.

use crate::{Error, Result};

/// Tokens are the bytes 0..=255 themselves; no special tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByteTokenizer;

impl ByteTokenizer {
    /// Size of the vocabulary.
    pub const VOCAB: usize = 256;

    /// One id per byte; accepts any bytes, valid UTF-8 or not.
    pub fn encode(&self, bytes: &[u8]) -> Vec<i64> {
        bytes.iter().map(|&b| i64::from(b)).collect()
    }

    /// The exact bytes that `encode` was given.
    ///
    /// # Errors
    /// When an id is outside 0..=255: names it and its place.
    pub fn decode(&self, ids: &[i64]) -> Result<Vec<u8>> {
        ids.iter()
            .enumerate()
            .map(|(at, &id)| {
                u8::try_from(id).map_err(|_| Error::new(format!("token {at} is {id}: a byte token lies in 0..=255")))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_41_exact_round_trip_of_any_bytes() {
        let t = ByteTokenizer;
        let all: Vec<u8> = (0..=255).collect();
        for bytes in [all.as_slice(), b"a\r\nb", &[0x92], b"", "🦀é\0".as_bytes()] {
            assert_eq!(t.decode(&t.encode(bytes)).unwrap(), bytes);
        }
        let e = t.decode(&[65, 256]).unwrap_err().to_string();
        assert!(e.contains("256") && e.contains("token 1"), "{e}");
        assert!(t.decode(&[-1]).is_err());
    }
}
