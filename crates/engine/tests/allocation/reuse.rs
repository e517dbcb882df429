//! Tests of addresses that are used again, and of a full table.

use windlass_engine::features::memory::allocation::{Allocations, Kind};

use crate::memory::*;
use crate::support::*;

/// A freed address that is allocated again is another allocation: over 40,000 allocations in a table of four, in sizes that overlap
/// the earlier ones.
#[test]
fn freed_and_allocated_again() {
    let primary = Primary::of(0);
    primary.make_current();
    let allocations = Allocations::new(counted(), 4);
    let cycles = if on_a_gpu() { 4_000 } else { 40_000 };
    let (mut reused, mut freed, mut before) = (0, 0, allocations.look(0));
    questions();
    for cycle in 0..cycles {
        let bytes = [4096, 8192, 12_288, 4096, 65_536][cycle % 5];
        let at = allocated(bytes);
        let found = allocations.look(at + cycle as u64 % bytes);
        assert_eq!((found.range, found.kind), (range(at, bytes), Kind::Cuda), "cycle {cycle}");
        assert_ne!(found.id, before.id, "cycle {cycle}");
        reused += u64::from(before.range.overlaps(found.range));
        before = found;
        free(at);
        if cycle % 7 == 0 {
            assert_eq!(allocations.look(at).kind, Kind::Unknown, "cycle {cycle}");
            freed += 1;
        }
    }
    println!("{reused} of {cycles} at addresses used before");
    assert!(reused > cycles as u64 / 4);
    // An id and the attributes of each, and no id of what is freed.
    assert_eq!(questions(), (2 * cycles as u64 + freed, 0));
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
    assert!([base, base + CHUNK].iter().all(|at| was_known(&allocations, *at)));
    unmap(base, 2 * CHUNK);
    map(base, 2 * CHUNK, one);
    assert_eq!(look(&allocations, base + 2 * CHUNK - 1).range, range(base, 2 * CHUNK));
    assert!(was_known(&allocations, base), "it is the same one");
    unmap(base, 2 * CHUNK);
    [one, two, left, right].into_iter().for_each(|handle| ok(cuMemRelease(handle)));
    give_back_addresses(base, 2 * CHUNK);
}

/// Freed memory leaves its place when it is looked at: then a new allocation takes that place, not another's.
#[test]
fn freed_memory_leaves_its_place() {
    let primary = Primary::of(0);
    primary.make_current();
    // The lower one of two addresses, and the higher one.
    for first in [true, false] {
        let [one, two, new] = [(); 3].map(|()| allocated(MIB));
        let (freed, stays) = if first == (one < two) { (one, two) } else { (two, one) };
        let allocations = Allocations::new(counted(), 2);
        for at in [freed, stays] {
            allocations.look(at);
        }
        free(freed);
        assert_eq!(allocations.look(freed).kind, Kind::Unknown);
        assert_eq!(allocations.look(new).range, range(new, MIB));
        assert!([stays, new].iter().all(|at| was_known(&allocations, *at)));
        [stays, new].into_iter().for_each(free);
    }
}

/// The least recently found entry leaves, and only when the table is full.
#[test]
fn least_recently_found_leaves() {
    let primary = Primary::of(0);
    primary.make_current();
    let blocks: Vec<u64> = (0..5).map(|_| allocated(MIB)).collect();
    // Each answer is that of a new cache after the same looks, as looking changes what is known.
    let known_after = |looks: &[usize]| {
        let is_known = |at: &u64| {
            let allocations = Allocations::new(counted(), 3);
            for look in looks {
                assert_eq!(allocations.look(blocks[*look]).range, range(blocks[*look], MIB));
            }
            was_known(&allocations, *at)
        };
        blocks.iter().map(is_known).collect::<Vec<_>>()
    };
    assert_eq!(known_after(&[0, 1, 2]), [true, true, true, false, false]);
    // Finding an entry counts as a use of it.
    assert_eq!(known_after(&[0, 1, 2, 0, 3]), [true, false, true, true, false]);
    let known = known_after(&[0, 1, 2, 0, 3, 4, 4]);
    assert!(known[4] && !known[1] && known.iter().filter(|known| **known).count() == 3, "{known:?}");
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

/// In a forked child there are no queries and all memory is unknown, although the parent knows an allocation.
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
        let silent = allocations.look(block).kind == Kind::Unknown && questions() == (0, 0);
        // SAFETY: no handlers of the parent's run.
        unsafe { libc::_exit(i32::from(!silent)) };
    }
    let mut status = -1;
    // SAFETY: the output is a local.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!((allocations.look(block), questions()), (found, (1, 0)), "the parent still knows it");
    free(block);
}
