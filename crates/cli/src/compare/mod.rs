//! `windlass compare`: runs a command in turns with Windlass and without, and says what differs and what is noise.

mod comparison;
mod counting;
mod family;
mod memory;
mod metric;
mod noise;
mod process;
mod row;
mod schedule;
mod session;
mod table;

use crate::{BadOption, interruption, text};
use anyhow::{Context, Result, bail};
use clap::Args;
use comparison::Comparison;
use metric::Metric;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Options of `windlass compare`.
#[derive(Args)]
#[command(after_help = "\
The runs with Windlass are those of `windlass run`. The runs without have no preload of Windlass: the program loads NCCL as it does \
today. WINDLASS=off is set for them, so that a Windlass which is linked, or named in VLLM_NCCL_SO_PATH, only passes calls on. Every \
other pair begins with the other side.

The table has the median, the lowest and the highest value of each side, and the ratio of each pair, with Windlass over without. \
Below the table stands the rule by which a difference is told from noise. The wall time is that of the command, from its start to its \
end. A metric's figure of a run is the median of the values that the run printed. The GPU memory is the highest value that NVML told, \
for each GPU: of the command's processes, or of the whole GPU where the driver does not name them. Windlass counts calls and bytes, no \
time inside calls.

Exit code: 0: all runs ended with success. 1: a run failed, or printed no figure for a metric; the message names the run. 125: Windlass would not \
take effect. 126, 127: the command cannot be run, or was not found. 130, 143: Ctrl-C or SIGTERM, which also end what the command has started; finished pairs of runs are printed.

Example: windlass compare --runs 5 --warmup --metric 'step (\\S+) ms' --metric-warmup 10 -- torchrun --nproc-per-node 2 train.py")]
pub struct Options {
    /// The number of runs of each side that count, 1 to 30
    #[arg(long = "runs", value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=noise::RUNS_MAX as i64))]
    pairs: u32,
    /// Each side runs once more at the beginning, and these two runs do not count
    #[arg(long)]
    warmup: bool,
    /// A figure that the command prints: a regular expression whose first group is the figure, as in 'step (\S+) ms'. The option may be given several times
    #[arg(long = "metric", value_name = "REGEX", value_parser = metric::parse)]
    metrics: Vec<Metric>,
    /// The number of values of each metric that are skipped at the beginning of each run
    #[arg(long, value_name = "N", default_value_t = 0, requires = "metrics")]
    metric_warmup: usize,
    /// The file for the comparison and the figures of all runs, as one JSON object
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The folder for the output and the counters of each run [default: a new folder in /tmp, which is kept]
    #[arg(long, value_name = "DIR")]
    logs: Option<PathBuf>,
    /// The real NCCL library of the runs with Windlass, as a file or its folder [default: searched, as `windlass doctor` shows]
    #[arg(long, value_name = "PATH", conflicts_with = "simulator")]
    nccl: Option<PathBuf>,
    /// Both sides run on the simulator of GPUs and NCCL, whose times say nothing about GPUs
    #[arg(long = "sim")]
    simulator: bool,
    /// The command to run, with its arguments
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

/// Makes all runs and prints the comparison.
pub fn run(options: &Options) -> Result<u8> {
    let names: BTreeSet<&str> = options.metrics.iter().map(|metric| &*metric.name).collect();
    if names.len() < options.metrics.len() {
        bail!(BadOption(
            "--metric: two patterns have the same name; name their groups apart, as in '(?<step>\\S+)'"
                .into()
        ));
    }
    // Opened before the runs, so that a wrong name fails at once.
    let json = options.json.as_deref().map(create).transpose()?;
    match session::make_runs(options)? {
        session::Made::Finished(None) => {}
        session::Made::Finished(Some(comparison)) => tell(&comparison, options, json)?,
        session::Made::Refused(code) => return Ok(code),
    }
    let Some(signal) = interruption::look() else { return Ok(0) };
    match family::look().len() {
        0 => say!("compare: interrupted; all that the command has started is ended"),
        left => say!("compare: interrupted; {left} processes of the command do not end"),
    }
    Ok(interruption::exit_code(signal))
}

/// Prints the comparison and writes the file that was asked for.
fn tell(comparison: &Comparison, options: &Options, json: Option<File>) -> Result<()> {
    text::print(told(comparison))?;
    if let (Some(mut file), Some(name)) = (json, &options.json) {
        let content = serde_json::to_string_pretty(comparison)? + "\n";
        file.write_all(content.as_bytes()).with_context(|| format!("cannot write {}", name.display()))?;
        say!("compare: wrote {}", name.display());
    }
    Ok(())
}

fn create(file: &Path) -> Result<File> {
    File::create(file).with_context(|| format!("cannot write {}", file.display()))
}

/// The comparison as text for people.
fn told(comparison: &Comparison) -> String {
    let mut out = format!(
        "{} runs of each side in turns; medians (lowest to highest)\n\n{}\n{}\n",
        comparison.request.pairs,
        table::table(&comparison.rows),
        comparison.rule
    );
    for note in &comparison.notes {
        out += &format!("Note: {note}\n");
    }
    out + &table::counters(&comparison.counters)
}
