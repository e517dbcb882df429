//! A call for communicators made from another once NCCL has taken it: a round, where there is one, and this rank's message.

use std::sync::Arc;

use crate::peers::setup::asked::{Asked, cannot_reach};
use crate::peers::setup::hosting::bootstrap;
use crate::peers::setup::request::{self, Laziness};
use crate::peers::shutdown::closing::settle;
use crate::peers::shutdown::room;
use windlass_bootstrap::children::{Invitation, child};
use windlass_bootstrap::colors::{Course, LazyVote, Parent, SplitMessage};
use windlass_bootstrap::local_rendezvous::{self, RosterAnswer};
use windlass_bootstrap::negotiated::{RANKS_MAX, Token};
use windlass_bootstrap::outcome::{Failure, FallbackReason, SessionOutcome};

use super::lineage::{Lineage, Wait};
use super::session_place::{self, SessionPlace};
use super::wanted::{Configured, NewCommunicator};

/// What comes before the communicators of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ahead {
    /// This rank's message, and then all others'.
    Round,
    /// NCCL's own split, of all.
    Nccl,
}

/// What the others of a round hear of a rank that leaves it before its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaves {
    Failing,
    ToNccl,
}

/// A call that NCCL has taken.
#[derive(Debug)]
pub struct ChildInit {
    pub(super) lineage: Arc<Lineage>,
    /// To its round.
    pub(super) invitation: Invitation,
    /// The ranks of the parent that take part, one bit each.
    pub(super) ranks: u64,
    pub(super) parent: Parent,
    pub(super) color: Option<i32>,
    pub(super) ahead: Ahead,
    pub(super) leaves: Leaves,
    pub(super) session: SessionPlace,
}

impl ChildInit {
    /// The call, by a name that its ranks share.
    pub fn call(&self) -> Token {
        self.invitation.call
    }

    /// The communicator that this rank will be in, by a name that its ranks share.
    pub fn child(&self) -> Token {
        self.invitation.child
    }

    /// Tells the other ranks of the call where this one goes (its key orders a split; a shrink's is 0), waits until all
    /// have spoken, and says what this rank does next; of a new communicator with its ranks in the parent. Ends with the parent. Where
    /// this rank has said that it goes to NCCL, or there is no round, nobody is waited for. Once.
    pub fn round(&mut self, key: i32, vote: LazyVote) -> Result<Course, Failure> {
        // The thread was there when the parent was made.
        let bootstrap = bootstrap().map_err(|_| Failure::HostLost)?;
        if std::mem::replace(&mut self.ahead, Ahead::Nccl) == Ahead::Nccl {
            return Ok(self.alone());
        }
        let message = SplitMessage { color: self.color, key, vote, parent: self.parent };
        let (place, ranks) = self.lineage.among(self.ranks);
        let inquiry = bootstrap.ask_round(&self.invitation, place, ranks.len() as u32, message);
        let wait = Wait::new(&self.lineage, inquiry.canceller());
        let table = inquiry.wait();
        drop(wait);
        if let Err(Failure::Aborted) = &table {
            // Its message is out: the others would wait for it where their communicator meets.
            self.leave_round();
        }
        let in_parent = |places: Vec<u32>| {
            places.iter().filter_map(|place| ranks.get(*place as usize).copied()).collect()
        };
        let course = match table?.course(place) {
            Course::Lazy { rank, ranks, others } => Course::Lazy { rank, ranks: in_parent(ranks), others },
            Course::Apart { rank, ranks } => Course::Apart { rank, ranks: in_parent(ranks) },
            course => course,
        };
        self.meets_after(&course);
        Ok(course)
    }

    /// This rank's way to the others, where it is clear what comes next.
    fn meets_after(&mut self, course: &Course) {
        match course {
            Course::Lazy { ranks, .. } | Course::Apart { ranks, .. } => self.meets_at_member(ranks),
            Course::Nccl => {
                self.session = session_place::enter(&self.lineage, self.color.map(|_| self.child()))
            }
            Course::Nothing | Course::Torn => {}
        }
    }

    /// This rank does not come, whatever it has said: the round ends for all, if it has not ended.
    fn leave_round(&self) {
        if let Ok(bootstrap) = bootstrap() {
            bootstrap.decline(&self.invitation.to_round(), self.absent());
        }
    }

    fn absent(&self) -> SessionOutcome {
        SessionOutcome::Failed(Failure::Absent { rank: self.lineage.rank })
    }

    /// The ranks of the new communicator are known. Whose process hosts awaits the others from now on.
    fn meets_at_member(&mut self, ranks: &[u32]) {
        let Some(host) = self.lineage.host(ranks).filter(|_| ranks.len() > 1) else { return };
        let child = self.child();
        // Its ranks are all that are waited for under this name.
        let invitation = Invitation {
            process_listener: host.process_listener,
            call: child,
            child,
            rank: self.lineage.rank,
        };
        self.session = SessionPlace::AtMember(invitation);
        if host.rank == self.lineage.rank
            && let Ok(bootstrap) = bootstrap()
        {
            let awaited = ranks.iter().fold(0, |all, rank| all | 1 << rank);
            bootstrap.await_ranks(child, awaited, self.lineage.watched(awaited));
        }
    }

    /// What this rank does without having heard the others.
    pub fn alone(&mut self) -> Course {
        let course = match self.parent {
            Parent::Unbuildable => {
                let (rank, ranks) = self.lineage.among(self.ranks);
                Course::Apart { rank, ranks }
            }
            Parent::Built | Parent::Lazy | Parent::Lost => Course::Nccl,
        };
        self.meets_after(&course);
        course
    }

    /// This rank's communicator has no peer group, and so none of its peers' has.
    pub fn refuse(mut self, reason: FallbackReason) {
        self.leaves = Leaves::ToNccl;
        self.decline(SessionOutcome::OnNccl(reason));
    }

    /// NCCL did not make this rank's.
    pub fn fail(self) {
        drop(self);
    }

    /// Begins the init of this rank's communicator. Waits for nobody. The reason says that NCCL does everything, for all its
    /// ranks, which the caller [tells](ChildInit::refuse) them. Once.
    pub fn ask(
        &mut self,
        new_communicator: NewCommunicator,
        configured: Configured,
    ) -> Result<Asked, FallbackReason> {
        self.ask_with(new_communicator, configured, Laziness::None)
    }

    /// The same before NCCL has made it, where a round found that it is lazy.
    pub fn ask_lazy(
        &mut self,
        new_communicator: NewCommunicator,
        configured: Configured,
    ) -> Result<Asked, FallbackReason> {
        self.ask_with(new_communicator, configured, Laziness::AsConfigured)
    }

    fn ask_with(
        &mut self,
        new_communicator: NewCommunicator,
        configured: Configured,
        laziness: Laziness,
    ) -> Result<Asked, FallbackReason> {
        let mut asked = self.ask_at(new_communicator, configured, laziness)?;
        self.leaves = Leaves::ToNccl;
        if let SessionPlace::AtRoster(Ok(local_entry)) =
            std::mem::replace(&mut self.session, SessionPlace::Nowhere)
        {
            asked.local_entry = Some(local_entry);
        }
        Ok(asked)
    }

    fn ask_at(
        &self,
        new_communicator: NewCommunicator,
        configured: Configured,
        laziness: Laziness,
    ) -> Result<Asked, FallbackReason> {
        let invitation = self.invited(new_communicator.ranks)?;
        request::check_child(configured.waiting)?;
        settle();
        let ctas = configured.ctas.unwrap_or(self.lineage.ctas);
        let (heap, share, mut facts) =
            request::on(new_communicator.device, new_communicator.ranks, ctas, laziness)?;
        room::close_soon(heap.device());
        facts.member.rank = new_communicator.rank;
        let participant = bootstrap().and_then(|bootstrap| match &self.session {
            SessionPlace::AtRoster(_) => bootstrap.join_local(&invitation, facts),
            _ => bootstrap.join_invited(&invitation, facts),
        });
        let participant = participant.map_err(cannot_reach)?;
        let until =
            participant.cancellers().into_iter().next().map(|canceller| Wait::new(&self.lineage, canceller));
        let token = invitation.child;
        Ok(Asked { participant, token, rank: new_communicator.rank, heap, share, until, local_entry: None })
    }

    /// To the session of the new communicator, which has so many ranks.
    pub(super) fn invited(&self, ranks: u32) -> Result<Invitation, FallbackReason> {
        if ranks < 2 {
            return Err(FallbackReason::OneRank);
        }
        if ranks as usize > RANKS_MAX {
            return Err(FallbackReason::ManyRanks);
        }
        let unreachable = |words| FallbackReason::Unreachable { words };
        match &self.session {
            SessionPlace::Nowhere => Err(unreachable("no rank of it can be reached".into())),
            SessionPlace::AtMember(invitation) => Ok(*invitation),
            SessionPlace::AtRoster(Err(words)) => Err(unreachable(words.clone())),
            SessionPlace::AtRoster(Ok(local_entry)) => {
                match local_entry.ask(ranks, &|| self.lineage.has_ended()) {
                    Ok(RosterAnswer::Complete { place, process_listener }) => {
                        let call = local_rendezvous::name(self.child());
                        Ok(Invitation { process_listener, call, child: child(call, 0), rank: place })
                    }
                    Ok(_) => Err(FallbackReason::Apart),
                    // Nobody can have a peer group without this rank's report.
                    Err(error) => Err(unreachable(error.to_string())),
                }
            }
        }
    }

    /// Says where it is waited for that it does not come.
    fn decline(&mut self, outcome: SessionOutcome) {
        match std::mem::replace(&mut self.session, SessionPlace::Nowhere) {
            SessionPlace::AtMember(invitation) => {
                bootstrap().into_iter().for_each(|bootstrap| bootstrap.decline(&invitation, outcome.clone()));
            }
            // The others have what NCCL gave them.
            SessionPlace::AtRoster(Ok(local_entry)) => local_entry.decline(),
            SessionPlace::Nowhere | SessionPlace::AtRoster(Err(_)) => {}
        }
    }
}

impl Drop for ChildInit {
    fn drop(&mut self) {
        // The others of the round wait for it.
        match (self.ahead, self.leaves) {
            (Ahead::Round, Leaves::Failing) => self.leave_round(),
            (Ahead::Round, Leaves::ToNccl) => {
                if let Ok(bootstrap) = bootstrap() {
                    let (place, ranks) = self.lineage.among(self.ranks);
                    bootstrap.go_to_nccl(&self.invitation, place, ranks.len() as u32, self.parent);
                }
            }
            (Ahead::Nccl, _) => {}
        }
        self.decline(self.absent());
    }
}
