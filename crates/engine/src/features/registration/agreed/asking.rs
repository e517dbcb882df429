//! Asks for the limit at a number as a state machine, one memory access per turn. Ranks run it in a loop; tests explore it in every order.
//!
//! Each access is one [`Step`]. Nothing else touches the shared words on the way to an answer.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::features::registration::agreed::head::{Head, LIMIT_MAX, Slowest};
use crate::features::registration::agreed::{
    HEAD, LAG_MAX, LAG_SEEN_EVERY, Number, OFFERS, Refusal, progress_of,
};

/// A request for the limit at a number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Asking {
    number: Number,
    ranks: usize,
    step: Step,
}

/// The next access.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Step {
    Look,
    /// The number is the next to be decided: loads the offer of one rank.
    Offer {
        head: Head,
        rank: usize,
        wanted: u8,
    },
    /// Loads the progress of one rank.
    Progress {
        head: Head,
        rank: usize,
        wanted: u8,
        least: Number,
    },
    Decide {
        head: Head,
        next: Head,
    },
}

impl Asking {
    /// A request by one of so many ranks.
    pub(crate) fn new(number: Number, ranks: usize) -> Asking {
        Asking { number, ranks, step: Step::Look }
    }

    /// Does one access, and returns the answer once it is known. `words` has at least [`crate::features::registration::agreed::WORDS`] words.
    pub(crate) fn turn(&mut self, words: &[AtomicU64]) -> Option<Result<u8, Refusal>> {
        let number = self.number;
        self.step = match self.step {
            Step::Look => {
                // SeqCst: see the head of `agreed`.
                let head = Head::of(words[HEAD].load(Ordering::SeqCst));
                match (head.limit_at(number), head.beyond(number)) {
                    (Some(limit), _) => return Some(Ok(limit)),
                    (None, -1) => Step::Offer { head, rank: 0, wanted: LIMIT_MAX },
                    (None, beyond) => return Some(Err(Refusal::Skipped { number, by: -beyond - 1 })),
                }
            }
            Step::Offer { head, rank, wanted } => {
                let offer = words[OFFERS + rank].load(Ordering::SeqCst).min(u64::from(LIMIT_MAX)) as u8;
                let wanted = wanted.min(offer);
                // Every candidate writes the lines of progress, so these are loaded only where they matter.
                let matters = wanted != head.limit || number.is_multiple_of(LAG_SEEN_EVERY);
                match rank + 1 {
                    rank if rank < self.ranks => Step::Offer { head, rank, wanted },
                    _ if matters => Step::Progress { head, rank: 0, wanted, least: Number::MAX },
                    _ => Step::Decide { head, next: head.next(wanted, Slowest::BeforeIt) },
                }
            }
            Step::Progress { head, rank, wanted, least } => {
                // Acquire: the answers to that rank's earlier requests were loaded before.
                let least = least.min(words[progress_of(rank)].load(Ordering::Acquire));
                match rank + 1 {
                    rank if rank < self.ranks => Step::Progress { head, rank, wanted, least },
                    _ if number > least.saturating_add(LAG_MAX) => {
                        return Some(Err(Refusal::Ahead { number, slowest: least }));
                    }
                    _ => {
                        let is_past = least.saturating_add(1) >= head.changed_at(number);
                        let slowest = if is_past { Slowest::PastTheChange } else { Slowest::BeforeIt };
                        Step::Decide { head, next: head.next(wanted, slowest) }
                    }
                }
            }
            Step::Decide { head, next } => {
                let word = &words[HEAD];
                let (sequential, old) = (Ordering::SeqCst, head.pack());
                match word.compare_exchange(old, next.pack(), sequential, sequential) {
                    Ok(_) => return Some(Ok(next.limit)),
                    // Another rank has decided the number.
                    Err(_) => Step::Look,
                }
            }
        };
        None
    }
}
