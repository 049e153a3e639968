//! `math`: an endless corpus of questions and answers that is computed, not stored, in the style of DeepMind Mathematics
//! (Saxton et al. 2019, arXiv 1904.01557). A pair is two lines, question then answer; a text is pairs without anything
//! between them.
//!
//! Question `i` of a module under a seed is a pure function of (seed, split, module, i), so any place of the text can be
//! made without what stands before it. Every pair draws its module evenly and its difficulty evenly from easy, medium and
//! hard. Arithmetic is exact (`i128` rationals, checked for overflow).
//!
//! **Splits.** `train` and `interpolate` cannot share a question: which split a question belongs to follows from its text
//! alone ([`split_of`]). What is hashed is the text without its wording, so a question and its paraphrase, or the same
//! equation in another letter, are on the same side. One residue in 16 is `interpolate`; a question that falls on the
//! wrong side is drawn again.

mod algebra;
mod arithmetic;
mod calculus;
mod comparison;
mod draw;
mod measurement;
mod numbers;
mod poly;
mod polynomials;
mod probability;
mod ratio;

#[cfg(test)]
mod check;

use crate::mix::hash;
use crate::{Error, Result, suggest};
use draw::{Draw, Level};

/// A question and its answer, one line each, without line ends.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pair {
    /// What is asked.
    pub question: String,
    /// The one right answer.
    pub answer: String,
}

/// Which of two disjoint sets of questions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum SplitName {
    /// For training: 15 of 16 questions.
    #[default]
    Train,
    /// Of the same kinds and sizes, never in training: 1 of 16.
    Interpolate,
}

/// Some bytes of the endless text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The text: question line, answer line, question line, …
    pub bytes: Vec<u8>,
    /// Whether a byte belongs to an answer line, its line end included (a model must also know where to stop).
    pub answers: Vec<bool>,
}

struct Module {
    name: &'static str,
    make: fn(&mut Draw, Level) -> Pair,
}

const AREAS: [&[Module]; 8] = [
    algebra::MODULES,
    arithmetic::MODULES,
    calculus::MODULES,
    comparison::MODULES,
    measurement::MODULES,
    numbers::MODULES,
    polynomials::MODULES,
    probability::MODULES,
];

fn all() -> impl Iterator<Item = &'static Module> {
    AREAS.into_iter().flatten()
}

/// Names of all modules, `area__module`, in alphabetical order of areas.
pub fn modules() -> Vec<&'static str> {
    all().map(|m| m.name).collect()
}

/// Question `index` of a module under `seed`.
///
/// # Errors
/// When there is no such module: names the nearest that there is.
pub fn pair(seed: u64, split: SplitName, module: &str, index: u64) -> Result<Pair> {
    find(module).map(|m| make(seed, split, m, index))
}

fn find(name: &str) -> Result<&'static Module> {
    all().find(|m| m.name == name).ok_or_else(|| Error::new(suggest::unknown("math module", name, &modules())))
}

fn make(seed: u64, split: SplitName, module: &Module, index: u64) -> Pair {
    let mut draw = Draw::new([seed, hash(module.name.as_bytes()), index, split as u64]);
    loop {
        let level = *draw.pick(&[Level::Easy, Level::Medium, Level::Hard]);
        let pair = (module.make)(&mut draw, level);
        if split_of(&pair.question) == split {
            return pair;
        }
    }
}

/// The split that a question belongs to, from its text alone.
pub fn split_of(question: &str) -> SplitName {
    if hash(canonical(question).as_bytes()).is_multiple_of(16) { SplitName::Interpolate } else { SplitName::Train }
}

/// The text without wording: numbers and operators, and letter strings that are data (they have no vowel; wording always
/// has one) under new names in order of appearance. Coarse on purpose: two questions about the same numbers fall together.
fn canonical(question: &str) -> String {
    let mut out = String::new();
    let mut names: Vec<char> = Vec::new();
    let chars: Vec<char> = question.chars().collect();
    let mut at = 0;
    while at < chars.len() {
        let c = chars[at];
        let word = chars[at..].iter().take_while(|c| c.is_ascii_alphabetic()).count();
        if word > 0 {
            let run = &chars[at..at + word];
            if word > 1 && !run.iter().any(|c| "aeiouyAEIOUY".contains(*c)) {
                out.push('_');
                for c in run {
                    let n = names.iter().position(|o| o == c).unwrap_or_else(|| {
                        names.push(*c);
                        names.len() - 1
                    });
                    out.push((b'a' + n as u8) as char);
                }
            }
            at += word;
            continue;
        }
        let point = c == '.' && chars.get(at + 1).is_some_and(char::is_ascii_digit);
        if c.is_ascii_digit() || "+-*/=<>:".contains(c) || point {
            out.push(c);
        } else if !out.ends_with(' ') {
            out.push(' ');
        }
        at += 1;
    }
    out.trim().to_owned()
}

/// The endless text of one split, over all modules or some.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MathText {
    split: SplitName,
    modules: Vec<&'static str>,
}

impl Default for MathText {
    fn default() -> Self {
        MathText::new(SplitName::Train)
    }
}

// A row needs fewer questions than this by far: 2^24 questions are over 100 MB.
const QUESTIONS_PER_ROW: u32 = 24;

impl MathText {
    /// All modules.
    pub fn new(split: SplitName) -> MathText {
        MathText { split, modules: modules() }
    }

    /// Only the named modules, evenly mixed.
    ///
    /// # Errors
    /// When none is named, or one that does not exist.
    pub fn only(split: SplitName, names: &[&str]) -> Result<MathText> {
        if names.is_empty() {
            return Err(Error::new("no math module is named; expected at least one"));
        }
        let modules = names.iter().map(|n| find(n).map(|m| m.name)).collect::<Result<_>>()?;
        Ok(MathText { split, modules })
    }

    /// The same modules in a split.
    pub fn with_split(&self, split: SplitName) -> MathText {
        MathText { split, ..self.clone() }
    }

    /// Pair `index` of the text, and its module.
    #[expect(clippy::missing_panics_doc, reason = "names are checked when the text is made")]
    pub fn pair(&self, seed: u64, index: u64) -> (&'static str, Pair) {
        let mut draw = Draw::new([seed, hash(b"which module"), index, self.split as u64]);
        let name = *draw.pick(&self.modules);
        let module = all().find(|m| m.name == name).expect("names are checked when the text is made");
        (name, make(seed, self.split, module, index))
    }

    /// Row `row` of the text: `len` bytes which start with a question. Rows are of different pairs.
    pub fn row(&self, seed: u64, row: u64, len: usize) -> Row {
        let mut out = Row { bytes: Vec::with_capacity(len + 256), answers: Vec::with_capacity(len + 256) };
        let mut index = row << QUESTIONS_PER_ROW;
        while out.bytes.len() < len {
            let (_, pair) = self.pair(seed, index);
            index += 1;
            for (line, is_answer) in [(pair.question, false), (pair.answer, true)] {
                out.bytes.extend_from_slice(line.as_bytes());
                out.bytes.push(b'\n');
                out.answers.resize(out.bytes.len(), is_answer);
            }
        }
        out.bytes.truncate(len);
        out.answers.truncate(len);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_areas_complete() {
        let names = modules();
        assert!(names.len() >= 16, "{}", names.len());
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len());
        let areas: HashSet<_> = names.iter().map(|n| n.split_once("__").unwrap().0).collect();
        assert_eq!(areas.len(), AREAS.len());
        let e = pair(0, SplitName::Train, "algebra__linear_1", 0).unwrap_err().to_string();
        assert!(e.contains("did you mean `algebra__linear_1d`"), "{e}");
        assert!(MathText::only(SplitName::Train, &[]).is_err());
    }

    #[test]
    fn splits_share_no_question_in_any_module() {
        for name in modules() {
            let some = |split, n| (0..n).map(|i| pair(1, split, name, i).unwrap()).collect::<Vec<_>>();
            let train: HashSet<String> = some(SplitName::Train, 400).into_iter().map(|p| p.question).collect();
            let held: HashSet<String> = some(SplitName::Interpolate, 200).into_iter().map(|p| p.question).collect();
            assert!(train.is_disjoint(&held), "{name}");
            assert!(train.iter().all(|q| split_of(q) == SplitName::Train));
            assert!(held.iter().all(|q| split_of(q) == SplitName::Interpolate));
            // Redrawing must not leave a handful of questions that come again and again.
            assert!(train.len() > 360, "{name}: {} different of 400", train.len());
            assert!(held.len() > 150, "{name}: {} different of 200", held.len());
        }
    }

    #[test]
    fn the_split_sees_numbers_not_wording() {
        assert_eq!(canonical("Solve 3*x - 4 = 8 for x."), canonical("Which value of t solves 3*t - 4 = 8?"));
        assert_eq!(canonical("Letters from bccb, then bc."), canonical("From rssr, what about rs?"));
        assert_ne!(canonical("Is 5 < 7?"), canonical("Is 7 < 5?"));
        assert_ne!(canonical("What is 1.5 plus 2?"), canonical("What is 15 plus 2?"));
        let held = (0..16_000).filter(|n| split_of(&format!("Is {n} prime?")) == SplitName::Interpolate).count();
        assert!((850..1150).contains(&held), "{held}");
    }

    #[test]
    fn pairs_are_two_clean_lines_and_pure() {
        let text = MathText::default();
        let mut seen = HashSet::new();
        for i in 0..2000 {
            let (name, p) = text.pair(5, i);
            assert_eq!(text.pair(5, i), (name, p.clone()));
            assert_eq!(pair(5, SplitName::Train, name, i).unwrap(), p);
            for line in [&p.question, &p.answer] {
                assert!(!line.is_empty() && line.len() < 320, "{name}: {line}");
                assert!(line.bytes().all(|b| (b' '..=b'~').contains(&b)) && line.trim() == line, "{name}: {line:?}");
            }
            seen.insert(name);
        }
        assert_eq!(seen.len(), modules().len());
        assert_ne!(text.pair(5, 0), text.pair(6, 0));
    }

    #[test]
    fn rows_are_stretches_of_pairs_with_their_answers_marked() {
        let text = MathText::default();
        let row = text.row(2, 7, 3000);
        assert_eq!(text.row(2, 7, 100).bytes, row.bytes[..100]);
        let whole = String::from_utf8(row.bytes.clone()).unwrap();
        let mut at = 0;
        for (n, line) in whole.split_inclusive('\n').enumerate() {
            assert!(row.answers[at..at + line.len()].iter().all(|&a| a == (n % 2 == 1)), "line {n}");
            at += line.len();
        }
        assert!(text.row(2, 8, 3000) != row && text.row(3, 7, 3000) != row);
    }

    #[test]
    fn the_text_never_changes() {
        // A change here makes old runs incomparable: only on purpose.
        let text = MathText::new(SplitName::Interpolate);
        let digest = (0..500).fold(0, |h: u64, i| {
            let (_, p) = text.pair(0, i);
            crate::mix::mix(h ^ hash(format!("{}\n{}\n", p.question, p.answer).as_bytes()))
        });
        assert_eq!(digest, PINNED);
    }

    const PINNED: u64 = 7_825_932_673_226_667_077;
}
