//! `kumiki checkpoint`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kumiki::tensor::safetensors::{self, Contents};
use kumiki_train::{Error, Result, checkpoint};
use serde::Serialize;

use crate::output::{json, line, plain};
use crate::table::{table, thousands};

/// Look into checkpoints, or compare two of them
#[derive(clap::Subcommand)]
pub enum Command {
    /// What a checkpoint says of itself, and the size of every tensor
    Show(Show),
    /// In what two checkpoints differ: what they say, their tensors, their values
    Diff(Diff),
}

#[derive(clap::Args)]
pub struct Show {
    /// A run's folder with one model, a model's, a save's (step-N), or a .safetensors file
    path: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
pub struct Diff {
    /// As for `show`
    one: PathBuf,
    /// As for `show`
    other: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Command {
    pub fn run(self) -> Result<()> {
        match self {
            Command::Show(args) => args.run(),
            Command::Diff(args) => args.run(),
        }
    }
}

/// The file meant, and what is in it. Any file of tensors will do: an optimiser's state as well as a model.
fn read(path: &Path) -> Result<(PathBuf, Contents)> {
    let file = checkpoint::find(path)?;
    let contents = safetensors::load(&file).map_err(|e| Error::new(e.to_string()))?;
    Ok((file, contents))
}

/// A tensor in numbers.
#[derive(Serialize)]
struct Numbers {
    name: String,
    shape: Vec<usize>,
    dtype: String,
    mean: f64,
    /// Root of the mean square.
    rms: f64,
    largest: f64,
    not_finite: usize,
}

impl Numbers {
    fn of(name: &str, tensor: &kumiki::tensor::Tensor) -> Numbers {
        let values = tensor.to_f64_vec();
        let n = values.len().max(1) as f64;
        Numbers {
            name: name.to_owned(),
            shape: tensor.shape().to_vec(),
            dtype: tensor.dtype().to_string(),
            mean: values.iter().sum::<f64>() / n,
            rms: (values.iter().map(|x| x * x).sum::<f64>() / n).sqrt(),
            largest: values.iter().fold(0.0, |most: f64, x| most.max(x.abs())),
            not_finite: values.iter().filter(|x| !x.is_finite()).count(),
        }
    }
}

/// A number of any size in few letters.
fn brief(x: f64) -> String {
    if x == 0.0 || (1e-3..1e5).contains(&x.abs()) { format!("{x:.5}") } else { format!("{x:.3e}") }
}

impl Show {
    fn run(self) -> Result<()> {
        let (file, contents) = read(&self.path)?;
        let all: Vec<Numbers> = contents.tensors.iter().map(|(name, tensor)| Numbers::of(name, tensor)).collect();
        if self.json {
            let metadata = &contents.metadata;
            return json(&serde_json::json!({"file": file, "metadata": metadata, "tensors": all}));
        }
        line(&plain(&format!("{}", file.display())))?;
        for (key, value) in &contents.metadata {
            line(&plain(&format!("{key}: {value}")))?;
        }
        let rows: Vec<Vec<String>> = (all.iter())
            .map(|t| {
                let mut row = vec![plain(&t.name), format!("{:?}", t.shape), t.dtype.clone()];
                row.extend([t.mean, t.rms, t.largest].map(brief));
                row.push(if t.not_finite == 0 { String::new() } else { thousands(t.not_finite as u64) });
                row
            })
            .collect();
        line(&format!("\n{}", table(&["tensor", "shape", "dtype", "mean", "RMS", "largest", "not finite"], &rows)))?;
        let values: usize = contents.tensors.values().map(kumiki::tensor::Tensor::len).sum();
        line(&format!("{} tensors, {} values", all.len(), thousands(values as u64)))
    }
}

/// How two tensors of one name differ.
#[derive(Serialize)]
struct Difference {
    name: String,
    /// `only in one`, `only in the other`, `shape`, `values`.
    what: &'static str,
    /// Shapes, where they differ.
    shapes: Option<(Vec<usize>, Vec<usize>)>,
    /// The largest difference of two values; none where one is no number.
    largest: Option<f64>,
    /// The root of the mean square of differences, as a part of that of the one's values.
    relative: Option<f64>,
    /// Values that differ.
    values: usize,
}

fn difference(name: &str, one: &Contents, other: &Contents) -> Option<Difference> {
    let difference =
        |what| Difference { name: name.to_owned(), what, shapes: None, largest: None, relative: None, values: 0 };
    let (a, b) = match (one.tensors.get(name), other.tensors.get(name)) {
        (Some(a), Some(b)) => (a, b),
        (Some(_), None) => return Some(difference("only in one")),
        _ => return Some(difference("only in the other")),
    };
    if (a.shape(), a.dtype()) != (b.shape(), b.dtype()) {
        let shapes = Some((a.shape().to_vec(), b.shape().to_vec()));
        return Some(Difference { shapes, ..difference(if a.shape() == b.shape() { "dtype" } else { "shape" }) });
    }
    let (a, b) = (a.to_f64_vec(), b.to_f64_vec());
    let values = a.iter().zip(&b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    let apart: Vec<f64> = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).collect();
    let square = |all: &[f64]| all.iter().map(|x| x * x).sum::<f64>();
    let finite = |x: f64| x.is_finite().then_some(x);
    let largest = apart.iter().try_fold(0.0, |most: f64, &x| finite(x).map(|x| most.max(x)));
    let relative = finite((square(&apart) / square(&a)).sqrt());
    (values > 0).then(|| Difference { largest, relative, values, ..difference("values") })
}

impl Diff {
    fn run(self) -> Result<()> {
        let (one_file, one) = read(&self.one)?;
        let (other_file, other) = read(&self.other)?;
        let keys: BTreeSet<&String> = one.metadata.keys().chain(other.metadata.keys()).collect();
        let said: Vec<(&String, Option<&String>, Option<&String>)> = (keys.into_iter())
            .map(|key| (key, one.metadata.get(key), other.metadata.get(key)))
            .filter(|(_, a, b)| a != b)
            .collect();
        let names: BTreeSet<&String> = one.tensors.keys().chain(other.tensors.keys()).collect();
        let count = names.len();
        let tensors: Vec<Difference> = names.into_iter().filter_map(|name| difference(name, &one, &other)).collect();
        if self.json {
            let files = [one_file, other_file];
            return json(&serde_json::json!({"files": files, "metadata": said, "tensors": tensors}));
        }
        for (key, a, b) in &said {
            let [a, b] = [a, b].map(|value| value.map_or("absent".to_owned(), |value| plain(value)));
            line(&format!("{}\n  {a}\n  {b}", plain(key)))?;
        }
        let optional = |x: Option<f64>| x.map_or("–".to_owned(), brief);
        let rows: Vec<Vec<String>> = (tensors.iter())
            .map(|d| {
                let what = d.shapes.as_ref().map_or(d.what.to_owned(), |(a, b)| format!("{}: {a:?}, {b:?}", d.what));
                let (largest, relative) = (optional(d.largest), optional(d.relative));
                vec![plain(&d.name), what, thousands(d.values as u64), largest, relative]
            })
            .collect();
        if !rows.is_empty() {
            line(&table(&["tensor", "differs in", "values", "largest", "relative RMS"], &rows))?;
        }
        line(&match tensors.len() {
            0 => format!("the same in all of {count} tensors"),
            n => format!("{n} of {count} tensors differ"),
        })
    }
}
