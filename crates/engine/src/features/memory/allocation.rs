//! Which allocation holds a pointer, and of which kind, for all threads of a process.
//!
//! What tells allocations apart is the driver's id, which never comes again; an address says nothing, since memory is freed
//! and allocated again without our hearing of it (`ctests/programs/buffer_ids.c`; CUDA's runtime may be linked in
//! statically). So [`Allocations::look`] asks the driver for the id at every call, 65 ns on an H200, and only what else it
//! would have to ask is remembered, 0.2 us of mapped memory, 0.1 of `cudaMalloc`'s. An id that is the remembered one proves all of it:
//! where an allocation lies and what it is never changes while it lives.
//!
//! [`Allocations::known`] asks nothing. It is for those who hear of every free and tell it by [`Allocations::forget`], and
//! for a hook of a free, which may ask nothing, to tell what is about to go.
//!
//! An answer that the driver refuses is [`Kind::Unknown`], as is everything in a forked child, where nothing is asked.

mod kind;

mod table;

use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde::Serialize;

use windlass_base::gpu::{Address, Driver};
use windlass_base::process;
use windlass_base::range::Range;

pub use kind::{Allocation, Kind};
use table::Table;

/// This process was forked off one that looks: CUDA is dead, and the lock may be held by a thread that is not here. Looked at
/// instead of [`Driver::is_in_forked_child`], which is a system call.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// The allocations that are known of a process.
#[derive(Debug)]
pub struct Allocations {
    driver: &'static Driver,
    table: Table,
    asked: AtomicU64,
    changed: AtomicU64,
    evicted: AtomicU64,
    forgotten: AtomicU64,
}

/// What is counted, for the report. Finding one again is not, which would have all threads write to one place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Allocations known now.
    pub entries: u64,
    /// How often the driver was asked for more than an id.
    pub asked: u64,
    /// How often memory had gone, or come anew, at known addresses, and nobody had told.
    pub changed: u64,
    /// How often one left to make room.
    pub evicted: u64,
    /// How many were forgotten because they were told to be freed.
    pub forgotten: u64,
}

impl Allocations {
    /// Knows none yet, and never more than `entries_max`: 56 bytes each, taken now. Nothing is allocated later.
    pub fn new(driver: &'static Driver, entries_max: usize) -> Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| process::on_fork(in_child));
        Allocations {
            driver,
            table: Table::new(entries_max),
            asked: AtomicU64::new(0),
            changed: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
            forgotten: AtomicU64::new(0),
        }
    }

    /// The allocation that holds `pointer`, also where it was freed and allocated again since. Asks the driver, so not for
    /// hooks. Of memory that another thread frees meanwhile the answer may be the one before.
    #[inline]
    pub fn look(&self, pointer: Address) -> Allocation {
        if pointer == 0 || FORKED.load(Ordering::Relaxed) {
            return Allocation::unknown(pointer);
        }
        let id = self.driver.buffer_id(pointer);
        match self.find(pointer) {
            Some(known) if Some(known.id) == id => known,
            known => self.look_anew(pointer, id, known),
        }
    }

    #[cold]
    fn look_anew(&self, pointer: Address, id: Option<u64>, known: Option<Allocation>) -> Allocation {
        if let Some(known) = known {
            self.changed.fetch_add(1, Ordering::Relaxed);
            self.table.remove(known.range);
        }
        if id.is_none() {
            return Allocation::unknown(pointer);
        }
        self.asked.fetch_add(1, Ordering::Relaxed);
        let Some(said) = self.driver.attributes(pointer) else { return Allocation::unknown(pointer) };
        let found = Allocation::of(&said, pointer, || self.driver.is_mapped_by_handle(pointer));
        if self.table.enter(found.range, [found.id, found.packed()]) {
            self.evicted.fetch_add(1, Ordering::Relaxed);
        }
        found
    }

    /// The allocation that held `pointer` when it was last looked for, if it is remembered. Right where every free is told by
    /// [`Allocations::forget`]; else it may be long gone. Asks nothing, waits for nobody; none now and then while another
    /// thread looks for what is not known.
    #[inline]
    pub fn known(&self, pointer: Address) -> Option<Allocation> {
        if FORKED.load(Ordering::Relaxed) { None } else { self.find(pointer) }
    }

    #[inline]
    fn find(&self, pointer: Address) -> Option<Allocation> {
        let (range, [id, packed]) = self.table.find(pointer)?;
        Some(Allocation::unpacked(range, id, packed))
    }

    /// Memory at these addresses was, or is about to be, freed or unmapped. For hooks: calls no CUDA, allocates nothing, and
    /// waits at most for another thread's walk through the table.
    pub fn forget(&self, range: Range) {
        if !FORKED.load(Ordering::Relaxed) && self.table.len() > 0 {
            let gone = self.table.remove(range);
            self.forgotten.fetch_add(gone as u64, Ordering::Relaxed);
        }
    }

    /// What was counted so far.
    pub fn counters(&self) -> Counters {
        Counters {
            entries: self.table.len() as u64,
            asked: self.asked.load(Ordering::Relaxed),
            changed: self.changed.load(Ordering::Relaxed),
            evicted: self.evicted.load(Ordering::Relaxed),
            forgotten: self.forgotten.load(Ordering::Relaxed),
        }
    }
}
