//! Tests of addresses that are used again, and of a full table.

use windlass_engine::features::memory::allocation::{Allocations, Kind};

use crate::memory::*;
use crate::support::*;

/// A freed address that is allocated again is another allocation, although `forget` was not called: over 40,000 allocations in a
/// table of four, in sizes that overlap the earlier ones.
#[test]
fn freed_and_allocated_again() {
    let primary = Primary::of(0);
    primary.make_current();
    let allocations = Allocations::new(counted(), 4);
    let cycles = if on_a_gpu() { 4_000 } else { 40_000 };
    let (mut reused, mut before) = (0, allocations.look(0));
    for cycle in 0..cycles {
        let bytes = [4096, 8192, 12_288, 4096, 65_536][cycle % 5];
        let at = allocated(bytes);
        let found = allocations.look(at + cycle as u64 % bytes);
        assert_eq!((found.range, found.kind), (range(at, bytes), Kind::Cuda), "cycle {cycle}");
        assert_ne!(found.id, before.id, "cycle {cycle}");
        reused += u64::from(before.range.overlaps(found.range));
        assert!(allocations.counters().entries <= 4);
        before = found;
        free(at);
        if cycle % 7 == 0 {
            // The memory is freed, and the table was not told.
            assert_eq!(allocations.look(at).kind, Kind::Unknown, "cycle {cycle}");
            assert_eq!(allocations.known(at), None);
        }
    }
    println!("{reused} of {cycles} at addresses used before; {:?}", allocations.counters());
    assert!(reused > cycles as u64 / 4);
    assert_eq!(allocations.counters().asked, cycles as u64);
}

/// Every mapping is an allocation of its own, with the same handle again, another one, or several of other sizes.
#[test]
fn mapped_again() {
    let primary = Primary::of(0);
    primary.make_current();
    let allocations = Allocations::new(counted(), 16);
    let base = reserved(2 * CHUNK);
    let [one, two] = [(); 2].map(|()| physical(2 * CHUNK, Sharing::ByDescriptor));
    let [left, right] = [(); 2].map(|()| physical(CHUNK, Sharing::Never));
    let mut ids = Vec::new();
    for handle in [one, two, one, one] {
        map(base, 2 * CHUNK, handle);
        let found = look(&allocations, base + CHUNK);
        assert_eq!((found.range, found.kind), (range(base, 2 * CHUNK), Kind::Vmm { exportable: true }));
        assert!(!ids.contains(&found.id));
        ids.push(found.id);
        unmap(base, 2 * CHUNK);
    }
    map(base, CHUNK, left);
    map(base + CHUNK, CHUNK, right);
    // The table still has the left mapping with a length of two chunks.
    let found = [base + CHUNK, base].map(|at| look(&allocations, at));
    assert_eq!(found.map(|found| found.range), [range(base + CHUNK, CHUNK), range(base, CHUNK)]);
    assert_eq!(found.map(|found| found.kind), [Kind::VmmParts { exportable: false }; 2]);
    assert_eq!(allocations.counters().entries, 2);
    unmap(base, 2 * CHUNK);
    map(base, 2 * CHUNK, one);
    assert_eq!(look(&allocations, base + 2 * CHUNK - 1).range, range(base, 2 * CHUNK));
    assert_eq!(allocations.counters().entries, 1);
    unmap(base, 2 * CHUNK);
    [one, two, left, right].into_iter().for_each(|handle| ok(cuMemRelease(handle)));
    give_back_addresses(base, 2 * CHUNK);
}

/// An allocation that was told to be freed is forgotten without a query. A free of unknown memory changes nothing.
#[test]
fn told_of_frees() {
    let primary = Primary::of(0);
    primary.make_current();
    let allocations = Allocations::new(counted(), 16);
    let blocks: Vec<u64> = (0..4).map(|_| allocated(MIB)).collect();
    blocks.iter().for_each(|at| assert_eq!(allocations.look(*at).range.base, *at));
    let known = allocations.known(blocks[1] + 77).unwrap();
    assert_eq!((known.range, known.kind), (range(blocks[1], MIB), Kind::Cuda));
    for nothing in [range(0, 4096), range(blocks[1], 0), range(1 << 62, u64::MAX)] {
        allocations.forget(nothing);
    }
    assert_eq!(allocations.counters().entries, 4);
    // A free may name any part of the freed allocation.
    allocations.forget(range(blocks[1] + MIB - 1, 1));
    assert_eq!(
        blocks.iter().map(|at| allocations.known(*at).is_some()).collect::<Vec<_>>(),
        [true, false, true, true]
    );
    allocations.forget(range(0, u64::MAX));
    let counters = allocations.counters();
    assert_eq!((counters.entries, counters.forgotten, counters.changed), (0, 4, 0));
    assert_eq!(allocations.look(blocks[0]).range, range(blocks[0], MIB));
    blocks.into_iter().for_each(free);
}

/// The least recently found entry leaves, and only when the table is full.
#[test]
fn least_recently_found_leaves() {
    let primary = Primary::of(0);
    primary.make_current();
    let allocations = Allocations::new(counted(), 3);
    let blocks: Vec<u64> = (0..5).map(|_| allocated(MIB)).collect();
    let known = || blocks.iter().map(|at| allocations.known(*at).is_some()).collect::<Vec<_>>();
    blocks[..3].iter().for_each(|at| assert_eq!(allocations.look(*at).range.base, *at));
    assert_eq!(allocations.counters().evicted, 0);
    allocations.look(blocks[0]);
    allocations.look(blocks[3]);
    assert_eq!(allocations.counters().evicted, 1);
    // Finding an entry counts as a use of it.
    assert_eq!(known(), [true, false, true, true, false]);
    allocations.look(blocks[4]);
    allocations.look(blocks[4]);
    let counters = allocations.counters();
    assert_eq!((counters.entries, counters.evicted, counters.asked), (3, 2, 5));
    assert_eq!(known().iter().filter(|known| **known).count(), 3);
    blocks.into_iter().for_each(free);
}

/// Queries do not break a capture, even in the strictest mode, and work on a thread without a context.
#[test]
fn in_a_capture_and_without_a_context() {
    let primary = Primary::of(0);
    primary.make_current();
    let allocations = Allocations::new(counted(), 16);
    let (base, handle) = (reserved(CHUNK), physical(CHUNK, Sharing::ByDescriptor));
    map(base, CHUNK, handle);
    let block = allocated(MIB);
    let stream = AppStream::new();
    ok(cuStreamBeginCapture_v2(stream.0, 0));
    let found = [base, block].map(|at| look(&allocations, at));
    ok(cuGraphDestroy(made(|out| cuStreamEndCapture(stream.0, out))));
    assert_eq!(found.map(|found| found.kind), [Kind::Vmm { exportable: true }, Kind::Cuda]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let fresh = Allocations::new(counted(), 16);
            assert_eq!([base, block].map(|at| look(&fresh, at)), found);
        });
    });
    free(block);
    unmap(base, CHUNK);
    ok(cuMemRelease(handle));
    give_back_addresses(base, CHUNK);
}

/// In a forked child there are no queries and no known allocations, although the parent knows one.
#[test]
fn fork() {
    let primary = Primary::of(0);
    primary.make_current();
    let allocations = Allocations::new(counted(), 16);
    let block = allocated(MIB);
    let found = allocations.look(block);
    questions();
    // SAFETY: the child only runs what follows, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        allocations.forget(range(block, MIB));
        let silent = allocations.look(block).kind == Kind::Unknown
            && allocations.known(block).is_none()
            && questions() == (0, 0)
            && allocations.counters().forgotten == 0;
        // SAFETY: no handlers of the parent's run.
        unsafe { libc::_exit(i32::from(!silent)) };
    }
    let mut status = -1;
    // SAFETY: the output is a local.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(allocations.known(block), Some(found));
    free(block);
}
