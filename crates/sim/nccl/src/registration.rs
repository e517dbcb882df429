//! Registered buffers: NCCL's table of ranges, and what it makes unsafe.

use crate::communicator::Communicator;
use crate::driver::driver;
use crate::operation::{Buffer, Call};
use crate::refusal::{Outcome, lock, refuse};
use crate::settings::settings;
use crate::strict;
use nccl_sys::*;

/// From here on NCCL takes another path for registered buffers.
pub const LARGE_BYTES: u64 = 1 << 20;

const PAGE_BYTES: usize = 4096;

/// How much of a rank's buffers of one call is registered.
pub type Coverage = u32;
pub const UNCOVERED: Coverage = 0;
pub const COVERED: Coverage = 1;
pub const PARTLY_COVERED: Coverage = 2;

/// A range that users registered, or of a window, with the identity that its memory had.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub start: usize,
    pub end: usize,
    /// As the user gave them.
    pub address: usize,
    pub bytes: usize,
    first_id: Option<u64>,
    last_id: Option<u64>,
    /// NCCL can use it only if the memory has exportable handles.
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
            effective: driver.is_virtual(address) || settings().legacy_registration,
        })
    }

    pub fn holds(&self, buffer: Buffer) -> bool {
        self.start <= buffer.address && buffer.address + buffer.bytes <= self.end
    }

    /// Fails if the memory is another than at registration.
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

struct Registration {
    range: Range,
    users: u64,
    handle: usize,
}

#[derive(Default)]
pub struct Registrations {
    entries: Vec<Registration>,
    made: usize,
}

impl Registrations {
    pub fn live(&self) -> impl Iterator<Item = &Range> {
        self.entries.iter().map(|entry| &entry.range)
    }
}

/// Registers a range; one inside a known one gives the old record, even if its memory has been freed since.
pub fn register(communicator: &Communicator, address: usize, bytes: usize) -> Outcome<usize> {
    let range = Range::new(address, bytes)?;
    let mut registrations = lock(&communicator.registrations);
    let inside = |entry: &&mut Registration| entry.range.start <= range.start && range.end <= entry.range.end;
    if let Some(entry) = registrations.entries.iter_mut().find(inside) {
        entry.users += 1;
        return Ok(entry.handle);
    }
    registrations.made += 1;
    // Never an address, so that a foreign handle is found out.
    let handle = registrations.made << 4 | 1;
    registrations.entries.push(Registration { range, users: 1, handle });
    Ok(handle)
}

pub fn deregister(communicator: &Communicator, handle: usize) -> Outcome {
    if handle == 0 {
        return Ok(());
    }
    let entries = &mut lock(&communicator.registrations).entries;
    let Some(index) = entries.iter().position(|entry| entry.handle == handle) else {
        return refuse(ncclInvalidUsage, "Deregister: Could not find handle");
    };
    entries[index].users -= 1;
    if entries[index].users == 0 {
        entries.remove(index);
    }
    Ok(())
}

/// How much of this rank's buffers is registered. Fails on registered memory that was freed.
pub fn coverage(
    communicator: &Communicator,
    call: &Call,
    buffers: (Option<Buffer>, Option<Buffer>),
) -> Coverage {
    let used = [buffers.0, buffers.1].into_iter().flatten().filter(|buffer| buffer.bytes > 0);
    let covered: Vec<bool> = used.map(|buffer| is_covered(communicator, call, buffer)).collect();
    match (covered.contains(&true), covered.contains(&false)) {
        (true, false) => COVERED,
        (true, true) => PARTLY_COVERED,
        (false, _) => UNCOVERED,
    }
}

fn is_covered(communicator: &Communicator, call: &Call, buffer: Buffer) -> bool {
    let registered = lock(&communicator.registrations).live().find(|range| range.holds(buffer)).copied();
    if let Some(range) = registered {
        range.check_alive(communicator, "registration", call);
        if range.effective {
            return true;
        }
    }
    let window = lock(&communicator.windows).find(buffer.address);
    if let Some(window) = window {
        window.range.check_alive(communicator, "window", call);
    }
    window.is_some()
}
