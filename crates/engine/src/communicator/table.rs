//! The table of communicators by handle: every call reads it without locks, changes happen under one lock.
//!
//! # Why readers need no lock
//! Tables and records are leaked and reused, never freed, so a pointer that was read stays valid, but may be out of date.
//! A record is written before the pointer to it, the pointer before the handle of its place, and the places of a table before [`TABLE`].
//! Each store is a release and each load an acquire, so a reader with a pointer sees the complete record.
//!
//! A place, or a whole table, may be refilled between two loads of a reader. Then the record's own handle, which is compared last,
//! differs; or a handle that is there is not found. In both cases the reader looks again under the lock ([`look_again`]), which costs
//! only calls on unknown handles. If a record is reused even later, its reader finds out by comparing the handle under the record's own
//! lock ([`Communicator::look_at_kept`]).

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use nccl_sys::ncclComm_t;

use crate::features::recycling::{self, alive};
use windlass_base::config::{Order, config};
use windlass_base::lock::Mutex;
use windlass_base::observers;
use windlass_base::stats::count::{self, Identity};

use super::{Communicator, Kept};

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
/// Held during changes of the table, for a few stores. Lock order: no other lock comes before it.
pub(super) static CHANGING: Mutex<Spare> = Mutex::new(Spare { records: Vec::new(), tables: Vec::new() });

/// Records and tables to reuse. They are not freed, as a thread may still read them.
pub(super) struct Spare {
    records: Vec<&'static Communicator>,
    /// At most one of each size.
    tables: Vec<&'static Table>,
}

/// The communicator with this handle. Takes the lock only if the handle is not found.
#[inline]
pub(crate) fn find(handle: ncclComm_t) -> Option<&'static Communicator> {
    look_up(handle).or_else(|| look_again(handle))
}

/// A reader that was slow in an old table while that was refilled may have missed a handle that is there.
#[cold]
fn look_again(handle: ncclComm_t) -> Option<&'static Communicator> {
    let _unchanging = CHANGING.lock();
    look_up(handle)
}

#[inline]
fn look_up(handle: ncclComm_t) -> Option<&'static Communicator> {
    let communicator = table()?.find(handle as usize)?;
    // The place may have been given to another handle between two loads.
    (communicator.handle.load(Ordering::Relaxed) == handle as usize).then_some(communicator)
}

/// Enters a new communicator. If the handle is known, its old communicator ended unseen, and is removed.
pub(crate) fn insert(handle: ncclComm_t, identity: Identity) -> &'static Communicator {
    drop(remove(handle));
    let counters = count::begin(identity);
    alive::begins();
    let mut spare = CHANGING.lock();
    let communicator: &'static Communicator =
        spare.records.pop().unwrap_or_else(|| Box::leak(Box::new(Communicator::unused())));
    communicator.counters.store(counters, Ordering::Relaxed);
    communicator.identify(identity);
    communicator.order_is_asked_for.store(config().order != Order::Auto, Ordering::Relaxed);
    communicator.order_is_said.store(false, Ordering::Relaxed);
    communicator.handle.store(handle as usize, Ordering::Relaxed);
    let grown = match table() {
        Some(table) if table.has_room() => table,
        full => Table::replace(full, &mut spare.tables),
    };
    grown.insert(handle as usize, communicator);
    communicator
}

/// Removes a communicator; its counts stay. Returns what its init left.
pub(crate) fn remove(handle: ncclComm_t) -> Option<Kept> {
    let mut spare = CHANGING.lock();
    let place = table()?.place_of(handle as usize)?;
    place.handle.store(REMOVED, Ordering::Release);
    let communicator = reference(place.communicator.load(Ordering::Relaxed));
    count::end(communicator.counters());
    recycling::look_after_kept();
    let kept = communicator.end();
    spare.records.push(communicator);
    drop(spare);
    // Plugins may take long, and wait for threads that begin or end communicators.
    if observers::are_on() {
        observers::profiler::ended(handle as usize);
    }
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

    /// Makes a table with room and the entries of `full`, which removed places fill in the end, whatever its size. The old table stays
    /// for its readers, and is refilled when the next table of its size is needed.
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

    /// Inserts an entry, under the lock. There must be a free place.
    fn insert(&self, handle: usize, communicator: &'static Communicator) {
        if let Some((place, _)) = self.probe(handle).find(|(_, found)| *found <= REMOVED) {
            // A reader that saw the old handle here may load this pointer before the new handle is stored.
            place.communicator.store(std::ptr::from_ref(communicator).cast_mut(), Ordering::Release);
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

    /// Random inits and ends against a map: exactly the living communicators are found. Growth and reuse both happen.
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

    /// Communicators that come and go at new addresses do not make ever more tables.
    #[test]
    fn cycles_leave_no_tables() {
        let mut tables = std::collections::HashSet::new();
        for number in 1..20_000 {
            // At times few are alive, at times many: tables of several sizes.
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
