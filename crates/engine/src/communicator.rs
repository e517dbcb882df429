//! The communicators we know, found by NCCL's own handle.
//!
//! The handle that applications hold is NCCL's pointer (of a promise, [ours](crate::promise)), so what we know of it lies beside, in a table that is read
//! without locks on every call. Entries come from every function that makes a communicator, and from the first
//! call of a handle that we have not seen (made by a non-blocking split, or before we were there).

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nccl_sys::{cudaStream_t, ncclComm_t};

use crate::fabric::Fabric;
use crate::gate::{Gate, Passed};
use crate::promise::Promise;
use crate::rendezvous::Canceller;
use crate::stats::count::{self, Identity};
use crate::tuning::{COLLECTIVES, Limits};

/// What is kept with a communicator.
#[derive(Debug)]
pub enum Kept {
    /// Its fabric.
    Fabric(Arc<Fabric>),
    /// It is a promise, with its fabric.
    Promise(Arc<Promise>),
    /// Its meeting is not over: an abort ends this rank's wait.
    Waiting(Canceller),
}

impl Kept {
    /// The fabric, if its meeting is over.
    pub fn fabric(&self) -> Option<&Arc<Fabric>> {
        match self {
            Kept::Fabric(fabric) => Some(fabric),
            Kept::Promise(promise) => Some(promise.fabric()),
            Kept::Waiting(_) => None,
        }
    }
}

/// What we know of a communicator. Records are reused, never freed: a thread that is inside a call while another
/// aborts its communicator still reads a record.
#[derive(Debug)]
pub struct Communicator {
    handle: AtomicUsize,
    counters: AtomicUsize,
    ranks: AtomicI32,
    known: AtomicBool,
    /// Whether a fabric is kept: what every call may look at.
    has_fabric: AtomicBool,
    /// Whether the handle is ours.
    is_promise: AtomicBool,
    has_run: AtomicBool,
    /// Ranks of its fabric, and what fast collectives serve, as [`Limits`]: written before `has_fabric`.
    members: AtomicUsize,
    fast: [AtomicU64; COLLECTIVES],
    /// Whether a thread of ours may be in NCCL's communicator, too: then calls pass the gate.
    has_gate: AtomicBool,
    gate: Gate,
    /// Whether it has had a window that is kept.
    has_windows: AtomicBool,
    /// Whether its calls are told to other ranks.
    is_checked: AtomicBool,
    /// The stream of the last call that went to NCCL since the last one of ours, by its handle; of a communicator with
    /// a fabric only. [`NO_STREAM`]: none did.
    forwarded_on: AtomicUsize,
    /// What its birth left. Held for a few stores, after the lock of the table.
    kept: Mutex<Option<Kept>>,
}

const NO_STREAM: usize = usize::MAX;

impl Communicator {
    /// Keeps what its birth left, until [`remove`] gives it back. If the communicator has ended meanwhile, gives it back
    /// at once.
    pub fn keep(&'static self, handle: ncclComm_t, kept: Kept) -> Option<Kept> {
        let _unchanging = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        if self.handle.load(Ordering::Relaxed) != handle as usize {
            return Some(kept);
        }
        self.forwarded_on.store(NO_STREAM, Ordering::Relaxed);
        self.has_run.store(false, Ordering::Relaxed);
        let fast = kept.fabric().map_or(Limits::NONE, |fabric| *fabric.limits());
        let members = kept.fabric().map_or(0, |fabric| fabric.contract().members.len());
        self.members.store(members, Ordering::Relaxed);
        self.fast.iter().zip(fast.0).for_each(|(place, limit)| place.store(limit, Ordering::Relaxed));
        self.is_promise.store(matches!(kept, Kept::Promise(_)), Ordering::Relaxed);
        let registering = kept.fabric().and_then(|fabric| fabric.registering());
        let windows = kept.fabric().and_then(|fabric| fabric.windows());
        self.has_gate.store(registering.is_some() || windows.is_some(), Ordering::Relaxed);
        self.has_windows.store(false, Ordering::Relaxed);
        let checking = kept.fabric().and_then(|fabric| fabric.checking());
        self.is_checked.store(checking.is_some(), Ordering::Relaxed);
        registering.into_iter().for_each(|registering| registering.guarded_by(&self.gate));
        windows.into_iter().for_each(|windows| windows.guarded_by(&self.gate));
        self.has_fabric.store(kept.fabric().is_some(), Ordering::Release);
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).replace(kept)
    }

    /// Whether it has a fabric, as long as nobody ends it. A promise has one.
    #[inline]
    pub fn has_fabric(&self) -> bool {
        self.has_fabric.load(Ordering::Acquire)
    }

    /// How many ranks its fabric has, and what fast collectives serve of it; while it has one.
    #[inline]
    pub fn terms(&self) -> (usize, Limits) {
        let fast = Limits(std::array::from_fn(|index| self.fast[index].load(Ordering::Relaxed)));
        (self.members.load(Ordering::Relaxed), fast)
    }

    /// To be held while NCCL runs anything of this communicator.
    #[inline]
    pub fn pass(&'static self) -> Option<Passed<'static>> {
        if self.has_gate.load(Ordering::Relaxed) { Some(self.gate.pass()) } else { None }
    }

    /// Whether NCCL may meet a window that is kept.
    #[inline]
    pub fn has_windows(&self) -> bool {
        self.has_windows.load(Ordering::Relaxed)
    }

    /// From now on it may.
    pub fn gets_windows(&self) {
        self.has_windows.store(true, Ordering::Relaxed);
    }

    /// Whether other ranks are told of its calls.
    #[inline]
    pub fn is_checked(&self) -> bool {
        self.is_checked.load(Ordering::Relaxed)
    }

    /// Whether its handle is ours, so that NCCL must not get it.
    #[inline]
    pub fn is_promise(&self) -> bool {
        self.is_promise.load(Ordering::Relaxed)
    }

    /// The promise, if it is one and nobody has ended it.
    pub fn promise(&self, handle: ncclComm_t) -> Option<Arc<Promise>> {
        let kept = |kept: &Kept| match kept {
            Kept::Promise(promise) => Some(promise.clone()),
            _ => None,
        };
        if self.is_promise() { self.look_at_kept(handle, kept)? } else { None }
    }

    /// Its fabric, which stays while this is held, also if another thread ends the communicator; none if this record is
    /// another communicator's by now.
    pub fn fabric(&self, handle: ncclComm_t) -> Option<Arc<Fabric>> {
        self.look_at_kept(handle, |kept| kept.fabric().cloned())?
    }

    /// Ends this rank's wait in the meeting of its birth, if it is there.
    pub fn cancel_meeting(&self, handle: ncclComm_t) {
        self.look_at_kept(handle, |kept| {
            if let Kept::Waiting(canceller) = kept {
                canceller.abort();
            }
        });
    }

    /// Gives what its birth left: there is no communicator, but NCCL's handle stays until its owner aborts it.
    pub fn give_up(&self, handle: ncclComm_t) -> Option<Kept> {
        let _unchanging = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        if self.handle.load(Ordering::Relaxed) != handle as usize {
            return None;
        }
        self.has_fabric.store(false, Ordering::Relaxed);
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// All that comes is NCCL's to answer from now on.
    pub fn give_up_fabric(&self) {
        self.has_fabric.store(false, Ordering::Relaxed);
    }

    /// Whether its fabric has run anything.
    #[inline]
    pub fn has_run(&self) -> bool {
        self.has_run.load(Ordering::Relaxed)
    }

    /// Its fabric runs something.
    pub fn runs(&self) {
        self.has_run.store(true, Ordering::Relaxed);
    }

    /// A call goes to NCCL on this stream.
    #[inline]
    pub fn forwards_on(&self, stream: cudaStream_t) {
        self.forwarded_on.store(stream as usize, Ordering::Relaxed);
    }

    /// One of ours comes on this stream: whether NCCL has work of the communicator that it is not ordered after. Asks once.
    pub fn has_forwarded_elsewhere(&self, stream: usize) -> bool {
        /// `cudaStreamPerThread`: every thread's is another.
        const PER_THREAD: usize = 2;
        let forwarded = self.forwarded_on.swap(NO_STREAM, Ordering::Relaxed);
        forwarded != NO_STREAM && (forwarded != stream || forwarded == PER_THREAD)
    }

    /// Looks at what its birth left, if it is still this communicator. `look` must be quick.
    pub fn look_at_kept<T>(&self, handle: ncclComm_t, look: impl FnOnce(&Kept) -> T) -> Option<T> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if self.handle.load(Ordering::Relaxed) != handle as usize {
            return None;
        }
        kept.as_ref().map(look)
    }

    /// Where its calls are counted.
    pub fn counters(&self) -> usize {
        self.counters.load(Ordering::Relaxed)
    }

    /// How many ranks it has; 0 while that is not known.
    pub fn ranks(&self) -> usize {
        self.ranks.load(Ordering::Relaxed) as usize
    }

    /// Whether rank, ranks and device are all known.
    pub fn is_known(&self) -> bool {
        self.known.load(Ordering::Relaxed)
    }

    /// Notes what has become known.
    pub fn identify(&self, identity: Identity) {
        self.ranks.store(identity.ranks.max(0), Ordering::Relaxed);
        let known = identity.rank >= 0 && identity.ranks > 0 && identity.device >= 0;
        self.known.store(known, Ordering::Relaxed);
        count::identify(self.counters(), identity);
    }
}

struct Place {
    handle: AtomicUsize,
    communicator: AtomicPtr<Communicator>,
}

struct Table {
    /// A power of two; at least half of the places were never used, so that every search ends.
    places: Box<[Place]>,
}

const NEVER_USED: usize = 0;
/// No heap pointer is odd.
const REMOVED: usize = 1;
const FIRST_PLACES: usize = 256;

static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());
/// Held by whoever changes the table, for a few stores. Comes after no other lock.
static CHANGING: Mutex<Spare> = Mutex::new(Spare { records: Vec::new(), tables: Vec::new() });

/// What is used again instead of being freed: a thread may still read it.
struct Spare {
    records: Vec<&'static Communicator>,
    /// At most one of each size.
    tables: Vec<&'static Table>,
}

/// The communicator with this handle.
#[inline]
pub fn find(handle: ncclComm_t) -> Option<&'static Communicator> {
    look_up(handle).or_else(|| look_again(handle))
}

/// A reader that was held up in an old table while that was filled anew may have missed a handle that is there.
#[cold]
fn look_again(handle: ncclComm_t) -> Option<&'static Communicator> {
    let _unchanging = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
    look_up(handle)
}

#[inline]
fn look_up(handle: ncclComm_t) -> Option<&'static Communicator> {
    let communicator = table()?.find(handle as usize)?;
    // The place may have been given to another handle between two loads.
    (communicator.handle.load(Ordering::Relaxed) == handle as usize).then_some(communicator)
}

/// Enters a new communicator. A handle that is known already belonged to one that ended unseen.
pub fn insert(handle: ncclComm_t, identity: Identity) -> &'static Communicator {
    drop(remove(handle));
    let counters = count::begin(identity);
    let mut spare = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
    let communicator: &'static Communicator = spare.records.pop().unwrap_or_else(|| {
        Box::leak(Box::new(Communicator {
            handle: AtomicUsize::new(0),
            counters: AtomicUsize::new(0),
            ranks: AtomicI32::new(0),
            known: AtomicBool::new(false),
            has_fabric: AtomicBool::new(false),
            is_promise: AtomicBool::new(false),
            has_run: AtomicBool::new(false),
            members: AtomicUsize::new(0),
            fast: [const { AtomicU64::new(0) }; COLLECTIVES],
            has_gate: AtomicBool::new(false),
            gate: Gate::new(),
            has_windows: AtomicBool::new(false),
            is_checked: AtomicBool::new(false),
            forwarded_on: AtomicUsize::new(NO_STREAM),
            kept: Mutex::new(None),
        }))
    });
    communicator.counters.store(counters, Ordering::Relaxed);
    communicator.identify(identity);
    communicator.handle.store(handle as usize, Ordering::Relaxed);
    let grown = match table() {
        Some(table) if table.has_room() => table,
        full => Table::replace(full, &mut spare.tables),
    };
    grown.insert(handle as usize, communicator);
    communicator
}

/// Takes a communicator out; its counts stay. Gives what its birth left.
pub fn remove(handle: ncclComm_t) -> Option<Kept> {
    let mut spare = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
    let place = table()?.place_of(handle as usize)?;
    place.handle.store(REMOVED, Ordering::Release);
    let communicator = reference(place.communicator.load(Ordering::Relaxed));
    count::end(communicator.counters());
    communicator.handle.store(0, Ordering::Relaxed);
    communicator.has_fabric.store(false, Ordering::Relaxed);
    communicator.is_promise.store(false, Ordering::Relaxed);
    communicator.is_checked.store(false, Ordering::Relaxed);
    communicator.has_gate.store(false, Ordering::Relaxed);
    let kept = communicator.kept.lock().unwrap_or_else(PoisonError::into_inner).take();
    spare.records.push(communicator);
    kept
}

fn table() -> Option<&'static Table> {
    let table = TABLE.load(Ordering::Acquire);
    (!table.is_null()).then(|| reference(table))
}

#[allow(unsafe_code)]
fn reference<T>(leaked: *mut T) -> &'static T {
    // SAFETY: tables and records come from `Box::leak` and are never freed.
    unsafe { &*leaked }
}

impl Table {
    fn with_places(count: usize) -> &'static Table {
        let place = |_| Place { handle: AtomicUsize::new(NEVER_USED), communicator: AtomicPtr::default() };
        Box::leak(Box::new(Table { places: (0..count).map(place).collect() }))
    }

    /// A table with room, holding what `full` holds; removed places fill one of any size in the end. The old one stays
    /// for its readers, and is filled anew when the next of its size is needed.
    fn replace(full: Option<&'static Table>, spare: &mut Vec<&'static Table>) -> &'static Table {
        let living: Vec<_> = full.iter().flat_map(|table| table.living()).collect();
        let count = (4 * living.len()).next_power_of_two().max(FIRST_PLACES);
        let table = match spare.iter().position(|table| table.places.len() == count) {
            Some(index) => spare.swap_remove(index),
            None => Table::with_places(count),
        };
        table.places.iter().for_each(|place| place.handle.store(NEVER_USED, Ordering::Relaxed));
        for (handle, communicator) in living {
            table.insert(handle, communicator);
        }
        TABLE.store(std::ptr::from_ref(table).cast_mut(), Ordering::Release);
        spare.extend(full);
        table
    }

    fn living(&self) -> impl Iterator<Item = (usize, &'static Communicator)> {
        self.places.iter().filter_map(|place| {
            let handle = place.handle.load(Ordering::Relaxed);
            (handle > REMOVED).then(|| (handle, reference(place.communicator.load(Ordering::Relaxed))))
        })
    }

    fn has_room(&self) -> bool {
        let used =
            self.places.iter().filter(|place| place.handle.load(Ordering::Relaxed) != NEVER_USED).count();
        2 * used < self.places.len()
    }

    /// The places to look at for a handle, in order, up to the first never used.
    #[inline]
    fn probe(&self, handle: usize) -> impl Iterator<Item = (&Place, usize)> {
        let mask = self.places.len() - 1;
        let start = (handle >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        (0..self.places.len()).map(move |step| {
            let place = &self.places[(start + step) & mask];
            (place, place.handle.load(Ordering::Acquire))
        })
    }

    #[inline]
    fn find(&self, handle: usize) -> Option<&'static Communicator> {
        let place = self.place_of(handle)?;
        Some(reference(place.communicator.load(Ordering::Acquire)))
    }

    #[inline]
    fn place_of(&self, handle: usize) -> Option<&Place> {
        if handle <= REMOVED {
            return None;
        }
        for (place, found) in self.probe(handle) {
            if found == handle {
                return Some(place);
            }
            if found == NEVER_USED {
                return None;
            }
        }
        None
    }

    /// Under the lock; there is a place that is free.
    fn insert(&self, handle: usize, communicator: &'static Communicator) {
        if let Some((place, _)) = self.probe(handle).find(|(_, found)| *found <= REMOVED) {
            place.communicator.store(std::ptr::from_ref(communicator).cast_mut(), Ordering::Relaxed);
            place.handle.store(handle, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn handle(number: usize) -> ncclComm_t {
        (0x10000 + 64 * number) as ncclComm_t
    }

    fn identity(ranks: i32) -> Identity {
        Identity { rank: 0, ranks, device: 0 }
    }

    /// Random births and deaths against a map; what is found is what is alive. Growth and reuse both happen.
    #[test]
    fn behaves_as_a_map() {
        let mut alive: HashMap<usize, i32> = HashMap::new();
        let mut state = 88172645463325252u64;
        for step in 0..20_000 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let number = (state % 700) as usize;
            if state.is_multiple_of(3) {
                remove(handle(number));
                alive.remove(&number);
            } else {
                insert(handle(number), identity(step));
                alive.insert(number, step);
            }
        }
        for number in 0..700 {
            let found = find(handle(number)).map(|communicator| communicator.ranks() as i32);
            assert_eq!(found, alive.get(&number).copied(), "handle {number}");
        }
        assert!(table().unwrap().places.len() <= 4096);
        alive.keys().for_each(|number| drop(remove(handle(*number))));
        assert!(find(std::ptr::null_mut()).is_none());
    }

    /// Communicators that come and go at ever new addresses leave no tables behind.
    #[test]
    fn cycles_leave_no_tables() {
        let mut tables = std::collections::HashSet::new();
        for number in 1..20_000 {
            // Now few are alive, now many: tables of several sizes.
            let alive = if number % 4_000 < 2_000 { 3 } else { 300 };
            insert(handle(number * 257), identity(1));
            (alive..=301)
                .filter(|age| *age < number)
                .for_each(|age| drop(remove(handle((number - age) * 257))));
            tables.insert(TABLE.load(Ordering::Relaxed) as usize);
        }
        assert!((3..=8).contains(&tables.len()), "{} tables", tables.len());
    }

    /// A reader never sees another's communicator while handles come and go beside it.
    #[test]
    fn readers_beside_changes() {
        let kept = handle(5000);
        insert(kept, identity(77));
        std::thread::scope(|scope| {
            let reader = scope
                .spawn(|| (0..200_000).all(|_| find(handle(5000)).is_some_and(|found| found.ranks() == 77)));
            for number in 0..30_000 {
                insert(handle(number % 900), identity(1));
                remove(handle((number + 450) % 900));
            }
            assert!(reader.join().unwrap());
        });
        (0..900).for_each(|number| drop(remove(handle(number))));
        remove(kept);
    }
}
