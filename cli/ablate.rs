//! `kumiki ablate`.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use kumiki::ops::FeatureMap;
use kumiki_train::ablation;
use kumiki_train::run::Plan;
use kumiki_train::settings::LARGEST;
use kumiki_train::zoo::{Suite, variant_name};
use kumiki_train::{Error, Result};

use crate::options::RunOptions;
use crate::output::line;
use crate::sources::{Resolved, Several};

/// Train one architecture with parts of it exchanged, under equal conditions
///
/// `feature-map` trains WANGO with every feature map at the preset's window, and with windows of other sizes at the
/// preset's feature map (or the first of --maps). Folder, files, --resume and --seeds are those of `compare`; a model is called
/// wango-FEATUREMAP-WINDOW. DIR/ablation.svg shows the losses against the window.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki ablate feature-map
  kumiki ablate feature-map --preset nano --windows 4,64 --full
  kumiki ablate feature-map --data book.txt --seeds 0,1,2 --out runs/maps")]
pub struct Args {
    /// What is exchanged
    #[arg(value_name = "PART", value_parser = PossibleValuesParser::new(["feature-map"]))]
    part: String,
    /// Feature maps, separated by commas [default: all]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    #[arg(value_parser = PossibleValuesParser::new(FeatureMap::ALL.map(FeatureMap::name)))]
    maps: Option<Vec<String>>,
    /// Window sizes beside the preset's, separated by commas [default: a quarter, half, twice and four times as many]
    #[arg(long, value_name = "N,N", value_delimiter = ',', allow_negative_numbers = true)]
    windows: Option<Vec<usize>>,
    /// Every feature map with every window
    #[arg(long)]
    full: bool,
    #[command(flatten)]
    several: Several,
    #[command(flatten)]
    options: RunOptions,
}

impl Args {
    pub fn run(self) -> Result<()> {
        let experiment = format!("ablate {}", self.part);
        let old = self.options.resumed(&experiment)?;
        let from = old.as_ref().map(|(folder, plan)| (folder.as_path(), plan));
        let resolved = self.options.sources.resolve(&["models"], Some(&self.several), from, |_| Suite::Tango)?;
        let Resolved { preset, corpora, seeds, models: named, settings, .. } = resolved;
        if named.is_some() && old.is_none() {
            return Err(Error::new("`models` in the configuration means nothing here; use --maps and --windows"));
        }
        let map = |name: &String| name.parse::<FeatureMap>().map_err(|e| Error::new(e.to_string()));
        let maps = match &self.maps {
            Some(names) => names.iter().map(map).collect::<Result<Vec<_>>>()?,
            None => FeatureMap::ALL.into(),
        };
        let own = settings.window;
        let around = || vec![own / 4, own / 2, own * 2, own * 4].into_iter().filter(|&w| w > 0).collect();
        let given = self.windows;
        let mut windows: Vec<usize> = given.clone().unwrap_or_else(around);
        if let Some(wrong) = windows.iter().find(|w| !(1..=LARGEST).contains(*w)) {
            return Err(Error::new(format!("--windows must be from 1 to {LARGEST}, found {wrong}")));
        }
        windows.push(own);
        windows.sort_unstable();
        // Windows vary with the settings' feature map; where that is left out, with the first that is not.
        let preferred = map(&settings.feature_map)?;
        let own_map = if maps.contains(&preferred) { preferred } else { maps[0] };
        let mut models: Vec<String> = Vec::new();
        for &feature_map in &maps {
            for &window in &windows {
                let name = variant_name(feature_map, window);
                let wanted = self.full || window == own || feature_map == own_map;
                if wanted && !models.contains(&name) {
                    models.push(name);
                }
            }
        }
        let models = old.filter(|_| self.maps.is_none() && given.is_none()).map_or(models, |(_, old)| old.models);
        let out = self.options.folder()?;
        let out = out.unwrap_or_else(|| PathBuf::from(format!("runs/ablate-{}-{preset}-{}", self.part, settings.seed)));
        let plan = Plan { experiment, preset, settings, corpora, seeds, models };
        let Some(results) = crate::run::run(plan, &out, &self.options)? else {
            return Ok(());
        };
        ablation::draw(&results, &out)?;
        line(&format!("Loss against the window: {}", out.join("ablation.svg").display()))
    }
}
