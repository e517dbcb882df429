//! The word of the shared page in which the ranks of a communicator agree whether to go on, step after step of a suspend or resume. Pure.
//!
//! A step passes once all ranks have said yes, and is refused at the first no. Whoever decides does so by one exchange of the word, so all
//! ranks see one outcome, also where one stops waiting in the very moment in which the last one comes. The word shows the outcome until all
//! ranks that have come have seen it. Only then a rank opens the next step. A rank that comes after a refusal hears of it.

/// Why a step was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub(super) enum Objection {
    /// Work of the rank did not end in time.
    Busy = 2,
    /// A capture of the rank has the communicator's operations.
    Captured,
    /// The rank did not come in time.
    Late,
    /// The rank's process has ended, or it has failed.
    Gone,
    /// The rank has no memory.
    NoMemory,
    /// The rank's driver refused something.
    Failed,
    /// The rank was aborted.
    Aborted,
    /// This rank has missed the outcome.
    Missed,
}

const ALL: [Objection; 8] = [
    Objection::Busy,
    Objection::Captured,
    Objection::Late,
    Objection::Gone,
    Objection::NoMemory,
    Objection::Failed,
    Objection::Aborted,
    Objection::Missed,
];

/// What a rank sees of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Open,
    Passed,
    /// By this rank.
    Refused(u32, Objection),
}

const OPEN: u8 = 0;
const PASSED: u8 = 1;

/// The word's content: the number of the step, its outcome, who refused it, and the ranks that have come and have not seen the outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ballot {
    step: u32,
    outcome: u8,
    by: u8,
    here: u16,
}

impl Ballot {
    pub(super) fn of(word: u64) -> Ballot {
        let (step, outcome) = ((word >> 32) as u32, (word >> 24) as u8);
        Ballot { step, outcome, by: (word >> 16) as u8, here: word as u16 }
    }

    pub(super) fn word(self) -> u64 {
        let Ballot { step, outcome, by, here } = self;
        u64::from(step) << 32 | u64::from(outcome) << 24 | u64::from(by) << 16 | u64::from(here)
    }

    /// Enters a rank's vote. None while ranks have yet to see the outcome of the step before.
    pub(super) fn vote(
        mut self,
        step: u32,
        (rank, ranks): (u32, u32),
        vote: Result<(), Objection>,
    ) -> Option<Ballot> {
        if self.step < step {
            if self.here != 0 {
                return None;
            }
            self = Ballot { step, outcome: OPEN, by: 0, here: 0 };
        }
        if self.step > step || self.outcome != OPEN {
            return Some(self);
        }
        self.here |= 1 << rank;
        match vote {
            Err(why) => Some(self.refuse(step, rank, why)),
            Ok(()) if self.missing(ranks) == 0 => Some(Ballot { outcome: PASSED, ..self }),
            Ok(()) => Some(self),
        }
    }

    /// Refuses the step in the name of a rank, unless its outcome is known.
    pub(super) fn refuse(self, step: u32, by: u32, why: Objection) -> Ballot {
        match (self.step, self.outcome) {
            (now, OPEN) if now == step => Ballot { outcome: why as u8, by: by as u8, ..self },
            _ => self,
        }
    }

    /// What a rank sees that has voted. Once it has seen an outcome, it is not waited for.
    pub(super) fn see(self, step: u32, rank: u32) -> (Ballot, Outcome) {
        if self.step != step {
            return (self, Outcome::Refused(rank, Objection::Missed));
        }
        let seen = Ballot { here: self.here & !(1 << rank), ..self };
        match self.outcome {
            OPEN => (self, Outcome::Open),
            PASSED => (seen, Outcome::Passed),
            why => {
                let why = ALL.into_iter().find(|one| *one as u8 == why).unwrap_or(Objection::Failed);
                (seen, Outcome::Refused(self.by.into(), why))
            }
        }
    }

    /// Whether the step was refused, or the others have gone on.
    pub(super) fn is_over(self, step: u32) -> bool {
        self.step > step || self.step == step && self.outcome > PASSED
    }

    /// The ranks that have not come, a bit each.
    pub(super) fn missing(self, ranks: u32) -> u64 {
        !u64::from(self.here) & ((1 << ranks) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A word keeps all that it says, also the last number. Words that nobody wrote are refusals, not panics.
    #[test]
    fn words() {
        for why in ALL {
            let open = Ballot::of(0).vote(u32::MAX, (15, 16), Ok(())).unwrap();
            let refused = Ballot::of(open.refuse(u32::MAX, 14, why).word());
            assert_eq!(refused.see(u32::MAX, 15).1, Outcome::Refused(14, why));
        }
        let strange = Ballot::of(7 << 32 | 200 << 24 | 255 << 16).see(7, 0).1;
        assert_eq!(strange, Outcome::Refused(255, Objection::Failed));
    }

    /// All of 16 ranks must come. A vote that comes after a refusal changes nothing, and the next step waits for all who have come.
    #[test]
    fn votes() {
        let mut ballot = Ballot::of(0);
        for rank in 0..16 {
            assert_ne!(ballot.see(2, 0).1, Outcome::Passed);
            ballot = ballot.vote(2, (rank, 16), Ok(())).unwrap();
        }
        for rank in 0..16 {
            assert_eq!(ballot.vote(3, (0, 16), Ok(())), None, "rank {rank} has not seen it");
            let (seen, outcome) = ballot.see(2, rank);
            assert_eq!(outcome, Outcome::Passed);
            ballot = seen;
        }
        let refused = ballot.vote(3, (4, 16), Err(Objection::NoMemory)).unwrap();
        let after = refused.vote(3, (5, 16), Ok(())).unwrap();
        assert_eq!(after.see(3, 5).1, Outcome::Refused(4, Objection::NoMemory));
        assert_eq!(after.refuse(3, 1, Objection::Late), after);
    }
}
