//! Single cases of what the tests in `properties` hold in general.

use windlass_engine::features::registration::cache::{Cache, Key, Use, Why};

use crate::strict::{Alias, Run, Strict, range};

const MIB: u64 = 1 << 20;

/// An allocation at a former one's address makes the old alias leave at once, although its last call may not be over: where the new
/// one covers it exactly, in part, or covers several.
#[test]
fn an_address_used_again() {
    let mut run = Run::new(8, 64 * MIB);
    let old = run.strict.allocate(range(4 * MIB, 4 * MIB));
    let first = run.want_whole(old, 1).unwrap();
    assert_eq!(run.want(old, range(5 * MIB, MIB), 2), Ok(first));
    run.strict.free(old);
    let same = run.strict.allocate(old.range);
    assert_ne!(run.want_whole(same, 3), Ok(first));
    run.strict.free(same);
    let half = run.strict.allocate(range(6 * MIB, 8 * MIB));
    let other = run.strict.allocate(range(4 * MIB, 2 * MIB));
    assert!(run.want_whole(half, 4).is_ok() && run.want_whole(other, 4).is_ok());
    assert_eq!((run.strict.live.len(), run.strict.gone), (2, 2));
    [half, other].into_iter().for_each(|key| run.strict.free(key));
    let all = run.strict.allocate(range(0, 32 * MIB));
    assert!(run.want_whole(all, 5).is_ok());
    assert_eq!((run.strict.live.len(), run.strict.gone), (1, 4));
    run.close();
}

/// Both parts of a key count: an id is not found at other addresses.
#[test]
fn one_id_over_other_addresses() {
    let mut run = Run::new(8, 64 * MIB);
    let key = run.strict.allocate(range(4 * MIB, 4 * MIB));
    let first = run.want_whole(key, 1).unwrap();
    let larger = Key { range: range(4 * MIB, 8 * MIB), ..key };
    run.strict.memory = vec![larger];
    assert_ne!(run.want_whole(larger, 2).unwrap(), first);
    assert_eq!((run.strict.live.len(), run.strict.deregistered), (1, 1));
    run.close();
}

/// At its limits the cache evicts the least recently used entry, but none that may be in use, and none if that would not make
/// enough room. It names the call that must be over first.
#[test]
fn limits() {
    let mut run = Run::new(3, 10 * MIB);
    let keys: Vec<Key> = (0..5).map(|i| run.strict.allocate(range(i * 16 * MIB, 3 * MIB))).collect();
    for (call, key) in (1..).zip(&keys[..3]) {
        assert!(run.want_whole(*key, call).is_ok());
    }
    assert_eq!((run.want_whole(keys[3], 4), run.cache.waits_for()), (Err(Why::Full), Some(Use(1))));
    run.over(2);
    assert_eq!(run.cache.waits_for(), None);
    assert!(run.want_whole(keys[0], 5).is_ok());
    // Only the second entry's last call is over.
    assert!(run.want_whole(keys[3], 6).is_ok());
    assert!(run.strict.find(keys[1]).is_none());
    // One entry could leave, which would not be enough room.
    run.over(3);
    let large = run.strict.allocate(range(512 * MIB, 8 * MIB));
    assert_eq!((run.want_whole(large, 7), run.cache.waits_for()), (Err(Why::Full), Some(Use(6))));
    assert_eq!((run.strict.evicted, run.strict.live.len()), (1, 3));
    // After a free the cache waits for no call.
    run.freed(keys[3].range);
    assert_eq!(run.cache.waits_for(), None);
    run.over(7);
    assert!(run.want_whole(large, 8).is_ok());
    assert_eq!((run.strict.evicted, run.strict.live.len()), (3, 1));
    let too_large = run.strict.allocate(range(1024 * MIB, 11 * MIB));
    assert_eq!((run.want_whole(too_large, 9), run.cache.waits_for()), (Err(Why::Full), None));
    assert_eq!((run.strict.entries_highest, run.strict.bytes_highest), (3, 9 * MIB));
    run.close();
}

/// A buffer that cannot be registered is tried once, not at every call. Other memory at its addresses is tried.
#[test]
fn refused_once() {
    let mut run = Run::new(8, 1 << 40);
    let key = run.strict.allocate(range(4 * MIB, 4 * MIB));
    run.strict.never.insert(key.id);
    for call in 1..100 {
        assert_eq!(run.want_whole(key, call), Err(Why::Refused));
    }
    assert_eq!(run.strict.registered, 1);
    run.strict.free(key);
    let new = run.strict.allocate(range(4 * MIB, 4 * MIB));
    assert!(run.want_whole(new, 100).is_ok());
    // A registration that failed for the moment is tried again.
    let later = run.strict.allocate(range(64 * MIB, MIB));
    run.strict.fails_now = true;
    assert_eq!(run.want_whole(later, 101), Err(Why::Failed));
    run.strict.fails_now = false;
    assert!(run.want_whole(later, 102).is_ok());
    // Four refusals are remembered; a repeated request renews one.
    let others: Vec<Key> = (100..120).map(|i| run.strict.allocate(range(i * MIB, MIB))).collect();
    run.strict.never.extend(others.iter().map(|key| key.id));
    let registered = run.strict.registered;
    for key in &others {
        assert_eq!(run.want_whole(*key, 103), Err(Why::Refused));
        assert_eq!(run.want_whole(others[0], 103), Err(Why::Refused));
    }
    assert_eq!(run.strict.registered, registered + 20);
    assert_eq!(run.want_whole(others[16], 104), Err(Why::Refused));
    assert_eq!(run.strict.registered, registered + 21);
    run.close();
}

/// A registration that cannot be ended is kept and never tried again. It takes room, and the application may use its addresses.
#[test]
fn stuck() {
    let mut run = Run::new(2, 1 << 40);
    let key = run.strict.allocate(range(4 * MIB, 4 * MIB));
    let first = run.want_whole(key, 1).unwrap();
    run.strict.free(key);
    run.strict.gives_back = false;
    assert_eq!(run.look(), 1);
    assert_eq!((run.look(), run.freed(range(0, u64::MAX))), (0, 0));
    assert!(run.cache.is_empty());
    let new = run.strict.allocate(key.range);
    assert_ne!(run.want_whole(new, 2).unwrap(), first);
    let other = run.strict.allocate(range(32 * MIB, MIB));
    assert_eq!((run.want_whole(other, 3), run.cache.waits_for()), (Err(Why::Full), Some(Use(2))));
    // The entry evicted for room gets stuck, too.
    run.over(2);
    assert_eq!((run.want_whole(other, 3), run.cache.waits_for()), (Err(Why::Full), None));
    assert_eq!((run.strict.stuck.len(), run.strict.evicted), (2, 0));
    run.strict.gives_back = true;
    run.close();
}

/// `freed` of several allocations at once, of parts, and of none; `look` finds all that are gone.
#[test]
fn freed_and_looked_for() {
    let mut run = Run::new(8, u64::MAX);
    let keys: Vec<Key> = (1..6).map(|i| run.strict.allocate(range(i * 4 * MIB, 4 * MIB))).collect();
    keys.iter().for_each(|key| assert!(run.want_whole(*key, 1).is_ok()));
    for nothing in [range(0, 4 * MIB), range(24 * MIB, MIB), range(u64::MAX, 1)] {
        assert_eq!(run.freed(nothing), 0);
    }
    assert_eq!(run.freed(range(8 * MIB - 1, 2)), 2);
    assert_eq!(run.look(), 0);
    // One is freed, and another freed and replaced by other memory.
    run.strict.free(keys[2]);
    run.strict.free(keys[3]);
    run.strict.allocate(keys[3].range);
    assert_eq!((run.look(), run.look()), (2, 0));
    assert_eq!((run.strict.gone, run.cache.registrations()), (4, 1));
    run.close();
}

/// Buffers outside of their allocation, and keys of no allocation, are refused.
#[test]
fn strange_buffers() {
    let mut run = Run::new(2, u64::MAX);
    let key = run.strict.allocate(range(4 * MIB, 4 * MIB));
    for _ in 0..2 {
        for part in [range(4 * MIB, 4 * MIB + 1), range(3 * MIB, MIB), range(5 * MIB, 0), range(9 * MIB, 1)] {
            assert_eq!(run.want(key, part, 1), Err(Why::Straddles));
        }
        assert!(run.want_whole(key, 1).is_ok());
    }
    let wrapping = Key { range: range(u64::MAX - 1, 16), id: 77 };
    assert_eq!(run.want(wrapping, range(u64::MAX - 1, 1), 1), Err(Why::Straddles));
    let nothing = Key { range: range(64, 0), id: 0 };
    assert_eq!(run.want(nothing, range(64, 1), 1), Err(Why::Straddles));
    assert_eq!(run.strict.registered, 1);
    run.close();
}

/// A cache without room registers nothing, and a cache can be moved to another thread.
#[test]
fn no_room_at_all() {
    fn is_send<T: Send>() {}
    is_send::<Cache<Alias>>();
    for mut run in [Run::new(0, u64::MAX), Run::new(8, 0)] {
        let key = run.strict.allocate(range(4 * MIB, 4 * MIB));
        assert_eq!((run.want_whole(key, 1), run.cache.waits_for()), (Err(Why::Full), None));
        run.close();
    }
}

/// More buffers than fit, in random order, with four calls in flight: each gets its alias, and none leaves during its call.
#[test]
fn eviction_under_load() {
    let mut run = Run::new(16, 64 * MIB);
    let keys: Vec<Key> =
        (0..48).map(|i| run.strict.allocate(range(i * 8 * MIB, (1 + i % 4) * MIB))).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for call in 1..20_000_u64 {
        for _ in 0..2 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let key = keys[(state >> 33) as usize % keys.len()];
            assert!(run.want_whole(key, call).is_ok(), "call {call}");
        }
        run.over(call.saturating_sub(4));
    }
    assert!(run.strict.evicted > 10_000 && run.strict.entries_highest == 16, "{:?}", run.strict);
    run.close();
}

/// In 40,000 cycles of allocation, use and free, told, found or neither, the registrations stay bounded, and so does this program's
/// memory.
#[test]
fn cycles() {
    let mut run = Run::new(16, 64 * MIB);
    let mut held = [0; 2];
    for cycle in 0..40_000_u64 {
        let key = run.strict.allocate(range((cycle * 7 % 24) * 4 * MIB, (1 + cycle % 4) * MIB));
        let refused = cycle % 11 == 0;
        if refused {
            run.strict.never.insert(key.id);
        }
        assert_eq!(run.want_whole(key, cycle + 1).err(), refused.then_some(Why::Refused), "cycle {cycle}");
        match cycle % 3 {
            0 => drop(run.freed(range(key.range.base, 1))),
            // An id never comes again.
            1 => run.strict.never.clear(),
            _ => {}
        }
        run.strict.free(key);
        if cycle % 5 == 0 {
            run.over(cycle + 1);
        }
        if cycle % 64 == 0 {
            run.look();
            assert!(run.strict.live.is_empty());
        }
        let (entries, bytes) = run.strict.held();
        assert!(entries <= 16 && bytes <= 64 * MIB);
        held[0] = held[0].max(crate::lookups::held().max(0) * i64::from(cycle < 20_000));
        held[1] = held[1].max(crate::lookups::held());
    }
    assert!(held[1] <= held[0], "{held:?} bytes of this program");
    run.close();
}

/// Closing a full cache returns all aliases, stuck ones, too, and deregisters none.
#[test]
fn closed() {
    let mut run = Run::new(8, u64::MAX);
    let keys: Vec<Key> = (1..6).map(|i| run.strict.allocate(range(i * 4 * MIB, MIB))).collect();
    keys.iter().for_each(|key| assert!(run.want_whole(*key, 1).is_ok()));
    run.strict.gives_back = false;
    run.freed(keys[0].range);
    let left: Vec<Alias> = run.cache.close().collect();
    assert_eq!((left.len(), run.strict.deregistered), (5, 0));
    // The cache is empty and can be used again.
    run.strict = Strict::new();
    let key = run.strict.allocate(range(4 * MIB, MIB));
    assert!(run.want_whole(key, 2).is_ok());
    assert_eq!((run.cache.registrations(), run.cache.bytes()), (1, MIB));
}
