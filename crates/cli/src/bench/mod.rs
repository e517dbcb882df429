//! `windlass bench`: the real library alone against the same calls through Windlass, in one run.
//!
//! Every rank process opens both libraries and makes a communicator with each; batches alternate between the two.
//! Both sides use the same mapped NCCL, since Windlass forwards to the file that `WINDLASS_NCCL` names.

pub mod adaptive;
mod batch;
mod companions;
pub mod company;
mod comparison;
mod first_use;
pub mod measurement;
mod memory;
pub mod operation;
pub mod plot;
mod product;
pub mod record;
pub mod sizes;
pub mod statistics;
mod worker;

pub use memory::Memory;
#[cfg(test)]
pub use worker::tests;
pub use worker::{CellDone, work};

use crate::element::{Element, Reduction, SUM};
use crate::machine::{Machine, MachineRequest};
use crate::nccl::version_text;
use crate::{BadOption, installation, interruption, text};
use anyhow::{Context, Result, bail};
use clap::Args;
use company::Company;
use measurement::{Plan, Results, measure};
use operation::Operation;
use record::{MachineFacts, Record, Versions};
use serde::{Deserialize, Serialize};
use sizes::Sizes;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Options of `windlass bench`.
#[derive(Args)]
pub struct Options {
    /// The operations to measure, separated by commas [default: all]
    #[arg(long = "op", value_name = "OPERATIONS", value_delimiter = ',')]
    operations: Vec<Operation>,
    /// The sizes of a call in bytes: FIRST:LAST:FACTOR, or a list separated by commas. K, M and G are powers of 1024
    #[arg(long, default_value = "1K:64M:4")]
    sizes: Sizes,
    /// The element types, separated by commas
    #[arg(long = "type", value_name = "TYPES", value_delimiter = ',', default_value = "float")]
    elements: Vec<Element>,
    /// The reduction of collectives that reduce
    #[arg(long, default_value = SUM.name)]
    reduction: Reduction,
    /// The memory of the measured buffers
    #[arg(long, value_enum, default_value_t = Memory::Device)]
    memory: Memory,
    #[command(flatten)]
    company: Company,
    /// The ways to issue and time calls, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "eager,graph")]
    mode: Vec<Mode>,
    /// Only the host's time to issue calls is measured: the same as --mode host
    #[arg(long, conflicts_with = "mode")]
    host: bool,
    /// The number of ranks, each a process with a GPU of its own [default: one for each GPU, at most 8; 2 on the simulator]
    #[arg(long)]
    ranks: Option<usize>,
    /// The number of batches of each side; their median counts
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// The time for one size of one operation, in seconds, at most 3600; it is kept approximately
    #[arg(long, default_value_t = 0.25)]
    seconds: f64,
    /// How often a size that looks slower through Windlass is measured again, before it is called slower; the median counts [default: 3; 0 on the simulator]
    #[arg(long, value_name = "ROUNDS")]
    again: Option<u32>,
    /// The elements on each side of the matrices that are multiplied, a multiple of 64 [default: 4096 if cuBLAS is found]
    #[arg(long, value_name = "ELEMENTS")]
    product: Option<usize>,
    /// The init of a communicator and its first message to a peer are measured, too
    #[arg(long)]
    first_use: bool,
    /// The file to which each measurement is appended, as one line of JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The folder into which curves are drawn, as SVG files
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    /// The real NCCL library, as a file or its folder [default: searched, as `windlass doctor` shows]
    #[arg(long, value_name = "PATH")]
    nccl: Option<PathBuf>,
    #[command(flatten)]
    request: MachineRequest,
}

/// How calls are issued and what is timed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Calls on a stream; the time on the GPU counts
    Eager,
    /// Calls in a CUDA graph; the time on the GPU counts
    Graph,
    /// Calls on a stream; the time that the host takes to issue them counts
    Host,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Mode::Eager => "eager",
            Mode::Graph => "graph",
            Mode::Host => "host",
        }
    }
}

/// One measurement to make.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    pub operation: Operation,
    pub bytes: u64,
    pub mode: Mode,
    pub element: Element,
}

/// Runs the benchmark and prints its table.
pub fn run(options: &Options) -> Result<()> {
    if !(options.seconds > 0.0 && options.seconds <= 3600.0) {
        bail!(BadOption(format!("--seconds {}: expected more than 0 and at most 3600", options.seconds)));
    }
    if let Some(size) = options.product.filter(|size| *size == 0 || size % product::PLAIN_STEP != 0) {
        bail!(BadOption(format!("--product {size}: expected a multiple of {}", product::PLAIN_STEP)));
    }
    interruption::note()?;
    let windlass = installation::windlass_library()?;
    let machine = Machine::for_tools(options.request, options.nccl.as_deref())?;
    let ranks = machine.ranks(options.ranks, 2, if machine.is_simulated() { 2 } else { 8 })?;
    fits(options, &machine, ranks)?;
    let cells = cells(options);
    let plan = plan(options, &machine, ranks, &cells);
    say!("bench: {ranks} ranks {}, {} measurements", machine.describe(), cells.len());
    if machine.is_simulated() {
        say!("bench: times on the simulator say nothing about GPUs; only that everything runs");
    }
    // Opened before the measurements, so that a wrong name fails at once.
    let json = options.json.as_deref().map(open_to_append).transpose()?;
    if let Some(folder) = &options.plot {
        plot::make_folder(folder)?;
    }
    let began = Instant::now();
    let results = measure(&machine, &windlass, plan, |done| {
        let (at, left) = (done.position + 1, text::left(began, done.position + 1, cells.len()));
        say!("bench: {at}/{} {}{left}", cells.len(), done.describe());
    })?;
    let records = records(options, &machine, ranks, &results);
    text::print(record::heading(ranks, options.memory, options.company) + "\n")?;
    text::print(record::table(&records))?;
    text::print(record::host_table(&records))?;
    text::print(record::summary(&records) + "\n")?;
    text::print(comparison::slower(&records) + "\n")?;
    if let Some(line) = company::kept_up(&records) {
        text::print(line + "\n")?;
    }
    if options.first_use {
        text::print(first_use::table(&results.first_uses))?;
    }
    if let Some(mut out) = json {
        for record in &records {
            writeln!(out, "{}", serde_json::to_string(record)?)?;
        }
        let (date, machine, versions) = circumstances(&machine, results.nccl_version);
        for measured in &results.first_uses {
            let (date, machine, versions) = (&date, &machine, &versions);
            let line = record::FirstUseLine { date, machine, versions, ranks, measured };
            writeln!(out, "{}", serde_json::to_string(&line)?)?;
        }
    }
    if let Some(folder) = &options.plot {
        for file in plot::draw(folder, &records)? {
            say!("bench: wrote {}", file.display());
        }
    }
    interruption::check()
}

/// Whether the larger buffer of the largest call fits into each GPU; the other one may be smaller.
fn fits(options: &Options, machine: &Machine, ranks: usize) -> Result<()> {
    let largest = options.sizes.0.iter().copied().max().unwrap_or_default();
    for (ordinal, device) in machine.gpus.devices.iter().enumerate().take(ranks) {
        if largest > device.memory_bytes {
            bail!(BadOption(format!(
                "--sizes: a buffer of {} does not fit on GPU {ordinal}: expected at most {} MiB",
                text::size(largest),
                device.memory_bytes >> 20
            )));
        }
    }
    Ok(())
}

fn open_to_append(file: &Path) -> Result<File> {
    let opened = File::options().create(true).append(true).open(file);
    opened.with_context(|| format!("cannot write {}", file.display()))
}

/// All measurements, in the order in which they are made.
fn cells(options: &Options) -> Vec<Cell> {
    let operations =
        if options.operations.is_empty() { Operation::ALL.to_vec() } else { options.operations.clone() };
    let modes = if options.host { vec![Mode::Host] } else { options.mode.clone() };
    let mut cells = Vec::new();
    for operation in operations {
        for mode in &modes {
            for element in &options.elements {
                let cell = |bytes: &u64| Cell { operation, bytes: *bytes, mode: *mode, element: *element };
                cells.extend(options.sizes.0.iter().map(cell));
            }
        }
    }
    cells
}

fn plan<'a>(options: &Options, machine: &Machine, ranks: usize, cells: &'a [Cell]) -> Plan<'a> {
    Plan {
        ranks,
        cells,
        reduction: options.reduction,
        memory: options.memory,
        company: options.company,
        repeat: options.repeat as usize,
        seconds: options.seconds,
        again: options.again.unwrap_or(if machine.is_simulated() { 0 } else { 3 }) as usize,
        inits: if options.first_use { first_use::INITS } else { 0 },
        product: options.product,
        environment: Vec::new(),
    }
}

/// The date, the machine and the versions.
pub fn circumstances(machine: &Machine, nccl_version: i32) -> (String, MachineFacts, Versions) {
    let date = record::date(std::time::SystemTime::now());
    let facts = MachineFacts {
        gpu: machine.device_name().to_owned(),
        driver: machine.gpus.driver.clone(),
        cuda: machine.gpus.cuda_version,
        simulated: machine.is_simulated(),
        variables: record::variables(std::env::vars_os()),
    };
    let versions = Versions { nccl: version_text(nccl_version), windlass: env!("CARGO_PKG_VERSION").into() };
    (date, facts, versions)
}

/// The facts that all records of a run share.
pub struct Common {
    date: String,
    machine: MachineFacts,
    versions: Versions,
    pub ranks: usize,
    pub memory: Memory,
    pub company: Company,
    pub repeat: u32,
}

impl Common {
    pub fn of(machine: &Machine, nccl_version: i32, ranks: usize, repeat: u32, company: Company) -> Common {
        let (date, machine, versions) = circumstances(machine, nccl_version);
        Common { date, machine, versions, ranks, memory: Memory::Device, company, repeat }
    }

    pub fn record(&self, done: &CellDone, reduction: Reduction) -> Record {
        Record {
            date: self.date.clone(),
            machine: self.machine.clone(),
            versions: self.versions.clone(),
            ranks: self.ranks,
            op: done.cell.operation.name().to_owned(),
            reduction: done.cell.operation.reduces().then(|| reduction.name.to_owned()),
            element: done.cell.element.name.to_owned(),
            bytes: done.bytes,
            memory: self.memory,
            company: self.company,
            mode: done.cell.mode,
            calls: done.calls,
            repeat: self.repeat,
            plain_us: done.plain.median,
            plain_min_us: done.plain.min,
            plain_max_us: done.plain.max,
            windlass_us: done.windlass.median,
            windlass_min_us: done.windlass.min,
            windlass_max_us: done.windlass.max,
            ratio: done.ratio(),
            again: done.again,
            plain_host_ns: done.plain_host_ns,
            windlass_host_ns: done.windlass_host_ns,
            plain_busy_part: done.plain_busy_part,
            windlass_busy_part: done.windlass_busy_part,
            path: done.path.clone(),
        }
    }
}

fn records(options: &Options, machine: &Machine, ranks: usize, results: &Results) -> Vec<Record> {
    let common = Common::of(machine, results.nccl_version, ranks, options.repeat, options.company);
    let common = Common { memory: options.memory, ..common };
    results.cells.iter().map(|done| common.record(done, options.reduction)).collect()
}
