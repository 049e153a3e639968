//! `kumiki compare`.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use kumiki_train::Result;
use kumiki_train::run::Plan;
use kumiki_train::zoo::Suite;

use crate::options::{RunOptions, model_name, preset_table};
use crate::sources::{Resolved, Several};

/// Train architectures side by side under equal conditions
///
/// Every model has the same number of parameters (of `cem`: the same widths) and sees the same batches in the same order,
/// for each corpus and seed. The tables at the end go to standard output, with the order of the models here and in the
/// paper; DIR/results.json, DIR/log.jsonl, DIR/curves.svg and DIR/MODEL/model.safetensors are written (with several corpora
/// or seeds: DIR/CORPUS/seed-N/MODEL/model.safetensors); beside each model are the saves of its training, step-N/, with which
/// --resume goes on.
///
/// Of `double` there is also the loss of every window's second half given the first, which an encoder-decoder has, too; it
/// is trained to fill gaps, so that a loss of all tokens it has not.
///
/// Losses are also told apart where a corpus allows it: answers to questions (`math`; files named AREA__MODULE.txt, as
/// those of DeepMind Mathematics), proofs and other source (files that are all .lean).
#[derive(clap::Args)]
#[command(after_help = after_help())]
pub struct Args {
    /// The experiment: `tango` compares TANGO and WANGO with other architectures of their size; `cem` compares Causal Energy
    /// Minimization, its steps, diagonals, preconditioners and either half of it, with the Llama that it saves parameters of;
    /// `double` compares block-based double decoders with decoder-only and encoder-decoder
    #[arg(value_name = "EXPERIMENT", value_parser = PossibleValuesParser::new(Suite::ALL.map(Suite::name)))]
    experiment: String,
    /// Models to train, in this order, separated by commas [default: all of the experiment's]
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = model_name)]
    models: Option<Vec<String>>,
    #[command(flatten)]
    several: Several,
    #[command(flatten)]
    options: RunOptions,
}

fn after_help() -> String {
    preset_table()
        + "
Models:
  tango         one block applied L times; its residual is a gate averaged over earlier tokens
  wango         TANGO within a window, a linear kernel beyond it: a state of fixed size
  recurrent     Transformer++, one block applied L times
  untied        Transformer++, L blocks of their own, together as large
  gau           gated attention units with squared-ReLU weights, L blocks of their own
  flash         GAU within chunks, linear beyond them: a state of fixed size
  llama         as untied; the baseline of cem
  cem-tN        Causal Energy Minimization of N steps, L layers as wide as llama's: half the
                attention's parameters and two thirds of the MLP's. What may follow, in this
                order: a diagonal, -none or -per_head (it is shared by the heads otherwise), -rR
                for a preconditioner of rank R, -etaX for a first step size other than 1.
                cem-attention-tN and cem-mlp-tN have one half of it, the other one as llama
  decoder       attention and a GELU layer, L layers; the baseline of double
  double        a context stack of two thirds of the layers, a generation stack of one third
                that sees its own block and, of the blocks before, what the context stack made
                of them. What may follow, in this order: how training cuts blocks, -logspace,
                -single_middle or -prompt_style (2 to 7 cuts anywhere otherwise), -separate for
                keys and values of the context's own, -loopsN for a context stack that is
                applied N times
  encoder-decoder
                as T5: an encoder that sees all, a decoder with attention across, trained to
                fill gaps

Examples:
  kumiki compare tango --models tango,recurrent
  kumiki compare tango --preset nano
  kumiki compare tango --data ~/texts --steps 1000 --out runs/texts
  kumiki compare tango --corpora math,texts,mathlib --seeds 0,1,2 --out runs/three
  kumiki compare tango --resume runs/three
  kumiki compare cem --models llama,cem-t1,cem-t2 --seeds 0,1,2
  kumiki compare cem --models cem-t1,cem-t2 --cem-width own     of llama's size, not its width
  kumiki compare double --data ~/texts
  kumiki compare tango --config mine.toml --seed 1     with mine.toml: preset = \"small\"
                                                                       lr = 2e-3"
}

impl Args {
    pub fn run(self) -> Result<()> {
        let suite = Suite::named(&self.experiment)?;
        let experiment = format!("compare {}", self.experiment);
        let old = self.options.resumed(&experiment)?;
        let old = old.as_ref().map(|(folder, plan)| (folder.as_path(), plan));
        let resolved = self.options.sources.resolve(&["models"], Some(&self.several), old, |_| suite)?;
        let Resolved { preset, corpora, seeds, models, settings, .. } = resolved;
        let models =
            self.models.or(models).unwrap_or_else(|| suite.models().iter().map(|&name| name.to_owned()).collect());
        // Named after the first seed: more of them extend the same run.
        let default = || PathBuf::from(format!("runs/compare-{}-{preset}-{}", self.experiment, settings.seed));
        let out = self.options.folder()?.unwrap_or_else(default);
        let plan = Plan { experiment, preset, settings, corpora, seeds, models };
        crate::run::run(plan, &out, &self.options).map(drop)
    }
}
