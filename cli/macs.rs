//! `kumiki macs`.

use clap::ValueEnum;
use clap::builder::PossibleValuesParser;
use kumiki::models::accounting::{self, Pairs};
use kumiki::models::{Architecture, LanguageModelConfig, ModelConfig};
use kumiki_train::Result;
use kumiki_train::settings::{PRESETS, Settings};
use kumiki_train::zoo::{DOUBLE_SIZES, Suite};
use serde::Serialize;

use crate::options::{check_distinct, model_name};
use crate::output::{json, line, remark};
use crate::table::{short, table, thousands};

/// Count what models cost: parameters, multiply-accumulates, bytes that decoding keeps
///
/// By formula, for models of equal size; the formulas are tested against models that run. Nothing is trained.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki macs                    the paper's table, T = 8192
  kumiki macs --suite cem        halves, steps and diagonals beside Llama
  kumiki macs --suite double     what two stacks cost to train and save in writing
  kumiki macs --preset tiny --pairs causal
  kumiki macs --seq 2048 --blocks 8 --models tango,wango --json")]
pub struct Args {
    /// Which paper's models
    #[arg(long, value_name = "NAME", default_value = "tango", value_parser = PossibleValuesParser::new(Suite::ALL.map(Suite::name)))]
    suite: String,
    /// Sizes
    #[arg(long, default_value = "paper", value_parser = PossibleValuesParser::new(PRESETS))]
    preset: String,
    /// Models, separated by commas [default: all of the suite]
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = model_name)]
    models: Option<Vec<String>>,
    /// Numbers of block applications, separated by commas [default: 4,8 for tango, else the preset's; of the preset paper for
    /// double, all of the paper's sizes]
    #[arg(long, value_name = "N,N", value_delimiter = ',', allow_negative_numbers = true)]
    blocks: Option<Vec<usize>>,
    /// Sequence length T [default: the preset's]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seq: Option<usize>,
    /// Parameters of each model (of Llama, for cem) outside of the token table [default: the preset's]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    params: Option<usize>,
    /// Token ids [default: for the preset paper 50257 (GPT-2's), or 32000 for double; else 256 (bytes)]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    vocab: Option<usize>,
    /// How token pairs are counted
    #[arg(long, value_enum, default_value_t = Counting::Full)]
    pairs: Counting,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum Counting {
    /// All T·T, as papers do
    Full,
    /// Those that are not masked
    Causal,
}

#[derive(Serialize)]
struct Row {
    model: String,
    d_model: usize,
    blocks: usize,
    tied: bool,
    /// The width that was solved for: E, or F of a Transformer++.
    width: usize,
    params: usize,
    /// Of CEM and Llama: the parameters by halves.
    #[serde(skip_serializing_if = "Option::is_none")]
    params_attention: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    params_mlp: Option<u64>,
    params_total: usize,
    /// Parameters with every application counted, whether it has its own or not; token table included.
    params_applied: usize,
    seq: usize,
    pairs: Counting,
    n_vocab: usize,
    macs: u64,
    macs_projection: u64,
    macs_pair: u64,
    macs_prefix: u64,
    macs_head: u64,
    /// To write one token after T others.
    token_macs: u64,
    /// Floating-point operations to train on one token: 6 for a multiply-accumulate.
    training_flops: f64,
    /// Of one sequence after T tokens, in f32.
    state_bytes: u64,
}

const LEGEND: &str = "\
L: block applications; width: E, or F of a Transformer++, solved for equal sizes (of CEM: that of Llama); attention, MLP:
parameters of the halves, as parts of Llama's in brackets
MACs: multiply-accumulates; in products with weights (matrices), over token pairs, in running
sums over earlier tokens (prefix), in the output head; state: bytes that decoding keeps, in f32";

const DOUBLE_LEGEND: &str = "\
parameters without the token table; MACs: of one sequence forward; training: three times that, two operations each;
MACs of a token: to write the one after a prompt of this length, head included; state: bytes kept after it, in f32.
A double decoder that goes on past a block also reads all of its text again, once for every block";

/// Room for the largest counts: all factors of a product are bounded.
const LARGEST: usize = 1 << 24;

impl Args {
    fn rows(&self) -> Result<Vec<Row>> {
        let (suite, preset) = (Suite::named(&self.suite)?, self.preset()?);
        let paper = match suite {
            Suite::Double => 32_000,
            _ => 50_257,
        };
        let n_vocab = self.vocab.unwrap_or(if self.preset == "paper" { paper } else { 256 });
        for (name, size) in [("vocab", n_vocab), ("seq", self.seq.unwrap_or(1))] {
            if !(1..=LARGEST).contains(&size) {
                return Err(kumiki_train::Error::new(format!("--{name} must be from 1 to {LARGEST}, found {size}")));
            }
        }
        let seq = self.seq.unwrap_or(preset.seq);
        let all = || suite.models().iter().map(|&name| name.to_owned()).collect();
        let names = self.models.clone().unwrap_or_else(all);
        check_distinct(&names)?;
        let mut rows = Vec::new();
        for settings in self.sizes(suite, &preset) {
            for name in &names {
                rows.push(self.row(name, &settings.model(name, n_vocab)?, seq));
            }
        }
        Ok(rows)
    }

    /// The settings of every size that is asked for.
    fn sizes(&self, suite: Suite, preset: &Settings) -> Vec<Settings> {
        let sized = |settings: Settings| match (self.params, suite) {
            (Some(params), _) => Settings { params, ..settings },
            (None, Suite::Double) => settings.with_layers(preset.lr),
            (None, _) => settings,
        };
        let with_blocks = |&blocks: &usize| sized(Settings { blocks, ..preset.clone() });
        match (&self.blocks, suite) {
            (Some(blocks), _) => blocks.iter().map(with_blocks).collect(),
            (None, Suite::Double) if self.preset == "paper" => {
                DOUBLE_SIZES.iter().map(|&size| sized(preset.clone().with_stacks(size))).collect()
            }
            (None, Suite::Tango) => [4, 8].iter().map(with_blocks).collect(),
            (None, _) => vec![sized(preset.clone())],
        }
    }

    fn row(&self, name: &str, config: &ModelConfig, seq: usize) -> Row {
        let pairs = if self.pairs == Counting::Full { Pairs::Full } else { Pairs::Causal };
        let macs = config.macs(seq, pairs);
        let (params, params_total) = (config.block_params(), config.total_params());
        let (blocks, tied) = (config.layers(), config.tied());
        let halves = match config {
            ModelConfig::Language(LanguageModelConfig { architecture: Architecture::Cem(c), .. }) => {
                let (attention, mlp) = (0..blocks)
                    .map(|layer| accounting::cem_halves(c, layer))
                    .fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
                Some((attention as u64, mlp as u64))
            }
            _ => None,
        };
        Row {
            params_attention: halves.map(|(attention, _)| attention),
            params_mlp: halves.map(|(_, mlp)| mlp),
            model: name.to_owned(),
            d_model: config.d_model(),
            blocks,
            tied,
            width: config.width(),
            params,
            params_total,
            params_applied: params_total + if tied { (blocks - 1) * params } else { 0 },
            seq,
            pairs: self.pairs,
            n_vocab: config.n_vocab(),
            macs: accounting::total(&macs),
            macs_projection: macs.projection,
            macs_pair: macs.pair,
            macs_prefix: macs.prefix,
            macs_head: macs.head,
            token_macs: config.token_macs(seq),
            training_flops: config.training_flops(seq),
            state_bytes: config.state_bytes(seq, 4),
        }
    }

    fn preset(&self) -> Result<Settings> {
        Settings::for_suite(Suite::named(&self.suite)?, &self.preset)
    }

    pub fn run(self) -> Result<()> {
        let rows = self.rows()?;
        let preset = self.preset()?;
        let wanted = self.params.unwrap_or(preset.params);
        // Of two stacks every size has its own number of parameters, unless one is asked for.
        let solved = self.params.is_some() || self.suite != Suite::Double.name();
        for row in rows
            .iter()
            .filter(|row| solved && preset.sizes(&row.model) && (row.params as f64 / wanted as f64 - 1.0).abs() > 0.05)
        {
            let (model, blocks, params) = (&row.model, row.blocks, row.params);
            remark(&format!(
                "note: `{model}` of {blocks} blocks has {params} parameters where {wanted} were asked for"
            ));
        }
        if self.json {
            return json(&rows);
        }
        if self.suite == Suite::Double.name() {
            return self.double(&rows);
        }
        let with_halves = rows.iter().any(|row| row.params_attention.is_some());
        let mut header = vec!["model", "L", "width", "parameters"];
        if with_halves {
            header.extend(["attention", "MLP"]);
        }
        header.extend(["with table", "MACs", "matrices", "pairs", "prefix", "head", "state"]);
        // Halves beside those of the Llama of as many layers, where there is one.
        let part = |row: &Row, of: fn(&Row) -> Option<u64>| {
            let llama = rows.iter().find(|other| other.model == "llama" && other.blocks == row.blocks).and_then(of);
            match (of(row), llama) {
                (Some(own), Some(llama)) => format!("{} ({:.3})", short(own as f64), own as f64 / llama as f64),
                (own, _) => own.map_or("–".to_owned(), |own| short(own as f64)),
            }
        };
        let macs = |n: u64| if n == 0 { "–".to_owned() } else { short(n as f64) };
        let cells = |row: &Row| {
            let mut cells =
                vec![row.model.clone(), row.blocks.to_string(), row.width.to_string(), thousands(row.params as u64)];
            if with_halves {
                cells.extend([part(row, |r| r.params_attention), part(row, |r| r.params_mlp)]);
            }
            cells.extend([
                thousands(row.params_total as u64),
                macs(row.macs),
                macs(row.macs_projection),
                macs(row.macs_pair),
                macs(row.macs_prefix),
                macs(row.macs_head),
                short(row.state_bytes as f64),
            ]);
            cells
        };
        line(&table(&header, &rows.iter().map(cells).collect::<Vec<_>>()))?;
        let (seq, n_vocab) = rows.first().map_or((0, 0), |row| (row.seq, row.n_vocab));
        let counted = if self.pairs == Counting::Full { "all T·T pairs" } else { "pairs that are not masked" };
        line(&format!(
            "one sequence of {} tokens forward, {} token ids, {counted}\n{LEGEND}",
            thousands(seq as u64),
            thousands(n_vocab as u64)
        ))
    }

    /// The table of two stacks: what training and writing cost beside the decoder-only model of the same size.
    fn double(&self, rows: &[Row]) -> Result<()> {
        let header = ["model", "D", "L", "F", "parameters", "MACs", "training FLOPs/token", "MACs of a token", "state"];
        let cells = |row: &Row| {
            let beside = |of: &dyn Fn(&Row) -> f64| {
                let own = of(row);
                let base =
                    rows.iter().find(|r| r.model == "decoder" && (r.d_model, r.blocks) == (row.d_model, row.blocks));
                base.map_or_else(|| short(own), |base| format!("{} ({:.3})", short(own), own / of(base)))
            };
            let mut cells = vec![row.model.clone()];
            cells.extend([row.d_model, row.blocks, row.width].map(|n| n.to_string()));
            cells.push(thousands(row.params as u64));
            cells.push(short(row.macs as f64));
            cells.push(beside(&|row| row.training_flops));
            cells.push(beside(&|row| row.token_macs as f64));
            cells.push(beside(&|row| row.state_bytes as f64));
            cells
        };
        line(&table(&header, &rows.iter().map(cells).collect::<Vec<_>>()))?;
        let (seq, n_vocab) = rows.first().map_or((0, 0), |row| (row.seq, row.n_vocab));
        let counted = if self.pairs == Counting::Full { "all T·T pairs" } else { "pairs that are not masked" };
        let baseline = rows.iter().any(|row| row.model == "decoder");
        line(&format!(
            "sequences of {} tokens, {} token ids, {counted}{}\n{DOUBLE_LEGEND}",
            thousands(seq as u64),
            thousands(n_vocab as u64),
            if baseline { "; in brackets: to the decoder-only model of that size" } else { "" }
        ))
    }
}
