//! What a reader sees of a segment at one moment. The JSON report has these fields.

use std::collections::BTreeMap;
use std::path::Path as FilePath;
use std::sync::atomic::{AtomicU64, Ordering};

use nccl_sys::slots::ENTRIES;
use serde::{Deserialize, Serialize};

use crate::call::Function;
use crate::path::Path;
use crate::stats::count::UNKNOWN;
use crate::stats::features::Lacks;
use crate::stats::resources::{Kept, Pooled, Registered};
use crate::stats::run::Run;
use crate::stats::segment::{self, FREE, LIVE, Opened, Segment};
use crate::stats::{files, limits, order, peer_group};

/// Counts of a process. Counters are read one by one while calls go on, so sums may differ by the calls in flight.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Snapshot {
    /// Windlass's version.
    pub windlass: String,
    /// The process's number.
    pub process: u32,
    /// The process with communicators from which this one was forked, 0 for none. A forked child counts no calls.
    #[serde(default, skip_serializing_if = "is_none")]
    pub forked_from: u32,
    /// The program's file name.
    pub program: String,
    /// The real library's file.
    pub nccl_path: String,
    /// The real library's version code, 0 if unknown.
    pub nccl_version: i32,
    /// When counting began, nanoseconds since 1970.
    pub began_ns: u64,
    /// Communicators made so far.
    pub communicators_made: u64,
    /// NCCL's communicators that are cached; at exit, those that were.
    #[serde(default)]
    pub cached: u64,
    /// Bytes of device memory that cached communicators keep, as far as is known.
    #[serde(default)]
    pub cached_bytes: u64,
    /// `fixed` or `strict`; empty where no fixed order is asked for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub order: String,
    /// Kernels of Windlass that ran several collectives of a group each.
    #[serde(default)]
    pub fused_kernels: u64,
    /// Collectives that these kernels ran. They also count among all others.
    #[serde(default)]
    pub fused_calls: u64,
    /// Counts of registrations by the names of [`crate::stats::registration`], without those that are 0.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub registrations: BTreeMap<String, u64>,
    /// Counts of blocks of `ncclMemAlloc` by the names of [`crate::stats::pool`], without those that are 0.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pool: BTreeMap<String, u64>,
    /// Counts of kept windows by the names of [`crate::stats::windows`], without those that are 0.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub windows: BTreeMap<String, u64>,
    /// Calls by function, without functions that were not called. A `pnccl` name counts as its `nccl` name.
    pub functions: BTreeMap<String, u64>,
    /// Communicators in the order of init. Serial 0 stands for unknown handles, and for ended ones whose place was
    /// taken.
    pub communicators: Vec<CommunicatorCounts>,
}

/// Counts of a communicator.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct CommunicatorCounts {
    /// The communicator's serial number in this process, from 1.
    pub serial: u64,
    /// `live` or `ended`.
    pub state: String,
    /// This process's rank, -1 if unknown.
    pub rank: i32,
    /// The number of ranks, 0 if unknown.
    pub ranks: i32,
    /// The CUDA device, -1 if unknown.
    pub device: i32,
    /// `yes`, or why there is no peer group; empty where none was asked for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub peer_group: String,
    /// For a lazy communicator `unbuilt`, `built` or `reused`; empty where NCCL built its part at the init.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub nccl: String,
    /// What the peer group lacks, and why.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lacks: BTreeMap<String, String>,
    /// The sources of the native collectives' limits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits_from: Vec<String>,
    /// Where fixed order is asked for: reductions that round and ran in fixed order.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub in_fixed_order: u64,
    /// Where fixed order is asked for: reductions that round and that NCCL ran, or that were refused.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub not_in_fixed_order: u64,
    /// What the reason in `peer_group` says besides, in words; of a peer group, why its limits are guesses. Else empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The rank whose reason it is, where one is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason_rank: Option<u32>,
    /// Calls that a graph capture recorded, as far as is known: see [`crate::stats::count::recorded`].
    #[serde(default, skip_serializing_if = "is_zero")]
    pub recorded: u64,
    /// Bytes of the device's memory that Windlass takes for it, as it was made, slept or woke last.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub memory_bytes: u64,
    /// Whether it has given that memory back (`ncclCommSuspend`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sleeps: bool,
    /// What would give the communicator a peer group; empty where nothing is known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub change: String,
    /// Calls by function and path, without those that are 0.
    pub calls: Vec<CallCounts>,
}

/// Calls of one function on one path.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct CallCounts {
    /// NCCL's name of the function.
    pub function: String,
    /// The path.
    pub path: String,
    /// The number of calls.
    pub calls: u64,
    /// Bytes of the larger buffer of each call, as nccl-tests counts.
    pub bytes: u64,
    /// Of calls that NCCL ran: below how many bytes native collectives serve the function, 0 if they do not.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub native_below: u64,
}

/// The counters of the processes of a run, as far as they can be read.
pub fn of_run(folder: &FilePath, run: Run) -> Vec<Snapshot> {
    let paths = files::of_run(folder, run);
    paths.iter().filter_map(|path| Snapshot::of_file(path).ok()).collect()
}

fn is_none(process: &u32) -> bool {
    *process == 0
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl Snapshot {
    /// Reads the file of any process's segment.
    pub fn of_file(path: &FilePath) -> std::io::Result<Snapshot> {
        Ok(Snapshot::of(&*Opened::open(path)?.read()?))
    }

    /// Reads a segment.
    pub fn of(segment: &Segment) -> Snapshot {
        let mut communicators: Vec<CommunicatorCounts> =
            (0..).zip(segment::places(segment)).filter_map(CommunicatorCounts::of).collect();
        communicators.sort_by_key(|communicator| communicator.serial);
        Snapshot {
            windlass: env!("CARGO_PKG_VERSION").into(),
            process: segment.process.load(Ordering::Relaxed),
            forked_from: segment.forked_from.load(Ordering::Relaxed),
            program: segment::read_text(&segment.program),
            nccl_path: segment::read_text(&segment.nccl_path),
            nccl_version: segment.nccl_version.load(Ordering::Relaxed),
            began_ns: segment.began_ns.load(Ordering::Relaxed),
            communicators_made: segment.communicators_made.load(Ordering::Relaxed),
            cached: segment.cached.load(Ordering::Relaxed),
            cached_bytes: segment.cached_bytes.load(Ordering::Relaxed),
            order: order::name(segment.order.load(Ordering::Relaxed)).into(),
            fused_kernels: segment.fused_kernels.load(Ordering::Relaxed),
            fused_calls: segment.fused_calls.load(Ordering::Relaxed),
            registrations: named(&Registered::NAMES, &segment.registrations),
            pool: named(&Pooled::NAMES, &segment.pool),
            windows: named(&Kept::NAMES, &segment.windows),
            functions: functions(segment, &communicators),
            communicators,
        }
    }

    /// Where fixed order is asked for: reductions that round, over all communicators, in fixed order and not.
    pub fn ordered(&self) -> (u64, u64) {
        self.communicators.iter().fold((0, 0), |(kept, lost): (u64, u64), one| {
            (kept.saturating_add(one.in_fixed_order), lost.saturating_add(one.not_in_fixed_order))
        })
    }

    /// Calls and bytes by path, over all communicators.
    pub fn paths(&self) -> BTreeMap<&str, (u64, u64)> {
        let mut paths = BTreeMap::new();
        for counts in self.communicators.iter().flat_map(|communicator| &communicator.calls) {
            let sum: &mut (u64, u64) = paths.entry(counts.path.as_str()).or_default();
            *sum = (sum.0.saturating_add(counts.calls), sum.1.saturating_add(counts.bytes));
        }
        paths
    }
}

impl CommunicatorCounts {
    /// Why NCCL runs all calls, in words; none of a communicator with a peer group, or for which none was asked.
    pub fn fallback(&self) -> Option<String> {
        let reason = Some(&self.peer_group).filter(|text| !matches!(text.as_str(), "" | "yes"))?;
        Some(match (self.reason.as_str(), self.reason_rank) {
            ("", _) => reason.clone(),
            (words, None) => format!("{reason}: {words}"),
            (words, Some(rank)) => format!("{reason}, rank {rank}: {words}"),
        })
    }

    fn of((number, counters): (usize, &segment::Communicator)) -> Option<CommunicatorCounts> {
        let state = counters.state.load(Ordering::Acquire);
        // Place 0 never gets a state, and is reported only if it has counted something.
        if state == FREE && number != UNKNOWN {
            return None;
        }
        let load = |value: &std::sync::atomic::AtomicI32| value.load(Ordering::Relaxed);
        let cells = Function::ALL.iter().zip(&counters.cells);
        let calls: Vec<CallCounts> = cells
            .flat_map(|(function, paths)| {
                Path::ALL.iter().zip(paths).map(move |(path, cell)| (function, path, cell))
            })
            .map(|(function, path, cell)| (function, path, cell, cell.calls.load(Ordering::Relaxed)))
            .filter(|(.., calls)| *calls > 0)
            .map(|(function, path, cell, calls)| CallCounts {
                function: function.entry().description().name.into(),
                path: path.name().into(),
                calls,
                bytes: cell.bytes.load(Ordering::Relaxed),
                native_below: match (path, counters.native_below.get(*function as usize)) {
                    (Path::Forward, Some(limit)) => limit.load(Ordering::Relaxed),
                    _ => 0,
                },
            })
            .collect();
        if state == FREE && calls.is_empty() {
            return None;
        }
        let number = counters.peer_group.load(Ordering::Relaxed);
        let reason = segment::read_text(&counters.reason);
        Some(CommunicatorCounts {
            serial: counters.serial.load(Ordering::Relaxed),
            state: if state == LIVE { "live" } else { "ended" }.into(),
            rank: load(&counters.rank),
            ranks: load(&counters.ranks),
            device: load(&counters.device),
            peer_group: peer_group::text(number).into(),
            nccl: peer_group::nccl(counters.nccl.load(Ordering::Relaxed)).into(),
            lacks: Lacks(counters.lacks.load(Ordering::Relaxed)).words(),
            limits_from: limits::names(counters.limits_from.load(Ordering::Relaxed)),
            in_fixed_order: counters.in_fixed_order.load(Ordering::Relaxed),
            not_in_fixed_order: counters.not_in_fixed_order.load(Ordering::Relaxed),
            reason_rank: (!reason.is_empty())
                .then(|| u32::try_from(load(&counters.reason_rank)).ok())
                .flatten(),
            reason,
            recorded: counters.recorded.load(Ordering::Relaxed),
            memory_bytes: counters.memory_bytes.load(Ordering::Relaxed),
            sleeps: counters.sleeps.load(Ordering::Relaxed) != 0,
            change: peer_group::change(number).into(),
            calls,
        })
    }
}

fn named(names: &[&str], counts: &[AtomicU64]) -> BTreeMap<String, u64> {
    let counts = counts.iter().map(|count| count.load(Ordering::Relaxed));
    let named = names.iter().zip(counts).filter(|(_, count)| *count > 0);
    named.map(|(name, count)| ((*name).into(), count)).collect()
}

fn functions(segment: &Segment, communicators: &[CommunicatorCounts]) -> BTreeMap<String, u64> {
    let mut functions: BTreeMap<String, u64> = BTreeMap::new();
    for (index, entry) in ENTRIES.iter().enumerate() {
        let passed = segment.passed[index].load(Ordering::Relaxed);
        let seen = segment.threads.iter().map(|set| set[index].load(Ordering::Relaxed));
        // The writer of the segment may have written anything.
        let calls = seen.fold(passed, u64::saturating_add);
        if calls > 0 {
            functions.insert(entry.name.into(), calls);
        }
    }
    for counts in communicators.iter().flat_map(|communicator| &communicator.calls) {
        let sum = functions.entry(counts.function.clone()).or_default();
        *sum = sum.saturating_add(counts.calls);
    }
    functions
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A segment may hold anything: sums end at the largest number.
    #[test]
    fn wild_counts() {
        let lacking = std::mem::offset_of!(Segment, places_lacking) / 8;
        let others = (0..size_of::<Segment>() / 8).filter(|place| *place != lacking);
        let words: Vec<(usize, u64)> = others.map(|place| (place, u64::MAX)).collect();
        let snapshot = segment::test_support::with_words(&words, Snapshot::of);
        assert_eq!(snapshot.communicators.len(), segment::COMMUNICATORS_MAX);
        assert!(snapshot.paths().values().all(|sum| *sum == (u64::MAX, u64::MAX)));
        assert!(snapshot.functions.values().all(|calls| *calls == u64::MAX));
    }
}
