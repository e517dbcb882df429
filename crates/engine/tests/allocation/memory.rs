//! Shared by the tests: memory of the application, and a driver that counts its calls.

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use windlass_base::gpu::failure::Code;
use windlass_base::gpu::{Calls, Driver};
use windlass_base::range::Range;
use windlass_engine::features::memory::allocation::{Allocation, Allocations};

use crate::support::*;

pub const MIB: u64 = 1 << 20;
/// The granularity of the driver's mappings.
pub const CHUNK: u64 = 2 * MIB;

pub fn range(base: u64, bytes: u64) -> Range {
    Range { base, bytes }
}

/// Whether the memory can be exported to peers.
#[derive(Clone, Copy)]
pub enum Sharing {
    ByDescriptor,
    Never,
}

pub fn allocated(bytes: u64) -> u64 {
    let mut at = 0;
    ok(cuMemAlloc_v2(&mut at, bytes as usize));
    at
}

pub fn free(at: u64) {
    ok(cuMemFree_v2(at));
}

pub fn reserved(bytes: u64) -> u64 {
    let mut at = 0;
    ok(cuMemAddressReserve(&mut at, bytes as usize, 0, 0, 0));
    at
}

/// A handle of new memory of the first device.
pub fn physical(bytes: u64, sharing: Sharing) -> u64 {
    // `CUmemAllocationProp`: pinned, and by what it is exported; on a device, the first.
    let properties = match sharing {
        Sharing::ByDescriptor => [1 | 1 << 32, 1, 0, 0],
        Sharing::Never => [1, 1, 0, 0],
    };
    let mut handle = 0;
    ok(cuMemCreate(&mut handle, bytes as usize, &properties, 0));
    handle
}

pub fn map(at: u64, bytes: u64, handle: u64) {
    ok(cuMemMap(at, bytes as usize, 0, handle, 0));
}

/// Gives the first device read and write access.
pub fn allow(at: u64, bytes: u64) {
    // `CUmemAccessDesc`: a device, the first; reading and writing.
    ok(cuMemSetAccess(at, bytes as usize, &[1, 0, 3], 1));
}

pub fn unmap(at: u64, bytes: u64) {
    ok(cuMemUnmap(at, bytes as usize));
}

pub fn give_back_addresses(at: u64, bytes: u64) {
    ok(cuMemAddressFree(at, bytes as usize));
}

static ASKED: AtomicU64 = AtomicU64::new(0);
static RETAINED: AtomicU64 = AtomicU64::new(0);
static CALLS: OnceLock<Calls> = OnceLock::new();

unsafe extern "C" fn attributes(count: u32, asked: *const u32, places: *mut *mut c_void, at: u64) -> Code {
    ASKED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the caller's arguments, unchanged.
    unsafe { (CALLS.get().unwrap().cuPointerGetAttributes)(count, asked, places, at) }
}

unsafe extern "C" fn retain(handle: *mut u64, at: *mut c_void) -> Code {
    RETAINED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: as above.
    unsafe { (CALLS.get().unwrap().cuMemRetainAllocationHandle)(handle, at) }
}

/// The driver whose calls [`questions`] counts.
pub fn counted() -> &'static Driver {
    let mut calls = *CALLS.get_or_init(|| start().calls);
    (calls.cuPointerGetAttributes, calls.cuMemRetainAllocationHandle) = (attributes, retain);
    Box::leak(Box::new(Driver::of(calls)))
}

/// The numbers of attribute queries and handle queries since the last call.
pub fn questions() -> (u64, u64) {
    (ASKED.swap(0, Ordering::Relaxed), RETAINED.swap(0, Ordering::Relaxed))
}

/// Holds that a cache that knows `pointer`'s allocation says the same as a new cache, and how many queries it takes.
#[track_caller]
pub fn look(allocations: &Allocations, pointer: u64) -> Allocation {
    let found = allocations.look(pointer);
    questions();
    assert_eq!(allocations.look(pointer), found);
    assert_eq!(questions(), (u64::from(pointer != 0), 0), "what is known costs one question");
    assert_eq!(Allocations::new(start(), 1).look(pointer), found, "the driver's own word");
    found
}

/// Whether a cache knew the allocation at `pointer`: then looking takes one query. It knows it afterwards, so another may leave.
pub fn was_known(allocations: &Allocations, pointer: u64) -> bool {
    questions();
    let found = allocations.look(pointer);
    assert_ne!(found.range.bytes, 0, "no memory is there");
    questions() == (1, 0)
}
