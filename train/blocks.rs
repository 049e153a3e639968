//! Where the blocks of a double decoder's training sequences start: drawn for every row, a pure function of seed and row.

use std::path::Path;

use kumiki_ops::BlockStarts;
use kumiki_tensor::Rng;

use crate::settings::LARGEST;
use crate::suggest::unknown;
use crate::{Error, Result};

/// How sequences are cut into blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockSampling {
    /// 2 to 7 cuts, each at any place.
    RandomUniform,
    /// Blocks that double in length: cuts at `T/2, T/4, T/8 ..` from the end, as far as blocks have 8 tokens.
    Logspace,
    /// One cut, in the middle.
    SingleMiddle,
    /// One cut, at the length of a prompt: drawn from these, which are lengths of prompts as they are met.
    PromptStyle(Vec<usize>),
}

/// Tokens of the shortest block of [`BlockSampling::Logspace`].
const SHORTEST: usize = 8;
/// Cuts of [`BlockSampling::RandomUniform`], from and to.
const CUTS: (usize, usize) = (2, 7);

/// The names of the ways that need no file.
pub const SAMPLINGS: [&str; 4] = ["random_uniform", "logspace", "single_middle", "prompt_style"];

impl BlockSampling {
    /// The way of that name; `lengths` is the file of lengths that `prompt_style` needs: whole numbers, separated by white
    /// space.
    ///
    /// # Errors
    /// Names the nearest way when there is none of that name; says what is wrong with the file, or that it is missing.
    pub fn named(name: &str, lengths: Option<&Path>) -> Result<BlockSampling> {
        match name {
            "random_uniform" => Ok(BlockSampling::RandomUniform),
            "logspace" => Ok(BlockSampling::Logspace),
            "single_middle" => Ok(BlockSampling::SingleMiddle),
            "prompt_style" => {
                let path =
                    lengths.ok_or_else(|| Error::new("blocks of `prompt_style` need a file of prompt lengths"))?;
                read_lengths(path).map(BlockSampling::PromptStyle)
            }
            other => Err(Error::new(unknown("block sampling", other, &SAMPLINGS))),
        }
    }

    /// The blocks of `rows` sequences of `len` tokens, each with its own: the rows of a run from number `first` on.
    #[expect(clippy::missing_panics_doc, reason = "blocks are drawn ascending and in range")]
    pub fn draw(&self, rows: usize, len: usize, seed: u64, first: u64) -> BlockStarts {
        let rng = Rng::new(seed).fork("blocks");
        let row = |i: u64| self.row(len, &mut rng.fork(&(first + i).to_string()));
        let starts = (0..rows.max(1) as u64).map(row).collect();
        BlockStarts::new(starts, len).expect("ascending, in range")
    }

    fn row(&self, len: usize, rng: &mut Rng) -> Vec<usize> {
        // Places between tokens: 1 to len - 1.
        let places = len.saturating_sub(1);
        let mut below = |n: usize| rng.below(n as u64) as usize;
        let mut starts = match self {
            _ if places == 0 => vec![],
            BlockSampling::RandomUniform => {
                let cuts = (CUTS.0 + below(CUTS.1 - CUTS.0 + 1)).min(places);
                let mut starts: Vec<usize> = Vec::with_capacity(cuts);
                while starts.len() < cuts {
                    let start = 1 + below(places);
                    if !starts.contains(&start) {
                        starts.push(start);
                    }
                }
                starts
            }
            BlockSampling::Logspace => {
                let sizes = std::iter::successors(Some(len / 2), |size| Some(size / 2));
                sizes.take_while(|&size| size >= SHORTEST).map(|size| len - size).collect()
            }
            BlockSampling::SingleMiddle => vec![len / 2],
            // A prompt that fills the sequence leaves one token to write.
            BlockSampling::PromptStyle(lengths) => vec![lengths[below(lengths.len())].clamp(1, places)],
        };
        starts.sort_unstable();
        starts
    }
}

/// The most bytes of a file of lengths.
const LARGEST_FILE: u64 = 16 << 20;

/// The most lengths that are read; more would only cost memory.
const MOST_LENGTHS: usize = 1 << 20;

fn read_lengths(path: &Path) -> Result<Vec<usize>> {
    let failed = |e| Error::io("read the prompt lengths", path, e);
    let meta = std::fs::metadata(path).map_err(failed)?;
    // A pipe would be waited for, a device read, for ever.
    if !meta.is_file() || meta.len() > LARGEST_FILE {
        let name = path.display();
        return Err(Error::new(format!(
            "`{name}` must be a regular file of at most {LARGEST_FILE} bytes with lengths"
        )));
    }
    let text = std::fs::read_to_string(path).map_err(failed)?;
    let mut lengths = Vec::new();
    for (n, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
        for word in line.split_whitespace() {
            let length =
                word.parse::<usize>().ok().filter(|length| (1..=LARGEST).contains(length)).ok_or_else(|| {
                    let name = path.display();
                    Error::new(format!(
                        "`{name}`, line {}: a length must be a whole number from 1 to {LARGEST}, found `{word}`",
                        n + 1
                    ))
                })?;
            lengths.push(length);
        }
        if lengths.len() > MOST_LENGTHS {
            let name = path.display();
            return Err(Error::new(format!(
                "`{name}` holds more than {MOST_LENGTHS} lengths; a sample of them will do"
            )));
        }
    }
    if lengths.is_empty() {
        return Err(Error::new(format!("`{}` holds no length; expected at least one number", path.display())));
    }
    Ok(lengths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn draws_are_in_order_and_depend_on_seed_and_row_alone() {
        for sampling in [BlockSampling::RandomUniform, BlockSampling::PromptStyle(vec![3, 900, 40])] {
            let draw = |seed, first| sampling.draw(6, 64, seed, first);
            assert_eq!(draw(1, 5), draw(1, 5));
            assert!(draw(1, 5) != draw(1, 6) && draw(1, 5) != draw(2, 5));
            assert_eq!(draw(1, 5).of(3), sampling.draw(1, 64, 1, 8).of(0), "whatever the rows of a batch");
        }
        let (mut fewest, mut most, mut seen) = (99, 0, [false; 64]);
        let blocks = BlockSampling::RandomUniform.draw(800, 64, 0, 0);
        for row in 0..800 {
            let starts = blocks.of(row);
            (fewest, most) = (starts.len().min(fewest), starts.len().max(most));
            starts.iter().for_each(|&start| seen[start] = true);
        }
        assert_eq!((fewest, most), CUTS);
        assert!(!seen[0] && seen[1..].iter().all(|&place| place), "every place is met");
    }

    #[test]
    fn the_ways_cut_where_they_say() {
        let of = |sampling: &BlockSampling, len| sampling.draw(1, len, 0, 0).of(0).to_vec();
        assert_eq!(of(&BlockSampling::SingleMiddle, 9), [4]);
        assert_eq!(of(&BlockSampling::Logspace, 128), [64, 96, 112, 120]);
        assert!(of(&BlockSampling::Logspace, 15).is_empty());
        assert_eq!(of(&BlockSampling::PromptStyle(vec![900]), 16), [15]);
        assert_eq!(of(&BlockSampling::PromptStyle(vec![5]), 16), [5]);
        for sampling in [BlockSampling::RandomUniform, BlockSampling::SingleMiddle, BlockSampling::PromptStyle(vec![1])]
        {
            assert!(of(&sampling, 1).is_empty());
            assert_eq!(of(&sampling, 2), [1]);
        }
        assert_eq!(of(&BlockSampling::RandomUniform, 3).len(), 2);
    }

    #[test]
    fn files_of_lengths_are_read_or_explained() {
        let dir = Scratch::new();
        let named = |path: Option<&Path>| BlockSampling::named("prompt_style", path);
        assert_eq!(
            named(Some(&dir.file("good", "12 7\n\n30\n"))).unwrap(),
            BlockSampling::PromptStyle(vec![12, 7, 30])
        );
        for (file, phrase) in [
            (dir.file("zero", "12\n0"), "line 2: a length must be a whole number from 1 to 1048576, found `0`"),
            (dir.file("word", "x"), "line 1: a length must be a whole number from 1 to 1048576, found `x`"),
            (dir.file("empty", "\n"), "holds no length"),
            (dir.path().join("absent"), "cannot read the prompt lengths"),
        ] {
            let error = named(Some(&file)).unwrap_err().to_string();
            assert!(error.contains(phrase), "{error}");
        }
        assert!(named(None).unwrap_err().to_string().contains("need a file"));
        let error = BlockSampling::named("logspce", None).unwrap_err().to_string();
        assert!(error.contains("did you mean `logspace`"), "{error}");
    }
}
