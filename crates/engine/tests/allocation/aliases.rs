//! Tests of aliases: the memory of an allocation mapped at a second address.

use std::ffi::c_void;
use std::sync::Arc;

use windlass_base::gpu::memory::{Mapping, Physical, Reservation};
use windlass_base::gpu::{Driver, Failure};
use windlass_base::range::Range;
use windlass_engine::features::memory::allocation::{Allocations, Kind};

use crate::memory::*;
use crate::support::*;

const BYTES: u64 = 32 * CHUNK;

/// Holds that `bytes` bytes are free. A GPU's driver may take some for its tables.
#[track_caller]
fn assert_free(driver: &Driver, bytes: u64) {
    let (found, tables) = (driver.free_bytes().unwrap(), if on_a_gpu() { 4 * CHUNK } else { 0 });
    assert!(found.abs_diff(bytes) <= tables, "{found} bytes are free, not {bytes}");
}

fn write(at: u64, value: u64) {
    ok(cuMemcpyHtoD_v2(at, (&raw const value).cast::<c_void>(), 8));
}

fn read(at: u64) -> u64 {
    let mut value = 0_u64;
    ok(cuMemcpyDtoH_v2((&raw mut value).cast::<c_void>(), at, 8));
    value
}

/// Memory as the application has it: the handle is released, and the mapping alone keeps the memory.
fn mapped() -> u64 {
    let (at, handle) = (reserved(BYTES), physical(BYTES, Sharing::ByDescriptor));
    map(at, BYTES, handle);
    allow(at, BYTES);
    ok(cuMemRelease(handle));
    at
}

fn unmapped(at: u64) {
    unmap(at, BYTES);
    give_back_addresses(at, BYTES);
}

fn alias(driver: &'static Driver, of: Range) -> Result<Mapping, Failure> {
    let physical = Physical::behind(driver, of.base, of.bytes)?;
    Mapping::new(&Arc::new(Reservation::new(driver, of.bytes, CHUNK)?), 0, physical, 0)
}

/// What is written at one address is read at the other, also when one of them is unmapped. When both are, the driver has the memory
/// again.
#[test]
fn one_memory_at_two_addresses() {
    let primary = Primary::of(0);
    primary.make_current();
    let driver = start();
    let allocations = Allocations::new(driver, 16);
    let free_at_first = driver.free_bytes().unwrap();
    for is_alias_first in [false, true] {
        let at = mapped();
        let known = allocations.look(at);
        assert_eq!((known.range, known.kind), (range(at, BYTES), Kind::Vmm { exportable: true }));
        let alias = alias(driver, known.range).unwrap();
        for (offset, value) in [(0, 11), (BYTES / 2, 12), (BYTES - 8, 13)] {
            write(at + offset, value);
            assert_eq!(read(alias.address + offset), value);
            write(alias.address + offset, value + 100);
            assert_eq!(read(at + offset), value + 100);
        }
        // The alias is an allocation with an id and a kind of its own; the first one has not changed.
        let ours = allocations.look(alias.address + BYTES - 1);
        assert_eq!((ours.range, ours.kind), (range(alias.address, BYTES), known.kind));
        assert_ne!(ours.id, known.id);
        assert_eq!(allocations.look(at), known);
        assert_eq!([at, alias.address].map(|at| driver.handle_types(at)), [1, 1]);
        // An alias takes no memory.
        assert_free(driver, free_at_first - BYTES);

        if is_alias_first {
            drop(alias);
            assert_eq!(read(at + BYTES - 8), 113);
            assert_eq!(allocations.look(at), known);
            unmapped(at);
        } else {
            unmapped(at);
            assert_eq!(driver.buffer_id(at), None);
            assert_eq!(read(alias.address + BYTES - 8), 113);
            write(alias.address, 5);
            assert_eq!(read(alias.address), 5);
            assert_free(driver, free_at_first - BYTES);
            drop(alias);
        }
        assert_free(driver, free_at_first);
    }
}

/// The addresses of freed memory may be used again while the alias still maps the old memory: these are two memories.
#[test]
fn the_address_used_again() {
    let primary = Primary::of(0);
    primary.make_current();
    let driver = start();
    let base = reserved(BYTES);
    let mut aliases = Vec::new();
    for value in 1..=3_u64 {
        let handle = physical(BYTES, Sharing::ByDescriptor);
        map(base, BYTES, handle);
        allow(base, BYTES);
        ok(cuMemRelease(handle));
        write(base + 64, value);
        aliases.push(alias(driver, range(base, BYTES)).unwrap());
        unmap(base, BYTES);
    }
    for (value, alias) in (1..).zip(&aliases) {
        assert_eq!(read(alias.address + 64), value);
    }
    drop(aliases);
    give_back_addresses(base, BYTES);
}

/// Memory that the driver maps itself has no handle, nor has an unknown address. Aliases that failed leave nothing, nor do a
/// thousand that succeeded and ended.
#[test]
fn refused_and_given_back() {
    let primary = Primary::of(0);
    primary.make_current();
    let driver = start();
    let block = allocated(BYTES);
    let at = mapped();
    let free_at_first = driver.free_bytes().unwrap();
    for nothing in [block, 0, &raw const driver as u64] {
        Physical::behind(driver, nothing, BYTES).unwrap_err();
    }
    assert_eq!([block, 0].map(|at| driver.handle_types(at)), [0, 0]);
    for _ in 0..1000 {
        assert_eq!(alias(driver, range(at, BYTES)).unwrap().physical.bytes, BYTES);
        alias(driver, range(at, 2 * BYTES)).unwrap_err();
    }
    assert_free(driver, free_at_first);
    unmapped(at);
    assert_free(driver, free_at_first + BYTES);
    free(block);
}
