//! Counting. Nothing here waits, allocates or is contended: a communicator's cells are written by the threads that
//! use it, and calls without one are spread over sets by thread.

use std::cell::Cell as ThreadCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use nccl_sys::Entry;

use crate::call::Function;
use crate::path::Path;
use crate::stats::check::Checked;
use crate::stats::features::{Feature, Lacks};
use crate::stats::peer_group;
use crate::stats::pool::Pooled;
use crate::stats::registration::Registered;
use crate::stats::segment::{self, COMMUNICATORS_MAX, Communicator, ENDED, FREE, LIVE, THREAD_SETS};
use crate::stats::windows::Kept;

thread_local! {
    static SET: ThreadCell<usize> = const { ThreadCell::new(usize::MAX) };
}
static NEXT_SET: AtomicUsize = AtomicUsize::new(0);
/// Communicators that have begun and not ended.
static LIVING: AtomicUsize = AtomicUsize::new(0);

/// Where the calls of no known communicator are counted.
pub const UNKNOWN: usize = 0;

/// What is known of a communicator at its init.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// This process's rank, -1 if not known yet.
    pub rank: i32,
    /// How many ranks, 0 if not known yet.
    pub ranks: i32,
    /// The CUDA device, -1 if not known yet.
    pub device: i32,
}

/// Counts a call that has no communicator.
pub fn function(entry: Entry) {
    let set = SET.get();
    let set = if set == usize::MAX { choose_set() } else { set };
    segment::current().threads[set][entry as usize].fetch_add(1, Ordering::Relaxed);
}

#[cold]
fn choose_set() -> usize {
    let set = NEXT_SET.fetch_add(1, Ordering::Relaxed) % THREAD_SETS;
    SET.set(set);
    set
}

/// Counts a call of the communicator with these counters.
///
/// NCCL forbids two threads in calls of one communicator at once, so its cells have one writer at a time and need no
/// locked instruction (each costs as much as all else here).
#[inline]
pub fn call(counters: usize, function: Function, path: Path, bytes: u64) {
    let Some(communicator) = segment::current().communicators.get(counters) else { return };
    let cell = &communicator.cells[function as usize][path as usize];
    if counters == UNKNOWN {
        cell.calls.fetch_add(1, Ordering::Relaxed);
        cell.bytes.fetch_add(bytes, Ordering::Relaxed);
    } else {
        cell.calls.store(cell.calls.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        cell.bytes.store(cell.bytes.load(Ordering::Relaxed).wrapping_add(bytes), Ordering::Relaxed);
    }
}

/// Gives counters to a new communicator: free ones, else those of the communicator that was made first among the
/// dead, whose counts go to [`UNKNOWN`]; else [`UNKNOWN`] itself.
pub fn begin(identity: Identity) -> usize {
    LIVING.fetch_add(1, Ordering::Relaxed);
    let segment = segment::current();
    let serial = segment.communicators_made.fetch_add(1, Ordering::Relaxed) + 1;
    let places = || (1..COMMUNICATORS_MAX).map(|index| (index, &segment.communicators[index]));
    let take = |from: u32, place: &Communicator| {
        place.state.compare_exchange(from, LIVE, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    let free = || places().find(|(_, place)| take(FREE, place));
    let oldest_dead = || {
        let dead = places().filter(|(_, place)| place.state.load(Ordering::Acquire) == ENDED);
        dead.min_by_key(|(_, place)| place.serial.load(Ordering::Relaxed))
            .filter(|(_, place)| take(ENDED, place))
    };
    let Some((index, place)) = free().or_else(oldest_dead) else { return UNKNOWN };
    forget(place, &segment.communicators[UNKNOWN]);
    place.serial.store(serial, Ordering::Relaxed);
    place.peer_group.store(peer_group::NOT_ASKED, Ordering::Relaxed);
    place.nccl.store(peer_group::MADE, Ordering::Relaxed);
    place.lacks.store(0, Ordering::Relaxed);
    place.limits_from.store(0, Ordering::Relaxed);
    identify(index, identity);
    index
}

/// Communicators of this process, whoever runs their calls.
pub fn living() -> usize {
    LIVING.load(Ordering::Relaxed)
}

/// Notes what has become known of a communicator.
pub fn identify(counters: usize, identity: Identity) {
    if counters == UNKNOWN {
        return;
    }
    let place = &segment::current().communicators[counters];
    place.rank.store(identity.rank, Ordering::Relaxed);
    place.ranks.store(identity.ranks, Ordering::Relaxed);
    place.device.store(identity.device, Ordering::Relaxed);
}

/// Notes whether a communicator has a peer group, by a number of [`crate::stats::peer_group`], and what it lacks; gives its number in this
/// process.
pub fn peer_group(counters: usize, number: u32, lacks: Lacks) -> u64 {
    if counters == UNKNOWN {
        return 0;
    }
    let place = &segment::current().communicators[counters];
    place.lacks.store(lacks.0, Ordering::Relaxed);
    place.peer_group.store(number, Ordering::Relaxed);
    place.serial.load(Ordering::Relaxed)
}

/// Notes where the limits of a communicator's native collectives come from, by bits of [`crate::stats::limits::Source`].
pub fn limits_from(counters: usize, bits: u32) {
    if counters != UNKNOWN {
        segment::current().communicators[counters].limits_from.store(bits, Ordering::Relaxed);
    }
}

/// Why a communicator's reductions are NCCL's, in words.
pub fn why_not_native(counters: usize) -> String {
    if counters == UNKNOWN {
        return "it is one of too many for a reason to be kept".into();
    }
    let place = &segment::current().communicators[counters];
    match place.peer_group.load(Ordering::Relaxed) {
        peer_group::NOT_ASKED => "WINDLASS_PEER_GROUPS=off".into(),
        peer_group::YES => {
            let lacks = Lacks(place.lacks.load(Ordering::Relaxed)).words();
            lacks
                .get(Feature::Native.name())
                .map_or("it is ending".into(), |why| format!("no native collectives: {why}"))
        }
        number => peer_group::text(number).into(),
    }
}

/// Counts a reduction that rounds and that NCCL runs, though fixed order was asked for.
pub fn not_in_fixed_order(counters: usize) {
    if let Some(communicator) = segment::current().communicators.get(counters) {
        communicator.not_in_fixed_order.fetch_add(1, Ordering::Relaxed);
    }
}

/// Notes what of NCCL stands behind a communicator, by a number of [`crate::stats::peer_group`].
pub fn nccl(counters: usize, number: u32) {
    if counters != UNKNOWN {
        segment::current().communicators[counters].nccl.store(number, Ordering::Relaxed);
    }
}

/// Notes how many of NCCL's communicators are cached, with how much memory.
pub fn cached(communicators: u64, bytes: u64) {
    let segment = segment::current();
    segment.cached.store(communicators, Ordering::Relaxed);
    segment.cached_bytes.store(bytes, Ordering::Relaxed);
}

/// One kernel runs so many collectives of a group.
pub fn fused(calls: u64) {
    let segment = segment::current();
    segment.fused_kernels.fetch_add(1, Ordering::Relaxed);
    segment.fused_calls.fetch_add(calls, Ordering::Relaxed);
}

/// Counts of registrations.
pub fn registered(what: Registered, more: u64) {
    segment::current().registrations[what as usize].fetch_add(more, Ordering::Relaxed);
}

/// Counts of what there is now: it has become more or less by so much.
pub fn registered_now(what: Registered, change: i64) {
    // Wraps to what it was.
    segment::current().registrations[what as usize].fetch_add(change as u64, Ordering::Relaxed);
}

/// Counts of blocks of `ncclMemAlloc`.
#[inline]
pub fn pooled(what: Pooled, more: u64) {
    segment::current().pool[what as usize].fetch_add(more, Ordering::Relaxed);
}

/// Counts of what there is now of them.
#[inline]
pub fn pooled_now(what: Pooled, count: u64) {
    segment::current().pool[what as usize].store(count, Ordering::Relaxed);
}

/// So many bytes are kept now.
#[inline]
pub fn pooled_highest(bytes: u64) {
    segment::current().pool[Pooled::BytesHighest as usize].fetch_max(bytes, Ordering::Relaxed);
}

/// Counts of windows that are kept.
pub fn windows(what: Kept, more: u64) {
    segment::current().windows[what as usize].fetch_add(more, Ordering::Relaxed);
}

/// Counts of calls that ranks compare.
pub fn checked(what: Checked, more: u64) {
    segment::current().checked[what as usize].fetch_add(more, Ordering::Relaxed);
}

/// Notes that a communicator has ended; its counts stay to be read.
pub fn end(counters: usize) {
    LIVING.fetch_sub(1, Ordering::Relaxed);
    if counters != UNKNOWN {
        segment::current().communicators[counters].state.store(ENDED, Ordering::Release);
    }
}

fn forget(place: &Communicator, into: &Communicator) {
    for (cell, sum) in place.cells.iter().flatten().zip(into.cells.iter().flatten()) {
        sum.calls.fetch_add(cell.calls.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        sum.bytes.fetch_add(cell.bytes.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
    let lost = place.not_in_fixed_order.swap(0, Ordering::Relaxed);
    into.not_in_fixed_order.fetch_add(lost, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::snapshot::Snapshot;

    const IDENTITY: Identity = Identity { rank: 1, ranks: 2, device: 1 };

    /// More communicators than places: none is lost, the dead are forgotten first, then the unknown share.
    #[test]
    fn places_run_out() {
        let made: Vec<usize> = (0..COMMUNICATORS_MAX + 3).map(|_| begin(IDENTITY)).collect();
        for place in &made {
            call(*place, Function::Send, Path::Forward, 10);
        }
        assert_eq!(made.iter().filter(|place| **place == UNKNOWN).count(), 4);
        end(made[7]);
        assert_eq!(begin(IDENTITY), made[7]);
        call(made[7], Function::Send, Path::Forward, 10);
        let seen = Snapshot::of(segment::current());
        assert_eq!(seen.functions["ncclSend"], COMMUNICATORS_MAX as u64 + 4);
        assert_eq!(seen.communicators_made, COMMUNICATORS_MAX as u64 + 4);
        let unknown = seen.communicators.iter().find(|communicator| communicator.serial == 0).unwrap();
        assert_eq!((unknown.calls[0].calls, unknown.calls[0].bytes), (5, 50));
    }

    /// Threads count together.
    #[test]
    fn threads_add_up() {
        let threads: Vec<_> = (0..40)
            .map(|_| std::thread::spawn(|| (0..100).for_each(|_| function(Entry::ncclGroupStart))))
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(Snapshot::of(segment::current()).functions["ncclGroupStart"], 4000);
    }
}
