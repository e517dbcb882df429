//! One case each of what the properties hold in general.

use windlass_engine::range::Range;
use windlass_engine::registration::{Answer, Cache, EntryId, Epoch, Key, Token, Why};

use crate::strict::{Strict, cache, close, pass, range};

const MIB: u64 = 1 << 20;

/// All of the allocation is used in an operation; the strict one knows.
fn use_whole(cache: &mut Cache<u64>, strict: &mut Strict, key: Key, epoch: u64) -> Answer {
    let answer = cache.want(strict, key, key.range, Epoch(epoch));
    if let (Answer::Registered(_), Some(live)) = (answer, strict.find(key)) {
        live.last_use = live.last_use.max(epoch);
        live.used_at = epoch;
    }
    answer
}

fn is_registered(answer: Answer) -> bool {
    matches!(answer, Answer::Registered(_))
}

fn entry(answer: Answer) -> EntryId {
    match answer {
        Answer::Registered(entry) => entry,
        other => panic!("{other:?}"),
    }
}

/// Memory at an address where other memory was is registered anew, after the old was given back, and staged until then;
/// whether somebody said that it was freed or not.
#[test]
fn an_address_used_again() {
    for marked in [false, true] {
        let (mut cache, mut strict) = (cache(8, 64 * MIB), Strict::new());
        let old = strict.allocate(range(4 * MIB, 4 * MIB));
        let id = entry(use_whole(&mut cache, &mut strict, old, 1));
        strict.free(old);
        if marked {
            cache.freed(range(4 * MIB, 1));
            assert!(cache.is_waiting());
        }
        if let Some(live) = strict.find(old) {
            live.is_active = false;
        }
        // Over its second half at first.
        let half = strict.allocate(range(6 * MIB, 8 * MIB));
        assert_eq!(use_whole(&mut cache, &mut strict, half, 2), Answer::Staged(Why::Waits));
        strict.free(half);
        let new = strict.allocate(range(4 * MIB, 4 * MIB));
        assert_eq!(use_whole(&mut cache, &mut strict, new, 2), Answer::Staged(Why::Waits));
        assert_eq!(cache.waits_for(), Some(Epoch(1)));
        assert!(!cache.make_way(&mut strict, new));
        pass(&mut cache, &mut strict, 1);
        assert!(cache.make_way(&mut strict, new));
        assert!(!cache.is_waiting());
        assert!(is_registered(use_whole(&mut cache, &mut strict, new, 3)));
        assert_eq!((strict.registered, strict.deregistered), (2, 1));
        assert!(!cache.hold(id), "the old one is gone");
        close(&mut cache, &mut strict);
    }
}

/// Identity is the whole of it: the same id over other addresses is another allocation.
#[test]
fn one_id_over_other_addresses() {
    let (mut cache, mut strict) = (cache(8, 64 * MIB), Strict::new());
    let key = strict.allocate(range(4 * MIB, 4 * MIB));
    assert!(is_registered(use_whole(&mut cache, &mut strict, key, 1)));
    let larger = Key { range: range(4 * MIB, 8 * MIB), ..key };
    strict.memory = vec![larger];
    strict.live[0].is_active = false;
    assert_eq!(use_whole(&mut cache, &mut strict, larger, 2), Answer::Staged(Why::Waits));
    pass(&mut cache, &mut strict, 2);
    assert!(is_registered(use_whole(&mut cache, &mut strict, larger, 3)));
    assert_eq!((strict.registered, strict.deregistered), (2, 1));
    close(&mut cache, &mut strict);
}

/// What a graph captured stays until the graph is gone and its last run is over, whatever becomes of the memory.
#[test]
fn captured_then_freed() {
    let (mut cache, mut strict) = (cache(1, 64 * MIB), Strict::new());
    let captured = strict.allocate(range(0x1000, MIB));
    let id = entry(use_whole(&mut cache, &mut strict, captured, 1));
    assert!(cache.hold(id) && cache.hold(id));
    strict.find(captured).unwrap().holds = 2;
    pass(&mut cache, &mut strict, 1);
    // No room for another: nothing may leave.
    let other = strict.allocate(range(16 * MIB, MIB));
    assert_eq!(use_whole(&mut cache, &mut strict, other, 2), Answer::Staged(Why::Full));
    cache.freed(captured.range);
    strict.find(captured).unwrap().is_active = false;
    cache.drain(&mut strict);
    cache.release(id, Epoch(3));
    cache.drain(&mut strict);
    assert_eq!(strict.live.len(), 1);
    cache.release(id, Epoch(5));
    let live = strict.find(captured).unwrap();
    (live.holds, live.last_use) = (0, 5);
    pass(&mut cache, &mut strict, 4);
    cache.drain(&mut strict);
    assert_eq!((strict.live.len(), cache.waits_for()), (1, Some(Epoch(5))));
    pass(&mut cache, &mut strict, 5);
    cache.drain(&mut strict);
    assert_eq!(strict.live.len(), 0);
    assert!(!cache.hold(id));
    cache.release(id, Epoch(6));
    close(&mut cache, &mut strict);
}

/// At its limits the cache lets go of what was used longest ago, but of nothing that may be in use, and of nothing in vain.
#[test]
fn limits() {
    let (mut cache, mut strict) = (cache(3, 10 * MIB), Strict::new());
    let keys: Vec<Key> = (0..5).map(|i| strict.allocate(range(i * 16 * MIB, 3 * MIB))).collect();
    for (i, key) in keys[..3].iter().enumerate() {
        assert!(is_registered(use_whole(&mut cache, &mut strict, *key, 1 + i as u64)));
    }
    assert_eq!(use_whole(&mut cache, &mut strict, keys[3], 4), Answer::Staged(Why::Full));
    pass(&mut cache, &mut strict, 2);
    assert!(is_registered(use_whole(&mut cache, &mut strict, keys[0], 5)));
    // The second alone is over.
    assert!(is_registered(use_whole(&mut cache, &mut strict, keys[3], 6)));
    assert!(strict.find(keys[1]).is_none());
    // One would leave, and that would not be room enough.
    pass(&mut cache, &mut strict, 3);
    let large = strict.allocate(range(512 * MIB, 8 * MIB));
    assert_eq!(use_whole(&mut cache, &mut strict, large, 7), Answer::Staged(Why::Full));
    assert_eq!((cache.counters().evicted, strict.live.len()), (1, 3));
    pass(&mut cache, &mut strict, 7);
    assert!(is_registered(use_whole(&mut cache, &mut strict, large, 8)));
    assert_eq!((cache.counters().evicted, strict.live.len()), (4, 1));
    let too_large = strict.allocate(range(1024 * MIB, 11 * MIB));
    assert_eq!(use_whole(&mut cache, &mut strict, too_large, 9), Answer::Staged(Why::Full));
    let counters = cache.counters();
    assert_eq!((counters.staged.full, counters.entries_highest, counters.bytes_highest), (3, 3, 9 * MIB));
    close(&mut cache, &mut strict);
}

/// What cannot be registered is asked for once, not again with every call; other memory at its addresses is.
#[test]
fn refused_once() {
    let (mut cache, mut strict) = (cache(8, 1 << 40), Strict::new());
    let key = strict.allocate(range(4 * MIB, 4 * MIB));
    strict.never.insert(key.id.0);
    for epoch in 1..100 {
        assert_eq!(use_whole(&mut cache, &mut strict, key, epoch), Answer::Staged(Why::Refused));
    }
    assert_eq!((strict.registered, cache.counters().refused), (1, 1));
    strict.free(key);
    let new = strict.allocate(range(4 * MIB, 4 * MIB));
    assert!(is_registered(use_whole(&mut cache, &mut strict, new, 100)));
    // What failed for now is tried again.
    let later = strict.allocate(range(64 * MIB, MIB));
    strict.fails_now = true;
    assert_eq!(use_whole(&mut cache, &mut strict, later, 101), Answer::Staged(Why::Failed));
    strict.fails_now = false;
    assert!(is_registered(use_whole(&mut cache, &mut strict, later, 102)));
    // No more than so many are remembered.
    for i in 0..100 {
        let key = strict.allocate(range((100 + i) * MIB, MIB));
        strict.never.insert(key.id.0);
        assert_eq!(use_whole(&mut cache, &mut strict, key, 103), Answer::Staged(Why::Refused));
    }
    assert_eq!(cache.counters().refused, 4);
    // What is asked for again stays remembered.
    let asked = strict.memory[strict.memory.len() - 1];
    for i in 0..20 {
        let key = strict.allocate(range((300 + i) * MIB, MIB));
        strict.never.insert(key.id.0);
        use_whole(&mut cache, &mut strict, key, 104);
        let registered = strict.registered;
        assert_eq!(use_whole(&mut cache, &mut strict, asked, 104), Answer::Staged(Why::Refused));
        assert_eq!(strict.registered, registered);
    }
    close(&mut cache, &mut strict);
}

/// What the application registered serves what lies in it, and is never given back by us; where its memory is no more,
/// what came instead does not reach NCCL.
#[test]
fn registrations_of_the_application() {
    let (mut cache, mut strict) = (cache(8, 1 << 40), Strict::new());
    let key = strict.allocate(range(4 * MIB, 4 * MIB));
    let first = range(4 * MIB, MIB);
    cache.application_registers(Token(7), key, first);
    cache.application_registers(Token(7), key, first);
    assert_eq!(cache.want(&mut strict, key, first, Epoch(1)), Answer::Applications);
    cache.application_deregisters(Token(7));
    assert_eq!(cache.want(&mut strict, key, first, Epoch(1)), Answer::Applications);
    assert_eq!((strict.registered, cache.counters().applications_hits), (0, 2));
    // What lies beside it needs the whole.
    assert!(is_registered(use_whole(&mut cache, &mut strict, key, 1)));
    cache.application_deregisters(Token(7));
    assert_eq!(cache.counters().applications, 0);
    assert!(is_registered(cache.want(&mut strict, key, first, Epoch(1))));
    assert_eq!(strict.deregistered, 0);
    // Freed before it was given back.
    cache.application_registers(Token(8), key, first);
    strict.free(key);
    cache.freed(key.range);
    strict.live[0].is_active = false;
    pass(&mut cache, &mut strict, 1);
    // NCCL took its registration for ours, of the whole, which is there as long as the application's is.
    let new = strict.allocate(range(6 * MIB, 2 * MIB));
    assert_eq!(use_whole(&mut cache, &mut strict, new, 2), Answer::Staged(Why::Applications));
    assert_eq!(strict.live.len(), 0);
    cache.application_deregisters(Token(8));
    assert!(is_registered(use_whole(&mut cache, &mut strict, new, 3)));
    close(&mut cache, &mut strict);
}

/// Where giving back failed nothing is ever registered, and nothing is tried twice.
#[test]
fn stuck() {
    let (mut cache, mut strict) = (cache(2, 1 << 40), Strict::new());
    let key = strict.allocate(range(4 * MIB, 4 * MIB));
    assert!(is_registered(use_whole(&mut cache, &mut strict, key, 1)));
    strict.free(key);
    strict.find(key).unwrap().is_active = false;
    cache.freed(key.range);
    pass(&mut cache, &mut strict, 1);
    strict.gives_back = false;
    cache.drain(&mut strict);
    assert!(!cache.is_waiting());
    let new = strict.allocate(key.range);
    assert_eq!(use_whole(&mut cache, &mut strict, new, 2), Answer::Staged(Why::Stuck));
    // It takes room; the limit holds.
    let others: Vec<Key> = (8..10).map(|i| strict.allocate(range(i * 4 * MIB, MIB))).collect();
    assert!(is_registered(use_whole(&mut cache, &mut strict, others[0], 3)));
    assert_eq!(use_whole(&mut cache, &mut strict, others[1], 3), Answer::Staged(Why::Full));
    strict.gives_back = true;
    close(&mut cache, &mut strict);
}

/// Buffers that do not lie within what is told of them, and keys that are no allocation.
#[test]
fn strange_buffers() {
    let (mut cache, mut strict) = (cache(2, u64::MAX), Strict::new());
    let key = strict.allocate(range(4 * MIB, 4 * MIB));
    for part in [range(4 * MIB, 4 * MIB + 1), range(3 * MIB, MIB), range(5 * MIB, 0), range(9 * MIB, 1)] {
        assert_eq!(cache.want(&mut strict, key, part, Epoch(1)), Answer::Staged(Why::Straddles));
    }
    let wrapping = Key { range: range(u64::MAX - 1, 16), ..key };
    let part = Range { base: u64::MAX - 1, bytes: 1 };
    assert_eq!(cache.want(&mut strict, wrapping, part, Epoch(1)), Answer::Staged(Why::Straddles));
    assert_eq!(strict.registered, 0);
    close(&mut cache, &mut strict);
}

/// 40,000 times allocated, used and freed, with and without a word of it: what is held stays bounded.
#[test]
fn cycles() {
    let (mut cache, mut strict) = (cache(16, 64 * MIB), Strict::new());
    let (mut served, mut epoch) = (0_u64, 0);
    for cycle in 0..40_000_u64 {
        let key = strict.allocate(range((cycle * 7 % 24) * 4 * MIB, (1 + cycle % 4) * MIB));
        epoch += 1;
        // What is over the new is seen as that.
        for live in strict.live.iter_mut().filter(|live| live.key.range.overlaps(key.range)) {
            live.is_active = false;
        }
        served += u64::from(is_registered(use_whole(&mut cache, &mut strict, key, epoch)));
        if cycle % 3 == 0 {
            cache.freed(range(key.range.base, 1));
            if let Some(live) = strict.find(key) {
                live.is_active = false;
            }
        }
        strict.free(key);
        if cycle % 5 == 0 {
            pass(&mut cache, &mut strict, epoch);
            cache.drain(&mut strict);
        }
        assert!(strict.live.len() <= 16 && strict.bytes() <= 64 * MIB);
    }
    assert!(served > 30_000, "only {served} were registered");
    close(&mut cache, &mut strict);
    assert_eq!(strict.live.len(), 0);
}
