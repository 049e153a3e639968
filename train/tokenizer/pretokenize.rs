//! GPT-2's words: where a text is cut before pairs of bytes are merged, by hand instead of by its regular expression
//!
//! ```text
//! 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//! ```
//!
//! which regex engines with look-ahead walk through at a few MB/s. Every word is found from its first character on, so a
//! text may be cut in front of any word: the words of the parts are the words of the whole, see [`cut`].

use std::sync::OnceLock;

use regex_syntax::hir::{Class as ClassOf, HirKind};

/// What a character is to the expression.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Other,
    Letter,
    Number,
    Space,
}

/// Kinds of all characters, by code point.
struct Kinds(Vec<Kind>);

impl Kinds {
    fn get() -> &'static Kinds {
        static KINDS: OnceLock<Kinds> = OnceLock::new();
        KINDS.get_or_init(|| {
            let mut kinds = vec![Kind::Other; char::MAX as usize + 1];
            for (class, kind) in [(r"\p{L}", Kind::Letter), (r"\p{N}", Kind::Number)] {
                let parsed = regex_syntax::parse(class).expect("a class that parses");
                let HirKind::Class(ClassOf::Unicode(class)) = parsed.into_kind() else { unreachable!("a class") };
                for range in class.iter() {
                    kinds[range.start() as usize..=range.end() as usize].fill(kind);
                }
            }
            for c in (0..=char::MAX as u32).filter_map(char::from_u32).filter(|c| c.is_whitespace()) {
                kinds[c as usize] = Kind::Space;
            }
            Kinds(kinds)
        })
    }

    /// The kind of the character at `at`, and its width; at the end, nothing of no width.
    #[inline]
    fn at(&self, text: &str, at: usize) -> Option<(Kind, usize)> {
        let byte = *text.as_bytes().get(at)?;
        if byte < 0x80 {
            return Some((self.0[byte as usize], 1));
        }
        let c = text[at..].chars().next()?;
        Some((self.0[c as usize], c.len_utf8()))
    }

    /// The end of the run of `kind` from `at` on.
    #[inline]
    fn run(&self, text: &str, mut at: usize, kind: Kind) -> usize {
        while let Some((found, width)) = self.at(text, at)
            && found == kind
        {
            at += width;
        }
        at
    }

    /// The end of the word that begins at `at`, which is before the end of `text`.
    fn word(&self, text: &str, at: usize) -> usize {
        let bytes = text.as_bytes();
        if bytes[at] == b'\'' {
            match bytes.get(at + 1..).unwrap_or_default() {
                [b's' | b't' | b'm' | b'd', ..] => return at + 2,
                [b'r' | b'v', b'e', ..] | [b'l', b'l', ..] => return at + 3,
                _ => {}
            }
        }
        let Some((kind, width)) = self.at(text, at) else { return bytes.len() };
        if kind != Kind::Space {
            return self.run(text, at + width, kind);
        }
        match self.at(text, at + width) {
            Some((next, next_width)) if next != Kind::Space => {
                // One blank goes with the word behind it, any other white space stands alone.
                if bytes[at] == b' ' { self.run(text, at + width + next_width, next) } else { at + width }
            }
            None => at + width,
            Some(_) => {
                let end = self.run(text, at + width, Kind::Space);
                // The last character of several is left for the word behind it.
                let last = text[at..end].chars().next_back().map_or(0, char::len_utf8);
                if end == bytes.len() { end } else { end - last }
            }
        }
    }
}

/// The words of `text`, which together are `text`.
pub(crate) fn words(text: &str) -> impl Iterator<Item = &str> {
    let kinds = Kinds::get();
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at;
        (start < text.len()).then(|| {
            at = kinds.word(text, start);
            &text[start..at]
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(text: &str) -> Vec<&str> {
        words(text).collect()
    }

    #[test]
    fn words_as_the_expression_finds_them() {
        assert_eq!(split("Hello  world\n\nfoo 12a"), ["Hello", " ", " world", "\n", "\n", "foo", " 12", "a"]);
        assert_eq!(split("it's we'll 'VE x'"), ["it", "'s", " we", "'ll", " '", "VE", " x", "'"]);
        assert_eq!(split("a\t b \u{a0}c  "), ["a", "\t", " b", " ", "\u{a0}", "c", "  "]);
        assert_eq!(split("Ⅷ½é ̈x"), ["Ⅷ½", "é", " ̈", "x"]);
        assert_eq!(split(""), [""; 0]);
    }

    #[test]
    fn letters_of_the_expression_are_not_all_that_is_alphabetic() {
        // U+0345 is alphabetic and a mark; U+2160 is alphabetic and a number.
        assert_eq!(split("a\u{345}b\u{2160}"), ["a", "\u{345}", "b", "\u{2160}"]);
    }
}
