//! The `kumiki` command: arguments to calls, nothing else.

mod ablate;
mod bench;
mod cem;
mod checkpoint;
mod compare;
mod config;
mod data;
mod data_progress;
mod eval;
#[cfg(feature = "report")]
mod export;
mod generate;
mod gp;
mod gradcheck;
mod inference;
mod interrupt;
mod macs;
mod mup;
mod options;
mod output;
#[cfg(feature = "report")]
mod page;
mod prefix;
mod progress;
mod report;
mod run;
mod scaling;
mod scaling_fit;
mod scaling_run;
mod setting_options;
mod sources;
mod table;
mod train;
mod writing;

use std::error::Error as _;
use std::io;
use std::num::ParseIntError;
use std::process::ExitCode;

use clap::error::ContextKind;
use clap::{Parser, Subcommand, ValueEnum};
use kumiki::{gpu, ops::simd, tensor::threads};
use kumiki_train::{Error, Result};

/// A tensor engine written from scratch, and the architectures of three 2026 papers on top of it
///
/// kumiki trains small language models on your processor and compares architectures under equal conditions: the same
/// parameters, the same batches in the same order, the same seed and schedule. Start with `kumiki compare tango`.
#[derive(Parser)]
#[command(name = "kumiki", version, subcommand_required = true, arg_required_else_help = true)]
// Of an option given twice the last counts, so that an alias or a script can be corrected at its end.
#[command(args_override_self = true, max_term_width = 110, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Where to compute
    #[arg(long, global = true, value_enum, default_value_t = Device::Cpu)]
    device: Device,
}

const EXAMPLES: &str = "\
Examples:
  kumiki compare tango --models tango,recurrent
                                         two architectures on generated mathematics, minutes
  kumiki compare tango --preset nano     all architectures, small, in seconds
  kumiki compare tango --data book.txt   on a text of yours
  kumiki data prepare books/ --out books-bytes
                                         many texts as tokens, for --data books-bytes
  kumiki config show --preset small      all settings, as a file for --config
  kumiki generate --checkpoint runs/compare-tango-tiny-0/tango --prompt 'What is 12 + 30?'
  kumiki report runs/mine runs/other     runs as a page with curves and tables
  kumiki gp                              functions inferred from their points
  kumiki scaling run --dry-run           what a grid for scaling laws would cost
  kumiki gradcheck                       is every gradient right?
  kumiki bench ops                       how fast is every operator on this machine?

`kumiki COMMAND --help` explains every option of a command.
KUMIKI_THREADS sets the number of threads; results do not depend on it.
KUMIKI_SIMD=portable|avx2|avx512|amx chooses the instructions, which round differently.";

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Device {
    /// The processor
    Cpu,
    /// An NVIDIA card; no command runs there yet
    Cuda,
}

#[derive(Subcommand)]
enum Command {
    Compare(compare::Args),
    Train(train::Args),
    Ablate(ablate::Args),
    #[command(subcommand)]
    Config(config::Command),
    #[command(subcommand)]
    Data(data::Command),
    Gp(gp::Args),
    Eval(eval::Args),
    #[cfg(feature = "report")]
    Report(page::Args),
    #[cfg(feature = "report")]
    Export(export::Args),
    Generate(generate::Args),
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    #[command(subcommand)]
    Prefix(prefix::Command),
    Inference(inference::Args),
    Macs(macs::Args),
    #[command(subcommand)]
    Cem(cem::Command),
    #[command(subcommand)]
    Mup(mup::Command),
    #[command(subcommand)]
    Scaling(scaling_fit::Command),
    Gradcheck(gradcheck::Args),
    #[command(subcommand)]
    Bench(bench::Command),
}

fn run(cli: Cli) -> Result<()> {
    if cli.device == Device::Cuda {
        gpu::availability().map_err(|error| Error::new(error.to_string()))?;
        let one = "cuda:0 is there, but no command runs on it yet: only operators do (docs/gpu.md); use --device cpu";
        return Err(Error::new(one));
    }
    // Asked for before anything runs: in the middle of it a wrong value could only be a panic.
    threads::configured_threads().map_err(Error::new)?;
    simd::configured_level().map_err(Error::new)?;
    match cli.command {
        Command::Compare(args) => args.run(),
        Command::Train(args) => args.run(),
        Command::Ablate(args) => args.run(),
        Command::Config(command) => command.run(),
        Command::Data(command) => command.run(),
        Command::Gp(args) => args.run(),
        Command::Eval(args) => args.run(),
        #[cfg(feature = "report")]
        Command::Report(args) => args.run(),
        #[cfg(feature = "report")]
        Command::Export(args) => args.run(),
        Command::Generate(args) => args.run(),
        Command::Checkpoint(command) => command.run(),
        Command::Prefix(command) => command.run(),
        Command::Inference(args) => args.run(),
        Command::Macs(args) => args.run(),
        Command::Cem(command) => command.run(),
        Command::Mup(command) => command.run(),
        Command::Scaling(command) => command.run(),
        Command::Gradcheck(args) => args.run(),
        Command::Bench(command) => command.run(),
    }
}

/// The range, where a value is no whole number that fits: the parsers of numbers say `invalid digit` to all of them.
fn whole_number(error: &clap::Error) -> Option<String> {
    error.source()?.downcast_ref::<ParseIntError>()?;
    let [arg, value] = [ContextKind::InvalidArg, ContextKind::InvalidValue].map(|kind| error.get(kind));
    let most = u64::MAX;
    Some(format!("invalid value '{}' for '{}': expected a whole number from 0 to {most}", value?, arg?))
}

fn parsed() -> Cli {
    Cli::try_parse().unwrap_or_else(|error| {
        let Some(sentence) = whole_number(&error) else { error.exit() };
        output::remark(&format!("error: {sentence}\n\nFor more information, try '--help'."));
        std::process::exit(2)
    })
}

fn main() -> ExitCode {
    let Err(error) = run(parsed()) else {
        return if interrupt::was_obeyed() { interrupt::CODE.into() } else { ExitCode::SUCCESS };
    };
    // Whoever reads our output has seen enough (`| head`): that is no failure.
    let closed = |e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe;
    if error.source().and_then(|e| e.downcast_ref()).is_some_and(closed) {
        return ExitCode::SUCCESS;
    }
    output::remark(&format!("kumiki: {error}"));
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser as _};

    #[test]
    fn the_definition_of_the_arguments_is_consistent() {
        super::Cli::command().debug_assert();
    }

    /// Lines of tables and examples that clap would wrap lose their columns.
    #[test]
    fn hand_set_lines_are_short() {
        let mut commands = vec![super::Cli::command()];
        while let Some(command) = commands.pop() {
            let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            for line in text.lines() {
                assert!(line.chars().count() <= 96, "{}: {} letters: {line}", command.get_name(), line.chars().count());
            }
            commands.extend(command.get_subcommands().cloned());
        }
    }

    #[test]
    fn what_is_no_whole_number_is_answered_with_the_range() {
        for (args, option) in [
            (&["compare", "tango", "--steps", "-1"][..], "--steps <N>"),
            (&["compare", "tango", "--heads", "many"], "--heads <N>"),
            (&["compare", "tango", "--seeds", "1,-2"], "--seeds <N,M>"),
            (&["gp", "--points", "99999999999999999999"], "--points <N>"),
            (&["macs", "--blocks", "2,-4"], "--blocks <N,N>"),
            (&["generate", "--checkpoint", "x", "--prompt", "a", "--top-k", "-1"], "--top-k <K>"),
            (&["bench", "step", "--threads", "1.5"], "--threads <N>"),
        ] {
            let all = ["kumiki"].iter().chain(args);
            let Err(error) = super::Cli::try_parse_from(all) else { panic!("{args:?}") };
            let sentence = super::whole_number(&error).unwrap_or_else(|| panic!("{args:?}: {error}"));
            let end = format!("for '{option}': expected a whole number from 0 to 18446744073709551615");
            assert!(sentence.starts_with("invalid value '") && sentence.ends_with(&end), "{sentence}");
        }
    }
}
