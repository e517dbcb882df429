//! `windlass explain`: which path calls took, or would take, and by which rule.

use crate::machine::{Machine, MachineRequest};
use crate::tune::held;
use crate::{BadOption, asking, interruption, stats, text};
use anyhow::{Context, Result, bail};
use clap::Args;
use std::path::PathBuf;
use windlass_base::config::{self, nccl};
use windlass_base::stats::report::size;
use windlass_base::stats::snapshot::{CallCounts, Snapshot};
use windlass_base::stats::why::why;
use windlass_transport::tuning::Collective;

/// Options of `windlass explain`.
#[derive(Args)]
pub struct Options {
    /// The id of a process, whose calls are explained
    #[arg(value_parser = stats::process_id, conflicts_with_all = ["op", "bytes", "ranks", "nccl", "simulator", "gpu"])]
    process: Option<u32>,
    /// A collective of sums or copies of usual types, as `windlass tune --show` names it
    #[arg(long, required_unless_present = "process", value_parser = op)]
    op: Option<String>,
    /// The size of its larger buffer, such as 64K or 1M
    #[arg(long, value_parser = crate::bench::sizes::bytes, required_unless_present = "process", allow_hyphen_values = true)]
    bytes: Option<u64>,
    /// The number of ranks, all on this machine
    #[arg(long, required_unless_present = "process")]
    ranks: Option<usize>,
    /// The real NCCL library, as a file or its folder [default: searched, as `windlass doctor` shows]
    #[arg(long, value_name = "PATH")]
    nccl: Option<PathBuf>,
    #[command(flatten)]
    request: MachineRequest,
}

fn op(text: &str) -> Result<String, String> {
    let names = Collective::ALL.map(Collective::name);
    if names.contains(&text) { Ok(text.into()) } else { Err(format!("expected one of {}", names.join(", "))) }
}

/// Prints a line for each kind of call of the process, or one for the call that the options describe.
pub fn run(options: &Options) -> Result<()> {
    match (options.process, &options.op, options.bytes, options.ranks) {
        (Some(process), ..) => {
            let snapshots = stats::of_process(process)?;
            text::print(snapshots.iter().map(of_process).collect::<String>())
        }
        (_, Some(op), Some(bytes), Some(ranks)) => text::print(of_call(options, op, bytes, ranks)? + "\n"),
        _ => bail!(BadOption("expected a process, or --op, --bytes and --ranks".into())),
    }
}

fn of_process(snapshot: &Snapshot) -> String {
    let mut text = format!("process {}, {}\n", snapshot.process, snapshot.program);
    for one in &snapshot.communicators {
        text +=
            &format!("\ncommunicator {}: rank {} of {}, {}\n", one.serial, one.rank, one.ranks, one.state);
        let row = |calls: &CallCounts| {
            let CallCounts { function, path, calls: count, bytes, .. } = calls;
            vec![function.clone(), path.clone(), count.to_string(), size(*bytes), why(calls, one)]
        };
        text += &text::table(&[], one.calls.iter().map(row), &[2, 3]);
    }
    text
}

fn of_call(options: &Options, op: &str, bytes: u64, ranks: usize) -> Result<String> {
    interruption::note()?;
    let machine = Machine::gpus_unless_asked(options.request, options.nccl.as_deref())?;
    machine.ranks(Some(ranks), 2, 2)?;
    let call = format!("{op} of {} over {ranks} ranks", text::size(bytes));
    let version = asking::nccl_version(&machine.nccl)?;
    let config = config::parse(std::env::vars_os()).config;
    let library_path = machine.library_path();
    let held = held(&machine.nccl, version, &config, &[ranks], library_path.as_deref())?;
    let limit = held.limits.iter().find(|limit| limit.collective == op).context("there is no such limit")?;
    if let Some(found) = nccl::found(version).into_iter().find(|found| found.effect.leaves_all_to_nccl()) {
        return Ok(format!("{call}: NCCL, because {found}"));
    }
    let path =
        if limit.bytes_max.is_some_and(|most| bytes <= most) { "a kernel of Windlass" } else { "NCCL" };
    let up_to = limit.bytes_max.map_or("none".into(), text::size);
    Ok(format!("{call}: {path}; the limit is {up_to} ({})", limit.source.name()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::tests::snapshot;

    /// Every row of a process has its path and the reason.
    #[test]
    fn processes() {
        let text = of_process(&snapshot(&[("ncclSend", "p2p", 2, 1024), ("ncclAllReduce", "native", 1, 8)]));
        let words = [
            "ncclSend       p2p     2  1.0 KiB  kernels of Windlass moved them",
            "ncclAllReduce  native  1      8 B  a kernel of",
        ];
        assert!(words.iter().all(|words| text.contains(words)), "{text}");
    }
}
