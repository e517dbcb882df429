//! Registered buffers: NCCL's table of ranges, and checks for misuse of it. Registering only adds a range to the table; peers import
//! it at its first use.

use crate::communicator::Communicator;
use crate::driver::driver;
use crate::import::Import;
use crate::lookup::refuse_beyond;
use crate::operation::{Buffer, Call};
use crate::refusal::{Outcome, lock, refuse};
use crate::settings::settings;
use crate::strict;
use nccl_sys::*;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, OnceLock};

const PAGE_BYTES: usize = 4096;

/// A registered range or that of a window, with the ids that its memory had then.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub start: usize,
    pub end: usize,
    /// As the user gave them; `start` and `end` are rounded to pages.
    pub address: usize,
    pub bytes: usize,
    first_id: Option<u64>,
    last_id: Option<u64>,
    /// Whether NCCL can use the range: only if the memory has exportable handles. (Within one process NCCL needs none.)
    pub effective: bool,
}

impl Range {
    pub fn new(address: usize, bytes: usize) -> Outcome<Range> {
        let driver = driver()?;
        let last = (address + bytes.max(1)) - 1;
        Ok(Range {
            start: address & !(PAGE_BYTES - 1),
            end: (address + bytes).next_multiple_of(PAGE_BYTES),
            address,
            bytes,
            first_id: driver.buffer_id(address),
            last_id: driver.buffer_id(last),
            effective: driver.is_exportable(address) || settings().legacy_registration,
        })
    }

    pub fn holds(&self, buffer: Buffer) -> bool {
        self.start <= buffer.address && buffer.address + buffer.bytes <= self.end
    }

    /// Ends the process if other memory lies at the range than at registration.
    pub fn check_alive(&self, communicator: &Communicator, what: &str, call: &Call) {
        let Ok(driver) = driver() else { return };
        let last = (self.address + self.bytes.max(1)) - 1;
        let now = (driver.buffer_id(self.address), driver.buffer_id(last));
        if strict::enabled() && now != (self.first_id, self.last_id) {
            let id = |id: Option<u64>| id.map_or_else(|| "none".to_owned(), |id| id.to_string());
            let line = format!(
                "{} uses a {what} of {} bytes at {:#x} whose memory was freed (buffer id then {}, now {})",
                call.describe(),
                self.bytes,
                self.address,
                id(self.first_id),
                id(now.0)
            );
            strict::fail(communicator.segment(), communicator.rank, &[line]);
        }
    }
}

/// A registered range, with the import of the peers and the count of operations that use it.
pub struct Record {
    pub range: Range,
    /// Made at the first use as a receive buffer; `None` for memory that cannot be imported.
    import: OnceLock<Option<Import>>,
    /// Eager operations that were issued and have not ended on this rank.
    in_flight: AtomicU64,
}

impl Record {
    /// The address at which peers write data for `buffer`. They import the range now if they have not yet.
    pub fn import(&self, communicator: &Communicator, buffer: Buffer, call: &Call) -> Option<usize> {
        let import = || Import::new(buffer.address, communicator.device);
        let import = self.import.get_or_init(import).as_ref()?;
        let place = import.place(buffer);
        if place.is_none() {
            refuse_beyond(communicator, buffer, call);
        }
        place
    }

    /// Ends the process if an operation still uses the record: peers would write to unmapped memory.
    fn check_idle(&self, communicator: &Communicator) {
        let uses = self.in_flight.load(SeqCst);
        if uses > 0 && strict::enabled() && !communicator.leave.load(SeqCst) {
            let line = format!(
                "ncclCommDeregister of {} bytes at {:#x} while {uses} operations of this rank that use it are in flight",
                self.range.bytes, self.range.address
            );
            strict::fail(communicator.segment(), communicator.rank, &[line]);
        }
    }
}

/// An operation's use of a record, from its issue to its end on this rank.
pub struct Use(Arc<Record>);

impl Use {
    pub fn new(record: &Arc<Record>) -> Use {
        record.in_flight.fetch_add(1, SeqCst);
        Use(record.clone())
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, SeqCst);
    }
}

struct Registration {
    record: Arc<Record>,
    users: u64,
    handle: usize,
}

/// A rank's registrations in one communicator, ordered by start address.
#[derive(Default)]
pub struct Registrations {
    entries: Vec<Registration>,
    made: usize,
}

impl Registrations {
    pub fn live(&self) -> impl Iterator<Item = &Range> {
        self.entries.iter().map(|entry| &entry.record.range)
    }

    /// The first record that holds a buffer.
    pub fn find(&self, buffer: Buffer) -> Option<Arc<Record>> {
        let holds = |entry: &&Registration| entry.users > 0 && entry.record.range.holds(buffer);
        self.entries.iter().find(holds).map(|entry| entry.record.clone())
    }
}

/// Registers a range and gives its handle. A range inside a known one gets that one's handle, even if its memory has been freed since.
pub fn register(communicator: &Communicator, address: usize, bytes: usize) -> Outcome<usize> {
    let range = Range::new(address, bytes)?;
    let mut registrations = lock(&communicator.registrations);
    let inside = |entry: &&mut Registration| {
        entry.record.range.start <= range.start && range.end <= entry.record.range.end
    };
    if let Some(entry) = registrations.entries.iter_mut().find(inside) {
        entry.users += 1;
        return Ok(entry.handle);
    }
    registrations.made += 1;
    // Never an address, so that a wrong handle is detected.
    let handle = registrations.made << 4 | 1;
    let record = Arc::new(Record { range, import: OnceLock::new(), in_flight: AtomicU64::new(0) });
    let index = registrations.entries.partition_point(|entry| entry.record.range.start <= range.start);
    registrations.entries.insert(index, Registration { record, users: 1, handle });
    Ok(handle)
}

/// Drops a use of a registration; with the last one the import of the peers ends. Does not wait for operations.
pub fn deregister(communicator: &Communicator, handle: usize) -> Outcome {
    if handle == 0 {
        return Ok(());
    }
    static ENDS: AtomicU64 = AtomicU64::new(0);
    if settings().kept_registrations.contains(&(ENDS.fetch_add(1, SeqCst) + 1)) {
        return refuse(ncclSystemError, "Deregister: kept, as WINDLASS_SIM_KEPT_REGISTRATIONS asks");
    }
    let mut registrations = lock(&communicator.registrations);
    let known = |entry: &&mut Registration| entry.handle == handle && entry.users > 0;
    let Some(entry) = registrations.entries.iter_mut().find(known) else {
        return refuse(ncclInvalidUsage, "Deregister: Could not find handle");
    };
    entry.users -= 1;
    if entry.users > 0 {
        return Ok(());
    }
    let record = entry.record.clone();
    drop(registrations);
    record.check_idle(communicator);
    std::thread::sleep(settings().deregistration);
    let mut registrations = lock(&communicator.registrations);
    registrations.entries.retain(|entry| entry.handle != handle);
    // Still under the lock: a thread that no longer finds the record can rely on its memory being unmapped.
    drop(record);
    Ok(())
}
