//! Runs the benchmark's ranks, from a plan to their results.

use super::Cell;
use super::company::Company;
use super::first_use::FirstUse;
use super::memory::Memory;
use super::worker::{CellDone, Job, Outcome};
use crate::BENCH_RANK;
use crate::element::Reduction;
use crate::interruption;
use crate::machine::Machine;
use crate::ranks::{self, Launch, Variable};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// What to measure, and how.
pub struct Plan<'a> {
    pub ranks: usize,
    pub cells: &'a [Cell],
    pub reduction: Reduction,
    pub memory: Memory,
    /// Communicators beside the measured ones.
    pub company: Company,
    /// Batches for each side; the median counts.
    pub repeat: usize,
    /// Approximate seconds for one cell.
    pub seconds: f64,
    /// How often a cell that looks slower than NCCL is measured again.
    pub again: usize,
    /// Communicators that are made to measure first messages; 0: none.
    pub inits: usize,
    /// Elements on each side of a product's matrices; none: the rank chooses.
    pub product: Option<usize>,
    /// Variables for every rank, besides the inherited ones and the machine's.
    pub environment: Vec<Variable>,
}

/// The results of the ranks.
pub struct Results {
    /// In the order of the plan; a repeated cell has its last result.
    pub cells: Vec<CellDone>,
    pub nccl_version: i32,
    pub first_uses: Vec<FirstUse>,
}

/// Runs the ranks. Calls `done` for each finished cell, and again for each repetition.
pub fn measure(
    machine: &Machine,
    windlass: &Path,
    plan: Plan,
    mut done: impl FnMut(&CellDone),
) -> Result<Results> {
    let mut environment = machine.environment();
    environment.extend(plan.environment);
    environment.extend(queues(plan.company));
    let launch = Launch {
        subcommand: BENCH_RANK,
        ranks: plan.ranks,
        environment,
        // Calls that do not wait are none of what runs here.
        without: |name| name == "NCCL_COMM_BLOCKING",
        silence: Duration::from_secs_f64(120.0 + 4.0 * f64::from(1 + plan.company.busy) * plan.seconds),
        deadline: None,
    };
    let job = |rank| Job {
        rank,
        ranks: plan.ranks,
        plain: machine.nccl.clone(),
        windlass: windlass.to_owned(),
        cells: plan.cells.to_vec(),
        reduction: plan.reduction.name.to_owned(),
        memory: plan.memory,
        company: plan.company,
        repeat: plan.repeat,
        batch_us: plan.seconds * 1e6 / (2 * plan.repeat) as f64,
        again: plan.again,
        inits: plan.inits,
        simulated: machine.is_simulated(),
        product: plan.product,
    };
    let mut cells: BTreeMap<usize, CellDone> = BTreeMap::new();
    let mut version = 0;
    let outcomes = ranks::run(
        &launch,
        job,
        |_| Vec::new(),
        |_, (nccl_version, cell): (i32, CellDone)| {
            done(&cell);
            version = nccl_version;
            cells.insert(cell.position, cell);
        },
    );
    let first = match outcomes {
        // What was measured until then is told.
        Err(_) if interruption::look().is_some() && !cells.is_empty() => {
            Outcome { nccl_version: version, first_uses: Vec::new() }
        }
        outcomes => outcomes?.into_iter().next().context("no ranks")?,
    };
    let cells = cells.into_values().collect();
    let Outcome { nccl_version, first_uses } = first;
    Ok(Results { cells, nccl_version, first_uses })
}

/// More hardware queues for busy communicators. Streams of a process share 8 queues by default: a batch would wait for the
/// bursts in the same queue instead of running beside them. A value of the user's stays.
fn queues(company: Company) -> Option<Variable> {
    const NAME: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    let needs = company.busy > 0 && std::env::var_os(NAME).is_none();
    needs.then(|| (NAME.into(), "32".into()))
}
