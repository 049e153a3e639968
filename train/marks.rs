//! Which tokens of a text are of a kind of their own, so that their loss is reported beside that of all.
//!
//! A file's bytes are classified from its start on, for what a byte is depends on what stands before it. Only files that
//! are evaluated are read, up to where they are; nothing is kept but the place.

use std::ops::Range;

use crate::corpus::Corpus;
use crate::lean::Lexer;

/// What a token belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The answer to a question, its line end included (a model must also know where to stop).
    Answer,
    /// A proof in Lean, after its statement's `:=` or `:= by`.
    Proof,
    /// Lean that is no proof.
    Source,
}

impl Class {
    /// All of them, in order: `class as usize` is the place.
    pub const ALL: [Class; 3] = [Class::Answer, Class::Proof, Class::Source];

    /// As in `proof NLL`.
    pub fn name(self) -> &'static str {
        match self {
            Class::Answer => "answer",
            Class::Proof => "proof",
            Class::Source => "source",
        }
    }
}

/// How the classes of a text are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marking {
    /// Every second line of a file is an [`Class::Answer`].
    Lines,
    /// Files are Lean: [`Class::Proof`] or [`Class::Source`].
    Lean,
}

#[derive(Clone, Debug)]
enum Scan {
    Lines { at: usize, answer: bool },
    Lean(Lexer),
}

impl Scan {
    fn new(marking: Marking) -> Scan {
        match marking {
            // The first line turns it to a question.
            Marking::Lines => Scan::Lines { at: 0, answer: true },
            Marking::Lean => Scan::Lean(Lexer::default()),
        }
    }

    /// The next stretch of one class of `bytes`, a whole file; `None` at its end.
    fn next(&mut self, bytes: &[u8]) -> Option<(Range<usize>, Option<Class>)> {
        match self {
            Scan::Lines { at, answer } => {
                let start = *at;
                let rest = bytes.get(start..).filter(|rest| !rest.is_empty())?;
                *at = start + rest.iter().position(|&b| b == b'\n').map_or(rest.len(), |end| end + 1);
                *answer = !*answer;
                Some((start..*at, answer.then_some(Class::Answer)))
            }
            Scan::Lean(lexer) => lexer.next(bytes).map(|(range, class)| (range, Some(class))),
        }
    }
}

/// A place in a text from which classification goes on.
#[derive(Clone, Debug)]
pub(crate) struct Cursor {
    marking: Marking,
    file: Option<usize>,
    scan: Scan,
    stretch: Range<usize>,
    class: Option<Class>,
}

impl Cursor {
    pub(crate) fn new(marking: Marking) -> Cursor {
        Cursor { marking, file: None, scan: Scan::new(marking), stretch: 0..0, class: None }
    }

    /// Appends the classes of the `count` bytes of `text` from `start`. Going forward is quick; what lies before the
    /// stretch that was read last makes its file be read again.
    pub(crate) fn mark(&mut self, text: &Corpus, start: u64, count: usize, out: &mut Vec<Option<Class>>) {
        let (mut at, end) = (start, start + count as u64);
        while at < end {
            let (file, bytes, offset) = text.file_at(at);
            if self.file != Some(file) || offset < self.stretch.start {
                *self = Cursor { file: Some(file), ..Cursor::new(self.marking) };
            }
            while self.stretch.end <= offset {
                let next = self.scan.next(bytes).expect("every byte of a file lies in a stretch");
                (self.stretch, self.class) = next;
            }
            let n = ((self.stretch.end - offset) as u64).min(end - at);
            out.extend(std::iter::repeat_n(self.class, n as usize));
            at += n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    /// `a` for answers, `p` for proofs, `s` for source, `-` for none.
    fn letters(text: &Corpus, marking: Marking, start: u64, count: usize) -> String {
        let mut out = Vec::new();
        Cursor::new(marking).mark(text, start, count, &mut out);
        out.into_iter().map(|class| class.map_or('-', |c| c.name().chars().next().unwrap())).collect()
    }

    #[test]
    fn every_second_line_of_each_file_is_an_answer() {
        let dir = Scratch::new();
        dir.file("a__a.txt", "q?\n12\nq\n3");
        dir.file("b__b.txt", "qq\r\n7\r\n");
        let text = Corpus::open(dir.path()).unwrap();
        let all = "---aaa--a----aaa";
        assert_eq!(letters(&text, Marking::Lines, 0, 16), all);
        for start in 0..16 {
            assert_eq!(letters(&text, Marking::Lines, start as u64, 16 - start), all[start..]);
            let tail = text.slice(start as u64..16);
            assert_eq!(letters(&tail, Marking::Lines, 0, 16 - start), all[start..], "a slice knows its file's start");
        }
    }

    #[test]
    fn a_cursor_goes_on_and_may_go_back() {
        let lean = "def a := 1\ntheorem b : 1 = 1 := by rfl\n".repeat(3);
        let text = Corpus::from_bytes("lean", lean.as_bytes());
        let all = letters(&text, Marking::Lean, 0, lean.len());
        assert_eq!((all.matches("psss").count(), all.matches('p').count()), (2, 15), "{all}");
        let (mut cursor, mut out) = (Cursor::new(Marking::Lean), Vec::new());
        for start in [0, 7, 14, 21, 28, 35, 42, 20, 3, 90] {
            out.clear();
            // Windows share a byte with the next one.
            cursor.mark(&text, start, 8, &mut out);
            let expected = letters(&text, Marking::Lean, start, 8);
            assert_eq!(out.iter().map(|c| &c.unwrap().name()[..1]).collect::<String>(), expected);
        }
    }
    #[cfg(target_os = "linux")]
    #[test]
    fn case_41_what_lies_before_the_windows_is_read_but_not_kept() {
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find(|l| l.starts_with("RssAnon")).unwrap().to_owned();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() // KiB
        };
        let dir = Scratch::new();
        let path = dir.file("a__b.txt", "question\n");
        std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 29).unwrap();
        let text = Corpus::open(&path).unwrap();
        let before = resident();
        assert_eq!(letters(&text, Marking::Lines, (1 << 29) - 4, 4), "aaaa");
        // Other tests of this process may hold some memory of their own.
        assert!(resident() < before + (256 << 10));
    }
}
