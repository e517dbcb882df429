//! Tests of which kind each memory has.

use windlass_base::gpu::Driver;
use windlass_base::gpu::failure::Code;
use windlass_engine::features::memory::allocation::{Allocations, Kind};

use crate::memory::*;
use crate::support::*;

/// Memory of each kind gives the same whole allocation at its first byte, in the middle and at its last byte.
#[test]
fn each_kind() {
    let primary = Primary::of(0);
    primary.make_current();
    let allocations = Allocations::new(counted(), 64);
    let stream = AppStream::new();
    let mut last_id = 0;
    let mut holds = |at: u64, bytes: u64, kind: Kind| {
        let found = look(&allocations, at);
        assert_eq!((found.range, found.kind, found.device), (range(at, bytes), kind, 0));
        assert!(found.id != last_id && found.id != 0);
        last_id = found.id;
        for inside in [at + bytes / 2, at + bytes - 1] {
            assert_eq!(look(&allocations, inside), found);
        }
        // Another allocation may begin right after it.
        let behind = allocations.look(at + bytes);
        assert!(behind.id != found.id && !behind.range.overlaps(found.range));
    };

    for bytes in [512, 65_536, 3 * MIB + 512] {
        let at = allocated(bytes);
        holds(at, bytes, Kind::Cuda);
        free(at);
    }
    let mut at = 0;
    ok(cuMemAllocAsync(&mut at, 8 << 20, stream.0));
    holds(at, 8 * MIB, Kind::Pool);
    ok(cuMemFreeAsync(at, stream.0));
    stream.synchronize();
    // 1: attached to no stream.
    ok(cuMemAllocManaged(&mut at, 4 << 20, 1));
    holds(at, 4 * MIB, Kind::Managed);
    free(at);
    let mut pages = vec![0_u64; 1 << 18];
    let own = pages.as_mut_ptr();
    ok(cuMemHostRegister_v2(own.cast(), 1 << 20, 0));
    holds(own as u64, MIB, Kind::Host);
    ok(cuMemHostUnregister(own.cast()));
    for (sharing, exportable) in [(Sharing::ByDescriptor, true), (Sharing::Never, false)] {
        let (at, handle) = (reserved(2 * CHUNK), physical(2 * CHUNK, sharing));
        map(at, 2 * CHUNK, handle);
        holds(at, 2 * CHUNK, Kind::Vmm { exportable });
        ok(cuMemRelease(handle));
        holds_the_same(&allocations, at, Kind::Vmm { exportable });
        unmap(at, 2 * CHUNK);
        give_back_addresses(at, 2 * CHUNK);
    }
}

/// Holds that the kind is the same after the handle was released, as the mapping keeps the memory.
fn holds_the_same(allocations: &Allocations, at: u64, kind: Kind) {
    assert_eq!(look(allocations, at).kind, kind);
}

/// Memory that the driver does not know, or for which it returns an error, is unknown: no error, and no entry in the table.
#[test]
fn unknown_memory() {
    let primary = Primary::of(0);
    primary.make_current();
    let allocations = Allocations::new(counted(), 1);
    let (known, on_stack) = (allocated(MIB), 0_u8);
    allocations.look(known);
    let reservation = reserved(2 * CHUNK);
    for at in [0, 1, &raw const on_stack as u64, reservation, reservation + CHUNK, u64::MAX] {
        let found = look(&allocations, at);
        assert_eq!((found.range, found.id, found.kind, found.device), (range(at, 0), 0, Kind::Unknown, -1));
    }
    give_back_addresses(reservation, 2 * CHUNK);
    assert!(was_known(&allocations, known), "nothing has taken the only place");
    free(known);

    unsafe extern "C" fn refuse(_: u32, _: *const u32, _: *mut *mut std::ffi::c_void, _: u64) -> Code {
        Code(4)
    }
    let mut calls = start().calls;
    calls.cuPointerGetAttributes = refuse;
    let refusing = Allocations::new(Box::leak(Box::new(Driver::of(calls))), 4);
    let at = allocated(MIB);
    assert_eq!(refusing.look(at).kind, Kind::Unknown);
    free(at);
}

/// In a segment that grows and shrinks each mapping is an allocation of its own, whatever is mapped beside it. A buffer over two of
/// them is in none.
#[test]
fn expandable_segment() {
    let primary = Primary::of(0);
    primary.make_current();
    let allocations = Allocations::new(counted(), 64);
    const PARTS: u64 = 4;
    let base = reserved(PARTS * CHUNK);
    let kind = Kind::VmmParts { exportable: true };
    let handles: Vec<u64> = (0..PARTS).map(|_| physical(CHUNK, Sharing::ByDescriptor)).collect();
    let mut parts = Vec::new();
    for (at, handle) in (base..).step_by(CHUNK as usize).zip(&handles) {
        map(at, CHUNK, *handle);
        let earlier = (base..).step_by(CHUNK as usize).zip(&parts);
        earlier.for_each(|(place, _)| assert!(was_known(&allocations, place)));
        parts.push(look(&allocations, at + 5));
        // The earlier parts do not change.
        for (place, part) in (base..).step_by(CHUNK as usize).zip(&parts) {
            assert_eq!((part.range, part.kind), (range(place, CHUNK), kind));
            assert_eq!([place, place + CHUNK - 1].map(|at| look(&allocations, at)), [*part; 2]);
        }
    }
    let over_two = range(base + CHUNK - 4096, 8192);
    assert!(!look(&allocations, over_two.base).range.contains(over_two));
    // The second part is unmapped and mapped again.
    let at = base + CHUNK;
    unmap(at, CHUNK);
    assert_eq!(look(&allocations, at).kind, Kind::Unknown);
    map(at, CHUNK, handles[1]);
    let again = look(&allocations, at);
    assert_eq!((again.range, again.kind), (parts[1].range, kind));
    assert_ne!(again.id, parts[1].id);
    for index in [0, 2, 3] {
        let place = base + index * CHUNK;
        assert!(was_known(&allocations, place));
        assert_eq!(look(&allocations, place), parts[index as usize]);
    }
    unmap(base, PARTS * CHUNK);
    handles.into_iter().for_each(|handle| ok(cuMemRelease(handle)));
    give_back_addresses(base, PARTS * CHUNK);
}
