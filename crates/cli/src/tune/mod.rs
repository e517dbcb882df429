//! `windlass tune`: measures up to which sizes Windlass's kernels run collectives faster than NCCL on this machine. The limits are kept in
//! the cache and, if asked for, in a table for `WINDLASS_TUNING`.
//!
//! The ranks time both sides in turns; Windlass has a table that sends all sizes to its kernels. Sizes that noise could decide are
//! measured again, and are NCCL's if they stay unclear.

mod show;

pub use show::{Limit, file_of, held};

use crate::bench::adaptive::{Effort, Group, What};
use crate::bench::company::{self, Company};
use crate::bench::sizes::Sizes;
use crate::bench::{Common, circumstances, plot};
use crate::calibrate::stamp::Stamp;
use crate::element::SUM;
use crate::limits::measure::{OfRanks, measure, usual_sizes};
use crate::limits::search::{Grid, REGISTERED};
use crate::limits::store::{Folder, Kept};
use crate::limits::written;
use crate::machine::{Machine, MachineRequest};
use crate::{BadOption, installation, interruption, text};
use anyhow::{Context, Result, bail};
use clap::Args;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;
use windlass_base::config::{self, Cache, Config};
use windlass_transport::native::RANKS_MAX;
use windlass_transport::tuning::file::Table;

/// Options of `windlass tune`.
#[derive(Args)]
#[command(after_help = "\
The limits are kept in the folder of WINDLASS_CACHE, by default ~/.cache/windlass, where every process that runs over Windlass finds them. \
On the simulator they are kept only if WINDLASS_CACHE names a folder.")]
pub struct Options {
    /// The numbers of ranks to measure, separated by commas; each rank is a process with a GPU of its own [default: 2 to 8, as far as there are GPUs]
    #[arg(long, value_delimiter = ',', value_parser = number)]
    ranks: Vec<usize>,
    /// A file for the limits as a table too, for WINDLASS_TUNING; an existing file is overwritten
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// What `windlass run` measures before its first command: a coarse grid within about 5 seconds
    #[arg(long, conflicts_with_all = ["sizes", "repeat", "seconds", "beside"])]
    quick: bool,
    /// Nothing is measured: the limits that hold on this machine are printed, with where each comes from
    #[arg(long, conflicts_with_all = ["quick", "out", "sizes", "repeat", "seconds", "beside"])]
    show: bool,
    /// The limits are printed as one JSON object
    #[arg(long, requires = "show")]
    json: bool,
    /// The folder into which curves of what was measured are drawn, as SVG files, in a folder for each number of ranks
    #[arg(long, value_name = "DIR", conflicts_with = "show")]
    plot: Option<PathBuf>,
    /// The sizes of the larger buffer in bytes: FIRST:LAST:FACTOR, or a list separated by commas. K, M and G are powers of 1024 [default: 1K:256M:2; 1K:64K:2 on the simulator]
    #[arg(long)]
    sizes: Option<Sizes>,
    /// The number of pairs of batches, at least 5
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(5..))]
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

fn number(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "expected whole numbers of ranks, separated by commas, as 2,4".into())
}

/// How often an unclear size is measured again.
const AGAIN_MOST: usize = 3;

/// Measures, keeps the limits and prints them.
pub fn run(options: &Options) -> Result<()> {
    if !(options.seconds > 0.0 && options.seconds <= 60.0) {
        bail!(BadOption(format!("--seconds {}: expected more than 0 and at most 60", options.seconds)));
    }
    interruption::note()?;
    let windlass = installation::windlass_library()?;
    let machine = Machine::gpus_unless_asked(options.request, options.nccl.as_deref())?;
    let numbers = numbers(options, &machine)?;
    let config = config::parse(std::env::vars_os()).config;
    if options.show {
        return show::run(&machine, &config, &numbers, options.json);
    }
    let efforts = efforts(options, &machine, numbers.clone());
    let beside = if options.quick { 0 } else { options.beside };
    let company = Company { beside, busy: 0 }.words();
    say!("tune: ranks {numbers:?} {}{company}", machine.describe());
    if machine.is_simulated() {
        say!("tune: times on the simulator say nothing about GPUs; only that everything runs");
    }
    // Opened before the measurements, so that a wrong name fails at once.
    let file = options.out.as_deref().map(beside_of).transpose()?;
    let kept = keeping(options, &machine, &config)?;
    let mut all: Vec<OfRanks> = Vec::new();
    // Unclear sizes are measured again, so there may be more.
    let (began, expected, mut seen) = (Instant::now(), efforts.iter().map(expected).sum(), 0);
    for effort in &efforts {
        let found = measure(&machine, &windlass, effort, None, |ranks, done| {
            seen += 1;
            let left = text::left(began, seen, expected);
            say!("tune: {ranks} ranks, {}. {}{left}", done.position + 1, done.describe());
        });
        let found = match found {
            // What was measured before is kept and told.
            Err(_) if interruption::look().is_some() && !all.is_empty() => break,
            found => found?,
        };
        for found in found {
            if found.what == What::Native && !found.is_native {
                bail!(
                    "{} ranks: Windlass's kernels ran nothing (`windlass doctor` and WINDLASS_LOG=info say why)",
                    found.group.ranks
                );
            }
            if let Some((folder, _)) = &kept {
                folder.keep(&found, if options.quick { "tune --quick" } else { "tune" }, Kept::IsReplaced)?;
            }
            all.push(found);
        }
    }
    text::print(written::summary(&all))?;
    interruption::check()?;
    if let Some(folder) = &options.plot {
        all.iter().try_for_each(|found| draw(folder, &machine, &efforts[0], found))?;
    }
    if let Some((folder, _)) = &kept {
        stamp(folder, &machine, &windlass, &all)?;
        text::print(format!("tune: kept in {}\n", folder.path().display()))?;
    }
    if let (Some(file), Some(name)) = (file, &options.out) {
        let version = all.first().map_or(0, |found| found.group.nccl_version);
        write_table(file, name, &written::table(&circumstances(&machine, version), beside, &all))?;
    }
    Ok(())
}

/// A temporary file in the folder of the file that is to be written.
fn beside_of(out: &Path) -> Result<tempfile::NamedTempFile> {
    let beside = out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    tempfile::NamedTempFile::new_in(beside).with_context(|| format!("cannot write beside {}", out.display()))
}

fn write_table(mut file: tempfile::NamedTempFile, out: &Path, table: &str) -> Result<()> {
    let cells = Table::parse(table).context("the table that was made cannot be read")?.cells();
    file.write_all(table.as_bytes())?;
    file.persist(out).with_context(|| format!("cannot write {}", out.display()))?;
    text::print(format!(
        "tune: wrote {}, {cells} cells: WINDLASS_TUNING={}\n",
        out.display(),
        std::path::absolute(out)?.display()
    ))
}

/// The folder for the limits, locked; none if they are not kept, which makes sense only with a file.
fn keeping(options: &Options, machine: &Machine, config: &Config) -> Result<Option<(Folder, File)>> {
    // Limits of the simulator would hold for all programs that run on it.
    if machine.is_simulated() && !matches!(config.cache, Cache::Folder(_)) {
        return Ok(None);
    }
    let prepared = Folder::of(config).and_then(|folder| {
        folder.iter().try_for_each(Folder::prepare)?;
        Ok(folder)
    });
    match prepared {
        Ok(None) if options.out.is_none() => {
            bail!("WINDLASS_CACHE=off: nothing would be kept; name a file with --out")
        }
        Ok(None) => Ok(None),
        Ok(Some(folder)) => {
            let lock = folder.lock()?.context("another process measures this machine's limits now")?;
            Ok(Some((folder, lock)))
        }
        Err(error) if options.out.is_some() => {
            say!("tune: the limits cannot be kept, only written to the file: {error:#}");
            Ok(None)
        }
        Err(error) => Err(error.context("the limits cannot be kept")),
    }
}

/// Draws the curves of one number of ranks; a repeated size has its last round.
fn draw(folder: &Path, machine: &Machine, effort: &Effort, found: &OfRanks) -> Result<()> {
    let Group { ranks, nccl_version, .. } = found.group;
    let company = Company { beside: effort.beside, busy: 0 };
    let mut common = Common::of(machine, nccl_version, ranks, effort.repeat as u32, company);
    common.memory = found.what.memory();
    let is_last =
        |at: usize| found.measured[at + 1..].iter().all(|later| later.cell != found.measured[at].cell);
    let last = found.measured.iter().enumerate().filter(|(at, _)| is_last(*at)).map(|(_, done)| done);
    let records: Vec<_> = last.map(|done| common.record(done, SUM)).collect();
    let name = match found.what {
        What::Native => format!("ranks-{ranks}"),
        What::Registered => format!("ranks-{ranks}-registered"),
    };
    for file in plot::draw(&folder.join(name), &records)? {
        say!("tune: wrote {}", file.display());
    }
    Ok(())
}

/// Writes the stamp, so that `windlass run` does not measure limits that are now known better.
fn stamp(folder: &Folder, machine: &Machine, windlass: &Path, all: &[OfRanks]) -> Result<()> {
    let of_run = Effort::quick(machine.gpus.devices.len(), machine).numbers;
    let is_known = |ranks: &usize| all.iter().any(|found| found.group.ranks == *ranks);
    if machine.is_simulated() || !of_run.iter().take(2).all(is_known) {
        return Ok(());
    }
    let stamp = Stamp::of(&machine.nccl, windlass, false);
    folder.write(&stamp.name, &stamp.text("windlass tune"))
}

/// How many measurements of an effort there are if none is unclear.
fn expected(effort: &Effort) -> usize {
    let tasks = effort.what.tasks();
    let sizes = tasks.iter().copied().flatten().map(|task| effort.grid.sizes_of(task).len());
    effort.numbers.len() * sizes.sum::<usize>()
}

/// The numbers of ranks, each once. All must be possible for native collectives, and this machine must have enough
/// devices.
fn numbers(options: &Options, machine: &Machine) -> Result<Vec<usize>> {
    if options.ranks.is_empty() {
        let most = machine.gpus.devices.len().min(RANKS_MAX);
        return match most {
            2.. => Ok((2..=most).collect()),
            _ => bail!("two GPUs are needed to communicate, this machine has {most}"),
        };
    }
    let numbers = BTreeSet::from_iter(options.ranks.iter().copied());
    for ranks in &numbers {
        machine.ranks(Some(*ranks), 2, 2)?;
        if *ranks > RANKS_MAX {
            bail!(BadOption(format!("--ranks {ranks}: expected 2 to {RANKS_MAX}")));
        }
    }
    Ok(numbers.into_iter().collect())
}

/// The runs of ranks: with `--quick` one for all numbers, else one for each.
fn efforts(options: &Options, machine: &Machine, numbers: Vec<usize>) -> Vec<Effort> {
    if options.quick {
        let quick = Effort::quick(machine.gpus.devices.len(), machine);
        let numbers = if options.ranks.is_empty() { quick.numbers } else { numbers };
        return vec![Effort { numbers, ..quick }];
    }
    let sizes = options.sizes.clone().map_or_else(|| usual_sizes(machine), |sizes| sizes.0);
    let grid = Grid::new(BTreeSet::from_iter(sizes).into_iter().collect(), 1, AGAIN_MOST);
    let effort = |ranks: usize, what: What| Effort {
        numbers: vec![ranks],
        grid: grid.clone(),
        what,
        repeat: options.repeat as usize,
        batch_us: options.seconds * 1e6 / f64::from(2 * options.repeat),
        beside: options.beside,
        time: None,
    };
    let of = |ranks: usize| {
        let registers = REGISTERED.iter().any(|task| !grid.sizes_of(task).is_empty());
        let registered = registers.then(|| effort(ranks, What::Registered));
        std::iter::once(effort(ranks, What::Native)).chain(registered)
    };
    numbers.into_iter().flat_map(of).collect()
}
