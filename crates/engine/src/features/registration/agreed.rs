//! Agrees on a limit from call to call, without waiting: each rank then chooses the same path though their facts differ. Pure over a few
//! words of the shared page.
//!
//! Ranks give each *candidate* the same number, from 1. Each rank [offers](RegistrationSlot::offer) a limit (log2 of bytes, 0 for none) that it
//! can serve. The rank that first [asks](RegistrationSlot::ask) for a number decides it as the least of all offers, by one compare-and-swap of
//! one word ([`head`]). Later ranks read it. A rank may ask again for a number that it has not [passed](RegistrationSlot::passed), even after
//! later ones: the answer is the same.
//!
//! # Why the answers are the same
//!
//! The head holds the newest decided number, the current limit, when the limit last changed, and the limit before. Numbers are decided one
//! by one, so of two deciders of one number one fails and looks again. The limit changes at `n` only after every
//! rank was seen to have passed all numbers before the last change `c`. A rank asks only for numbers that it has not passed, so for none
//! before `c`, and two limits are enough. A change that is not allowed yet waits for a later
//! number. Until then the limit may be above an offer: so an offer that was taken back still binds ([`RegistrationSlot::owes`]).
//!
//! A limit that is set at `n` is at most every rank's offer, as the decider read it after it had read the head with
//! `n - 1`.
//!
//! # Orderings
//!
//! - *Progress* is stored with release, after the answers that its rank will not ask for again, and loaded with acquire before the
//!   swap. So that rank looks up no passed number after the change.
//! - *Offers* and the head are sequentially consistent. A rank stores its offer and then loads the head, which says `d`. A decider
//!   swaps the head to `d + 1`, or sees that, and then loads the offers for `d + 2`. With weaker orderings both could see the old
//!   value (store buffering). So all deciders of `d + 2` and later know the new offer. A decider of `d + 1` may have loaded the old one.
//! - The head is one word, so a rank that has seen a number decided always sees it decided.
//!
//! # Limits
//!
//! Numbers in the head are modulo 2^32, and the time of a change is exact for 2^20 numbers. Both suffice while no rank is
//! further behind the newest number than that. So the decider of every [`LAG_SEEN_EVERY`]th number looks, and decides nothing
//! if a rank is more than [`LAG_MAX`] behind. (NCCL's queues end at some thousand calls.)

mod asking;
mod exploring;
mod hammering;
mod head;

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;
use windlass_bootstrap::negotiated::RANKS_MAX;

use asking::Asking;
use head::Head;
pub use head::{LIMIT_MAX, Number};

/// Words of a line of 64 bytes.
const LINE_WORDS: usize = 8;
/// Where the head is: on a line that every decision writes.
const HEAD: usize = 0;
/// Where the offers are, one word per rank. They change seldom, so all deciders keep them in their caches.
const OFFERS: usize = LINE_WORDS;
/// Where progress is, one line per rank. A rank writes its own at each candidate; others read it when the limit is to change.
const PROGRESS: usize = OFFERS + RANKS_MAX;
/// How many words the ranks share. All are zero at first.
pub const WORDS: usize = PROGRESS + RANKS_MAX * LINE_WORDS;

/// At multiples of this number the decider looks how far the slowest rank is behind.
pub const LAG_SEEN_EVERY: Number = 1 << 16;
/// How far a rank may be behind. If one is further, the decider refuses.
pub const LAG_MAX: Number = 1 << 18;
// A rank that has passed `p` asks for `p + 1` and later, and the newest is at most `p + LAG_MAX + LAG_SEEN_EVERY`.
const _: () = assert!(LAG_MAX + LAG_SEEN_EVERY < head::LONG_AGO as Number);

fn progress_of(rank: usize) -> usize {
    PROGRESS + rank * LINE_WORDS
}

/// Why there is no limit for a number.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    /// The rank has passed the number.
    #[error("candidate {number} is over on this rank, which has passed {passed}")]
    Passed {
        /// The number that was asked for.
        number: Number,
        /// The last number that the rank has passed.
        passed: Number,
    },
    /// Numbers before this one are undecided: the rank has skipped them.
    #[error("candidate {number} comes {by} candidates too early")]
    Skipped {
        /// The number that was asked for.
        number: Number,
        /// How many numbers before it are undecided.
        by: i64,
    },
    /// A rank is too far behind. The number may be decided later.
    #[error("candidate {number} is too far ahead of a rank that has passed {slowest}")]
    Ahead {
        /// The number that was asked for.
        number: Number,
        /// The last number that all ranks have passed.
        slowest: Number,
    },
}

/// A rank's slot in the shared words. One thread at a time, as NCCL demands of a communicator. The fields are atomic only so that
/// other threads may read them ([`RegistrationSlot::owes`] may then be outdated).
#[derive(Debug)]
pub struct RegistrationSlot<W> {
    words: W,
    rank: usize,
    ranks: usize,
    /// The first number whose decider surely sees the newest offer.
    firm_from: AtomicU64,
    /// The largest earlier offer with which a number before `firm_from` may be decided.
    before: AtomicU64,
}

impl<W: Deref> RegistrationSlot<W>
where
    W::Target: AsRef<[AtomicU64]>,
{
    /// The slot of one of 2 to [`RANKS_MAX`] ranks, over at least [`WORDS`] words. None if they do not fit. A rank has one slot.
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

    /// The limit at a number: log2 of bytes, 0 for none. The same on every rank. A rank must ask for all numbers in turn, and may ask again for
    /// one that it has not passed. Never waits: an attempt to decide fails only if another rank has decided.
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

    /// Says that this rank does not ask for this number, whose answer it has, or for an earlier one again.
    pub fn passed(&self, number: Number) {
        if number > self.progress() {
            // Release: the answers were loaded before.
            self.words()[progress_of(self.rank)].store(number, Ordering::Release);
        }
    }

    /// Sets the limit (log2 of bytes, 0 for none; at most [`LIMIT_MAX`]) up to which this rank serves candidates from now on. Its earlier offers
    /// still bind as [`RegistrationSlot::owes`] says.
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

    /// Called after the offer was stored: a decider of the next number may have missed it, but no later one.
    fn look_when_firm(&self) {
        self.firm_from.store(self.decided().saturating_add(2), Ordering::Relaxed);
    }

    /// The largest limit that any number which this rank has not passed has or may get. The rank must be able to serve it. It falls to
    /// the rank's offer once all deciders see that offer, and the rank has passed the numbers decided before.
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

    fn own_offer(&self) -> u8 {
        self.words()[OFFERS + self.rank].load(Ordering::Relaxed) as u8
    }

    /// Whether the decider of the next number sees this rank's newest offer.
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

    /// The last number that this rank has passed. Only this rank writes it.
    fn progress(&self) -> Number {
        self.words()[progress_of(self.rank)].load(Ordering::Relaxed)
    }

    fn words(&self) -> &[AtomicU64] {
        self.words.as_ref()
    }
}
