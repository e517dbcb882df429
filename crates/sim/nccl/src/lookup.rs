//! Looks up which buffers of a call are registered or in windows, and whether NCCL uses that, as 2.28.9 does on one host without multicast.

use crate::communicator::Communicator;
use crate::driver::driver;
use crate::operation::{Buffer, Call, Kind};
use crate::refusal::lock;
use crate::registration::{Record, Use};
use crate::strict;
use crate::window::{self, Window};
use std::sync::Arc;

/// From this size on NCCL takes another path for registered buffers.
pub const LARGE_BYTES: u64 = 1 << 20;
/// The same for all-gathers, in bytes of all ranks: smaller ones use a protocol that looks up no registration.
pub const LARGE_GATHER_BYTES: u64 = 8 << 20;

/// How much of a rank's buffers of one call is registered.
pub type Coverage = u32;
pub const UNCOVERED: Coverage = 0;
pub const COVERED: Coverage = 1;
pub const PARTLY_COVERED: Coverage = 2;

/// The result of looking up the buffers of a call.
pub struct Found {
    pub coverage: Coverage,
    /// Whether an eager collective takes the path of registered buffers.
    pub registered: bool,
    /// Uses of the records that an eager operation needs until it ends.
    pub uses: Vec<Use>,
    /// Uses of the windows, likewise.
    pub windows: Vec<window::Use>,
    /// The address at which peers write into the receive buffer, if it is not this rank's own.
    pub arrives: Option<usize>,
}

/// Looks up this rank's buffers. Ends the process if registered memory was freed.
pub fn look_up(
    communicator: &Communicator,
    call: &Call,
    buffers: (Option<Buffer>, Option<Buffer>),
    captured: bool,
) -> Found {
    let used = [(buffers.0, Role::Send), (buffers.1, Role::Receive)].into_iter();
    let used = used.filter_map(|(buffer, role)| Some((buffer.filter(|buffer| buffer.bytes > 0)?, role)));
    let covers: Vec<Cover> = used.map(|(buffer, role)| cover(communicator, call, buffer, role)).collect();
    let is_covered = |cover: &Cover| !matches!(cover, Cover::None);
    let coverage = match (covers.iter().any(is_covered), covers.iter().all(is_covered)) {
        (true, true) => COVERED,
        (true, false) => PARTLY_COVERED,
        (false, _) => UNCOVERED,
    };
    // NCCL registers the buffers of captured calls itself, and keeps them with the graph.
    let is_used = coverage == COVERED && !captured && communicator.ranks > 1;
    let registered = is_used && may_run_registered(call, communicator.ranks);
    let mut found = Found { coverage, registered, uses: Vec::new(), windows: Vec::new(), arrives: None };
    if is_used {
        found.windows = covers.iter().filter_map(Cover::window).map(window::Use::new).collect();
    }
    if registered && let (Some(receive), Some(Cover::Record(record))) = (buffers.1, covers.last()) {
        found.arrives = record.import(communicator, receive, call);
    }
    if registered || is_used && is_of_messages(call.kind) && call.bytes() as u64 >= LARGE_BYTES {
        found.uses = covers.iter().filter_map(Cover::record).map(Use::new).collect();
    }
    found
}

fn may_run_registered(call: &Call, ranks: usize) -> bool {
    let bytes = call.bytes() as u64;
    match call.kind {
        Kind::AllGather => bytes * ranks as u64 >= LARGE_GATHER_BYTES,
        Kind::Broadcast => bytes >= LARGE_BYTES,
        Kind::AllReduce => bytes >= LARGE_BYTES && call.send != call.receive,
        _ => false,
    }
}

fn is_of_messages(kind: Kind) -> bool {
    matches!(kind, Kind::AlltoAll | Kind::Gather | Kind::Scatter | Kind::Send | Kind::Recv)
}

/// The registration or window that holds a buffer.
enum Cover {
    None,
    Window(Arc<Window>),
    Record(Arc<Record>),
}

impl Cover {
    fn record(&self) -> Option<&Arc<Record>> {
        if let Cover::Record(record) = self { Some(record) } else { None }
    }

    fn window(&self) -> Option<&Arc<Window>> {
        if let Cover::Window(window) = self { Some(window) } else { None }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Send,
    Receive,
}

fn cover(communicator: &Communicator, call: &Call, buffer: Buffer, role: Role) -> Cover {
    let record = lock(&communicator.registrations).find(buffer);
    if let Some(record) = record {
        record.range.check_alive(communicator, "registration", call);
        // A buffer that peers import must lie in one allocation; a collective's send buffer is only looked up.
        let is_imported = role == Role::Receive || is_of_messages(call.kind);
        if record.range.effective && (!is_imported || is_of_one_allocation(buffer)) {
            return Cover::Record(record);
        }
    }
    let window = lock(&communicator.windows).find(buffer.address).cloned();
    if let Some(window) = window {
        window.range.check_alive(communicator, "window", call);
        return Cover::Window(window);
    }
    Cover::None
}

fn is_of_one_allocation(buffer: Buffer) -> bool {
    let allocation = driver().and_then(|driver| driver.allocation(buffer.address));
    allocation.is_ok_and(|(base, bytes)| buffer.address + buffer.bytes <= base + bytes)
}

/// Ends the process for a buffer that ends behind the allocation that peers have imported.
pub fn refuse_beyond(communicator: &Communicator, buffer: Buffer, call: &Call) {
    if strict::enabled() {
        let line = format!(
            "{} receives {} bytes at {:#x}, beyond the allocation that peers imported of its registration",
            call.describe(),
            buffer.bytes,
            buffer.address
        );
        strict::fail(communicator.segment(), communicator.rank, &[line]);
    }
}
