//! The picture of `ablate feature-map`: loss against window, one line per feature map.

use std::path::Path;

use kumiki_ops::FeatureMap;

use crate::Result;
use crate::chart::{self, Line, Panel, Scale};
use crate::folder::ABLATION;
use crate::run::Results;
use crate::zoo::variant;

/// Draws the losses of finished variants of WANGO, one panel per corpus, into the run's folder.
///
/// # Errors
/// When the file cannot be written.
pub fn draw(results: &Results, folder: &Path) -> Result<()> {
    let panels: Vec<Panel> = results.data.iter().map(|data| panel(results, &data.name)).collect();
    let title = format!("WANGO's feature maps and windows, preset {}", results.plan.preset);
    chart::write(folder.join(ABLATION), &title, &panels)
}

fn panel(results: &Results, corpus: &str) -> Panel {
    let line = |map: FeatureMap| {
        let mut points: Vec<(f64, f64)> = (results.summary.iter().filter(|s| s.corpus == corpus))
            .filter_map(|s| variant(&s.model).filter(|w| w.feature_map == map).zip(s.val_nll))
            .map(|(window, nll)| (window.size as f64, nll.mean))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Line { name: map.name().to_owned(), points, ..Line::default() }
    };
    // The path is in results.json; the picture may be shown to others.
    let short = Path::new(corpus).file_name().map_or(corpus.into(), |name| name.to_string_lossy());
    Panel {
        title: format!("{short}: validation loss (nats per token)"),
        x: "window W (tokens)".into(),
        x_scale: Scale::Log,
        scale: Scale::Linear,
        lines: FeatureMap::ALL.into_iter().map(line).filter(|line| !line.points.is_empty()).collect(),
    }
}
