//! What `compare` and `train` do once their settings are known.

use std::path::Path;

use kumiki_train::Result;
use kumiki_train::data::{Data, short_name};
use kumiki_train::kinds::Kind;
use kumiki_train::run::{Plan, Results, Run};

use crate::interrupt;
use crate::options::RunOptions;
use crate::output::{in_pool, line, program, quoted, remark};
use crate::progress::Progress;
use crate::report::report;
use crate::table::count;

/// Trains the plan's models one after the other; prints the tables and where everything lies. Gives the results, unless it
/// was stopped.
pub fn run(plan: Plan, folder: &Path, options: &RunOptions) -> Result<Option<Results>> {
    let (existing, keeping) = (options.existing(), options.keeping()?);
    // Everything on one thread of the pool: an operator that runs there need not wake another to begin.
    in_pool(|| {
        plan.check()?;
        let open = |name: &String| Data::open(name, plan.settings.val_fraction, plan.settings.seq);
        let data = plan.corpora.iter().map(open).collect::<Result<Vec<_>>>()?;
        let mut run = Run::begin(plan, data, folder, existing)?;
        run.keeping = keeping;
        #[cfg(feature = "report")]
        if options.tensorboard || run.has_events() {
            run.write_events()?;
        }
        remark(&opening(&run.results));
        run.notes.iter().for_each(|note| remark(&format!("note: {note}")));
        let Plan { models, .. } = &run.results.plan;
        let mut progress = Progress::new(models.iter().map(String::len).max().unwrap_or(0), "tok");
        let mut place = None;
        for cell in run.cells() {
            let here = Some((cell.corpus.clone(), cell.seed));
            if run.results.plan.is_wide() && place != here {
                remark(&format!("on `{}` with seed {}:", cell.corpus, cell.seed));
                place = here;
            }
            let stopped = run.train(&cell, &mut |event| progress.show(event));
            if let Ok(None) = stopped {
                continue;
            }
            progress.clear();
            if !run.results.rows.is_empty() {
                line(&report(&run.results))?;
                remark(&format!("the models that are done stay in `{}`", folder.display()));
            }
            if let Some(step) = stopped? {
                interrupt::stopped();
                remark(&stop(&run.results.plan, &cell.model, step, folder));
                return Ok(None);
            }
        }
        let finished = run.finish();
        // The numbers first: they must not be lost with a file that cannot be written.
        line(&report(&run.results))?;
        finished?;
        line(&closing(&run.results, folder, run.has_events())?)?;
        Ok(Some(run.results))
    })
}

/// Where a run was stopped and how it goes on.
fn stop(plan: &Plan, model: &str, step: u64, folder: &Path) -> String {
    // `train` has its model in the name of the experiment; `compare tango` has not, though a model is called so.
    let command = if plan.experiment.starts_with("train ") { "train" } else { &plan.experiment };
    let (steps, folder) = (plan.settings.steps, folder.to_string_lossy());
    format!(
        "stopped: `{model}` is saved after step {step} of {steps}. Go on with: {} {command} --resume {}",
        program(),
        quoted(&folder)
    )
}

/// What is about to be done, in a line.
fn opening(results: &Results) -> String {
    let Results { plan, machine, .. } = results;
    let names: Vec<String> = plan.corpora.iter().map(|name| format!("`{name}`")).collect();
    let seeds: Vec<String> = plan.seeds.iter().map(u64::to_string).collect();
    format!(
        "{} on {}, preset {}, seed{} {}: {} of {} each ({}{}, {})",
        plan.experiment,
        names.join(", "),
        plan.preset,
        if seeds.len() == 1 { "" } else { "s" },
        seeds.join(", "),
        count(plan.settings.steps, "step"),
        count((plan.settings.batch * plan.settings.seq * plan.settings.accumulate) as u64, "token"),
        // F32 is what one expects.
        if plan.settings.dtype == "f32" { String::new() } else { format!("{}, ", plan.settings.dtype) },
        machine.simd,
        count(machine.threads as u64, "thread"),
    )
}

/// Where everything is, and what can be done with it.
fn closing(results: &Results, folder: &Path, has_events: bool) -> Result<String> {
    let Results { plan, rows, data, .. } = results;
    let stems = match plan.corpora.as_slice() {
        [_] => vec!["curves".to_owned()],
        several => several.iter().map(|c| short_name(c).map(|c| format!("curves-{c}"))).collect::<Result<_>>()?,
    };
    let pictures: Vec<String> = stems.iter().map(|stem| format!("{stem}.svg {stem}.png")).collect();
    // A run that was extended has models in both places.
    let (deep, flat): (Vec<_>, Vec<_>) =
        rows.iter().map(|row| format!("{}/", row.folder)).partition(|f| f.matches('/').count() > 1);
    let deep = (!deep.is_empty()).then(|| "<corpus>/seed-<n>/<model>/".to_owned());
    let models = flat.into_iter().chain(deep).collect::<Vec<_>>().join(" ");
    let events = if has_events { "events/ " } else { "" };
    let files =
        format!("Files in `{}`: results.json log.jsonl {} {events}{models}", folder.display(), pictures.join(" "));
    let Some(first) = rows.first() else { return Ok(files) };
    let prompt = match data.iter().find(|data| data.name == first.corpus).map(|data| data.kind) {
        Some(Kind::Mathematics) => "What is 12 + 30?",
        Some(Kind::Lean) => "theorem ",
        _ => "The ",
    };
    Ok(format!(
        "\n{files}\nLet it speak: {} generate --checkpoint {} --prompt {}",
        program(),
        quoted(&folder.join(&first.folder).to_string_lossy()),
        quoted(prompt)
    ))
}
