//! `windlass tune`: up to which sizes Windlass's kernels run collectives faster than NCCL on this machine, as a table for
//! `WINDLASS_TUNING`.
//!
//! The benchmark's ranks time both sides in turn, Windlass with a table that sends all sizes to its kernels. What could be turned
//! round by noise is measured again, and if it stays unclear it is NCCL's.

mod limit;
mod written;

use crate::bench::company::{self, Company};
use crate::bench::measurement::{Plan, measure};
use crate::bench::operation::Operation;
use crate::bench::sizes::Sizes;
use crate::bench::{Cell, CellDone, Memory, Mode};
use crate::element::{SUM, element};
use crate::machine::{Machine, MachineRequest};
use crate::{installation, search, text};
use anyhow::{Context, Result, bail};
use clap::Args;
use limit::Finding;
use nccl_sys::types::ncclFloat32;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use windlass_base::config::nccl::{self, Effect};
use windlass_transport::tuning::Collective;
use windlass_transport::tuning::file::{Key, Multicast, Table};
use written::{Circumstances, Tuned};

/// Options of `windlass tune`.
#[derive(Args)]
pub struct Options {
    /// The numbers of ranks to measure, separated by commas; each rank is a process with a GPU of its own
    #[arg(long, value_delimiter = ',', required = true)]
    ranks: Vec<usize>,
    /// The file for the table; an existing file is overwritten
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// The sizes of the larger buffer in bytes: FIRST:LAST:FACTOR, or a list separated by commas. K, M and G are powers of 1024 [default: 1K:256M:2; 1K:64K:4 on the simulator]
    #[arg(long)]
    sizes: Option<Sizes>,
    /// The number of batches of each side, at least 3; their median counts
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(3..))]
    repeat: u32,
    /// The time for one size of one collective, in seconds, at most 60; it is kept approximately
    #[arg(long, default_value_t = 0.2)]
    seconds: f64,
    /// The number of idle communicators beside the measured one on each side, 0 to 64, as in jobs with several groups
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = company::idle())]
    beside: u32,
    /// The real NCCL library, as a file or its folder [default: searched, as `windlass doctor` shows]
    #[arg(long, value_name = "PATH")]
    nccl: Option<PathBuf>,
    #[command(flatten)]
    request: MachineRequest,
}

/// How often what is unclear is measured again.
const AGAIN_MOST: usize = 3;

const COLLECTIVES: [(Operation, Collective); 7] = [
    (Operation::AllReduce, Collective::AllReduce),
    (Operation::Broadcast, Collective::Broadcast),
    (Operation::Reduce, Collective::Reduce),
    (Operation::AllGather, Collective::AllGather),
    (Operation::ReduceScatter, Collective::ReduceScatter),
    (Operation::UnevenAllGather, Collective::UnevenAllGather),
    (Operation::UnevenReduceScatter, Collective::UnevenReduceScatter),
];

/// Measures, writes the table and says what is in it.
pub fn run(options: &Options) -> Result<()> {
    if !(options.seconds > 0.0 && options.seconds <= 60.0) {
        bail!("--seconds {}: expected more than 0 and at most 60", options.seconds);
    }
    let windlass = installation::windlass_library()?;
    let machine = Machine::prepare(options.request, options.nccl.as_deref(), || {
        search::for_tools(options.nccl.as_deref())
    })?;
    let sizes = options.sizes.clone().map_or_else(|| usual_sizes(&machine), Ok)?;
    let ranks = ranks(options, &machine)?;
    let company = Company { beside: options.beside, busy: 0 }.words();
    eprintln!("tune: ranks {:?} {}{company}", ranks, machine.describe());
    if machine.is_simulated() {
        eprintln!("tune: times on the simulator say nothing about GPUs; only that everything runs");
    }
    // Opened first: a wrong name should not cost the measurements.
    let beside =
        options.out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(beside)
        .with_context(|| format!("cannot write beside {}", options.out.display()))?;
    let (mut tuned, mut nccl_version) = (Vec::new(), 0);
    for ranks in ranks {
        let of_ranks = Tuning { options, machine: &machine, windlass: &windlass, sizes: &sizes, ranks };
        let (cells, version) = of_ranks.run()?;
        tuned.extend(cells);
        nccl_version = version;
    }
    let text = written::table(&Circumstances::of(&machine, nccl_version, options.beside), &tuned);
    let table = Table::parse(&text).context("the table that was made cannot be read")?;
    file.write_all(text.as_bytes())?;
    file.persist(&options.out).with_context(|| format!("cannot write {}", options.out.display()))?;
    text::print(written::summary(&tuned))?;
    text::print(format!(
        "tune: wrote {}, {} cells: WINDLASS_TUNING={}\n",
        options.out.display(),
        table.cells(),
        std::path::absolute(&options.out)?.display()
    ))
}

fn usual_sizes(machine: &Machine) -> Result<Sizes> {
    let text = if machine.is_simulated() { "1K:64K:4" } else { "1K:256M:2" };
    text.parse().map_err(|reason: String| anyhow::anyhow!(reason))
}

/// The numbers of ranks, each once, all of which native collectives know and this machine has devices for.
fn ranks(options: &Options, machine: &Machine) -> Result<Vec<usize>> {
    let mut ranks = options.ranks.clone();
    ranks.sort();
    ranks.dedup();
    for ranks in &ranks {
        machine.ranks(Some(*ranks), *ranks)?;
        if !(2..=windlass_transport::native::RANKS_MAX).contains(ranks) {
            bail!("--ranks {ranks}: expected 2 to {}", windlass_transport::native::RANKS_MAX);
        }
    }
    Ok(ranks)
}

/// The cell of a collective: this machine's devices must be alike.
fn key(machine: &Machine, ranks: usize, collective: Collective) -> Result<Key> {
    let devices = &machine.gpus.devices[..ranks];
    let kind = |device: &crate::asking::Device| (device.compute_capability, device.multiprocessors);
    if let Some(other) = devices.iter().find(|device| kind(device) != kind(&devices[0])) {
        bail!(
            "{ranks} ranks: the devices differ ({}, {}), a table has no cell for that",
            devices[0].name,
            other.name
        );
    }
    let ((major, minor), multiprocessors) = kind(&devices[0]);
    let multicast =
        devices.iter().all(|device| device.multicast) && !nccl::settings().has(Effect::NoMulticast);
    Ok(Key {
        collective,
        ranks,
        capability: u16::try_from(major * 10 + minor)?,
        multiprocessors: u16::try_from(multiprocessors)?,
        multicast: if multicast { Multicast::Yes } else { Multicast::No },
    })
}

/// The measurements of one number of ranks.
struct Tuning<'a> {
    options: &'a Options,
    machine: &'a Machine,
    windlass: &'a Path,
    sizes: &'a Sizes,
    ranks: usize,
}

impl Tuning<'_> {
    /// The cells, and the version of NCCL.
    fn run(&self) -> Result<(Vec<Tuned>, i32)> {
        let keys = COLLECTIVES.map(|(_, collective)| key(self.machine, self.ranks, collective));
        let keys = keys.into_iter().collect::<Result<Vec<Key>>>()?;
        let mut forced = tempfile::NamedTempFile::new().context("cannot make a temporary file")?;
        forced.write_all(written::forced(&keys).as_bytes())?;
        let (modes, element) = ([Mode::Eager, Mode::Graph], element(ncclFloat32));
        let cells: Vec<Cell> = COLLECTIVES
            .iter()
            .flat_map(|(operation, _)| self.sizes.0.iter().map(|bytes| (*operation, *bytes)))
            .flat_map(|(operation, bytes)| modes.map(|mode| Cell { operation, bytes, mode, element }))
            .collect();
        let (mut measured, nccl_version) = self.measure(forced.path(), &cells, "")?;
        if !measured.iter().any(|done| limit::finding(done) != Finding::NotOurs) {
            bail!(
                "{} ranks: Windlass's kernels ran nothing (`windlass doctor` and WINDLASS_LOG=info say why)",
                self.ranks
            );
        }
        for round in 1..=AGAIN_MOST {
            let unclear = unclear(&measured);
            if unclear.is_empty() {
                break;
            }
            eprintln!("tune: {} measurements vary too much to tell, once more", unclear.len());
            let (again, _) = self.measure(forced.path(), &unclear, &format!("again {round}, "))?;
            again.into_iter().for_each(|done| limit::replace(&mut measured, done));
        }
        let tuned = COLLECTIVES.iter().zip(keys).map(|((operation, _), key)| {
            let own = |done: &&CellDone| done.cell.operation == *operation;
            Tuned::of(key, measured.iter().filter(own).cloned().collect())
        });
        Ok((tuned.collect(), nccl_version))
    }

    fn measure(&self, forced: &Path, cells: &[Cell], round: &str) -> Result<(Vec<CellDone>, i32)> {
        let environment =
            [("WINDLASS_TUNING", forced.as_os_str()), ("WINDLASS_COLLECTIVES", "auto".as_ref())]
                .into_iter()
                .chain([("WINDLASS_PEER_GROUPS", "on".as_ref()), ("WINDLASS", "on".as_ref())])
                .map(|(name, value)| (name.into(), value.to_owned()))
                .collect();
        let plan = Plan {
            ranks: self.ranks,
            cells,
            reduction: SUM,
            memory: Memory::Device,
            company: Company { beside: self.options.beside, busy: 0 },
            repeat: self.options.repeat as usize,
            seconds: self.options.seconds,
            // Here what is unclear is, whichever side it favours.
            again: 0,
            inits: 0,
            symmetric: None,
            product: None,
            environment,
        };
        let began = Instant::now();
        let results = measure(self.machine, self.windlass, plan, |done| {
            let count = done.position + 1;
            let left = left(began.elapsed(), count, cells.len());
            eprintln!(
                "tune: {} ranks, {round}{count}/{} {}, {left}",
                self.ranks,
                cells.len(),
                done.describe()
            );
        })?;
        Ok((results.cells, results.nccl_version))
    }
}

/// What is to be measured again, of all collectives.
fn unclear(measured: &[CellDone]) -> Vec<Cell> {
    let of = |operation: Operation| {
        let own: Vec<CellDone> =
            measured.iter().filter(|done| done.cell.operation == operation).cloned().collect();
        limit::again(&own).into_iter()
    };
    COLLECTIVES.iter().flat_map(|(operation, _)| of(*operation)).collect()
}

/// How long it will take, by how long it took.
fn left(took: Duration, count: usize, of: usize) -> String {
    let seconds = (took.as_secs_f64() / count.max(1) as f64 * (of - count.min(of)) as f64).ceil() as u64;
    format!("{}:{:02} left", seconds / 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rest takes as long as what was done did.
    #[test]
    fn time_left() {
        assert_eq!(left(Duration::from_secs(10), 5, 100), "3:10 left");
        assert_eq!(left(Duration::from_secs(10), 10, 10), "0:00 left");
        assert_eq!(left(Duration::ZERO, 0, 10), "0:00 left");
    }
}
