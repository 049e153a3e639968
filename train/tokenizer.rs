//! The byte tokenizer: every byte is a token, so any file is text and every round trip is exact.
//!
//! Printing is the one hard part: a character may lie over several tokens. [`StreamDecoder`] holds back an unfinished
//! character and gives out complete text only; bytes that can no longer become a character turn into U+FFFD, one per
//! maximal wrong part (the practice of Unicode and of `String::from_utf8_lossy`, with which the result agrees).

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

    /// The exact bytes that `encode` was given. An id outside 0..=255 is an error that names it and its place.
    pub fn decode(&self, ids: &[i64]) -> Result<Vec<u8>> {
        ids.iter()
            .enumerate()
            .map(|(at, &id)| {
                u8::try_from(id).map_err(|_| Error::new(format!("token {at} is {id}: a byte token lies in 0..=255")))
            })
            .collect()
    }
}

/// Turns bytes that arrive one by one into pieces of whole characters.
///
/// ```
/// use kumiki_train::tokenizer::StreamDecoder;
/// let mut out = StreamDecoder::default();
/// assert_eq!(out.push(0xc3), "");
/// assert_eq!(out.push(0xa9), "é");
/// assert_eq!(out.flush(), "");
/// ```
#[derive(Clone, Debug, Default)]
pub struct StreamDecoder {
    // The start of a character that is valid so far: at most 3 bytes.
    held: Vec<u8>,
}

impl StreamDecoder {
    /// Takes one byte and returns the text that has become certain: empty while a character is unfinished.
    pub fn push(&mut self, byte: u8) -> String {
        self.held.push(byte);
        self.drain()
    }

    /// Takes many bytes; the same text as pushing them one by one.
    pub fn push_bytes(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        self.drain()
    }

    /// Takes one token id; an id outside 0..=255 is an error and changes nothing.
    pub fn push_id(&mut self, id: i64) -> Result<String> {
        let byte = u8::try_from(id).map_err(|_| Error::new(format!("token id {id}: a byte token lies in 0..=255")))?;
        Ok(self.push(byte))
    }

    /// Ends the text: a character that never finished becomes one U+FFFD.
    pub fn flush(&mut self) -> String {
        let unfinished = !std::mem::take(&mut self.held).is_empty();
        if unfinished { char::REPLACEMENT_CHARACTER.to_string() } else { String::new() }
    }

    fn drain(&mut self) -> String {
        let mut text = String::new();
        let mut rest = self.held.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                }
                Err(e) => {
                    let (valid, bad) = rest.split_at(e.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                    rest = bad;
                    // No error length means that more bytes could still complete the character.
                    if let Some(n) = e.error_len() {
                        text.push(char::REPLACEMENT_CHARACTER);
                        rest = &rest[n..];
                        continue;
                    }
                }
            }
            break;
        }
        self.held = rest.to_vec();
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(bytes: &[u8]) -> (Vec<String>, String) {
        let mut decoder = StreamDecoder::default();
        let pieces: Vec<String> = bytes.iter().map(|&b| decoder.push(b)).collect();
        let end = decoder.flush();
        (pieces, end)
    }

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

    #[test]
    fn case_41_emoji_over_several_tokens_stays_intact() {
        let (pieces, end) = stream("a🦀b".as_bytes());
        assert_eq!(pieces, ["a", "", "", "", "🦀", "b"]);
        assert_eq!(end, "");
    }

    #[test]
    fn case_41_a_bad_byte_is_replaced_once_it_is_certain() {
        let (pieces, end) = stream(&[b'x', 0x92, b'y']);
        assert_eq!((pieces.concat() + &end).as_str(), "x\u{fffd}y");
        // E2 82 could become €; the x decides that it does not.
        let (pieces, _) = stream(&[0xe2, 0x82, b'x']);
        assert_eq!(pieces, ["", "", "\u{fffd}x"]);
        // F5 can start nothing: certain at once.
        assert_eq!(stream(&[0xf5]).0, ["\u{fffd}"]);
        // Unfinished at the end.
        assert_eq!(stream(&[0xf0, 0x9f]), (vec![String::new(), String::new()], "\u{fffd}".into()));
    }

    #[test]
    fn agrees_with_the_lossy_decoding_of_the_whole() {
        // All strings of length 4 over bytes that matter: ASCII, continuations, leads, never-valid.
        let alphabet = [0x41, 0x80, 0x9f, 0xa0, 0xbf, 0xc0, 0xc3, 0xe0, 0xe2, 0xed, 0xf0, 0xf4, 0xff];
        for n in 0..(alphabet.len() as u32).pow(4) {
            let mut left = n as usize;
            let bytes: Vec<u8> = (0..4)
                .map(|_| {
                    let b = alphabet[left % alphabet.len()];
                    left /= alphabet.len();
                    b
                })
                .collect();
            let (pieces, end) = stream(&bytes);
            let mut whole = StreamDecoder::default();
            let at_once = whole.push_bytes(&bytes) + &whole.flush();
            let expected = String::from_utf8_lossy(&bytes);
            assert_eq!(pieces.concat() + &end, expected, "{bytes:x?}");
            assert_eq!(at_once, expected, "{bytes:x?}");
        }
    }
}
