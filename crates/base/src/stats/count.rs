//! Counts calls and notes facts of communicators. Counting neither waits, allocates nor contends: a communicator's
//! cells are written by the threads that use it, and calls without a communicator are spread over sets by thread.

use std::cell::Cell as ThreadCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use nccl_sys::Entry;

use crate::call::{Call, Function};
use crate::path::Path;
use crate::stats::features::{Feature, Lacks};
use crate::stats::order;
use crate::stats::peer_group;
use crate::stats::resources::{Kept, Pooled, Registered};
use crate::stats::segment::{self, Communicator, ENDED, FREE, LIVE, THREAD_SETS};

thread_local! {
    static SET: ThreadCell<usize> = const { ThreadCell::new(usize::MAX) };
}
static NEXT_SET: AtomicUsize = AtomicUsize::new(0);
/// Communicators that were made and have not ended.
static LIVING: AtomicUsize = AtomicUsize::new(0);

/// The place in which calls with an unknown handle are counted.
pub const UNKNOWN: usize = 0;

/// The rank, size and device of a communicator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// This process's rank, -1 if not known yet.
    pub rank: i32,
    /// The number of ranks, 0 if not known yet.
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
/// NCCL forbids two threads in calls of one communicator at once. So its cells have one writer at a time and need no
/// locked instruction, which would cost as much as all else here.
#[inline]
pub fn call(counters: usize, call: &Call, path: Path, ranks: usize) {
    let segment = segment::current();
    let Some(communicator) = segment.communicators.get(counters) else { return };
    let bytes = call.shared.bytes(ranks);
    let cell = &communicator.cells[call.local.called as usize][path as usize];
    if counters == UNKNOWN {
        cell.calls.fetch_add(1, Ordering::Relaxed);
        cell.bytes.fetch_add(bytes, Ordering::Relaxed);
    } else {
        cell.calls.store(cell.calls.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        cell.bytes.store(cell.bytes.load(Ordering::Relaxed).wrapping_add(bytes), Ordering::Relaxed);
        let ring = communicator.ring.load(Ordering::Relaxed).wrapping_sub(1);
        if let Some(ring) = segment.rings.get(ring as usize) {
            ring.add(call, path, bytes);
        }
    }
}

/// Gives a place for counters to a new communicator: a free one, else that of the oldest ended communicator, whose
/// counts go to [`UNKNOWN`], else [`UNKNOWN`] itself.
pub fn begin(identity: Identity) -> usize {
    LIVING.fetch_add(1, Ordering::Relaxed);
    let segment = segment::current();
    let serial = segment.communicators_made.fetch_add(1, Ordering::Relaxed) + 1;
    let places = || segment::places(segment).iter().enumerate().skip(1);
    let take = |from: u32, place: &Communicator| {
        place.state.compare_exchange(from, LIVE, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    let free = || places().find(|(_, place)| take(FREE, place));
    let oldest_dead = || {
        let dead = places().filter(|(_, place)| place.state.load(Ordering::Acquire) == ENDED);
        dead.min_by_key(|(_, place)| place.serial.load(Ordering::Relaxed))
            .filter(|(_, place)| take(ENDED, place))
    };
    let more = || if segment::get_more_places() { free() } else { None };
    let Some((index, place)) = free().or_else(more).or_else(oldest_dead) else { return UNKNOWN };
    forget(place, &segment.communicators[UNKNOWN]);
    place.serial.store(serial, Ordering::Relaxed);
    place.peer_group.store(peer_group::NOT_ASKED, Ordering::Relaxed);
    place.nccl.store(peer_group::MADE, Ordering::Relaxed);
    place.lacks.store(0, Ordering::Relaxed);
    place.limits_from.store(0, Ordering::Relaxed);
    place.name.store(0, Ordering::Relaxed);
    place.token.store(0, Ordering::Relaxed);
    memory(index, 0, false);
    place.native_below.iter().for_each(|limit| limit.store(0, Ordering::Relaxed));
    reason(index, None, "");
    identify(index, identity);
    segment::begin_ring(index);
    index
}

/// The place of a communicator's own counters; none for [`UNKNOWN`].
fn place(counters: usize) -> Option<&'static Communicator> {
    segment::current().communicators.get(counters).filter(|_| counters != UNKNOWN)
}

/// The number of communicators of this process, with and without a peer group.
pub fn living() -> usize {
    LIVING.load(Ordering::Relaxed)
}

/// Whether a communicator of this process was on another device than the first.
static ELSEWHERE: AtomicBool = AtomicBool::new(false);

/// Whether any communicator of this process was on another device than the first, as far as noted.
pub fn is_any_elsewhere() -> bool {
    ELSEWHERE.load(Ordering::Relaxed)
}

/// Notes a communicator's rank, size and device.
pub fn identify(counters: usize, identity: Identity) {
    if identity.device > 0 {
        ELSEWHERE.store(true, Ordering::Relaxed);
    }
    let Some(place) = place(counters) else { return };
    place.rank.store(identity.rank, Ordering::Relaxed);
    place.ranks.store(identity.ranks, Ordering::Relaxed);
    place.device.store(identity.device, Ordering::Relaxed);
}

/// Notes whether a communicator has a peer group, by a number of [`crate::stats::peer_group`], and what it lacks. Returns the
/// communicator's serial number in this process, 0 for [`UNKNOWN`].
pub fn peer_group(counters: usize, number: u32, lacks: Lacks) -> u64 {
    let Some(place) = place(counters) else { return 0 };
    place.lacks.store(lacks.0, Ordering::Relaxed);
    place.peer_group.store(number, Ordering::Relaxed);
    place.serial.load(Ordering::Relaxed)
}

/// Notes how much device memory of this process Windlass takes for a communicator, and whether it has given that back.
pub fn memory(counters: usize, bytes: u64, sleeps: bool) {
    if let Some(place) = place(counters) {
        place.memory_bytes.store(bytes, Ordering::Relaxed);
        place.sleeps.store(sleeps.into(), Ordering::Relaxed);
    }
}

/// Notes the name of the socket at which this process answers others.
pub fn request_socket(name: [u8; 16]) {
    let places = &segment::current().request_socket;
    places.iter().zip(name).for_each(|(place, byte)| place.store(byte, Ordering::Relaxed));
}

/// Notes a half of the token of a communicator's peer group.
pub fn token(counters: usize, token: u64) {
    place(counters).into_iter().for_each(|place| place.token.store(token, Ordering::Relaxed));
}

/// Notes what all ranks of a communicator call it, unless it has a name.
pub fn name(counters: usize, name: u64) {
    if let Some(place) = place(counters) {
        let _ = place.name.compare_exchange(0, name, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// What all ranks of a communicator call it, 0 if that is not known.
pub fn name_of(counters: usize) -> u64 {
    place(counters).map_or(0, |place| place.name.load(Ordering::Relaxed))
}

/// A communicator's rank, size and device, as far as noted.
pub fn identity(counters: usize) -> Identity {
    match place(counters) {
        None => Identity { rank: -1, ranks: 0, device: -1 },
        Some(place) => Identity {
            rank: place.rank.load(Ordering::Relaxed),
            ranks: place.ranks.load(Ordering::Relaxed),
            device: place.device.load(Ordering::Relaxed),
        },
    }
}

/// Notes what a fallback reason says besides its number, or why limits are guesses: words, cut to the field, and the rank whose reason it is.
pub fn reason(counters: usize, rank: Option<u32>, words: &str) {
    let Some(place) = place(counters) else { return };
    let rank = rank.and_then(|rank| i32::try_from(rank).ok()).unwrap_or(-1);
    place.reason_rank.store(rank, Ordering::Relaxed);
    let end = words.floor_char_boundary(place.reason.len() - 1);
    segment::write_text(&place.reason, &words.as_bytes()[..end]);
}

/// Notes the sources of the limits of a communicator's native collectives, by bits of [`crate::stats::limits::Source`].
pub fn limits_from(counters: usize, bits: u32) {
    if let Some(place) = place(counters) {
        place.limits_from.store(bits, Ordering::Relaxed);
    }
}

/// Notes below how many bytes native collectives serve a function of a communicator.
pub fn native_below(counters: usize, function: Function, bytes: u64) {
    if let Some(limit) = place(counters).and_then(|place| place.native_below.get(function as usize)) {
        limit.store(bytes, Ordering::Relaxed);
    }
}

/// Why NCCL runs a communicator's reductions, in words, with what would change that.
pub fn why_not_native(counters: usize) -> String {
    let Some(place) = place(counters) else {
        return "it is one of too many for a reason to be kept".into();
    };
    let number = place.peer_group.load(Ordering::Relaxed);
    match (number, peer_group::change(number)) {
        (peer_group::NOT_ASKED, _) => "WINDLASS_PEER_GROUPS=off".into(),
        (peer_group::YES, _) => {
            let lacks = Lacks(place.lacks.load(Ordering::Relaxed)).words();
            let native = lacks.get(Feature::Native.name());
            native.map_or("it is ending, or the call has more bytes than there are addresses".into(), |why| {
                format!("no native collectives: {why}")
            })
        }
        (_, "") => peer_group::text(number).into(),
        (_, change) => format!("{} ({change})", peer_group::text(number)),
    }
}

/// Notes that Windlass is switched off and sees no later call.
pub fn switched_off() {
    segment::current().order.fetch_or(order::SWITCHED_OFF, Ordering::Relaxed);
}

/// The serial number of a communicator in this process; 0 for [`UNKNOWN`].
pub fn serial(counters: usize) -> u64 {
    place(counters).map_or(0, |place| place.serial.load(Ordering::Relaxed))
}

/// Counts a reduction that rounds, where fixed order is asked for: `is_fixed` if it runs in fixed order.
pub fn ordered(counters: usize, is_fixed: bool) {
    if let Some(communicator) = segment::current().communicators.get(counters) {
        let count = if is_fixed { &communicator.in_fixed_order } else { &communicator.not_in_fixed_order };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts calls that a graph capture recorded. Known are kernels of Windlass, each of which counts as one call, and calls that NCCL runs
/// after such a kernel, of a group one a stream. Where the communicator has run no kernel of Windlass, nobody asks whether a stream is
/// captured.
pub fn recorded(counters: usize, calls: u64) {
    if let Some(communicator) = segment::current().communicators.get(counters) {
        communicator.recorded.fetch_add(calls, Ordering::Relaxed);
    }
}

/// Notes the state of NCCL's part of a communicator, by a number of [`crate::stats::peer_group`].
pub fn nccl(counters: usize, number: u32) {
    if let Some(place) = place(counters) {
        place.nccl.store(number, Ordering::Relaxed);
    }
}

/// Notes how many communicators of NCCL's are cached, and their bytes of device memory.
pub fn cached(communicators: u64, bytes: u64) {
    let segment = segment::current();
    segment.cached.store(communicators, Ordering::Relaxed);
    segment.cached_bytes.store(bytes, Ordering::Relaxed);
}

/// Counts a kernel that runs `calls` collectives of a group.
pub fn fused(calls: u64) {
    let segment = segment::current();
    segment.fused_kernels.fetch_add(1, Ordering::Relaxed);
    segment.fused_calls.fetch_add(calls, Ordering::Relaxed);
}

/// Adds to a count of registrations.
pub fn registered(what: Registered, more: u64) {
    segment::current().registrations[what as usize].fetch_add(more, Ordering::Relaxed);
}

/// Changes a count of registrations that exist now.
pub fn registered_now(what: Registered, change: i64) {
    // A negative change wraps around to a subtraction.
    segment::current().registrations[what as usize].fetch_add(change as u64, Ordering::Relaxed);
}

/// Adds to a count of blocks of `ncclMemAlloc`.
#[inline]
pub fn pooled(what: Pooled, more: u64) {
    segment::current().pool[what as usize].fetch_add(more, Ordering::Relaxed);
}

/// Sets a count of blocks of `ncclMemAlloc` that exist now.
#[inline]
pub fn pooled_now(what: Pooled, count: u64) {
    segment::current().pool[what as usize].store(count, Ordering::Relaxed);
}

/// Notes the bytes that the pool keeps now, for their maximum.
#[inline]
pub fn pooled_highest(bytes: u64) {
    segment::current().pool[Pooled::BytesHighest as usize].fetch_max(bytes, Ordering::Relaxed);
}

/// Adds to a count of kept windows.
pub fn windows(what: Kept, more: u64) {
    segment::current().windows[what as usize].fetch_add(more, Ordering::Relaxed);
}

/// Notes that a communicator has ended; its counts stay to be read.
pub fn end(counters: usize) {
    LIVING.fetch_sub(1, Ordering::Relaxed);
    if let Some(place) = place(counters) {
        place.state.store(ENDED, Ordering::Release);
    }
}

fn forget(place: &Communicator, into: &Communicator) {
    for (cell, sum) in place.cells.iter().flatten().zip(into.cells.iter().flatten()) {
        sum.calls.fetch_add(cell.calls.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        sum.bytes.fetch_add(cell.bytes.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
    let counts = [
        (&place.in_fixed_order, &into.in_fixed_order),
        (&place.not_in_fixed_order, &into.not_in_fixed_order),
        (&place.recorded, &into.recorded),
    ];
    for (count, sum) in counts {
        sum.fetch_add(count.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::tests::send;
    use crate::stats::segment::COMMUNICATORS_MAX;
    use crate::stats::snapshot::Snapshot;

    const IDENTITY: Identity = Identity { rank: 1, ranks: 2, device: 1 };

    /// With more communicators than places, no call is lost. The oldest ended communicator's place is taken first,
    /// then [`UNKNOWN`] is shared.
    #[test]
    fn places_run_out() {
        let made: Vec<usize> = (0..COMMUNICATORS_MAX + 3).map(|_| begin(IDENTITY)).collect();
        for place in &made {
            call(*place, &send(10), Path::Forward, 2);
        }
        assert_eq!(made.iter().filter(|place| **place == UNKNOWN).count(), 4);
        recorded(made[7], 3);
        reason(made[7], Some(1), "no device is current");
        end(made[7]);
        assert_eq!(begin(IDENTITY), made[7]);
        call(made[7], &send(10), Path::Forward, 2);
        let seen = Snapshot::of(segment::current());
        assert_eq!(seen.functions["ncclSend"], COMMUNICATORS_MAX as u64 + 4);
        assert_eq!(seen.communicators_made, COMMUNICATORS_MAX as u64 + 4);
        let unknown = seen.communicators.iter().find(|communicator| communicator.serial == 0).unwrap();
        assert_eq!((unknown.calls[0].calls, unknown.calls[0].bytes, unknown.recorded), (5, 50, 3));
        let reasons = seen.communicators.iter().filter(|communicator| !communicator.reason.is_empty());
        assert_eq!(reasons.count(), 0);
    }

    /// A reason's words end between two characters, and its rank may be missing.
    #[test]
    fn reasons() {
        let place = begin(IDENTITY);
        let seen = || Snapshot::of(segment::current()).communicators.pop().unwrap();
        reason(place, Some(1), &format!("{}é", "x".repeat(190)));
        assert_eq!((seen().reason, seen().reason_rank), ("x".repeat(190), Some(1)));
        reason(place, None, "no device is current");
        assert_eq!((seen().reason.as_str(), seen().reason_rank), ("no device is current", None));
    }

    /// Counts of all threads are added up.
    #[test]
    fn threads_add_up() {
        let threads: Vec<_> = (0..40)
            .map(|_| std::thread::spawn(|| (0..100).for_each(|_| function(Entry::ncclGroupStart))))
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(Snapshot::of(segment::current()).functions["ncclGroupStart"], 4000);
    }
}
