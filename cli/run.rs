//! What `compare` and `train` do once their settings are known.

use std::path::Path;

use kumiki_train::Result;
use kumiki_train::compare::ModelResult;
use kumiki_train::data::Data;
use kumiki_train::run::{Plan, Results, Run};

use crate::output::{in_pool, line, program, quoted, remark};
use crate::progress::Progress;
use crate::table::{count, optional, short, table, thousands};

/// Trains the plan's models one after the other; prints the table and where everything lies.
pub fn run(plan: Plan, data: &str, folder: &Path, restart: bool) -> Result<()> {
    // Everything on one thread of the pool: an operator that runs there need not wake another to begin.
    in_pool(|| {
        plan.check()?;
        let data = Data::open(data, plan.settings.val_fraction, plan.settings.seq)?;
        let note = data.note.clone();
        let mut run = Run::begin(plan, data, folder, restart)?;
        let Results { plan, data, machine, .. } = &run.results;
        let models = plan.models.clone();
        remark(&format!(
            "{} on `{}`, preset {}, seed {}: {} of {} each ({}, {})",
            plan.experiment,
            data.name,
            plan.preset,
            plan.settings.seed,
            count(plan.settings.steps, "step"),
            count((plan.settings.batch * plan.settings.seq * plan.settings.accumulate) as u64, "token"),
            machine.simd,
            count(machine.threads as u64, "thread"),
        ));
        if let Some(note) = note {
            remark(&format!("note: {note}"));
        }
        let mut progress = Progress::new(models.iter().map(String::len).max().unwrap_or(0));
        for model in &models {
            if let Err(error) = run.train(model, &mut |event| progress.show(event)) {
                progress.clear();
                if !run.results.rows.is_empty() {
                    line(&report(&run.results))?;
                    remark(&format!("the models that are done stay in `{}`", folder.display()));
                }
                return Err(error);
            }
        }
        let finished = run.finish();
        // The numbers first: they must not be lost with a file that cannot be written.
        line(&report(&run.results))?;
        finished?;
        let models = models.join("/ ") + "/";
        line(&format!("\nFiles in `{}`: results.json log.jsonl curves.svg {models}", folder.display()))?;
        let checkpoint = folder.join(&run.results.plan.models[0]);
        let prompt = if run.results.data.name == "math" { "What is 12 + 30?" } else { "The " };
        line(&format!(
            "Let it speak: {} generate --checkpoint {} --prompt {}",
            program(),
            quoted(&checkpoint.to_string_lossy()),
            quoted(prompt)
        ))
    })
}

/// The table of the models that are done, with the line that they must fall below.
fn report(results: &Results) -> String {
    let answers = results.rows.iter().any(|row| row.answer_nll.is_some());
    let mut header = vec!["model", "parameters", "MACs", "val NLL", "bits/byte", "tok/s", "seconds"];
    if answers {
        header.insert(5, "answer NLL");
    }
    let row = |row: &ModelResult| {
        let mut cells = vec![
            row.model.clone(),
            thousands(row.params as u64),
            short(row.macs as f64),
            optional(row.val_nll, 3),
            optional(row.bits_per_byte, 3),
            short(row.tok_s),
            format!("{:.1}", row.seconds),
        ];
        if answers {
            cells.insert(5, optional(row.answer_nll, 3));
        }
        cells
    };
    let rows: Vec<_> = results.rows.iter().map(row).collect();
    let mut text = table(&header, &rows);
    text += "\nparameters without the token table; MACs of one sequence forward; NLL in nats per byte";
    if let Some(entropy) = results.data.unigram_nll {
        text += &format!("\nentropy of single bytes of the held-out text: {entropy:.3} nats");
    }
    text
}
