//! Finds the allocation that holds a pointer, and its kind, for all threads of a process.
//!
//! The driver's buffer id tells allocations apart, as it is never reused. An address does not: memory is freed and allocated again
//! unseen (`ctests/programs/buffer_ids.c`; CUDA's runtime may be linked in statically). So [`Allocations::look`] asks the driver
//! for the id at every call, 65 ns on an H200. The rest is remembered: asking takes 0.2 us for mapped memory, 0.1 us for
//! `cudaMalloc`'s. An equal id proves the remembered range and kind, which never change while an allocation lives.
//!
//! An allocation is [`Kind::Unknown`] if the driver refuses to answer, and in a forked child, where the driver is not asked.

mod kind;

mod table;

use windlass_base::gpu::{Address, Driver};
use windlass_base::lock::Mutex;

pub use kind::{Allocation, Kind};
use table::Table;

/// The known allocations of a process.
#[derive(Debug)]
pub struct Allocations {
    driver: &'static Driver,
    /// Locked across no call of the driver.
    table: Mutex<Table>,
}

impl Allocations {
    /// An empty table of at most `entries_max` allocations. Takes 48 bytes for each now, and allocates nothing later.
    pub fn new(driver: &'static Driver, entries_max: usize) -> Self {
        Allocations { driver, table: Mutex::new(Table::new(entries_max)) }
    }

    /// The allocation that holds `pointer`, even if the memory was freed and allocated again. If another thread frees the memory
    /// meanwhile, the answer may be the old allocation.
    #[inline]
    pub fn look(&self, pointer: Address) -> Allocation {
        if pointer == 0 || self.driver.is_in_forked_child() {
            return Allocation::unknown(pointer);
        }
        let id = self.driver.buffer_id(pointer);
        let known = self.table.lock().find(pointer);
        match known {
            Some(known) if Some(known.id) == id => known,
            known => self.look_anew(pointer, id, known),
        }
    }

    #[cold]
    fn look_anew(&self, pointer: Address, id: Option<u64>, known: Option<Allocation>) -> Allocation {
        if let Some(known) = known {
            self.table.lock().remove(known.range);
        }
        if id.is_none() {
            return Allocation::unknown(pointer);
        }
        let Some(said) = self.driver.attributes(pointer) else { return Allocation::unknown(pointer) };
        let found = Allocation::of(&said, pointer, || self.driver.is_mapped_by_handle(pointer));
        self.table.lock().enter(found);
        found
    }
}
