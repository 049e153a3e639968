//! What the names of variants say, and how they are written: one spelling for one model. See [`crate::zoo`].

use std::fmt;
use std::str::FromStr;

use kumiki_models::accounting::MAX_APPLICATIONS;
use kumiki_models::{MAX_DESCENT_STEPS, Window};
use kumiki_nn::Diagonal;
use kumiki_ops::FeatureMap;

use crate::blocks::SAMPLINGS;
use crate::settings::LARGEST;

/// What is wrong with the number in a name as that of [`variant`], if it is such a name.
pub(crate) fn wrong_window(name: &str) -> Option<String> {
    let (map, size) = name.strip_prefix("wango-")?.split_once('-')?;
    map.parse::<FeatureMap>().ok()?;
    counted("window", size, LARGEST)?.err()
}

/// The number that `digits` are, if they are digits.
///
/// # Errors
/// A sentence when it is out of the range.
fn counted(what: &str, digits: &str, most: usize) -> Option<std::result::Result<usize, String>> {
    let digits = Some(digits).filter(|text| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()))?;
    let number = digits.parse().ok().filter(|n| (1..=most).contains(n));
    Some(number.ok_or_else(|| format!("{what} must be from 1 to {most}, found {digits}")))
}

/// The name of WANGO with this feature map and window, whatever the settings say.
pub fn variant_name(feature_map: FeatureMap, window: usize) -> String {
    format!("wango-{}-{window}", feature_map.name())
}

/// What [`variant_name`] was made from.
pub fn variant(name: &str) -> Option<Window> {
    let (map, size) = name.strip_prefix("wango-")?.split_once('-')?;
    let window = Window { feature_map: map.parse().ok()?, size: size.parse().ok()? };
    // One name for one model.
    (variant_name(window.feature_map, window.size) == name).then_some(window)
}

/// Which halves of a block descend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Both.
    Both,
    /// Attention; the MLP is SwiGLU.
    Attention,
    /// The MLP; attention is plain.
    Mlp,
}

/// What a name that begins with `cem` says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CemVariant {
    /// Which halves descend.
    pub half: Half,
    /// Steps T.
    pub steps: usize,
    /// Of the attention.
    pub diagonal: Diagonal,
    /// Of the preconditioners.
    pub rank: Option<usize>,
    /// The step size at the start.
    pub eta: f64,
}

impl fmt::Display for CemVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.half {
            Half::Both => "cem",
            Half::Attention => "cem-attention",
            Half::Mlp => "cem-mlp",
        })?;
        write!(f, "-t{}", self.steps)?;
        if self.diagonal != Diagonal::Shared {
            write!(f, "-{}", self.diagonal.name())?;
        }
        if let Some(rank) = self.rank {
            write!(f, "-r{rank}")?;
        }
        if self.eta != 1.0 {
            write!(f, "-eta{}", self.eta)?;
        }
        Ok(())
    }
}

impl FromStr for CemVariant {
    type Err = ();

    /// Takes one spelling for one model: that of the display.
    fn from_str(name: &str) -> std::result::Result<CemVariant, ()> {
        variant_of(name).and_then(std::result::Result::ok).filter(|found| found.to_string() == name).ok_or(())
    }
}

/// The least and the largest step size at the start.
const ETAS: (f64, f64) = (1e-6, 1e3);

/// What a name means whose parts may stand in another order or say what is as usual; `None` when it is none of these.
///
/// # Errors
/// A sentence when a number in it is out of its range.
pub(crate) fn variant_of(name: &str) -> Option<std::result::Result<CemVariant, String>> {
    let mut found = CemVariant { half: Half::Both, steps: 1, diagonal: Diagonal::Shared, rank: None, eta: 1.0 };
    let mut wrong = None;
    let mut rest = name.strip_prefix("cem")?;
    while !rest.is_empty() {
        rest = rest.strip_prefix('-')?;
        if let Some((eta, after)) = rest.strip_prefix("eta").and_then(leading_number) {
            let text = &rest[3..rest.len() - after.len()];
            (found.eta, rest) = (eta, after);
            if !(ETAS.0..=ETAS.1).contains(&eta) {
                wrong = wrong.or(Some(format!("eta must be from {} to {}, found {text}", ETAS.0, ETAS.1)));
            }
            continue;
        }
        let part = &rest[..rest.find('-').unwrap_or(rest.len())];
        rest = &rest[part.len()..];
        let mut number = |prefix: &str, what: &str, most: usize| {
            let number = counted(what, part.strip_prefix(prefix)?, most)?;
            Some(number.unwrap_or_else(|why| {
                wrong = wrong.take().or(Some(why));
                1
            }))
        };
        match part {
            "attention" => found.half = Half::Attention,
            "mlp" => found.half = Half::Mlp,
            _ => {
                if let Some(&diagonal) = Diagonal::ALL.iter().find(|d| d.name() == part) {
                    found.diagonal = diagonal;
                } else if let Some(steps) = number("t", "steps", MAX_DESCENT_STEPS) {
                    found.steps = steps;
                } else {
                    found.rank = Some(number("r", "the preconditioner's rank", LARGEST)?);
                }
            }
        }
    }
    Some(wrong.map_or(Ok(found), Err))
}

/// The number at the start of `text`, up to the end or a hyphen that is not its own, and what follows it.
fn leading_number(text: &str) -> Option<(f64, &str)> {
    let ends = [text.len()].into_iter().chain(text.rmatch_indices('-').map(|(at, _)| at));
    ends.map(|end| text.split_at(end)).find_map(|(number, after)| Some((number.parse().ok()?, after)))
}

/// What a name that begins with `double` says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DoubleVariant {
    /// How training sequences are cut into blocks, one of [`SAMPLINGS`].
    pub sampling: &'static str,
    /// Whether generation layers project the context with keys and values of their own.
    pub separate_kv: bool,
    /// How often the context layers are applied.
    pub loops: usize,
}

impl fmt::Display for DoubleVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("double")?;
        if self.sampling != SAMPLINGS[0] {
            write!(f, "-{}", self.sampling)?;
        }
        if self.separate_kv {
            f.write_str("-separate")?;
        }
        if self.loops != 1 {
            write!(f, "-loops{}", self.loops)?;
        }
        Ok(())
    }
}

impl FromStr for DoubleVariant {
    type Err = ();

    /// Takes one spelling for one model: that of the display.
    fn from_str(name: &str) -> std::result::Result<DoubleVariant, ()> {
        double_variant_of(name).and_then(std::result::Result::ok).filter(|found| found.to_string() == name).ok_or(())
    }
}

/// As [`variant_of`], of a double decoder.
pub(crate) fn double_variant_of(name: &str) -> Option<std::result::Result<DoubleVariant, String>> {
    let mut found = DoubleVariant { sampling: SAMPLINGS[0], separate_kv: false, loops: 1 };
    let mut wrong = None;
    let mut parts = name.split('-');
    if parts.next() != Some("double") {
        return None;
    }
    for part in parts {
        if let Some(sampling) = SAMPLINGS.into_iter().find(|&sampling| sampling == part) {
            found.sampling = sampling;
        } else if part == "separate" {
            found.separate_kv = true;
        } else {
            match counted("loops", part.strip_prefix("loops")?, MAX_APPLICATIONS)? {
                Ok(loops) => found.loops = loops,
                Err(why) => wrong = Some(why),
            }
        }
    }
    Some(wrong.map_or(Ok(found), Err))
}
