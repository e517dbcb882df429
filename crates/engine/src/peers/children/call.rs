//! [`ChildCall`]: a rank's call for a child communicator. It says and hears what the [plan](windlass_bootstrap::children::plan) asks for.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::background::own_thread;
use crate::forward::configuration;
use crate::forward::init::Ctas;
use crate::peers::setup::asked::cannot_reach;
use crate::peers::setup::request;
use crate::peers::shutdown::{at_exit, room};
use crate::peers::{Asked, InitRequest, Laziness, settle};
use windlass_base::gpu::Ordinal;
use windlass_base::stats::count::Identity;
use windlass_bootstrap::LocalEntry;
use windlass_bootstrap::children::local_rendezvous::{self, RosterAnswer};
use windlass_bootstrap::children::plan::{CallFacts, ChildPlan, LazyVote, Parent, SplitMessage};
use windlass_bootstrap::children::{self, Invitation, NOBODY, child};
use windlass_bootstrap::facts::Waiting;
use windlass_bootstrap::negotiated::{RANKS_MAX, Token, capability};
use windlass_bootstrap::outcome::{Failure, FallbackReason, SessionOutcome};

use super::lineage::{Lineage, Wait};

/// What a program asks for, and what its rank knows.
#[derive(Clone, Debug)]
pub struct ChildRequest {
    /// The rank's color; in a shrink 0. With `None` it is in no child.
    pub color: Option<i32>,
    /// Of a shrink: the excluded ranks, in any order.
    pub excluded: Vec<i32>,
    /// Orders the ranks of a split.
    pub key: i32,
    /// Whether the rank wants its child lazy, if it can wait.
    pub vote: LazyVote,
    /// Whether NCCL has built the parent.
    pub parent: Parent,
    /// NCCL refuses the call by its arguments.
    pub is_refused: bool,
    /// The call stands in a group.
    pub is_in_group: bool,
    /// This rank's device, if it is known.
    pub device: Option<Ordinal>,
    /// Whether the ranks may wait for each other.
    pub waiting: Waiting,
    /// NCCL's calls of the new communicator do not wait (`blocking = 0`).
    pub is_nonblocking: bool,
    /// What the configuration says of blocks. If none, the parent's holds.
    pub ctas: Option<Ctas>,
    /// The whole configuration.
    pub configuration: configuration::Kept,
    /// Whether NCCL lets the child use its parent's resources.
    pub shares: bool,
}

/// Where the ranks of a child meet: always at a process of one of them. A rank of the parent that is not in the child may have ended.
#[derive(Debug)]
enum SessionPlace {
    /// This rank is in no child, or it has sent all that it has to send.
    Nowhere,
    /// At the roster of the child, which this rank entered before NCCL was asked. The error says why it could not.
    AtRoster(Result<LocalEntry, String>),
    /// At the process of the child's first rank, which expects this one. After a round, or without need of one, all know the child's ranks.
    AtMember(Invitation),
}

/// A call for a child communicator. Dropping it before [`ask`](ChildCall::ask) tells the ranks that wait for this one that it does not come.
#[derive(Debug)]
pub struct ChildCall {
    /// Its end ends the waits for other ranks.
    pub lineage: Arc<Lineage>,
    /// What was asked for.
    pub request: ChildRequest,
    facts: CallFacts,
    /// The name of the first call that excludes the same ranks: those have one count.
    kind: Token,
    /// The invitation to the call. Its round is at the process listener of the first rank that makes it.
    pub invitation: Invitation,
    /// The ranks of the parent that make the call.
    ranks: Vec<u32>,
    /// Whether the call has [begun](ChildCall::begun).
    pub is_begun: bool,
    session: SessionPlace,
}

impl ChildCall {
    /// A call that NCCL has not taken yet. None if there can be no session, which is the same on all ranks.
    pub fn of(lineage: &Arc<Lineage>, request: ChildRequest) -> Option<ChildCall> {
        let excluded: BTreeSet<u32> = request.excluded.iter().map(|rank| *rank as u32).collect();
        let members = lineage.members();
        let ranks: Vec<u32> = (0..members.len() as u32).filter(|rank| !excluded.contains(rank)).collect();
        // In a split all ranks are alive. In a shrink the excluded ones may not be.
        let process_listener =
            ranks.first().map_or(NOBODY, |first| members[*first as usize].process_listener);
        if lineage.has_peer_group() && process_listener == NOBODY {
            return None;
        }
        let excluded: Vec<u32> = excluded.into_iter().collect();
        let kind = children::call(lineage.comm, &excluded, 0);
        let counted = lineage.counted(kind, |_| ());
        let call = children::call(lineage.comm, &excluded, counted.begun);
        let ChildRequest { color, key, vote, parent, is_refused, is_in_group, .. } = request;
        let is_readable = !matches!(request.configuration, configuration::Kept::Unknown);
        // In a group one thread may have several ranks, and waits for none of them.
        let own = members.get(lineage.rank as usize).map(|member| member.process);
        let is_near = |rank: &u32| {
            *rank != lineage.rank && members.get(*rank as usize).map(|member| member.process) == own
        };
        let waits_for_itself = is_in_group && parent == Parent::Unbuildable && ranks.iter().any(is_near);
        let facts = CallFacts {
            message: SplitMessage { color, key, vote, parent },
            place: ranks.iter().position(|rank| *rank == lineage.rank).unwrap_or_default() as u32,
            ranks: ranks.len() as u32,
            is_refused,
            has_round: lineage.has_rounds,
            has_said: counted.has_hurried(),
            is_in_group,
            is_known: request.device.is_some() && is_readable && !waits_for_itself,
        };
        let child = color.map_or(NOBODY, |color| child(call, color));
        let invitation = Invitation { process_listener, call, child, rank: lineage.rank };
        let (lineage, is_begun, session) = (lineage.clone(), false, SessionPlace::Nowhere);
        Some(ChildCall { lineage, request, facts, kind, invitation, ranks, is_begun, session })
    }

    /// What the child keeps for its own children, if it has no peer group.
    pub fn lineage_of_child(&self, rank: u32) -> Arc<Lineage> {
        lineage_on_nccl(self.invitation.child, rank, self.ctas(), self.request.configuration.clone())
    }

    fn ctas(&self) -> Ctas {
        self.request.ctas.unwrap_or(self.lineage.ctas)
    }

    /// Comes before the real call. Says what this rank has to say, waits for the round if this rank can, and prepares the way to the ranks
    /// of the child. Returns what is left to do, with ranks of the parent in the place of places. The end of the parent ends the wait.
    pub fn begin(&mut self) -> Result<ChildPlan, Failure> {
        let (said, first) = self.facts.first();
        if let Some(message) = said {
            self.say(message);
        }
        let mut plan = if first == ChildPlan::Round { self.round()? } else { first };
        match &mut plan {
            ChildPlan::Nccl => self.enter(),
            ChildPlan::Meet { ranks, .. } | ChildPlan::StayAway { ranks, .. } => {
                self.begun();
                ranks.iter_mut().for_each(|place| *place = self.ranks[*place as usize]);
                self.await_at_member(ranks);
            }
            ChildPlan::Torn => self.begun(),
            ChildPlan::Refused | ChildPlan::Round | ChildPlan::Nothing => {}
        }
        Ok(plan)
    }

    /// Says this in the round without waiting. If NCCL refuses the call, the message stands for the next one.
    fn say(&mut self, message: SplitMessage) {
        let Ok(bootstrap) = windlass_bootstrap::process() else { return };
        self.lineage.counted(self.kind, |counted| counted.hurried = Some(counted.begun));
        self.facts.has_said = true;
        self.await_round();
        bootstrap.say_in_round(&self.invitation, self.facts.place, self.facts.ranks, message);
    }

    /// Tells the other ranks where this one goes, and waits for all messages.
    fn round(&mut self) -> Result<ChildPlan, Failure> {
        self.begun();
        // The bootstrap thread was started when the parent was made.
        let bootstrap = windlass_bootstrap::process().map_err(|_| Failure::HostLost)?;
        let CallFacts { message, place, ranks, .. } = self.facts;
        let inquiry = bootstrap.ask_round(&self.invitation, place, ranks, message);
        let wait = Wait::new(&self.lineage, inquiry.canceller());
        let table = inquiry.wait();
        drop(wait);
        // After an abort the others, who have the message, would wait for this rank where their communicator meets.
        self.facts.has_said = table != Err(Failure::Aborted);
        Ok(table?.plan(place))
    }

    /// If this rank hosts the round, its process begins to expect the ranks of the round.
    fn await_round(&self) {
        if self.ranks.first() == Some(&self.lineage.rank) {
            self.await_ranks(self.invitation.to_round().child, &self.ranks);
        }
    }

    /// Enters the roster of this rank's child on this host. Waits a limited time for another process in the same call to acknowledge. A rank
    /// that has not entered by then has no peer group, nor have the other ranks of the child. Where the parent has none, calls in a group
    /// and those that do not wait are not followed: the other ranks then find that not all are there.
    fn enter(&mut self) {
        let follows = self.lineage.has_peer_group()
            || !self.facts.is_in_group && request::check_child(self.request.waiting).is_ok();
        if self.invitation.child == NOBODY || !follows {
            return;
        }
        let name = local_rendezvous::name(self.invitation.child);
        let is_over = || self.lineage.has_ended();
        let entered = windlass_bootstrap::process()
            .and_then(|bootstrap| bootstrap.enter_local(name, self.lineage.rank, &is_over));
        self.session = SessionPlace::AtRoster(entered.map_err(|error| error.to_string()));
    }

    /// Sets the meeting place at the first of these ranks with a process listener. If this rank hosts, its process begins to expect the others.
    fn await_at_member(&mut self, ranks: &[u32]) {
        let Some(host) = self.lineage.host(ranks).filter(|_| ranks.len() > 1) else { return };
        // Only the child's ranks are expected under this name.
        let child = self.invitation.child;
        let to = Invitation { process_listener: host.process_listener, call: child, ..self.invitation };
        if host.rank == self.lineage.rank {
            self.await_ranks(child, ranks);
        }
        self.session = SessionPlace::AtMember(to);
    }

    fn await_ranks(&self, name: Token, ranks: &[u32]) {
        if let Ok(bootstrap) = windlass_bootstrap::process() {
            let ranks = ranks.iter().fold(0, |all, rank| all | 1 << rank);
            bootstrap.await_ranks(name, ranks, self.lineage.watched(ranks));
        }
    }

    /// Whether the parent ended while this rank waited at the roster: NCCL's parent may be gone.
    pub fn has_lost_parent(&self) -> bool {
        matches!(self.session, SessionPlace::AtRoster(_)) && self.lineage.has_ended()
    }

    /// Whether the ranks of the child meet once NCCL has made it.
    pub fn meets(&self) -> bool {
        self.lineage.has_peer_group() || !matches!(self.session, SessionPlace::Nowhere)
    }

    /// Counts the call, once. Called when NCCL has taken it, or as soon as nothing can keep it from being made: equally often and in the same
    /// order on all ranks.
    pub fn begun(&mut self) {
        if !std::mem::replace(&mut self.is_begun, true) {
            self.lineage.counted(self.kind, |counted| counted.begun += 1);
            if self.is_due() {
                self.await_round();
            }
        }
    }

    /// Whether the others of the round wait for this rank's message.
    fn is_due(&self) -> bool {
        self.is_begun && self.facts.has_round && !self.facts.has_said
    }

    /// Tells the ranks of this rank's child that it has no peer group, so that none of theirs has.
    pub fn refuse(mut self, reason: FallbackReason) {
        self.decline(SessionOutcome::OnNccl(reason));
    }

    /// Begins the init of this rank's child, once. Waits for no other rank of it. An error means that all its ranks stay on NCCL, which the
    /// caller [tells](ChildCall::refuse) them.
    pub fn ask(&mut self, new: Identity, laziness: Laziness) -> Result<Asked, FallbackReason> {
        own_thread::run(|| self.ask_here(new, laziness))
    }

    fn ask_here(&mut self, new: Identity, laziness: Laziness) -> Result<Asked, FallbackReason> {
        let (rank, ranks) = (new.rank as u32, new.ranks as u32);
        let invitation = self.invited(ranks)?;
        request::check_child(self.request.waiting)?;
        request::check_order(self.ctas())?;
        settle();
        let (heap, mut share, mut facts) = request::on(new.device, ranks, self.ctas(), laziness)?;
        room::close_soon(heap.device());
        facts.member.rank = rank;
        if self.request.is_nonblocking {
            facts.capabilities &= !capability::OF_BLOCKING;
            share.lacks = share.lacks.without_waits();
        }
        let participant = windlass_bootstrap::process().and_then(|bootstrap| match &self.session {
            SessionPlace::AtRoster(_) => bootstrap.join_local(&invitation, facts),
            _ => bootstrap.join_invited(&invitation, facts),
        });
        let participant = participant.map_err(cannot_reach)?;
        let until = Some(Wait::new(&self.lineage, participant.canceller()));
        let local_entry = match std::mem::replace(&mut self.session, SessionPlace::Nowhere) {
            SessionPlace::AtRoster(entry) => entry.ok(),
            SessionPlace::Nowhere | SessionPlace::AtMember(_) => None,
        };
        Ok(Asked { participant, heap, share, until, local_entry })
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
        let entry = match &self.session {
            SessionPlace::Nowhere => return Err(unreachable("no rank of it can be reached".into())),
            SessionPlace::AtMember(invitation) => return Ok(*invitation),
            SessionPlace::AtRoster(entry) => entry.as_ref().map_err(|words| unreachable(words.clone()))?,
        };
        match entry.ask(ranks, &|| self.lineage.has_ended()) {
            Ok(RosterAnswer::Complete { place, process_listener }) => {
                let call = local_rendezvous::name(self.invitation.child);
                Ok(Invitation { process_listener, call, child: child(call, 0), rank: place })
            }
            Ok(_) => Err(FallbackReason::Apart),
            // No rank can have a peer group without this rank's report.
            Err(error) => Err(unreachable(error.to_string())),
        }
    }

    /// Tells those who wait for this rank at its meeting place that it does not come.
    fn decline(&mut self, outcome: SessionOutcome) {
        match std::mem::replace(&mut self.session, SessionPlace::Nowhere) {
            SessionPlace::AtMember(to) => decline_at(&to, outcome),
            // The others keep what NCCL gave them.
            SessionPlace::AtRoster(Ok(entry)) => entry.decline(),
            SessionPlace::Nowhere | SessionPlace::AtRoster(Err(_)) => {}
        }
    }
}

impl Drop for ChildCall {
    fn drop(&mut self) {
        let absent = SessionOutcome::Failed(Failure::Absent { rank: self.lineage.rank });
        if self.is_due() {
            decline_at(&self.invitation.to_round(), absent.clone());
        }
        self.decline(absent);
    }
}

fn decline_at(to: &Invitation, outcome: SessionOutcome) {
    windlass_bootstrap::process().into_iter().for_each(|bootstrap| bootstrap.decline(to, outcome.clone()));
}

/// What a communicator that was made from an id, and has no peer group, keeps for its children. None where no child of it can have one.
pub fn lineage_of(request: &InitRequest, configuration: configuration::Kept) -> Option<Arc<Lineage>> {
    let (comm, rank) = (request.name_of_parent()?, request.rank.max(0) as u32);
    Some(lineage_on_nccl(comm, rank, request.ctas, configuration))
}

/// The same for the ranks of the communicator itself, if no session is behind its ids: they meet as its one child would.
pub fn roster_of(request: &InitRequest, configuration: configuration::Kept) -> Option<Arc<Lineage>> {
    let (comm, rank) = (request.name_of_roster()?, request.rank.max(0) as u32);
    Some(lineage_on_nccl(comm, rank, request.ctas, configuration))
}

fn lineage_on_nccl(comm: Token, rank: u32, ctas: Ctas, configuration: configuration::Kept) -> Arc<Lineage> {
    // Its children may be this process's first peer groups.
    at_exit::at_exit_too();
    Lineage::on_nccl(comm, rank, ctas, configuration)
}
