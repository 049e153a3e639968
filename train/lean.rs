//! Which bytes of a Lean file are proofs: a lexer that knows just enough of the language to tell.
//!
//! A **proof** is what follows the `:=` (with a `by` after it: the `:= by`) of a `theorem`, `lemma` or `example`, up to the
//! next top-level declaration; everything else is **source**. That `:=` is the first outside of all brackets, so the
//! one in a binder `(h : x := 1)` is none; a `let` or `have` of the statement keeps its own. A declaration begins with one
//! of its words or its attributes at the start of a line, indented or not; other commands and documentation comments only
//! in the first column, for they may stand in a proof (`open Real in`). Strings, characters, `«names»` and comments, nested
//! ones too, hide what is in them. A theorem without such a `:=` (cases `| 0 => …` at the start of a line, `where`) is all
//! source.
//!
//! Not known: macros that declare theorems by other words, and strings within `{}` of interpolated strings.

use std::ops::Range;

use crate::marks::Class;

const THEOREMS: &str = "theorem lemma example";

/// Reserved words: at the start of a line they always begin a declaration.
const DECLARATIONS: &str = "\
    def abbrev instance structure class inductive coinductive axiom opaque mutual namespace section private \
    protected noncomputable partial unsafe";

/// Words that begin a command in the first column and may be something else further right. A command that is missing here
/// goes with the proof before it; if any word ended a proof, tactics in the first column would.
const COMMANDS: &str = "\
    add_decl_doc alias assert_not_exists assert_not_imported attribute builtin_initialize compile_inductive \
    constant declare_syntax_cat deriving dsimproc elab elab_rules end export grind_pattern import include infix \
    infixl infixr initialize initialize_simps_projections irreducible_def library_note local macro macro_rules \
    meta mk_iff_of_inductive_prop nonrec notation notation3 omit open postfix prefix proof_wanted public \
    register_option register_simp_attr run_cmd run_elab run_meta scoped seal set_option simproc \
    suppress_compilation syntax unif_hint universe unseal variable variables";

const LETS: &str = "let have letI haveI";

const OPENING: [char; 6] = ['(', '[', '{', '⟨', '⦃', '⟦'];
const CLOSING: [char; 6] = [')', ']', '}', '⟩', '⦄', '⟧'];

/// Where the lexer is in the course of a declaration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Source,
    /// In a theorem, before its `:=`.
    Statement,
    Proof,
}

/// A place in a file, and what must be known of everything before it: a few numbers, however large the file.
#[derive(Clone, Debug)]
pub(crate) struct Lexer {
    at: usize,
    state: State,
    /// Open brackets.
    depth: u32,
    /// `let`s of the statement whose `:=` is still to come.
    lets: u32,
    /// Whether the statement has a `match`, whose cases are not the theorem's.
    matching: bool,
    /// Whether nothing but blanks and comments stands before `at` on its line.
    fresh: bool,
}

impl Default for Lexer {
    fn default() -> Lexer {
        Lexer { at: 0, state: State::Source, depth: 0, lets: 0, matching: false, fresh: true }
    }
}

/// What a stretch of a file is, as far as it matters here.
enum Token<'a> {
    Blank,
    LineEnd,
    Comment,
    /// `@[`, which opens the attributes of a declaration.
    Attribute,
    /// A comment that documents what follows, or a `#command`.
    Herald,
    Word(&'a [u8]),
    Mark,
    Bar,
    Open,
    Close,
    Other,
}

impl Lexer {
    /// The next stretch of `bytes`, which must be the same file each time; `None` at its end.
    pub(crate) fn next(&mut self, bytes: &[u8]) -> Option<(Range<usize>, Class)> {
        let start = self.at;
        let rest = bytes.get(start..).filter(|rest| !rest.is_empty())?;
        let (token, mut length) = token(rest);
        let first_column = start == 0 || bytes[start - 1] == b'\n';
        let before = self.state;
        self.take(&token, first_column);
        // The mark itself is no part of the proof.
        let marks = before == State::Statement && self.state == State::Proof;
        if marks {
            length += by(&rest[length..]);
        }
        self.at = start + length.max(1);
        let class = if self.state == State::Proof && !marks { Class::Proof } else { Class::Source };
        Some((start..self.at, class))
    }

    fn take(&mut self, token: &Token, first_column: bool) {
        let (fresh, outside) = (self.fresh, self.depth == 0);
        let in_statement = self.state == State::Statement && outside;
        match token {
            Token::LineEnd => self.fresh = true,
            Token::Blank | Token::Comment => {}
            _ => self.fresh = false,
        }
        match token {
            Token::Herald if first_column => self.begin(State::Source),
            Token::Attribute if fresh => self.begin(State::Source),
            // `lemma` is a name like others where Mathlib is not used: in a proof it begins one only on a line of its own,
            // for what may stand before it has ended the proof.
            Token::Word(word) if is_among(word, THEOREMS) && (fresh || outside && self.state == State::Source) => {
                self.begin(State::Statement)
            }
            Token::Word(word) if fresh && is_among(word, DECLARATIONS) => self.begin(State::Source),
            Token::Word(word) if first_column && is_among(word, COMMANDS) => self.begin(State::Source),
            Token::Word(b"where") if in_statement => self.state = State::Source,
            Token::Word(b"match") if in_statement => self.matching = true,
            Token::Word(word) if in_statement && is_among(word, LETS) => self.lets += 1,
            Token::Bar if in_statement && fresh && !self.matching => self.state = State::Source,
            Token::Mark if in_statement && self.lets > 0 => self.lets -= 1,
            Token::Mark if in_statement => self.state = State::Proof,
            Token::Open => self.depth += 1,
            Token::Close => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
    }

    /// A declaration begins: brackets that were never closed are forgotten.
    fn begin(&mut self, state: State) {
        *self = Lexer { at: self.at, state, fresh: self.fresh, ..Lexer::default() };
    }
}

fn is_among(word: &[u8], words: &str) -> bool {
    words.split(' ').any(|other| other.as_bytes() == word)
}

/// The length of blanks and the word `by` at the start of `rest`, if they are there.
fn by(rest: &[u8]) -> usize {
    let blanks = rest.iter().take_while(|b| b.is_ascii_whitespace()).count();
    match token(&rest[blanks..]) {
        (Token::Word(b"by"), length) => blanks + length,
        _ => 0,
    }
}

/// The first token of `rest` and its length.
fn token(rest: &[u8]) -> (Token<'_>, usize) {
    match rest {
        [] => (Token::Other, 0),
        [b'\n', ..] => (Token::LineEnd, 1),
        [b' ' | b'\t' | b'\r', ..] => {
            (Token::Blank, rest.iter().take_while(|b| matches!(b, b' ' | b'\t' | b'\r')).count())
        }
        [b'-', b'-', ..] => (Token::Comment, line(rest)),
        [b'/', b'-', b'-' | b'!', ..] => (Token::Herald, comment(rest)),
        [b'/', b'-', ..] => (Token::Comment, comment(rest)),
        [b'@', b'[', ..] => (Token::Attribute, 1),
        [b'#', b'a'..=b'z', ..] => (Token::Herald, 1),
        [b':', b'=', ..] => (Token::Mark, 2),
        [b'|', ..] => (Token::Bar, 1),
        [b'"', ..] => (Token::Other, string(rest)),
        [b'\'', ..] => (Token::Other, character(rest)),
        [b'r', b'"' | b'#', ..] if raw_string(rest).is_some() => (Token::Other, raw_string(rest).unwrap_or(1)),
        _ => word_or_sign(rest),
    }
}

fn word_or_sign(rest: &[u8]) -> (Token<'_>, usize) {
    let (c, width) = char_at(rest, 0);
    if c == '«' {
        let end = rest.windows(2).take_while(|pair| pair[0] != b'\n').position(|pair| pair == "»".as_bytes());
        return (Token::Other, end.map_or(width, |end| end + 2));
    }
    let mut end = 0;
    loop {
        let (c, width) = char_at(rest, end);
        let inside = c.is_alphanumeric() || matches!(c, '_' | '\'' | '!' | '?' | '\u{2080}'..='\u{209c}');
        // `x.lemma` is one name, and so is `.lemma`.
        let dot = c == '.' && rest.get(end + 1).is_some_and(u8::is_ascii_alphabetic);
        if !(inside || dot) {
            break;
        }
        end += width;
    }
    match end {
        0 if OPENING.contains(&c) => (Token::Open, width),
        0 if CLOSING.contains(&c) => (Token::Close, width),
        0 => (Token::Other, width.max(1)),
        _ => (Token::Word(&rest[..end]), end),
    }
}

/// The character at `at` and its width; for bytes that are none, a replacement of one byte; at the end, of none.
fn char_at(bytes: &[u8], at: usize) -> (char, usize) {
    if let Some(&byte) = bytes.get(at).filter(|byte| byte.is_ascii()) {
        return (char::from(byte), 1);
    }
    let piece = &bytes[at.min(bytes.len())..bytes.len().min(at + 4)];
    let valid = match std::str::from_utf8(piece) {
        Ok(text) => text,
        Err(e) => std::str::from_utf8(&piece[..e.valid_up_to()]).unwrap_or_default(),
    };
    let wrong = (char::REPLACEMENT_CHARACTER, piece.len().min(1));
    valid.chars().next().map_or(wrong, |c| (c, c.len_utf8()))
}

fn line(rest: &[u8]) -> usize {
    rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len())
}

/// A block comment, with the comments in it; one without end goes to the end of the file.
fn comment(rest: &[u8]) -> usize {
    let (mut at, mut depth) = (2, 1);
    while depth > 0 && at < rest.len() {
        match rest[at..] {
            [b'/', b'-', ..] => (depth, at) = (depth + 1, at + 2),
            [b'-', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    at.min(rest.len())
}

fn string(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    rest.len()
}

/// `r"…"` or `r#"…"#`, with any number of `#`.
fn raw_string(rest: &[u8]) -> Option<usize> {
    let marks = rest[1..].iter().take_while(|&&b| b == b'#').count();
    let body = marks + 2;
    if rest.get(marks + 1) != Some(&b'"') {
        return None;
    }
    let closes = |at: &usize| rest[*at] == b'"' && rest[at + 1..].iter().take_while(|&&b| b == b'#').count() >= marks;
    Some((body..rest.len()).find(closes).map_or(rest.len(), |at| at + 1 + marks))
}

/// A character literal; or the sign alone, as in `f '' s`.
fn character(rest: &[u8]) -> usize {
    if rest.get(1) == Some(&b'\\') {
        // Of `'\''` the second quote is the content; the longest is `'\u{10ffff}'`.
        let end = rest.iter().take(12).skip(3).position(|&b| b == b'\'');
        return end.map_or(1, |at| at + 4);
    }
    let (c, width) = char_at(rest, 1);
    if c != '\'' && rest.get(1 + width) == Some(&b'\'') { width + 2 } else { 1 }
}

#[cfg(test)]
#[path = "lean_tests.rs"]
mod tests;
