//! [`ChildInit`]: a call for child communicators after [`ChildCall::begun`](super::ChildCall::begun): the round, if there is one, and the init.

use std::sync::Arc;

use crate::background::own_thread;
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

/// What comes before the communicators of a call are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ahead {
    /// This rank's message, then the messages of all others.
    Round,
    /// NCCL's own split, which all ranks make.
    Nccl,
}

/// What the other ranks of a round hear if this rank leaves before its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaves {
    Failing,
    ToNccl,
}

/// A call that has begun.
#[derive(Debug)]
pub struct ChildInit {
    pub(super) lineage: Arc<Lineage>,
    /// The invitation to the round of the call.
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
    /// The call's name, which all its ranks share.
    pub fn call(&self) -> Token {
        self.invitation.call
    }

    /// The name of the communicator that this rank will be in. All ranks of that communicator share it.
    pub fn child(&self) -> Token {
        self.invitation.child
    }

    /// Runs the round: tells the other ranks where this one goes, waits for all messages, and returns this rank's course with ranks of the parent.
    /// `key` orders a split; a shrink's is 0. The end of the parent ends the wait. Does not wait if this rank has said that it goes to
    /// NCCL, or if there is no round. To be called once.
    pub fn round(&mut self, key: i32, vote: LazyVote) -> Result<Course, Failure> {
        // The bootstrap thread was started when the parent was made.
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
            // The message was sent, so the others would wait for this rank where their communicator meets.
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

    /// Prepares this rank's way to the others, once its course is known.
    fn meets_after(&mut self, course: &Course) {
        match course {
            Course::Lazy { ranks, .. } | Course::Apart { ranks, .. } => self.meets_at_member(ranks),
            Course::Nccl => {
                self.session = session_place::enter(&self.lineage, self.color.map(|_| self.child()))
            }
            Course::Nothing | Course::Torn => {}
        }
    }

    /// Says that this rank does not come, whatever it said before. The round ends for all, if it has not ended.
    fn leave_round(&self) {
        if let Ok(bootstrap) = bootstrap() {
            bootstrap.decline(&self.invitation.to_round(), self.absent());
        }
    }

    fn absent(&self) -> SessionOutcome {
        SessionOutcome::Failed(Failure::Absent { rank: self.lineage.rank })
    }

    /// Sets the meeting place once the child's ranks are known. If this rank hosts, its process begins to expect the others.
    fn meets_at_member(&mut self, ranks: &[u32]) {
        let Some(host) = self.lineage.host(ranks).filter(|_| ranks.len() > 1) else { return };
        let child = self.child();
        // Only the child's ranks are expected under this name.
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

    /// This rank's course without a round.
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

    /// Tells the peers that this rank's communicator has no peer group, so that none of theirs has.
    pub fn refuse(mut self, reason: FallbackReason) {
        self.leaves = Leaves::ToNccl;
        self.decline(SessionOutcome::OnNccl(reason));
    }

    /// Tells the peers that NCCL did not make this rank's communicator.
    pub fn fail(self) {
        drop(self);
    }

    /// Begins the init of this rank's communicator, once. Waits for no other rank of it. An error means that all its ranks stay on NCCL,
    /// which the caller [tells](ChildInit::refuse) them.
    pub fn ask(
        &mut self,
        new_communicator: NewCommunicator,
        configured: Configured,
    ) -> Result<Asked, FallbackReason> {
        self.ask_with(new_communicator, configured, Laziness::None)
    }

    /// The same as [`ChildInit::ask`], before NCCL makes the communicator: for one that the round found to be lazy.
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
        let mut asked = own_thread::run(|| self.ask_at(new_communicator, configured, laziness))?;
        self.leaves = Leaves::ToNccl;
        if let SessionPlace::AtRoster(Ok(local_entry)) =
            std::mem::replace(&mut self.session, SessionPlace::Nowhere)
        {
            asked.local_entry = Some(local_entry);
        }
        Ok(asked)
    }

    fn ask_at(
        &mut self,
        new_communicator: NewCommunicator,
        configured: Configured,
        laziness: Laziness,
    ) -> Result<Asked, FallbackReason> {
        let invitation = self.invited(new_communicator.ranks)?;
        request::check_child(configured.waiting)?;
        let ctas = configured.ctas.unwrap_or(self.lineage.ctas);
        request::check_order(ctas)?;
        settle();
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

    /// The invitation to the session of the child, which has so many ranks. May wait for the roster's answer.
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
                    // No rank can have a peer group without this rank's report.
                    Err(error) => Err(unreachable(error.to_string())),
                }
            }
        }
    }

    /// Tells those who wait for this rank at its meeting place that it does not come.
    fn decline(&mut self, outcome: SessionOutcome) {
        match std::mem::replace(&mut self.session, SessionPlace::Nowhere) {
            SessionPlace::AtMember(invitation) => {
                bootstrap().into_iter().for_each(|bootstrap| bootstrap.decline(&invitation, outcome.clone()));
            }
            // The others keep what NCCL gave them.
            SessionPlace::AtRoster(Ok(local_entry)) => local_entry.decline(),
            SessionPlace::Nowhere | SessionPlace::AtRoster(Err(_)) => {}
        }
    }
}

impl Drop for ChildInit {
    fn drop(&mut self) {
        // The others of the round wait for this rank.
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
