//! What ranks agree on from call to call without waiting for each other: a limit, by which each chooses the same path though
//! their facts differ. Pure over a few words of memory that all ranks share.
//!
//! Ranks number the same *candidates* alike, from 1. Each [offers](RegistrationSlot::offer) a limit (log2 of bytes, 0 for none) that it can
//! serve. Whoever first [asks](RegistrationSlot::ask) for a number decides it, as the least of all offers, by one compare-and-swap of one
//! word ([`head`]); who comes later reads it. A number that is not yet [passed](RegistrationSlot::passed) may be asked again, also after later
//! ones: the answer is the same.
//!
//! # Why the answers are the same
//!
//! The head holds the newest decided number, the limit that holds since the last change and the one before. It grows by one
//! number at a time, so that of two deciders of one number one fails and looks again. The limit changes at `n` only after every
//! rank was seen to have passed all numbers before the last change `c`: a rank asks for what it has not passed, so for nothing
//! before `c` any more, and two limits are enough for all that may be asked. A change that is not allowed waits for a later
//! number. Until then the limit may be above an offer, which is why an offer that was taken back still binds ([`RegistrationSlot::owes`]).
//!
//! A limit that is set at `n` is at most every rank's offer at the moment the decider read it, after it had read the head with
//! `n - 1`.
//!
//! # Orderings
//!
//! - *Progress* is stored with release, after the answers that its rank will not ask for again, and read with acquire before the
//!   swap: no look of that rank for a passed number comes after the change.
//! - *Offers* and the head are sequentially consistent. A rank stores its offer and then looks at the head, which says `d`; a decider
//!   swaps the head to `d + 1`, or sees that, and then reads the offers, for `d + 2`. With less, both could see the old (as in a
//!   store buffer). So the new offer is known to all who decide `d + 2` and later; `d + 1` may be decided by one who read before.
//! - The head itself is one word, and each rank's looks at it never go back: a number that it has seen decided stays so.
//!
//! # Limits
//!
//! Numbers in the head are modulo 2^32, and a change is told from a long ago one for 2^20 numbers. Both hold while no rank is
//! further behind the newest number than that: at every [`LAG_SEEN_EVERY`]th number its decider looks, and refuses to go on
//! where one is [`LAG_MAX`] behind. Nothing is decided then. (NCCL's queues end at some thousand calls.)

mod asking;
mod exploring;
mod hammering;
mod head;

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};

use windlass_bootstrap::negotiated::RANKS_MAX;

use asking::Asking;
use head::Head;
pub use head::LIMIT_MAX;

/// Counts candidates, from 1.
pub type Number = u64;

/// In a line of memory of 64 bytes.
const LINE_WORDS: usize = 8;
/// Where the head lies: a line that every decision writes.
const HEAD: usize = 0;
/// Where offers lie, one word a rank: written seldom, so that all deciders keep them in their caches.
const OFFERS: usize = LINE_WORDS;
/// Where progress lies, one line a rank: written by its rank with each candidate, read where the limit is to change.
const PROGRESS: usize = OFFERS + RANKS_MAX;
/// So many words ranks share; all of them zero at first.
pub const WORDS: usize = PROGRESS + RANKS_MAX * LINE_WORDS;

/// At these numbers a decider looks how far the slowest rank is behind.
pub const LAG_SEEN_EVERY: Number = 1 << 16;
/// Where that is more than this, it refuses.
pub const LAG_MAX: Number = 1 << 18;
// A rank that has passed `p` asks for `p + 1` and later, and the newest is at most `p + LAG_MAX + LAG_SEEN_EVERY`.
const _: () = assert!(LAG_MAX + LAG_SEEN_EVERY < head::LONG_AGO as Number);

fn progress_of(rank: usize) -> usize {
    PROGRESS + rank * LINE_WORDS
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The rank has passed the number.
    Passed {
        /// What was asked for.
        number: Number,
        /// The last that it has passed.
        passed: Number,
    },
    /// The rank has asked for none of the numbers before.
    Skipped {
        /// What was asked for.
        number: Number,
        /// How many before it nobody has decided.
        by: i64,
    },
    /// A rank is too far behind. Asked again later, the number may have an answer.
    Ahead {
        /// What was asked for.
        number: Number,
        /// The last that all ranks have passed.
        slowest: Number,
    },
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refusal::Passed { number, passed } => {
                write!(f, "candidate {number} is over on this rank, which has passed {passed}")
            }
            Refusal::Skipped { number, by } => {
                write!(f, "candidate {number} comes {by} candidates too early")
            }
            Refusal::Ahead { number, slowest } => {
                write!(f, "candidate {number} is too far ahead of a rank that has passed {slowest}")
            }
        }
    }
}

/// A rank's place at the shared words. One thread at a time, as in a communicator; what is kept here is atomic only so that
/// others may look ([`RegistrationSlot::owes`] may then be that of a moment ago).
#[derive(Debug)]
pub struct RegistrationSlot<W> {
    words: W,
    rank: usize,
    ranks: usize,
    /// The first number that is surely decided with the newest offer.
    firm_from: AtomicU64,
    /// The largest offer with which a number before that may be decided.
    before: AtomicU64,
}

impl<W: Deref> RegistrationSlot<W>
where
    W::Target: AsRef<[AtomicU64]>,
{
    /// For one of 2 to [`RANKS_MAX`] ranks, over at least [`WORDS`] words; none otherwise. A rank has one slot.
    pub fn new(words: W, rank: u32, ranks: u32) -> Option<RegistrationSlot<W>> {
        let (rank, ranks) = (rank as usize, ranks as usize);
        let fits = (2..=RANKS_MAX).contains(&ranks) && rank < ranks && words.as_ref().len() >= WORDS;
        let slot = || RegistrationSlot {
            words,
            rank,
            ranks,
            firm_from: AtomicU64::new(0),
            before: AtomicU64::new(0),
        };
        fits.then(slot)
    }

    /// The limit at a number: log2 of bytes, 0 for none; the same on every rank. All numbers are asked for in turn; one that has
    /// not been passed may be asked for again. Never waits: fails to decide only where another rank has.
    pub fn ask(&self, number: Number) -> Result<u8, Refusal> {
        let passed = self.progress();
        if number <= passed {
            return Err(Refusal::Passed { number, passed });
        }
        let mut asking = Asking::new(number, self.ranks);
        loop {
            if let Some(answer) = asking.turn(self.words()) {
                return answer;
            }
        }
    }

    /// This rank asks for this number, which it has an answer for, and those before it no more.
    pub fn passed(&self, number: Number) {
        if number > self.progress() {
            // Release: the answers were read before.
            self.words()[progress_of(self.rank)].store(number, Ordering::Release);
        }
    }

    /// Up to which limit (log2 of bytes, 0 for none; at most [`LIMIT_MAX`]) this rank serves candidates from now on. What it has offered
    /// before binds for as long as [`RegistrationSlot::owes`] says.
    pub fn offer(&self, limit: u8) {
        self.publish(limit.min(LIMIT_MAX));
        self.look_when_firm();
    }

    fn publish(&self, limit: u8) {
        let word = &self.words()[OFFERS + self.rank];
        let was = word.load(Ordering::Relaxed);
        let still = if self.is_firm(self.decided()) { 0 } else { self.before.load(Ordering::Relaxed) };
        self.before.store(was.max(still), Ordering::Relaxed);
        word.store(u64::from(limit), Ordering::SeqCst);
    }

    /// After the offer was stored: the next number may be being decided by one who has not seen it, no later one.
    fn look_when_firm(&self) {
        self.firm_from.store(self.decided().saturating_add(2), Ordering::Relaxed);
    }

    /// The largest limit that a number which this rank has not passed has or may get: what it must be able to serve. Falls to
    /// its offer when all have seen that, and it has passed what was decided before.
    pub fn owes(&self) -> u8 {
        let head = self.head();
        let next = self.progress().saturating_add(1);
        let decided = next.saturating_add_signed(head.beyond(next));
        let asked = if next < head.changed_at(next) { head.limit.max(head.previous) } else { head.limit };
        let to_come = match self.is_firm(decided) {
            true => 0,
            false => self.before.load(Ordering::Relaxed) as u8,
        };
        asked.max(to_come).max(self.own_offer())
    }

    /// The limit at the newest number that has been decided.
    pub fn limit(&self) -> u8 {
        self.head().limit
    }

    /// What every rank offers now, in order.
    pub fn offers(&self) -> Vec<u8> {
        let offers = self.words()[OFFERS..].iter().take(self.ranks);
        offers.map(|offer| offer.load(Ordering::Relaxed) as u8).collect()
    }

    fn own_offer(&self) -> u8 {
        self.words()[OFFERS + self.rank].load(Ordering::Relaxed) as u8
    }

    /// Whether whoever decides the next number has seen this rank's newest offer.
    fn is_firm(&self, decided: Number) -> bool {
        decided.saturating_add(1) >= self.firm_from.load(Ordering::Relaxed)
    }

    /// The newest decided number.
    fn decided(&self) -> Number {
        let near = self.progress();
        near.saturating_add_signed(self.head().beyond(near))
    }

    fn head(&self) -> Head {
        Head::of(self.words()[HEAD].load(Ordering::SeqCst))
    }

    /// Written by this rank alone.
    fn progress(&self) -> Number {
        self.words()[progress_of(self.rank)].load(Ordering::Relaxed)
    }

    fn words(&self) -> &[AtomicU64] {
        self.words.as_ref()
    }
}
