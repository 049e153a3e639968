//! One training step at given sizes, timed: `kumiki bench step`; and one matrix product: `kumiki bench gemm`.

use std::rc::Rc;
use std::time::Instant;

use kumiki_autograd::{Cost, Profile, Tape};
use kumiki_models::{
    Architecture, AttentionKind, CemConfig, GauConfig, LanguageModel, LanguageModelConfig, MlpKind, ModelConfig,
    TangoConfig, TransformerConfig, Window, accounting,
};
use kumiki_nn::{AdamW, Diagonal, Module, clip_global_norm};
use kumiki_ops::{FeatureMap, ProductTiming};
use kumiki_tensor::{DType, Rng};

use crate::memory;
use crate::suggest::unknown;
use crate::{Error, Result};

/// The models that can be timed, by name.
pub const STEP_MODELS: [&str; 6] = ["tango", "wango", "transformer", "gau", "flash", "cem"];

/// Width of the queries and keys of GAU and FLASH: that of the PyTorch counterpart.
const KEY_WIDTH: usize = 64;

/// The sizes of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepBench {
    /// `tango`, `wango` and `transformer`, all tied; `gau` and `flash`, with a block for every application.
    pub model: String,
    /// Dtype of parameters and arithmetic; BF16 means products of parameters in it, and F32 for all else.
    pub dtype: DType,
    /// Model width D.
    pub d_model: usize,
    /// Key width of TANGO's heads.
    pub head_dim: usize,
    /// Heads.
    pub heads: usize,
    /// WANGO's window.
    pub window: usize,
    /// FLASH's chunk.
    pub chunk: usize,
    /// Sequence length T.
    pub seq: usize,
    /// Rows of a batch.
    pub batch: usize,
    /// Token ids.
    pub vocab: usize,
    /// Block applications L.
    pub applications: usize,
    /// Wanted parameters of the blocks.
    pub params: usize,
    /// Steps that are timed, after two that are not.
    pub steps: usize,
}

/// What was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTiming {
    /// Parameters of the blocks.
    pub params: usize,
    /// Median seconds of a step.
    pub seconds: f64,
    /// Tokens per second.
    pub tok_s: f64,
    /// The operators of all timed steps and the parts after the backward, the longest first; empty unless asked for.
    pub profile: Vec<(&'static str, Cost)>,
}

impl StepBench {
    /// The model, its free width rounded as its PyTorch counterpart rounds it: both have the same parameters.
    ///
    /// # Errors
    /// When there is no such model or the sizes do not fit.
    pub fn config(&self) -> Result<LanguageModelConfig> {
        let &StepBench { d_model: d, head_dim, heads, applications, params, .. } = self;
        let limit = 1 << 20;
        let axes = [d, head_dim, heads, self.window, self.chunk, self.seq, self.batch, self.vocab, self.steps];
        let names = ["d-model", "head-dim", "heads", "window", "chunk", "seq", "batch", "vocab", "steps"];
        let most = accounting::MAX_APPLICATIONS;
        if !(1..=most).contains(&applications) {
            return Err(Error::new(format!("--applications must be from 1 to {most}, found {applications}")));
        }
        if let Some(i) = axes.iter().position(|size| !(1..=limit).contains(size)) {
            return Err(Error::new(format!("--{} must be from 1 to {limit}, found {}", names[i], axes[i])));
        }
        // `sets` blocks of `fixed` parameters and `matrices` of the width that is looked for.
        let width_of = |sets: usize, fixed: usize, matrices: usize, step: usize| {
            let width = (params / sets).saturating_sub(fixed) / (matrices * d) / step * step;
            if width == 0 {
                return Err(Error::new(format!(
                    "--params {params} is too few for these sizes; {} are needed at least",
                    sets * (fixed + matrices * d * step)
                )));
            }
            Ok(width)
        };
        let width = |sets, fixed, step| width_of(sets, fixed, 3, step);
        let rope_base = 10_000.0;
        let architecture = match self.model.as_str() {
            name @ ("tango" | "wango") => {
                let gate_width = width(1, 2 * d * heads * head_dim, 8 * heads)?;
                Architecture::Tango(TangoConfig {
                    d_model: d,
                    heads,
                    head_dim,
                    gate_width,
                    applications,
                    tied: true,
                    rope_base,
                    window: (name == "wango")
                        .then_some(Window { size: self.window, feature_map: FeatureMap::default() }),
                })
            }
            "transformer" => {
                let d_ff = width(1, 4 * d * d, 8)?;
                Architecture::Transformer(TransformerConfig {
                    d_model: d,
                    heads,
                    d_ff,
                    applications,
                    tied: true,
                    rope_base,
                })
            }
            name @ ("gau" | "flash") => Architecture::Gau(GauConfig {
                d_model: d,
                key_width: KEY_WIDTH,
                gate_width: width(applications, d * KEY_WIDTH, 8)?,
                applications,
                tied: false,
                rope_base,
                chunk: (name == "flash").then_some(self.chunk),
            }),
            "cem" => Architecture::Cem(CemConfig {
                d_model: d,
                heads,
                head_dim,
                d_ff: width_of(applications, 2 * d * heads * head_dim, 2, 8)?,
                applications,
                tied: false,
                rope_base,
                attention: vec![AttentionKind::Cem],
                mlp: vec![MlpKind::Cem],
                diagonal: Diagonal::Shared,
                rank: Some(4),
                steps: 2,
                eta: 1.0,
            }),
            other => return Err(Error::new(unknown("model", other, &STEP_MODELS))),
        };
        architecture.check().map_err(|e| Error::new(e.to_string()))?;
        Ok(LanguageModelConfig { n_vocab: self.vocab, architecture })
    }

    /// Times the steps: forward, backward, clipping and AdamW on random tokens; `profiled`, operator by operator too.
    ///
    /// # Errors
    /// As [`StepBench::config`]; also when the memory cannot do or a gradient is not finite.
    pub fn run(&self, profiled: bool) -> Result<StepTiming> {
        let config = self.config()?;
        let StepBench { batch: rows, seq, .. } = *self;
        let dtype = self.dtype.compute();
        let step = memory::Step { dtype, rows, seq, accumulate: 1, recompute: false };
        step.check(&self.model, &ModelConfig::Language(config.clone()), "--params, --batch, --seq or --vocab")?;
        let failed = |e: kumiki_tensor::Error| Error::new(e.to_string());
        let mut model = LanguageModel::new(&config, 0, dtype).map_err(failed)?;
        let mut rng = Rng::new(0);
        let shape = [self.batch, self.seq];
        let mut ids = || rng.ids(DType::I64, &shape, self.vocab as u64);
        let (tokens, targets) = (ids(), ids());
        let mut optimizer = AdamW::default();
        let mut times = Vec::with_capacity(self.steps);
        let profile = Rc::new(Profile::default());
        let (mut clipping, mut updating) = (Cost::default(), Cost::default());
        // The first two fill the buffer pool and the optimiser's state.
        for step in 0..self.steps + 2 {
            let started = Instant::now();
            let narrow = self.dtype == DType::BF16;
            let mut tape = Tape::training(Rng::new(step as u64)).with_narrow_products(narrow);
            if profiled && step >= 2 {
                tape = tape.with_profile(profile.clone());
            }
            let loss = model.loss(&tape, &tokens, &targets);
            let mut grads = tape.backward(&loss);
            // A loss on the tape would keep it alive, and the optimiser would have to copy what it writes.
            drop((loss, tape));
            let mut params = model.params_mut();
            let walked = Instant::now();
            clip_global_norm(&params, &mut grads, 1.0).map_err(failed)?;
            let clipped = Instant::now();
            optimizer.step(&mut params, &grads, 1e-3).map_err(failed)?;
            if step >= 2 {
                times.push(started.elapsed().as_secs_f64());
                for (cost, took) in [(&mut clipping, clipped - walked), (&mut updating, clipped.elapsed())] {
                    cost.calls += 1;
                    cost.backward += took;
                }
            }
        }
        times.sort_by(f64::total_cmp);
        let seconds = times[times.len() / 2];
        let params = accounting::block_params(&config.architecture);
        let mut profile = if profiled { profile.costs() } else { vec![] };
        if profiled {
            profile.extend([("(clipping)", clipping), ("(AdamW)", updating)]);
        }
        Ok(StepTiming { params, seconds, tok_s: (self.batch * self.seq) as f64 / seconds, profile })
    }
}

/// Median seconds of `[m, k]` by `[k, n]` of random numbers: F32, or with `narrow` BF16 summed and written in F32.
///
/// # Errors
/// When the memory cannot hold them.
pub fn product_seconds(shape: [usize; 3], narrow: bool) -> Result<f64> {
    memory::check_product(shape, narrow)?;
    Ok(ProductTiming::measure(shape, narrow).median)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bench(model: &str) -> StepBench {
        StepBench {
            model: model.into(),
            dtype: DType::F32,
            d_model: 256,
            head_dim: 32,
            heads: 8,
            window: 64,
            chunk: 64,
            seq: 512,
            batch: 4,
            vocab: 256,
            applications: 4,
            params: 5_000_000,
            steps: 1,
        }
    }

    #[test]
    fn sizes_are_those_of_the_counterpart() {
        let params = |model: &str| accounting::block_params(&bench(model).config().unwrap().architecture);
        assert_eq!((params("tango"), params("transformer")), (4_997_384, 4_999_680));
        assert_eq!((params("gau"), params("flash")), (4_982_784, 4_983_808));
        let few = StepBench { params: 1000, ..bench("tango") }.config().unwrap_err().to_string();
        assert!(few.contains("--params 1000 is too few"), "{few}");
        assert!(
            StepBench { seq: 0, ..bench("tango") }.config().unwrap_err().to_string().contains("--seq must be from 1")
        );
        assert!(bench("tangoo").config().unwrap_err().to_string().contains("did you mean `tango`"));
    }

    #[test]
    fn a_small_step_runs() {
        let small = StepBench {
            d_model: 16,
            head_dim: 4,
            heads: 2,
            seq: 9,
            batch: 2,
            vocab: 11,
            params: 3000,
            ..bench("tango")
        };
        let timing = small.run(true).unwrap();
        assert!(timing.seconds > 0.0 && timing.tok_s > 0.0 && timing.params <= 3000 + 16 + 2);
        let calls = |name| timing.profile.iter().find(|(found, _)| *found == name).map(|(_, cost)| cost.calls);
        assert_eq!((calls("gate_aggregate_mul"), calls("(AdamW)"), calls("swiglu")), (Some(4), Some(1), None));
        let whole: f64 = timing.profile.iter().map(|(_, cost)| (cost.forward + cost.backward).as_secs_f64()).sum();
        assert!(whole <= timing.seconds, "{whole} s in operators of a step of {} s", timing.seconds);
    }
}
