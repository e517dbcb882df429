#![cfg(test)]

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use crate::features::memory::pool::ledger::*;

const MIB: u64 = 1 << 20;
const LIMIT: u64 = 64 * MIB;

fn block(ledger: &mut PoolLedger, device: Ordinal, base: u64, mebibytes: u64) -> Block {
    ledger.enter(device, Range { base: base * MIB, bytes: mebibytes * MIB }, 1000 + base);
    ledger.find(base * MIB).unwrap().0
}

fn cached(windows: u32) -> Over {
    Over { windows, owed: 0 }
}

fn kept(over: &[u64]) -> Given {
    Given::Kept { over: over.iter().map(|base| base * MIB).collect() }
}

/// Of one size, the block made first is handed out first, in whatever order blocks are freed. Other sizes and devices are not touched.
#[test]
fn lowest_serial() {
    let mut ledger = PoolLedger::default();
    let made: Vec<Block> = [(0, 10, 4), (0, 20, 4), (0, 30, 4), (0, 40, 8), (1, 50, 4)]
        .map(|(device, base, bytes)| block(&mut ledger, device, base, bytes))
        .into();
    for index in [2, 4, 0, 3, 1] {
        assert_eq!(ledger.give_back(&made[index], LIMIT), kept(&[]));
    }
    let bases: Vec<u64> =
        std::iter::from_fn(|| ledger.take(0, 4 * MIB)).map(|block| block.base / MIB).collect();
    assert_eq!(bases, [10, 20, 30]);
    let again = ledger.find(10 * MIB + 5).unwrap();
    assert_eq!((again.0.life, again.0.held, again.1), (2, true, State::Held));
    // The block's earlier life is over.
    assert_eq!(ledger.give_back(&made[0], LIMIT), Given::NotHeld);
    assert_eq!(ledger.give_back(&again.0, LIMIT), kept(&[]));
    assert_eq!(ledger.give_back(&again.0, LIMIT), Given::NotHeld);
}

/// Over the limit other sizes leave first, the longest unused of them. Of one size the block made last leaves. A block that is
/// too large is not kept at all.
#[test]
fn eviction() {
    let mut ledger = PoolLedger::default();
    let sizes = [(10, 16), (30, 16), (50, 8), (60, 16), (80, 32)];
    let made = sizes.map(|(base, bytes)| block(&mut ledger, 0, base, bytes));
    for index in [1, 2, 0, 3] {
        assert_eq!(ledger.give_back(&made[index], LIMIT), kept(&[]));
    }
    // 56 MiB are kept: the 8 of one size leave, then the last of the other.
    assert_eq!(ledger.give_back(&made[4], LIMIT), kept(&[50, 60]));
    assert_eq!(ledger.sums().kept_bytes, LIMIT);
    let large = block(&mut ledger, 0, 200, 65);
    assert_eq!(ledger.give_back(&large, LIMIT), Given::LetGo);
    let own = block(&mut ledger, 0, 300, 32);
    assert_eq!(ledger.give_back(&own, 32 * MIB), kept(&[30, 10, 300]));
    let mut left = ledger.trim(0);
    left.sort_unstable();
    assert_eq!(left, [80 * MIB]);
    assert_eq!(ledger.sums(), Sums::default());
}

/// A block that is unused for a while leaves. One that was used since does not.
#[test]
fn ageing() {
    let mut ledger = PoolLedger::default();
    let made = [(0, 10), (1, 20), (0, 30)].map(|(device, base)| block(&mut ledger, device, base, 4));
    ledger.set_windows(made[2].serial, cached(1));
    ledger.at(100);
    made.iter().for_each(|block| assert_eq!(ledger.give_back(block, LIMIT), kept(&[])));
    ledger.at(150);
    assert!(ledger.age(50).is_empty());
    let again = ledger.take(0, 4 * MIB).unwrap();
    assert_eq!((again.serial, ledger.give_back(&again, LIMIT)), (made[0].serial, kept(&[])));
    ledger.at(151);
    assert_eq!(ledger.age(50), [20 * MIB]);
    let leaving: Vec<u64> = ledger.leaving().iter().map(|block| block.serial).collect();
    assert_eq!(leaving, [made[2].serial]);
    ledger.at(1000);
    assert_eq!((ledger.age(50), ledger.sums().kept_blocks), (vec![10 * MIB], 0));
}

/// Registered or tainted blocks are not kept, deregistered ones are. One handle may stand for several calls.
#[test]
fn registrations() {
    let mut ledger = PoolLedger::default();
    let [one, two] = [10, 14].map(|base| block(&mut ledger, 0, base, 4));
    let handle = Registration { communicator: 1, handle: 7 };
    let range = Range { base: 10 * MIB, bytes: 8 * MIB };
    ledger.register(range, handle);
    ledger.register(Range { base: 11 * MIB, bytes: 1 }, handle);
    let of = |block: &Block| Range { base: block.base, bytes: block.bytes };
    assert_eq!(ledger.registered_by(handle), [of(&one)]);
    ledger.deregister(handle);
    assert_eq!(ledger.registered_by(handle), [of(&one), of(&two)]);
    ledger.deregister(Registration { communicator: 2, handle: 7 });
    assert_eq!(ledger.give_back(&one, LIMIT), Given::LetGo);
    assert_eq!(ledger.find(10 * MIB), None);
    ledger.deregister(handle);
    assert_eq!(ledger.give_back(&two, LIMIT), kept(&[]));
    assert!(ledger.registrations.is_empty());
    let two = ledger.take(0, 4 * MIB).unwrap();
    ledger.taint_within(Range { base: 17 * MIB, bytes: MIB });
    assert_eq!(ledger.give_back(&two, LIMIT), Given::LetGo);
}

/// A block with windows is not freed. It leaves when they are gone.
#[test]
fn windows() {
    let mut ledger = PoolLedger::default();
    let made = [10, 20, 30].map(|base| block(&mut ledger, 0, base, 4));
    made.iter().for_each(|block| ledger.set_windows(block.serial, cached(2)));
    assert_eq!(ledger.give_back(&made[0], LIMIT), kept(&[]));
    assert!(ledger.trim(0).is_empty());
    ledger.taint(made[1].serial);
    assert_eq!(ledger.give_back(&made[1], LIMIT), kept(&[]));
    let serials: Vec<u64> = ledger.leaving().iter().map(|block| block.serial).collect();
    assert_eq!(serials, [made[0].serial, made[1].serial]);
    assert_eq!(ledger.take(0, 4 * MIB), None);
    assert_eq!(ledger.leave(made[2].serial), None);
    assert_eq!(ledger.leave(made[0].serial), Some(10 * MIB));
    assert_eq!(ledger.leave(made[0].serial), None);
    ledger.set_windows(made[2].serial, cached(0));
    assert_eq!(ledger.give_back(&made[2], LIMIT), kept(&[]));
    assert_eq!(ledger.trim(0), vec![30 * MIB]);
}

/// Windows that the program has not ended do not keep a block: NCCL frees it under them, as without Windlass.
#[test]
fn owed_windows() {
    let mut ledger = PoolLedger::default();
    let made = [10, 20, 30].map(|base| block(&mut ledger, 0, base, 4));
    made.iter().for_each(|block| ledger.set_windows(block.serial, Over { windows: 2, owed: 2 }));
    ledger.set_windows(made[2].serial, Over { windows: 2, owed: 1 });
    assert_eq!(ledger.give_back(&made[0], 0), Given::LetGo);
    assert_eq!(ledger.give_back(&made[1], LIMIT), kept(&[]));
    assert_eq!(ledger.give_back(&made[2], LIMIT), kept(&[]));
    assert_eq!(ledger.trim(0), vec![20 * MIB]);
    assert_eq!(ledger.leaving().len(), 1);
}

/// Blocks that peers may be writing to are never handed out again, whoever holds them.
#[test]
fn tainted() {
    let mut ledger = PoolLedger::default();
    let made = [(0, 10), (0, 20), (0, 30), (1, 40), (1, 50)]
        .map(|(device, base)| block(&mut ledger, device, base, 4));
    for index in [0, 1, 3] {
        assert_eq!(ledger.give_back(&made[index], LIMIT), kept(&[]));
    }
    let leaving =
        |ledger: &PoolLedger| -> Vec<u64> { ledger.leaving().iter().map(|block| block.base / MIB).collect() };
    ledger.taint(made[0].serial);
    assert_eq!(leaving(&ledger), [10]);
    assert_eq!(ledger.take(0, 4 * MIB).map(|block| block.serial), Some(made[1].serial));
    ledger.taint_all(Some(0));
    let again = ledger.find(20 * MIB).unwrap().0;
    assert_eq!([again, made[2]].map(|block| ledger.give_back(&block, LIMIT)), [Given::LetGo, Given::LetGo]);
    assert_eq!(ledger.take(1, 4 * MIB).map(|block| block.serial), Some(made[3].serial));
    let again = ledger.find(40 * MIB).unwrap().0;
    assert_eq!(ledger.give_back(&again, LIMIT), kept(&[]));
    ledger.taint_all(None);
    assert_eq!((ledger.take(1, 4 * MIB), leaving(&ledger)), (None, vec![10, 40]));
    assert_eq!(ledger.give_back(&made[4], LIMIT), Given::LetGo);
    assert_eq!(
        [10, 40].map(|base| ledger.leave(ledger.find(base * MIB).unwrap().0.serial)),
        [10, 40].map(|base| Some(base * MIB))
    );
    assert_eq!(ledger.sums(), Sums::default());
}

/// New memory in the place of a block replaces it in the ledger.
#[test]
fn entered_over_others() {
    let mut ledger = PoolLedger::default();
    let old = [10, 12, 16].map(|base| block(&mut ledger, 0, base, 2));
    let new = block(&mut ledger, 0, 11, 3);
    assert_eq!(ledger.find(10 * MIB), None);
    assert_eq!(ledger.find(13 * MIB), Some((new, State::Held)));
    assert_eq!(ledger.find(17 * MIB), Some((old[2], State::Held)));
    assert_eq!(ledger.sums().held_blocks, 2);
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u8, u8),
    Free(usize),
    FreeAgain(usize),
    Taint(usize),
    Window(usize, u8),
    Left,
    Trim(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..2_u8, 1..6_u8).prop_map(|(device, size)| Step::Allocate(device, size)),
        4 => any::<usize>().prop_map(Step::Free),
        1 => any::<usize>().prop_map(Step::FreeAgain),
        1 => any::<usize>().prop_map(Step::Taint),
        1 => (any::<usize>(), 0..3_u8).prop_map(|(which, count)| Step::Window(which, count)),
        1 => Just(Step::Left),
        1 => (0..2_u8).prop_map(Step::Trim),
    ]
}

proptest! {
    /// In any sequence: no block is handed out while it is held or after it left, nor for another size. No block
    /// is freed twice, while held, or while it has windows. No more is kept than allowed, and the totals are right.
    #[test]
    fn keeps_the_ledger(steps in prop::collection::vec(step(), 1..200)) {
        const LIMIT: u64 = 12 * MIB;
        let mut ledger = PoolLedger::default();
        let mut held: Vec<Block> = Vec::new();
        let mut freed: Vec<Block> = Vec::new();
        // Blocks that exist: base, size, windows.
        let mut real: BTreeMap<u64, (u64, u8)> = BTreeMap::new();
        let mut next = 1;
        let gone = |real: &mut BTreeMap<u64, (u64, u8)>, held: &[Block], bases: &[u64]| {
            for base in bases {
                let (_, windows) = real.remove(base).expect("freed once");
                assert_eq!(windows, 0);
                assert!(held.iter().all(|block| block.base != *base));
            }
        };
        for step in steps {
            match step {
                Step::Allocate(device, size) => {
                    let (device, bytes) = (Ordinal::from(device), u64::from(size) * MIB);
                    let block = match ledger.take(device, bytes) {
                        Some(block) => {
                            prop_assert!(real.contains_key(&block.base));
                            block
                        }
                        None => {
                            let range = Range { base: next * 16 * MIB, bytes };
                            next += 1;
                            ledger.enter(device, range, next);
                            real.insert(range.base, (bytes, 0));
                            ledger.find(range.base).unwrap().0
                        }
                    };
                    prop_assert!(block.held && block.device == device && block.bytes == bytes);
                    prop_assert!(held.iter().all(|other| other.base != block.base));
                    held.push(block);
                }
                Step::Free(which) if !held.is_empty() => {
                    let block = held.swap_remove(which % held.len());
                    freed.push(block);
                    match ledger.give_back(&block, LIMIT) {
                        Given::Kept { over } => gone(&mut real, &held, &over),
                        Given::LetGo => gone(&mut real, &held, &[block.base]),
                        Given::NotHeld => prop_assert!(false, "it was held"),
                    }
                }
                Step::FreeAgain(which) if !freed.is_empty() => {
                    prop_assert_eq!(ledger.give_back(&freed[which % freed.len()], LIMIT), Given::NotHeld);
                }
                Step::Taint(which) if !held.is_empty() => ledger.taint(held[which % held.len()].serial),
                Step::Window(which, count) if !held.is_empty() => {
                    let block = held[which % held.len()];
                    ledger.set_windows(block.serial, cached(u32::from(count)));
                    real.get_mut(&block.base).unwrap().1 = count;
                }
                Step::Left => {
                    for block in ledger.leaving() {
                        real.get_mut(&block.base).unwrap().1 = 0;
                        ledger.set_windows(block.serial, cached(0));
                        let base = ledger.leave(block.serial).unwrap();
                        gone(&mut real, &held, &[base]);
                    }
                }
                Step::Trim(device) => {
                    let left = ledger.trim(Ordinal::from(device));
                    gone(&mut real, &held, &left);
                    prop_assert!(!ledger.devices().contains(&Ordinal::from(device)));
                }
                _ => {}
            }
            let sums = ledger.sums();
            prop_assert_eq!(sums.held_blocks, held.len());
            prop_assert_eq!(sums.held_blocks + sums.kept_blocks + sums.leaving_blocks, real.len());
            let bytes: u64 = real.values().map(|(bytes, _)| bytes).sum();
            prop_assert_eq!(sums.held_bytes + sums.kept_bytes + sums.leaving_bytes, bytes);
            prop_assert!(ledger.devices().into_iter().all(|device| ledger.kept_on(device) <= LIMIT));
            let used: BTreeSet<_> = ledger.used.iter().copied().collect();
            prop_assert_eq!(used.len(), ledger.used.len());
            prop_assert!(ledger.kept().all(|entry| used.contains(&entry.class())));
        }
    }
}
