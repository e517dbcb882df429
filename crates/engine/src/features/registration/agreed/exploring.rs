//! Explores every order of two or three ranks' memory accesses, for small programs of offers, requests and passing.

#![cfg(test)]

use std::collections::HashSet;
use std::sync::atomic::AtomicU64;

use crate::features::registration::agreed::asking::Asking;
use crate::features::registration::agreed::*;

const RANKS: usize = 3;

fn zeroed() -> Vec<AtomicU64> {
    (0..WORDS).map(|_| AtomicU64::new(0)).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Operation {
    Offer(u8),
    Ask(Number),
    Passed(Number),
}

/// The state of a rank between two memory accesses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Rank {
    /// Operations that are done.
    done: usize,
    /// Whether an offer was stored and the head is still to be loaded.
    published: bool,
    asking: Option<Asking>,
    /// By rank, the largest offer since this request last loaded the head.
    offered: [u8; RANKS],
    firm_from: u64,
    before: u64,
    owes: u8,
}

/// The state of all ranks and of the shared words.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    head: u64,
    offers: [u64; RANKS],
    progress: [u64; RANKS],
    ranks: Vec<Rank>,
    /// The answer for each number, by its distance from the first.
    answers: [Option<u8>; 8],
}

/// What an exploration covered. A run in which some field stays 0 proves nothing.
#[derive(Debug, Default)]
struct Seen {
    states: usize,
    changes: usize,
    /// Answers that were the limit before the last change.
    previous: usize,
    /// Deciders that another rank was ahead of.
    late: usize,
    /// Answers above some rank's offer.
    bound: usize,
}

impl World {
    /// All ranks have passed the numbers up to `passed`.
    fn new(ranks: usize, passed: Number) -> World {
        let head = Head { decided: passed as u32, since: head::LONG_AGO - 1, ..Head::default() };
        World {
            head: head.pack(),
            offers: [0; RANKS],
            progress: [passed; RANKS],
            ranks: vec![Rank::default(); ranks],
            answers: [None; 8],
        }
    }

    fn put(&self, words: &[AtomicU64]) {
        words[HEAD].store(self.head, Ordering::Relaxed);
        for rank in 0..RANKS {
            words[OFFERS + rank].store(self.offers[rank], Ordering::Relaxed);
            words[progress_of(rank)].store(self.progress[rank], Ordering::Relaxed);
        }
    }

    /// Does one access of a rank. Returns whether it had one.
    fn turn(&mut self, rank: usize, programs: &Programs, words: &[AtomicU64], seen: &mut Seen) -> bool {
        let Programs { programs, first } = programs;
        let Some(operation) = programs[rank].get(self.ranks[rank].done) else { return false };
        self.put(words);
        let slot = RegistrationSlot::new(words, rank as u32, self.ranks.len() as u32).unwrap();
        let this = &mut self.ranks[rank];
        slot.firm_from.store(this.firm_from, Ordering::Relaxed);
        slot.before.store(this.before, Ordering::Relaxed);
        let before = Head::of(self.head);
        let mut is_done = true;
        match *operation {
            Operation::Offer(limit) if !this.published => {
                slot.publish(limit);
                (this.published, is_done) = (true, false);
            }
            Operation::Offer(_) => {
                slot.look_when_firm();
                this.published = false;
            }
            Operation::Passed(number) => slot.passed(number),
            Operation::Ask(number) => {
                let asking = this.asking.get_or_insert_with(|| Asking::new(number, programs.len()));
                if *asking == Asking::new(number, programs.len()) {
                    this.offered = self.offers.map(|offer| offer as u8);
                }
                let answer = asking.turn(words);
                seen.late += usize::from(*asking == Asking::new(number, programs.len()) && answer.is_none());
                is_done = answer.is_some();
                if let Some(answer) = answer {
                    let limit = answer.unwrap();
                    let known = &mut self.answers[(number - *first) as usize];
                    assert_eq!(*known.get_or_insert(limit), limit, "rank {rank} at {number}");
                    assert!(limit <= this.owes, "rank {rank} at {number}: {limit}, owed {}", this.owes);
                    this.asking = None;
                    let after = Head::of(words[HEAD].load(Ordering::Relaxed));
                    if before.decided != after.decided && after.since == 0 {
                        seen.changes += 1;
                        let offered = this.offered.iter().take(programs.len());
                        assert!(offered.into_iter().all(|offer| limit <= *offer), "{this:?}");
                    }
                    seen.previous += usize::from(limit != after.limit);
                    seen.bound +=
                        usize::from(self.offers[..programs.len()].iter().any(|o| limit as u64 > *o));
                    this.offered = [0; RANKS];
                }
            }
        }
        (this.firm_from, this.before) =
            (slot.firm_from.load(Ordering::Relaxed), slot.before.load(Ordering::Relaxed));
        if is_done {
            this.owes = slot.owes();
            this.done += 1;
        }
        self.head = words[HEAD].load(Ordering::Relaxed);
        for rank in 0..RANKS {
            self.offers[rank] = words[OFFERS + rank].load(Ordering::Relaxed);
            self.progress[rank] = words[progress_of(rank)].load(Ordering::Relaxed);
        }
        let offer = self.offers[rank] as u8;
        for other in self.ranks.iter_mut().filter(|other| other.asking.is_some()) {
            other.offered[rank] = other.offered[rank].max(offer);
        }
        true
    }
}

/// What each rank does, and the first number that it asks for.
struct Programs {
    programs: Vec<Vec<Operation>>,
    first: Number,
}

fn explore(programs: &Programs, seen: &mut Seen) {
    let (words, ranks) = (zeroed(), programs.programs.len());
    let mut known = HashSet::new();
    let mut open = vec![World::new(ranks, programs.first - 1)];
    while let Some(world) = open.pop() {
        for rank in 0..ranks {
            let mut next = world.clone();
            if next.turn(rank, programs, &words, seen) && known.insert(next.clone()) {
                open.push(next);
            }
        }
    }
    seen.states += known.len();
}

/// A generator of small numbers, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// A program that asks for numbers in turn, changes offers, asks again for numbers that it has not passed, and passes numbers late.
fn program(random: &mut Random, passed: Number, count: Number) -> Vec<Operation> {
    let (mut operations, mut least) = (vec![Operation::Offer([23, 25, 0][random.below(3) as usize])], passed);
    for number in passed + 1..=passed + count {
        operations.push(Operation::Ask(number));
        if random.below(4) == 0 {
            operations.push(Operation::Offer([0, 23, 25][random.below(3) as usize]));
        }
        if random.below(4) == 0 {
            operations.push(Operation::Ask(least + 1 + random.below(number - least)));
        }
        if random.below(3) > 0 {
            least += 1 + random.below(number - least);
            operations.push(Operation::Passed(least));
        }
    }
    operations
}

fn explore_random(seed: u64, programs: usize, ranks: usize, count: Number) {
    let (mut random, mut seen) = (Random(seed), Seen::default());
    for turn in 0..programs {
        // Includes the wrap of the number, and the point where a change counts as long ago.
        let passed = [0, 500, (1 << 32) - 3][turn % 3];
        let programs = (0..ranks).map(|_| program(&mut random, passed, count)).collect();
        explore(&Programs { programs, first: passed + 1 }, &mut seen);
    }
    let Seen { states, changes, previous, late, bound } = seen;
    println!("{seen:?}");
    assert!(states > 10_000 && changes > 0 && previous > 0 && late > 0 && bound > 0);
}

/// Two ranks: in every order all get the same answers, none above what a rank owes or the decider loaded.
#[test]
fn two_ranks() {
    explore_random(1, 24, 2, 5);
}

/// Three ranks.
#[test]
fn three_ranks() {
    explore_random(2, 6, 3, 2);
}

/// An offer that is taken back still binds for the next number, whose decider may have loaded it before, and while a number
/// decided with it may be asked for again. A change waits for the slowest rank.
#[test]
fn late_decider() {
    let words = zeroed();
    let slots = [0, 1].map(|rank| RegistrationSlot::new(&words[..], rank, 2).unwrap());
    slots.iter().for_each(|slot| slot.offer(23));
    let mut deciding = Asking::new(1, 2);
    // The decider loads the head and both offers.
    for _ in 0..3 {
        assert_eq!(deciding.turn(&words), None);
    }
    slots[1].offer(0);
    assert_eq!((slots[1].owes(), slots[1].head().limit), (23, 0));
    let answer = (0..9).find_map(|_| deciding.turn(&words));
    assert_eq!((answer, slots[1].owes()), (Some(Ok(23)), 23));
    assert_eq!((slots[1].ask(1), slots[1].ask(2), slots[1].owes()), (Ok(23), Ok(0), 23));
    slots[1].passed(1);
    assert_eq!(slots[1].owes(), 0);
    slots[1].offer(25);
    assert_eq!((slots[1].ask(3), slots[1].head().limit), (Ok(0), 0), "rank 0 may still ask for 1");
    assert_eq!((slots[0].ask(1), slots[0].ask(2), slots[0].ask(3)), (Ok(23), Ok(0), Ok(0)));
    slots[0].passed(1);
    assert_eq!((slots[0].ask(4), slots[1].ask(4)), (Ok(23), Ok(23)));
}
