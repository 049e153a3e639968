//! `kumiki bench`.

use std::time::Duration;

use kumiki::ops::{BenchCase, Roofline, bench_cases, op_cases, simd};
use kumiki::tensor::{DType, threads};
use kumiki_train::bench::{StepBench, StepTiming, product_seconds};
use kumiki_train::run::Machine;
use kumiki_train::suggest::unknown;
use kumiki_train::{Error, Result};
use serde_json::json;

use crate::gradcheck::check_filter;
use crate::output::{in_pool, json, line};
use crate::scaling::Scaling;
use crate::table::count;

/// Measure speed on this machine
#[derive(clap::Subcommand)]
pub enum Command {
    Roofline(Limits),
    Ops(Ops),
    Gemm(Gemm),
    Step(Step),
    Scaling(Scaling),
}

impl Command {
    pub fn run(self) -> Result<()> {
        match self {
            Command::Roofline(args) => args.run(),
            Command::Ops(args) => in_pool(|| args.run()),
            Command::Gemm(args) => args.run(),
            Command::Step(args) => args.run(),
            Command::Scaling(args) => in_pool(|| args.run()),
        }
    }
}

/// Measure what this machine can do at best: memory bandwidth and matrix products, on one thread and on all
///
/// The bandwidth is that of `a = b + s c` over arrays far larger than the caches; the products are of 2048 x 2048 numbers,
/// f32, and bf16 summed in f32.
#[derive(clap::Args)]
pub struct Limits {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Limits {
    fn run(self) -> Result<()> {
        let machine = in_pool(|| Ok(Machine::here()))?;
        let counts = if machine.threads == 1 { vec![1] } else { vec![1, machine.threads] };
        let mut rows = Vec::new();
        for threads in counts {
            let limits = threads::try_with_threads(threads, Roofline::measure).map_err(Error::new)?;
            rows.push((threads, limits));
        }
        if self.json {
            let rows: Vec<_> = rows
                .iter()
                .map(|(threads, limits)| {
                    json!({
                        "threads": threads, "triad_gb_s": limits.bandwidth / 1e9, "gemm_f32_gflop_s": limits.gemm / 1e9,
                        "gemm_bf16_gflop_s": limits.gemm_bf16 / 1e9,
                    })
                })
                .collect();
            return json(&json!({"machine": machine, "limits": rows}));
        }
        line(&format!("{} on {} {}", machine.simd, machine.os, machine.arch))?;
        line("threads  triad GB/s  f32 GFLOP/s  bf16 GFLOP/s")?;
        for (threads, limits) in rows {
            let [triad, f32, bf16] = [limits.bandwidth, limits.gemm, limits.gemm_bf16].map(|x| x / 1e9);
            line(&format!("{threads:>7}  {triad:>10.1}  {f32:>11.0}  {bf16:>12.0}"))?;
        }
        Ok(())
    }
}

/// Time every operator, next to what this machine could do at best
///
/// Memory bandwidth and the rate of matrix products are measured first. An operator's percentage is the least time that
/// its bytes and operations need by these, over the time it takes. An operator whose gradient check fails gets no number.
/// The same done in another way stands below an operator, timed in turn with it on the same inputs.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki bench ops
  kumiki bench ops --filter attention
  KUMIKI_THREADS=1 kumiki bench ops --json")]
pub struct Ops {
    /// Only operators whose name contains this
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    filter: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Ops {
    fn run(self) -> Result<()> {
        let (mut cases, checks) = (bench_cases(), op_cases());
        check_filter("operator", &self.filter, &cases.iter().map(|case| case.name).collect::<Vec<_>>())?;
        cases.retain(|case| case.name.contains(&self.filter));
        let roofline = Roofline::measure();
        let (triad, gemm) = (roofline.bandwidth / 1e9, roofline.gemm / 1e9);
        let machine = Machine::here();
        let width = cases.iter().map(|case| case.name.len()).max().unwrap_or(0).max(8);
        if !self.json {
            line(&format!(
                "{}, {}: triad {triad:.1} GB/s, matrix product {gemm:.0} GFLOP/s",
                count(machine.threads as u64, "thread"),
                machine.simd
            ))?;
            line(&format!("{:<width$}  forward ms  with backward ms     GB/s  GFLOP/s  roofline  inputs", "operator"))?;
        }
        let (mut rows, mut refused) = (Vec::new(), Vec::new());
        for cases in cases.chunk_by(|a, b| b.is_beside(a)) {
            let shapes: Vec<String> = cases[0].inputs.iter().map(|(name, shape)| format!("{name} {shape:?}")).collect();
            let shapes = shapes.join(", ");
            if let Some(reason) = cases[0].refused(&checks) {
                for case in cases {
                    refused.push(case.name);
                    match self.json {
                        true => rows.push(json!({"name": case.name, "inputs": shapes, "refused": reason})),
                        false => line(&format!("{:<width$}  no number: {reason}", case.name))?,
                    }
                }
                continue;
            }
            let times = BenchCase::time_in_turn(cases);
            for (case, time) in cases.iter().zip(&times) {
                let (forward, both) = (1e3 * time.forward, 1e3 * time.both);
                let (gb, gflop) = (case.bytes as f64 / time.forward / 1e9, case.flops as f64 / time.forward / 1e9);
                let percent = 100.0 * roofline.least_seconds(case.bytes, case.flops) / time.forward;
                // Of the operator itself, for the same done otherwise.
                let ratios = (case.name != case.operator() && cases[0].name == case.operator())
                    .then(|| (time.forward / times[0].forward, time.both / times[0].both));
                if self.json {
                    let mut row = json!({
                        "name": case.name, "inputs": shapes, "forward_ms": forward, "forward_backward_ms": both, "gb_s": gb,
                        "gflop_s": gflop, "roofline_percent": percent,
                    });
                    if let Some((forward, both)) = ratios {
                        row["times_as_long"] =
                            json!({"as": case.operator(), "forward": forward, "forward_backward": both});
                    }
                    rows.push(row);
                    continue;
                }
                let what = match ratios {
                    Some((forward, both)) => {
                        format!("{forward:.2} and {both:.2} times as long as {}", case.operator())
                    }
                    None => shapes.clone(),
                };
                line(&format!(
                    "{:<width$}  {forward:>10.3}  {both:>16.3}  {gb:>7.1}  {gflop:>7.1}  {percent:>6.0} %  {what}",
                    case.name
                ))?;
            }
        }
        if self.json {
            json(&json!({"machine": machine, "triad_gb_s": triad, "gemm_gflop_s": gemm, "operators": rows}))?;
        }
        if !refused.is_empty() {
            return Err(Error::new(format!("no number for {}: see above", refused.join(", "))));
        }
        Ok(())
    }
}

/// As given, or as configured.
fn thread_count(given: Option<usize>) -> Result<usize> {
    let count = given.map_or_else(|| threads::configured_threads().map_err(Error::new), Ok)?;
    let most = threads::MAX_THREADS;
    if !(1..=most).contains(&count) {
        return Err(Error::new(format!("--threads must be from 1 to {most}, found {count}")));
    }
    Ok(count)
}

/// Time one matrix product of random numbers, C[m, n] = A[m, k] B[k, n]
///
/// The median of several is printed as one line of JSON.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki bench gemm 2048 512 2048
  kumiki bench gemm 2048 2048 2048 --dtype bf16 --threads 1")]
pub struct Gemm {
    /// Rows of A and C
    m: usize,
    /// Columns of B and C
    n: usize,
    /// Columns of A, rows of B
    k: usize,
    /// f32, or bf16 (summed and written in f32)
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    dtype: String,
    /// Threads; all of them without it
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

impl Gemm {
    fn run(self) -> Result<()> {
        let narrow = match self.dtype.as_str() {
            "f32" => false,
            "bf16" => true,
            other => return Err(Error::new(unknown("dtype", other, &["f32", "bf16"]))),
        };
        let shape = [self.m, self.n, self.k];
        let most = shape.iter().try_fold(1usize, |size, &n| size.checked_mul(n.max(1)));
        if shape.contains(&0) || shape.iter().any(|&n| n > 1 << 20) || most.is_none_or(|most| most > 1 << 40) {
            let [m, n, k] = shape;
            return Err(Error::new(format!(
                "m, n and k must be at least 1 and at most {}, and m n k at most {}, found {m}, {n} and {k}",
                1 << 20,
                1u64 << 40
            )));
        }
        let threads = thread_count(self.threads)?;
        let measure = || product_seconds(shape, narrow);
        let seconds = threads::try_with_threads(threads, measure).map_err(Error::new)??;
        let work = 2.0 * self.m as f64 * self.n as f64 * self.k as f64;
        json(&json!({
            "m": self.m, "n": self.n, "k": self.k, "dtype": self.dtype, "threads": threads,
            "simd": simd::level().to_string(),
            "ms": seconds * 1e3, "gflop_s": work / seconds / 1e9,
        }))
    }
}

/// Time one training step: forward, backward, clipping, AdamW
///
/// Two steps warm up, the median of the others is printed as one line of JSON. Tokens are random.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  kumiki bench step
  kumiki bench step --model transformer --seq 2048 --batch 1 --threads 1 --steps 9")]
pub struct Step {
    /// Print JSON (it always does; accepted so that both benches can be called alike)
    #[arg(long, hide = true)]
    json: bool,
    /// tango, wango or transformer, all tied; gau or flash, not tied, with queries and keys of 64; cem, not tied, of two
    /// steps with a shared diagonal and a preconditioner of rank 4
    #[arg(long, value_name = "NAME", default_value = "tango")]
    model: String,
    /// f32, bf16 (products with weights in bf16, all else in f32) or f64
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    dtype: String,
    /// Model width D
    #[arg(long, value_name = "N", default_value_t = 256, allow_negative_numbers = true)]
    d_model: usize,
    /// Key width of the heads of tango, wango and cem
    #[arg(long, value_name = "N", default_value_t = 32, allow_negative_numbers = true)]
    head_dim: usize,
    /// Heads, but of gau and flash
    #[arg(long, value_name = "N", default_value_t = 8, allow_negative_numbers = true)]
    heads: usize,
    /// Sequence length T
    #[arg(long, value_name = "N", default_value_t = 512, allow_negative_numbers = true)]
    seq: usize,
    /// Rows of a batch
    #[arg(long, value_name = "N", default_value_t = 4, allow_negative_numbers = true)]
    batch: usize,
    /// Token ids
    #[arg(long, value_name = "N", default_value_t = 256, allow_negative_numbers = true)]
    vocab: usize,
    /// Block applications L
    #[arg(long, value_name = "N", default_value_t = 4, allow_negative_numbers = true)]
    applications: usize,
    /// Parameters of the block, roughly
    #[arg(long, value_name = "N", default_value_t = 5e6, allow_hyphen_values = true)]
    params: f64,
    /// Window of wango
    #[arg(long, value_name = "N", default_value_t = 64, allow_negative_numbers = true)]
    window: usize,
    /// Chunk of flash
    #[arg(long, value_name = "N", default_value_t = 64, allow_negative_numbers = true)]
    chunk: usize,
    /// Threads [default: KUMIKI_THREADS, else all cores]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    threads: Option<usize>,
    /// Steps to time
    #[arg(long, value_name = "N", default_value_t = 5, allow_negative_numbers = true)]
    steps: usize,
    /// Print the time of every operator first, and what it keeps for its backward
    #[arg(long)]
    profile: bool,
}

/// The largest resident size of this process so far, in MiB, where the system tells.
fn peak_rss_mb() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib / 1024)
}

/// Milliseconds of a step, operator by operator.
fn print_profile(timing: &StepTiming, steps: usize) -> Result<()> {
    let ms = |time: Duration| 1e3 * time.as_secs_f64() / steps as f64;
    let whole: f64 = timing.profile.iter().map(|(_, cost)| ms(cost.forward + cost.backward)).sum();
    line(&format!("{:<28} calls  forward ms  backward ms  share  saved MiB", "operator"))?;
    for (name, cost) in &timing.profile {
        let (forward, backward) = (ms(cost.forward), ms(cost.backward));
        let (share, saved) = (100.0 * (forward + backward) / whole, cost.saved as f64 / steps as f64 / 1048576.0);
        let calls = cost.calls / steps;
        line(&format!("{name:<28} {calls:>5}  {forward:>10.2}  {backward:>11.2}  {share:>3.0} %  {saved:>9.1}"))?;
    }
    line(&format!("{:<28}        all {whole:.1} ms of a step of {:.1} ms", "", 1e3 * timing.seconds))
}

impl Step {
    fn run(self) -> Result<()> {
        let dtype = match self.dtype.as_str() {
            "f32" => DType::F32,
            "f64" => DType::F64,
            "bf16" => DType::BF16,
            other => return Err(Error::new(unknown("dtype", other, &["f32", "bf16", "f64"]))),
        };
        let count = thread_count(self.threads)?;
        // The largest count that a setting `params` may have, too.
        let most = (1u64 << 40) as f64;
        if !(self.params >= 1.0 && self.params <= most) {
            return Err(Error::new(format!("--params must be a number from 1 to {most}, found {:?}", self.params)));
        }
        let Step { model, d_model, head_dim, heads, window, chunk, seq, batch, vocab, applications, steps, .. } = self;
        let params = self.params as usize;
        let bench = StepBench {
            model,
            dtype,
            d_model,
            head_dim,
            heads,
            window,
            chunk,
            seq,
            batch,
            vocab,
            applications,
            params,
            steps,
        };
        let timing = threads::try_with_threads(count, || bench.run(self.profile)).map_err(Error::new)??;
        if self.profile {
            print_profile(&timing, bench.steps)?;
        }
        json(&json!({
            "engine": concat!("kumiki ", env!("CARGO_PKG_VERSION")), "model": bench.model, "dtype": self.dtype,
            "params": timing.params, "step_ms": (timing.seconds * 1e4).round() / 10.0, "tok_s": timing.tok_s.round() as u64,
            "peak_rss_mb": peak_rss_mb(), "threads": count, "simd": simd::level().to_string(),
        }))
    }
}
