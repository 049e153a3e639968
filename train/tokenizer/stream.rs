//! Printing what comes token by token: a character may lie over several tokens. [`StreamDecoder`] holds back an unfinished
//! character and gives out complete text only; bytes that can no longer become a character turn into U+FFFD, one per
//! maximal wrong part (the practice of Unicode and of `String::from_utf8_lossy`, with which the result agrees).

use super::Tokenizer;
use crate::{Error, Result};

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

    /// Takes one token id.
    ///
    /// # Errors
    /// When the id is outside 0..=255; nothing has changed then.
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

/// Turns tokens that arrive one by one into pieces of whole characters. See [`Tokenizer::decoder`].
#[derive(Clone, Debug)]
pub struct TokenDecoder {
    tokenizer: Tokenizer,
    bytes: StreamDecoder,
    /// For tokens whose text depends on those before: the tokens since text was last given out, those of that text first.
    window: Vec<u32>,
    /// How many of them are of that text.
    given: usize,
}

impl TokenDecoder {
    pub(super) fn new(tokenizer: Tokenizer) -> TokenDecoder {
        TokenDecoder { tokenizer, bytes: StreamDecoder::default(), window: Vec::new(), given: 0 }
    }

    /// Takes one token and returns the text that has become certain. The token that ends a text adds none.
    ///
    /// # Errors
    /// When the vocabulary has no such token.
    pub fn push(&mut self, id: i64) -> Result<String> {
        let token = u32::try_from(id).ok().filter(|&id| (id as usize) < self.tokenizer.vocab());
        let token = token.ok_or_else(|| {
            let (name, vocab) = (self.tokenizer.name(), self.tokenizer.vocab());
            Error::new(format!("token id {id}: the tokenizer `{name}` has the ids 0..={}", vocab - 1))
        })?;
        if self.tokenizer.is_byte_level() {
            return Ok(self.bytes.push_bytes(&self.tokenizer.decode(&[token])?));
        }
        if self.tokenizer.end() == Some(token) {
            return Ok(String::new());
        }
        self.window.push(token);
        self.rest(false)
    }

    /// What the window says beyond what was given out; nothing while it ends in an unfinished character.
    fn rest(&mut self, all: bool) -> Result<String> {
        let text = |ids: &[u32]| self.tokenizer.decode(ids).map(|b| String::from_utf8_lossy(&b).into_owned());
        let (before, now) = (text(&self.window[..self.given])?, text(&self.window)?);
        if !all && now.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        let new = now.get(before.len()..).unwrap_or_default().to_owned();
        if !new.is_empty() {
            self.window.drain(..self.given);
            self.given = self.window.len();
        }
        Ok(new)
    }

    /// Ends the text: a character that never finished becomes one U+FFFD.
    pub fn flush(&mut self) -> String {
        let held = self.bytes.flush();
        let rest = self.rest(true).unwrap_or_default();
        (self.window, self.given) = (Vec::new(), 0);
        held + &rest
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
