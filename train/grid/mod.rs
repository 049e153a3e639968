//! A grid of trainings for scaling laws: sizes × token budgets × models, one cell after the other.
//!
//! Every cell is a run of its own, with its own schedule: a loss in the middle of a longer run would be that of a learning
//! rate that has not come down. Sizes are those of layers with `F = 4D`; the learning rate falls with the width,
//! `lr · sqrt(128/D)` (our choice), the warm-up takes a tenth of the steps.
//!
//! Budgets are tokens of text. Matched by FLOPs, a model trains on as many tokens as cost what the budget costs the
//! decoder-only model of its size.
//! Source: the grid of Block-Based Double Decoders, arXiv 2605.18807.

pub mod run;

use serde::{Deserialize, Serialize};

use crate::data::vocab_of;
use crate::settings::Settings;
use crate::suggest::unknown;
use crate::zoo::{self, DOUBLE_SIZES, Suite, suite_of};
use crate::{Error, Result};

/// The model whose cost others are matched to.
const BASELINE: &str = "decoder";

/// Width D, layers of the first stack (context or encoder) and of the second; a decoder-only model has them all in one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Model width.
    pub d_model: usize,
    /// Layers of the first stack.
    pub first: usize,
    /// Layers of the second.
    pub second: usize,
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}", self.d_model, self.first, self.second)
    }
}

impl std::str::FromStr for Size {
    type Err = Error;

    /// `D/first/second`, as `192/10/5`.
    fn from_str(text: &str) -> Result<Size> {
        let parts: Vec<usize> =
            text.split('/').map(str::parse).collect::<std::result::Result<_, _>>().unwrap_or_default();
        match parts.as_slice() {
            &[d_model, first, second] if d_model > 0 && first > 0 && second > 0 => Ok(Size { d_model, first, second }),
            _ => Err(Error::new(format!(
                "a size must be D/LAYERS/LAYERS, width and layers of both stacks, as 192/10/5; found `{text}`"
            ))),
        }
    }
}

/// What a budget means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Matched {
    /// Tokens of text, for every model.
    Tokens,
    /// What these tokens cost the decoder-only model.
    Flops,
}

/// Everything that is asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Grid {
    /// The preset that sizes, budgets and settings started from.
    pub preset: String,
    /// A path or `math`.
    pub corpus: String,
    /// Models.
    pub models: Vec<String>,
    /// Sizes.
    pub sizes: Vec<Size>,
    /// Tokens of text.
    pub budgets: Vec<u64>,
    /// What they mean.
    pub matched: Matched,
    /// Everything else; widths, layers, steps and learning rate are the cells'.
    pub settings: Settings,
}

/// One training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// The model.
    pub model: String,
    /// Its size.
    pub size: Size,
    /// The budget that it belongs to.
    pub budget: u64,
}

impl std::fmt::Display for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` of {} on {} tokens", self.model, self.size, self.budget)
    }
}

impl Cell {
    /// The name of its folder.
    pub fn folder(&self) -> String {
        let Size { d_model, first, second } = self.size;
        format!("{}-{d_model}-{first}-{second}-{}", self.model, self.budget)
    }
}

/// What a cell costs.
#[derive(Clone, Debug, Serialize)]
pub struct Cost {
    /// Which one.
    #[serde(flatten)]
    pub cell: Cell,
    /// Distinct parameters outside of the token table, N.
    pub params: usize,
    /// Tokens of text, D.
    pub tokens: u64,
    /// Optimiser steps.
    pub steps: u64,
    /// Floating-point operations, 6 for every multiply-accumulate of a forward pass.
    pub flops: f64,
}

/// The most tokens of a budget: more are taken for a mistake.
const LARGEST_BUDGET: u64 = 1_000_000_000_000_000;

/// The most cells of a grid; more are taken for a mistake.
const MOST_CELLS: usize = 10_000;

impl Grid {
    /// The grid of a preset.
    ///
    /// # Errors
    /// Names the nearest preset when there is none of that name.
    pub fn preset(name: &str) -> Result<Grid> {
        let size = |(d_model, first, second)| Size { d_model, first, second };
        let tiny = Settings::for_suite(Suite::Double, "tiny")?;
        let (sizes, budgets, settings) = match name {
            "nano" => {
                let sizes = [(32, 2, 1), (48, 2, 1), (64, 4, 2), (96, 4, 2)].map(size).to_vec();
                (sizes, vec![250_000, 500_000, 1_000_000], Settings { seq: 128, ..tiny })
            }
            "tiny" => {
                let sizes = [(64, 4, 2), (96, 4, 2), (128, 4, 2), (192, 4, 2), (256, 8, 4)].map(size).to_vec();
                (sizes, vec![1_000_000, 2_000_000, 4_000_000, 8_000_000], tiny)
            }
            "small" => {
                let sizes = DOUBLE_SIZES[..3].iter().copied().map(size).collect();
                let settings = Settings::for_suite(Suite::Double, "small")?;
                (sizes, vec![10_000_000, 20_000_000, 40_000_000], settings)
            }
            "paper" => {
                let budgets = vec![62_500_000, 125_000_000, 250_000_000, 500_000_000, 1_000_000_000];
                let settings = Settings::for_suite(Suite::Double, "paper")?;
                (DOUBLE_SIZES.map(size).to_vec(), budgets, Settings { lr: 2e-3, ..settings })
            }
            other => return Err(Error::new(unknown("preset", other, &crate::settings::PRESETS))),
        };
        // Only the last evaluation is of use.
        let settings = Settings { eval_every: 0, ..settings };
        let models = Suite::Double.models().iter().map(|&name| name.to_owned()).collect();
        let (preset, corpus, matched) = (name.to_owned(), "math".to_owned(), Matched::Tokens);
        Ok(Grid { preset, corpus, models, sizes, budgets, matched, settings })
    }

    /// Everything that can be known to be wrong before any work is done.
    ///
    /// # Errors
    /// A sentence naming what is missing, twice, too large or unknown.
    pub fn check(&self) -> Result<()> {
        self.settings.check()?;
        for (what, count) in [("model", self.models.len()), ("size", self.sizes.len()), ("budget", self.budgets.len())]
        {
            if count == 0 {
                return Err(Error::new(format!("a grid needs at least one {what}, found none")));
            }
        }
        twice("model", &self.models)?;
        twice("size", &self.sizes)?;
        twice("budget", &self.budgets)?;
        if let Some(name) = self.models.iter().find(|name| suite_of(name) != Suite::Double) {
            zoo::checked(name)?;
            let known = Suite::Double.models().join(", ");
            return Err(Error::new(format!(
                "`{name}` has no size by layers; a grid compares {known} and their variants"
            )));
        }
        if let Some(wrong) = self.budgets.iter().find(|budget| !(1..=LARGEST_BUDGET).contains(*budget)) {
            return Err(Error::new(format!("a budget must be from 1 to {LARGEST_BUDGET} tokens, found {wrong}")));
        }
        self.models.iter().try_for_each(|name| self.settings.sampling(name).map(drop))?;
        let cells = self.models.len() * self.sizes.len() * self.budgets.len();
        if cells > MOST_CELLS {
            return Err(Error::new(format!("a grid of {cells} cells is too large; at most {MOST_CELLS}")));
        }
        self.costs().map(drop)
    }

    /// The size of the vocabulary of its corpus.
    fn vocab(&self) -> Result<usize> {
        vocab_of(&self.corpus)
    }

    /// All cells, the cheapest sizes and budgets first: what can be learnt early is.
    pub fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for &size in &self.sizes {
            for &budget in &self.budgets {
                cells.extend(self.models.iter().map(|model| Cell { model: model.clone(), size, budget }));
            }
        }
        cells
    }

    /// The settings that a cell is trained with.
    ///
    /// # Errors
    /// When the size does not fit, or the budget is less than one step.
    pub fn settings_of(&self, cell: &Cell) -> Result<Settings> {
        let Size { d_model, first, second } = cell.size;
        let lr = self.settings.lr * (128.0 / d_model as f64).sqrt();
        let sized = self.settings.clone().with_stacks((d_model, first, second)).with_layers(lr);
        let step = (sized.batch * sized.seq * sized.accumulate) as u64;
        let tokens = match self.matched {
            Matched::Tokens => cell.budget as f64,
            Matched::Flops => {
                let vocab = self.vocab()?;
                let flops = |name: &str| -> Result<f64> { Ok(sized.model(name, vocab)?.training_flops(sized.seq)) };
                cell.budget as f64 * flops(BASELINE)? / flops(&cell.model)?
            }
        };
        let steps = (tokens / step as f64).round() as u64;
        if steps == 0 {
            return Err(Error::new(format!("{cell}: the budget is less than half of one step's {step} tokens")));
        }
        Ok(Settings { steps, warmup: steps.div_ceil(10), ..sized })
    }

    /// What every cell costs.
    ///
    /// # Errors
    /// As [`Grid::settings_of`]; when a size does not fit a model.
    pub fn costs(&self) -> Result<Vec<Cost>> {
        self.cells().into_iter().map(|cell| self.cost(cell)).collect()
    }

    fn cost(&self, cell: Cell) -> Result<Cost> {
        let settings = self.settings_of(&cell)?;
        let config = settings.model(&cell.model, self.vocab()?)?;
        let tokens = settings.steps * (settings.batch * settings.seq * settings.accumulate) as u64;
        let flops = tokens as f64 * config.training_flops(settings.seq);
        Ok(Cost { params: config.block_params(), tokens, steps: settings.steps, flops, cell })
    }
}

fn twice<T: PartialEq + std::fmt::Display>(what: &str, all: &[T]) -> Result<()> {
    match all.iter().enumerate().find(|(i, one)| all[..*i].contains(one)) {
        Some((_, one)) => Err(Error::new(format!("{what} {one} is named twice"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_hold_and_sizes_are_the_papers() {
        for preset in crate::settings::PRESETS {
            let grid = Grid::preset(preset).unwrap();
            grid.check().unwrap();
            for cost in grid.costs().unwrap() {
                let Size { d_model: d, first, second } = cost.cell.size;
                let layers = (first + second) * (12 * d * d + 2 * d);
                assert!((cost.params as f64 / layers as f64 - 1.0).abs() < 0.01, "{} {}", cost.cell, cost.params);
                assert!((cost.tokens as f64 / cost.cell.budget as f64 - 1.0).abs() < 0.02);
            }
        }
        assert_eq!(Grid::preset("paper").unwrap().cells().len(), 75);
    }

    #[test]
    fn matched_by_flops_all_models_of_a_cell_cost_the_same() {
        let grid = Grid { matched: Matched::Flops, ..Grid::preset("nano").unwrap() };
        for cells in grid.costs().unwrap().chunks(3) {
            let base = cells[0].flops;
            assert!(cells.iter().all(|cost| (cost.flops / base - 1.0).abs() < 0.02), "{cells:?}");
            // The double decoder reads less text for it, the encoder-decoder more.
            assert!(cells[1].tokens <= cells[0].tokens && cells[2].tokens > cells[0].tokens);
        }
    }

    #[test]
    fn what_is_wrong_is_a_sentence() {
        let nano = Grid::preset("nano").unwrap();
        for (grid, phrase) in [
            (Grid { models: vec![], ..nano.clone() }, "at least one model, found none"),
            (Grid { budgets: vec![], ..nano.clone() }, "at least one budget, found none"),
            (Grid { models: vec!["tango".into()], ..nano.clone() }, "`tango` has no size by layers"),
            (Grid { models: vec!["doubel".into()], ..nano.clone() }, "did you mean `double`"),
            (Grid { models: vec!["double".into(); 2], ..nano.clone() }, "model double is named twice"),
            (Grid { budgets: vec![250_000, 250_000], ..nano.clone() }, "budget 250000 is named twice"),
            (Grid { budgets: vec![u64::MAX], ..nano.clone() }, "a budget must be from 1 to 1000000000000000 tokens"),
            (Grid { models: vec!["double-prompt_style".into()], ..nano.clone() }, "need a file of prompt lengths"),
            (Grid { budgets: vec![3], ..nano.clone() }, "less than half of one step's 2048 tokens"),
            (Grid { sizes: vec!["33/2/1".parse().unwrap()], ..nano.clone() }, "must divide d_model=33"),
            (Grid { budgets: (1..2000).map(|n| n * 10_000).collect(), ..nano }, "too large; at most 10000"),
        ] {
            let error = grid.check().unwrap_err().to_string();
            assert!(error.contains(phrase), "{error}");
        }
        for wrong in ["", "192", "192/10", "192/10/0", "a/b/c", "192/10/5/1"] {
            let error = wrong.parse::<Size>().unwrap_err().to_string();
            assert!(error.contains("as 192/10/5") && error.contains(&format!("`{wrong}`")), "{error}");
        }
    }
}
