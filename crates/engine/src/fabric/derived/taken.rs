//! A call for communicators made from another once NCCL has taken it: a round, where there is one, and this rank's word.

use std::sync::Arc;

use crate::contract::Token;
use crate::fabric::birth::cannot_reach;
use crate::fabric::hosting::rendezvous;
use crate::fabric::{Asked, Patience, settle, wish};
use crate::rendezvous::Mustered;
use crate::rendezvous::colors::{Course, Parent, Willing, Word};
use crate::rendezvous::derived::{Invitation, NOBODY};
use crate::rendezvous::verdict::{Failure, Reason, Verdict};

use super::waits::{Line, Wait};
use super::{Configured, Newborn, Plain};

/// What comes before the communicators of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ahead {
    /// This rank's word, and then all others'.
    Round,
    /// NCCL's own split, of all.
    Nccl,
}

/// Whether the host still waits for this rank's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Word,
    Nothing,
}

/// A call that NCCL has taken.
#[derive(Debug)]
pub struct Derivation {
    pub(super) line: Arc<Line>,
    pub(super) invitation: Invitation,
    /// The ranks of the parent that take part, one bit each.
    pub(super) ranks: u64,
    pub(super) parent: Parent,
    pub(super) color: Option<i32>,
    pub(super) ahead: Ahead,
    pub(super) due: Due,
    /// Of one whose parent has no fabric: until this rank's meeting is over, so that its end is seen.
    pub(super) mustered: Option<Mustered>,
    /// Of such a one: by which those made from it go, if it has no fabric itself.
    pub(super) own_name: Option<Token>,
}

impl Derivation {
    /// The call, by a name that its ranks share.
    pub fn call(&self) -> Token {
        self.invitation.call
    }

    /// The communicator that this rank will be in, by a name that its ranks share.
    pub fn child(&self) -> Token {
        self.invitation.child
    }

    /// What the new communicator keeps for those made from it, where it has no fabric itself: where its parent has none either.
    pub fn plain(&self, rank: u32, configured: &Configured) -> Option<Arc<Plain>> {
        Some(Plain::of_child(self.own_name?, &self.line, rank, configured))
    }

    /// Tells the other ranks of the call where this one goes (its key orders a split; a shrink's is 0), waits until all
    /// have spoken, and says what this rank does next; of a new communicator with its ranks in the parent. Ends with the parent. Where
    /// this rank has said that it goes to NCCL, or there is no round, nobody is waited for. Once.
    pub fn round(&mut self, key: i32, willing: Willing) -> Result<Course, Failure> {
        // The thread was there when the parent was born.
        let rendezvous = rendezvous().map_err(|_| Failure::HostLost)?;
        if std::mem::replace(&mut self.ahead, Ahead::Nccl) == Ahead::Nccl {
            return Ok(self.alone());
        }
        let word = Word { color: self.color, key, willing, parent: self.parent };
        let (place, ranks) = self.line.among(self.ranks);
        let inquiry = rendezvous.ask_round(&self.invitation, place, ranks.len() as u32, word);
        let wait = Wait::new(&self.line, inquiry.canceller());
        let table = inquiry.wait();
        drop(wait);
        let in_parent = |places: Vec<u32>| {
            places.iter().filter_map(|place| ranks.get(*place as usize).copied()).collect()
        };
        Ok(match table?.course(place) {
            Course::Promise { rank, ranks, others } => {
                Course::Promise { rank, ranks: in_parent(ranks), others }
            }
            Course::Apart { rank, ranks } => Course::Apart { rank, ranks: in_parent(ranks) },
            course => course,
        })
    }

    /// What this rank does without having heard the others.
    pub fn alone(&self) -> Course {
        match self.parent {
            Parent::Unbuildable => {
                let (rank, ranks) = self.line.among(self.ranks);
                Course::Apart { rank, ranks }
            }
            Parent::Built | Parent::Promised | Parent::Lost => Course::Nccl,
        }
    }

    /// This rank is in no new communicator.
    pub fn pass_by(mut self) {
        if self.declined_mustered() {
            return;
        }
        self.due = Due::Nothing;
        if let Ok(rendezvous) = rendezvous() {
            rendezvous.pass_by(&self.invitation);
        }
    }

    /// This rank's communicator has no fabric, and so none of its peers' has.
    pub fn refuse(mut self, reason: Reason) {
        self.decline(Verdict::Plain(reason));
    }

    /// NCCL did not make this rank's.
    pub fn fail(self) {
        drop(self);
    }

    /// Begins the birth of this rank's communicator. Waits for nobody; the reason says that NCCL does everything, for all its
    /// ranks.
    pub fn ask(self, newborn: Newborn, configured: Configured) -> Result<Asked, Reason> {
        self.ask_with(newborn, configured, Patience::None)
    }

    /// The same before NCCL has made it, where a round found that it is a promise.
    pub fn ask_promise(self, newborn: Newborn, configured: Configured) -> Result<Asked, Reason> {
        self.ask_with(newborn, configured, Patience::AsConfigured)
    }

    fn ask_with(
        mut self,
        newborn: Newborn,
        configured: Configured,
        patience: Patience,
    ) -> Result<Asked, Reason> {
        if newborn.ranks < 2 {
            self.pass_by();
            return Err(Reason::OneRank);
        }
        let mut asked = self.report(newborn, configured, patience);
        match &mut asked {
            Ok(asked) => {
                self.due = Due::Nothing;
                asked.mustered = self.mustered.take();
            }
            Err(reason) => self.decline(Verdict::Plain(reason.clone())),
        }
        asked
    }

    fn report(&self, newborn: Newborn, configured: Configured, patience: Patience) -> Result<Asked, Reason> {
        wish::check_derived(configured.waiting)?;
        settle();
        let ctas = configured.ctas.unwrap_or(self.line.ctas);
        let (arena, share, mut facts) = wish::on(newborn.device, newborn.ranks, ctas, patience)?;
        facts.member.rank = newborn.rank;
        let party = rendezvous().and_then(|rendezvous| match &self.mustered {
            Some(_) => rendezvous.attend_mustered(&self.invitation, facts),
            None => rendezvous.attend_invited(&self.invitation, facts),
        });
        let party = party.map_err(cannot_reach)?;
        let until = party.cancellers().into_iter().next().map(|canceller| Wait::new(&self.line, canceller));
        Ok(Asked {
            party,
            token: self.invitation.child,
            rank: newborn.rank,
            arena,
            share,
            until,
            mustered: None,
        })
    }

    /// Whether this is a rank of a muster, which says there that it does not come.
    fn declined_mustered(&mut self) -> bool {
        let Some(mustered) = self.mustered.take() else { return false };
        self.due = Due::Nothing;
        mustered.decline();
        true
    }

    fn decline(&mut self, verdict: Verdict) {
        if self.declined_mustered() {
            return;
        }
        self.due = Due::Nothing;
        if self.invitation.child == NOBODY {
            return rendezvous().into_iter().for_each(|rendezvous| rendezvous.pass_by(&self.invitation));
        }
        if let Ok(rendezvous) = rendezvous() {
            rendezvous.decline(&self.invitation, verdict);
        }
    }
}

impl Drop for Derivation {
    fn drop(&mut self) {
        if self.ahead == Ahead::Round
            && let Ok(rendezvous) = rendezvous()
        {
            // The others of the round wait for it.
            match self.due {
                Due::Word => {
                    let absent = Failure::Absent { rank: self.invitation.rank };
                    rendezvous.decline(&self.invitation.to_round(), Verdict::Failed(absent));
                }
                Due::Nothing => {
                    let (place, ranks) = self.line.among(self.ranks);
                    rendezvous.go_to_nccl(&self.invitation, place, ranks.len() as u32, self.parent);
                }
            }
        }
        if self.due == Due::Word {
            self.decline(Verdict::Failed(Failure::Absent { rank: self.invitation.rank }));
        }
    }
}
