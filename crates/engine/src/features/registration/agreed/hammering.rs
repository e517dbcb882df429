//! Stress test: threads ask and offer at the same words for a while. Then tests of the edges of the words' values.

#![cfg(test)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8};
use std::time::{Duration, Instant};

use crate::features::registration::agreed::*;

fn zeroed() -> Arc<[AtomicU64]> {
    (0..WORDS).map(|_| AtomicU64::new(0)).collect()
}

/// Words in which all ranks have passed the numbers up to `passed`.
fn after(passed: Number, since: u32) -> Arc<[AtomicU64]> {
    let words = zeroed();
    let head = Head { decided: passed as u32, since, ..Head::default() };
    words[HEAD].store(head.pack(), Ordering::Relaxed);
    (0..RANKS_MAX).for_each(|rank| words[progress_of(rank)].store(passed, Ordering::Relaxed));
    words
}

fn slots(words: &Arc<[AtomicU64]>, ranks: u32) -> Vec<RegistrationSlot<Arc<[AtomicU64]>>> {
    (0..ranks).map(|rank| RegistrationSlot::new(words.clone(), rank, ranks).unwrap()).collect()
}

const NUMBERS: usize = 1 << 22;
const UNKNOWN: u8 = u8::MAX;

/// Four threads with random offers and lags ask again for numbers they have not passed, across the wrap of the number. All
/// get the same answers, none above what a rank owes.
#[test]
fn threads() {
    let passed: Number = (1 << 32) - 2000;
    let words = after(passed, 0);
    let answers: Vec<AtomicU8> = (0..NUMBERS).map(|_| AtomicU8::new(UNKNOWN)).collect();
    let is_over = AtomicBool::new(false);
    let ends = Instant::now() + Duration::from_secs(2);
    let reached: Vec<(Number, u64, u64)> = std::thread::scope(|scope| {
        let run = |slot: RegistrationSlot<Arc<[AtomicU64]>>| {
            let (answers, is_over) = (&answers, &is_over);
            scope.spawn(move || {
                let mut random = 77 * (slot.rank as u64 + 1);
                let mut below = |bound: u64| {
                    random =
                        random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
                    (random >> 33) % bound
                };
                let (mut number, mut least, mut owes, mut registered, mut free) = (passed, passed, 0, 0, 0);
                while !is_over.load(Ordering::Relaxed) && number - passed + 1 < NUMBERS as Number {
                    number += 1;
                    let asked = if below(8) == 0 { least + 1 + below(number - least) } else { number };
                    for asked in [number, asked] {
                        let limit = match slot.ask(asked) {
                            Ok(limit) => limit,
                            Err(Refusal::Ahead { .. }) => {
                                number -= 1;
                                std::thread::yield_now();
                                break;
                            }
                            Err(refusal) => panic!("{refusal}"),
                        };
                        let (sequential, place) = (Ordering::SeqCst, &answers[(asked - passed) as usize]);
                        let known = place.compare_exchange(UNKNOWN, limit, sequential, sequential);
                        assert!(known.is_ok() || known == Err(limit), "{asked}: {limit} and {known:?}");
                        assert!(limit <= owes, "{asked}: {limit}, owed {owes}");
                        registered += u64::from(limit > 0);
                    }
                    match below(200) {
                        0 => slot.offer(0),
                        1..=8 => slot.offer([23, 25, 30][below(3) as usize]),
                        9 => std::thread::yield_now(),
                        10 if below(50) == 0 => std::thread::sleep(Duration::from_micros(below(3000))),
                        _ => {}
                    }
                    if below(3) > 0 && number > least {
                        least += 1 + below(number - least);
                        slot.passed(least);
                    }
                    owes = slot.owes();
                    free += u64::from(owes == 0);
                    if Instant::now() > ends {
                        is_over.store(true, Ordering::Relaxed);
                    }
                }
                is_over.store(true, Ordering::Relaxed);
                (number - passed, registered, free)
            })
        };
        let threads: Vec<_> = slots(&words, 4).into_iter().map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    println!("numbers, registered, free of debt by thread: {reached:?}");
    assert!(reached.iter().all(|(numbers, ..)| *numbers > 2000), "the number wrapped");
    assert!(reached.iter().all(|(_, registered, _)| *registered > 0));
}

/// The limit rises when all ranks offer, and falls with the first rank that does not.
#[test]
fn one_after_the_other() {
    let slots = slots(&zeroed(), 3);
    let all = |number| {
        let answers: Vec<_> = slots.iter().map(|slot| slot.ask(number).unwrap()).collect();
        slots.iter().for_each(|slot| slot.passed(number));
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
        answers[0]
    };
    slots[0].offer(25);
    slots[1].offer(23);
    assert_eq!((all(1), slots[0].owes()), (0, 25));
    slots[2].offer(99);
    assert_eq!(all(2), 23);
    assert_eq!([0, 1, 2].map(|rank| slots[rank].own_offer()), [25, 23, LIMIT_MAX]);
    assert_eq!(slots[1].head().limit, 23);
    slots[1].offer(30);
    assert_eq!(all(3), 25);
    slots[0].offer(0);
    assert_eq!((slots[0].owes(), all(4), slots[0].owes()), (25, 0, 0));
}

/// A rank that asks out of turn gets an error, and nothing is decided.
#[test]
fn out_of_turn() {
    let slots = slots(&zeroed(), 2);
    assert_eq!(slots[0].ask(3), Err(Refusal::Skipped { number: 3, by: 2 }));
    assert_eq!((slots[0].ask(1), slots[0].ask(1), slots[0].ask(2)), (Ok(0), Ok(0), Ok(0)));
    slots[0].passed(2);
    slots[0].passed(1);
    assert_eq!(slots[0].ask(2), Err(Refusal::Passed { number: 2, passed: 2 }));
    assert_eq!((slots[1].ask(2), slots[1].ask(1), slots[0].ask(3)), (Ok(0), Ok(0), Ok(0)));
}

/// There are slots for the allowed ranks and words only.
#[test]
fn slots_there_are() {
    let words = zeroed();
    let is = |words: &[AtomicU64], rank, ranks| RegistrationSlot::new(words, rank, ranks).is_some();
    assert!(is(&words, 15, 16) && is(&words, 0, 2));
    assert!(!is(&words, 2, 2) && !is(&words, 0, 1) && !is(&words, 0, 17) && !is(&words[1..], 0, 2));
}

/// A rank that is far behind gets the right limits around an old change. A rank that is too far ahead
/// decides nothing until the other has come nearer. Also across the wrap of the number.
#[test]
fn far_behind() {
    for passed in [0, (1 << 32) - 100] {
        let slots = slots(&after(passed, head::LONG_AGO - 3), 2);
        let changes = passed + 6;
        for number in passed + 1..changes {
            assert_eq!(slots[0].ask(number), Ok(0));
        }
        slots.iter().for_each(|slot| slot.offer(23));
        let mut number = changes;
        let refusal = loop {
            match slots[0].ask(number) {
                Ok(limit) => assert_eq!(limit, 23),
                Err(refusal) => break refusal,
            }
            slots[0].passed(number);
            number += 1;
        };
        assert_eq!(refusal, Refusal::Ahead { number, slowest: passed });
        assert!(number > passed + LAG_MAX && number <= passed + LAG_MAX + LAG_SEEN_EVERY);
        // Rank 0 has taken its offer back, but the slower rank may still ask for earlier numbers.
        slots[0].offer(0);
        assert_eq!((slots[0].ask(number), slots[0].owes()), (Err(refusal), 23));
        let answer = |number| slots[1].ask(number).unwrap();
        assert_eq!([1, 5, 6, 7].map(|n| answer(passed + n)), [0, 0, 23, 23]);
        assert_eq!(answer(number - 1), 23);
        slots[1].passed(number - 1);
        assert_eq!((slots[0].ask(number), slots[1].ask(number)), (Ok(0), Ok(0)));
    }
}

/// Shared memory may hold any value: there is always an answer.
#[test]
fn wild_words() {
    for word in [u64::MAX, u64::MAX - 1, 1 << 63] {
        let words = zeroed();
        words.iter().for_each(|place| place.store(word, Ordering::Relaxed));
        let slot = RegistrationSlot::new(words, 1, 3).unwrap();
        slot.offer(7);
        assert!(slot.owes() <= LIMIT_MAX && slot.head().limit <= LIMIT_MAX);
        for number in [1, word, u64::MAX] {
            let _ = slot.ask(number);
            slot.passed(number);
        }
    }
}
