//! [`ChildCall`]: a call for child communicators, before NCCL has taken it.

use std::sync::Arc;

use crate::peers::setup::hosting::bootstrap;
use windlass_bootstrap::children::{Invitation, Making, NOBODY, child};
use windlass_bootstrap::colors::Parent;
use windlass_bootstrap::negotiated::Token;

use super::lineage::{Kind, Lineage};
use super::session_place::{self, SessionPlace};
use super::taken::{Ahead, ChildInit, Leaves};
use super::wanted::{Standing, Wanted};

/// A call for child communicators that NCCL has not taken yet. `hosts` is the rank at whose process listener the ranks meet.
#[derive(Debug)]
pub struct ChildCall {
    pub(super) lineage: Arc<Lineage>,
    pub(super) process_listener: Token,
    pub(super) hosts: u32,
    pub(super) ranks: u64,
    /// Of a shrink: the excluded ranks.
    pub(super) shrinks: Option<Vec<u32>>,
    pub(super) parent: Parent,
    pub(super) color: Option<i32>,
    /// The roster, once this rank has [entered](ChildCall::enter) it.
    pub(super) session: SessionPlace,
}

impl ChildCall {
    /// Makes the call before NCCL is asked. None if there can be no session, which is the same on all ranks.
    pub fn of(lineage: &Arc<Lineage>, wanted: &Wanted, standing: Standing) -> Option<ChildCall> {
        let members = lineage.members();
        let all = (1u64 << members.len()) - 1;
        let (excluded, color) = match wanted {
            Wanted::Split(color) => (Vec::new(), *color),
            Wanted::Shrink(excluded) => (excluded.clone(), Some(0)),
        };
        let is_out = |rank: &u32| excluded.contains(&(*rank as i32));
        let excluded: Vec<u32> = (0..members.len() as u32).filter(is_out).collect();
        let ranks = excluded.iter().fold(all, |ranks, rank| ranks & !(1 << rank));
        // In a split all ranks are alive. In a shrink the excluded ones may not be.
        let host = members.get(ranks.trailing_zeros() as usize)?;
        if host.process_listener == NOBODY {
            return None;
        }
        let shrinks = matches!(wanted, Wanted::Shrink(_)).then_some(excluded);
        let parent = match (wanted, standing) {
            (_, Standing::Built) => Parent::Built,
            (Wanted::Split(_), Standing::Lazy) => Parent::Lazy,
            (Wanted::Split(_), Standing::Lost) => Parent::Lost,
            // The excluded ranks, or those that lack the parent, do not make the call, so NCCL cannot build it.
            (Wanted::Shrink(_), _) => Parent::Unbuildable,
        };
        Some(ChildCall {
            lineage: lineage.clone(),
            process_listener: host.process_listener,
            hosts: host.rank,
            ranks,
            shrinks,
            parent,
            color,
            session: SessionPlace::Nowhere,
        })
    }

    /// Whether NCCL cannot make this call, as far as this rank knows: the parent is not built on all ranks, and cannot be.
    pub fn is_without_parent(&self) -> bool {
        self.parent == Parent::Unbuildable
    }

    /// Whether the ranks of this call first tell each other where they go. The answer is the same on all ranks.
    pub fn has_round(&self) -> bool {
        self.lineage.has_rounds
    }

    /// Whether NCCL has built the parent on this rank and not on all.
    pub fn has_lost_parent(&self) -> bool {
        self.parent == Parent::Lost
    }

    /// Says that this rank does not wait for the others of the round, so that NCCL makes all communicators of this call. Called before the
    /// real call. If NCCL refuses that call, the message stands for the next one. Never waits.
    pub fn go_to_nccl(&self) {
        let Ok(bootstrap) = bootstrap() else { return };
        if !self.has_round() {
            return;
        }
        let before = self.lineage.counted(self.kind(), |counted| counted.hurried = Some(counted.begun));
        if before.has_hurried() {
            return;
        }
        let invitation = self.invitation(before.begun);
        self.await_round(&invitation);
        let (place, ranks) = self.lineage.among(self.ranks);
        bootstrap.go_to_nccl(&invitation, place, ranks.len() as u32, self.parent);
    }

    /// Enters the roster of this rank's child, before NCCL makes it. For a call without a round, where this rank knows nothing of the others.
    pub fn enter(&mut self) {
        let before = self.lineage.counted(self.kind(), |_| ());
        let child = self.color.map(|_| self.invitation(before.begun).child);
        self.session = session_place::enter(&self.lineage, child);
    }

    /// Counts the call. Called once NCCL has taken it or, with a round, once nothing can keep it from being made.
    pub fn begun(self) -> ChildInit {
        let before = self.lineage.counted(self.kind(), |counted| counted.begun += 1);
        let invitation = self.invitation(before.begun);
        let is_due = self.has_round() && !before.has_hurried();
        let ahead = if is_due { Ahead::Round } else { Ahead::Nccl };
        if is_due {
            self.await_round(&invitation);
        }
        let ChildCall { lineage, ranks, parent, color, session, .. } = self;
        ChildInit { lineage, invitation, ranks, parent, color, ahead, leaves: Leaves::Failing, session }
    }

    fn kind(&self) -> Kind {
        Kind::of(&self.making(0), self.lineage.comm)
    }

    fn making(&self, count: u32) -> Making {
        match &self.shrinks {
            None => Making::Split { count },
            Some(excluded) => Making::Shrink { count, excluded: excluded.clone() },
        }
    }

    /// The invitation to the call of its kind that came after `count` others.
    fn invitation(&self, count: u32) -> Invitation {
        let call = self.making(count).name(self.lineage.comm);
        let child = self.color.map_or(NOBODY, |color| child(call, color));
        Invitation { process_listener: self.process_listener, call, child, rank: self.lineage.rank }
    }

    /// If this rank hosts the round, its process begins to expect the ranks of the round.
    fn await_round(&self, invitation: &Invitation) {
        if self.hosts == self.lineage.rank
            && let Ok(bootstrap) = bootstrap()
        {
            bootstrap.await_ranks(invitation.to_round().child, self.ranks, self.lineage.watched(self.ranks));
        }
    }
}
