//! `windlass demo`: a training-like mix of calls that move data through Windlass, all data checked on the host, and the
//! counters of Windlass compared with the calls that were made. Below `WINDLASS=off` nothing is counted, and data alone are checked.

mod counters;
mod data;
mod session;
mod steps;
mod worker;

pub use worker::work;

use crate::machine::{Machine, MachineRequest};
use crate::ranks::{self, Launch};
use crate::{counts, installation, interruption, text};
use anyhow::{Context, Result};
use clap::Args;
use counters::Made;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use windlass_base::config::{Switch, parse};
use windlass_base::path::Path;
use windlass_base::stats::closing;
use windlass_base::stats::features::Feature;

/// Options of `windlass demo`.
#[derive(Args)]
pub struct Options {
    /// The number of ranks, each a process with a GPU of its own [default: 4, or one for each GPU if there are fewer]
    #[arg(long)]
    ranks: Option<usize>,
    #[command(flatten)]
    request: MachineRequest,
    /// The real NCCL library, as a file or its folder [default: searched, as `windlass doctor` shows]
    #[arg(long, value_name = "PATH")]
    nccl: Option<PathBuf>,
}

/// What a rank is to do.
#[derive(Serialize, Deserialize)]
struct Job {
    rank: usize,
    ranks: usize,
    windlass: PathBuf,
}

/// What a rank did.
#[derive(Serialize, Deserialize)]
struct Outcome {
    passed: usize,
    failures: Vec<String>,
    made: Made,
}

/// Runs the demo; the answer is whether all checks passed.
pub fn run(options: &Options) -> Result<bool> {
    let started = Instant::now();
    interruption::note()?;
    let windlass = installation::windlass_library()?;
    let machine = Machine::for_tools(options.request, options.nccl.as_deref())?;
    let ranks = machine.ranks(options.ranks, 1, 4)?;
    say!("demo: {ranks} ranks {}", machine.describe());
    say!("demo: Windlass {}", windlass.display());
    if std::env::var_os("WINDLASS_REPORT").is_some() {
        say!("demo: WINDLASS_REPORT is ignored: each rank's report goes into the table below");
    }

    let is_off = parse(std::env::vars_os()).startup.windlass == Switch::Off;
    let reports =
        tempfile::Builder::new().prefix("windlass-demo-").tempdir().context("cannot make a folder")?;
    let report = |rank: usize| reports.path().join(format!("{rank}.json"));
    let launch = Launch {
        subcommand: super::DEMO_RANK,
        ranks,
        environment: machine.environment(),
        // Calls that do not wait are none of what runs here.
        without: |name| name == "NCCL_COMM_BLOCKING",
        silence: Duration::from_secs(120),
        deadline: None,
    };
    let job = |rank| Job { rank, ranks, windlass: windlass.clone() };
    let own = |rank| vec![("WINDLASS_REPORT".into(), counts::report_to(&report(rank)))];
    let outcomes: Vec<Outcome> = ranks::run(&launch, job, own, |rank, text: String| {
        if rank == 0 {
            say!("demo: {text}");
        }
    })?;

    let mut passed = 0;
    let mut failures = Vec::new();
    let mut all = Vec::new();
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let report = (!is_off).then(|| counts::read(&report(rank)));
        let compared = match &report {
            None => Vec::new(),
            Some(Ok(report)) => counters::compare(&outcome.made, report),
            Some(Err(error)) => vec![Err(format!("{error:#}"))],
        };
        passed += outcome.passed + compared.iter().filter(|line| line.is_ok()).count();
        let failed = outcome.failures.into_iter().chain(compared.into_iter().filter_map(Result::err));
        failures.extend(failed.map(|failure| format!("rank {rank}: {failure}")));
        all.extend(report.and_then(Result::ok));
    }
    if is_off {
        text::print("demo: WINDLASS=off is set: NCCL ran all calls, and none is counted (unset WINDLASS)\n")?;
    } else {
        text::print(counters::table(&all))?;
    }
    let lacks =
        all.iter().flat_map(|one| &one.communicators).find_map(|one| one.lacks.get(Feature::Native.name()));
    lacks.into_iter().try_for_each(|why| text::print(format!("demo: no native collectives: {why}\n")))?;
    if !all.is_empty() {
        text::print(format!("demo: {}\n", closing::line(&all)))?;
    }
    for failure in &failures {
        text::print(format!("FAILED {failure}\n"))?;
    }
    say!("demo: {:.1} s", started.elapsed().as_secs_f64());
    text::print(format!("demo: {passed} checks passed, {} failed\n", failures.len()))?;
    if failures.is_empty() && !is_off {
        let ours = [Path::Native.name(), Path::P2p.name()];
        let has_run = all.iter().any(|one| one.paths().keys().any(|path| ours.contains(path)));
        let sim = if machine.is_simulated() { " --sim" } else { "" };
        if has_run {
            say!("demo: next: windlass run{sim} -- your program");
        } else if ranks > 1 {
            say!("demo: next: windlass doctor{sim} says what stands in the way");
        }
    }
    Ok(failures.is_empty())
}
