//! Finds the allocation that holds a pointer, and its kind, for all threads of a process.
//!
//! The driver's buffer id tells allocations apart, as it is never reused. An address does not: memory is freed and allocated again
//! unseen (`ctests/programs/buffer_ids.c`; CUDA's runtime may be linked in statically). So [`Allocations::look`] asks the driver
//! for the id at every call, 65 ns on an H200. The rest is remembered: asking takes 0.2 us for mapped memory, 0.1 us for
//! `cudaMalloc`'s. An equal id proves the remembered range and kind, which never change while an allocation lives.
//!
//! [`Allocations::known`] asks nothing. It is for callers that hear of every free and report it by [`Allocations::forget`], and
//! for hooks of a free, which must not call the driver.
//!
//! An allocation is [`Kind::Unknown`] if the driver refuses to answer, and in a forked child, where the driver is not asked.

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

/// Set in the child of a fork: CUDA does not work there, and another thread of the parent may hold the lock. Read instead of
/// [`Driver::is_in_forked_child`], which is a system call.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// The known allocations of a process.
#[derive(Debug)]
pub struct Allocations {
    driver: &'static Driver,
    table: Table,
    asked: AtomicU64,
    changed: AtomicU64,
    evicted: AtomicU64,
    forgotten: AtomicU64,
}

/// Counters for the report. Repeated finds are not counted, because all threads would write to one cache line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Allocations known now.
    pub entries: u64,
    /// How often the driver was asked for more than an id.
    pub asked: u64,
    /// How often memory at known addresses was found freed or replaced, without a report.
    pub changed: u64,
    /// How often an allocation was forgotten to make room.
    pub evicted: u64,
    /// How many were forgotten because their free was reported.
    pub forgotten: u64,
}

impl Allocations {
    /// An empty table of at most `entries_max` allocations. Takes 56 bytes for each now, and allocates nothing later.
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

    /// The allocation that holds `pointer`, even if the memory was freed and allocated again. Calls the driver, so it is not for
    /// hooks. If another thread frees the memory meanwhile, the answer may be the old allocation.
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

    /// The allocation that held `pointer` when it was last looked up, if it is remembered. Right only where every free is reported by
    /// [`Allocations::forget`]. Calls no driver and never waits. Returns None now and then while another thread changes
    /// the table.
    #[inline]
    pub fn known(&self, pointer: Address) -> Option<Allocation> {
        if FORKED.load(Ordering::Relaxed) { None } else { self.find(pointer) }
    }

    #[inline]
    fn find(&self, pointer: Address) -> Option<Allocation> {
        let (range, [id, packed]) = self.table.find(pointer)?;
        Some(Allocation::unpacked(range, id, packed))
    }

    /// Forgets allocations in this range, which was or will be freed or unmapped. For hooks: calls no CUDA, allocates nothing, and
    /// waits at most for another thread's walk through the table.
    pub fn forget(&self, range: Range) {
        if !FORKED.load(Ordering::Relaxed) && self.table.len() > 0 {
            let gone = self.table.remove(range);
            self.forgotten.fetch_add(gone as u64, Ordering::Relaxed);
        }
    }

    /// The counters so far.
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
