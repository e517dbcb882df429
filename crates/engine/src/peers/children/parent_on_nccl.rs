//! Child communicators of a parent without a peer group. Their ranks [find each other](windlass_bootstrap::local_rendezvous) on their host
//! before NCCL makes the child. If all ranks of the child are there, they meet as the children of a peer group do.
//!
//! So the children of a world of several hosts, or of more ranks than a peer group may have, can have peer groups. A child that is made in an
//! NCCL group has none.

use std::sync::Arc;

use crate::forward::configuration;
use crate::forward::init::Ctas;
use crate::peers::setup::request::{self, InitRequest};
use crate::peers::shutdown::at_exit;
use windlass_bootstrap::children::{Invitation, Making, NOBODY, child};
use windlass_bootstrap::colors::Parent;
use windlass_bootstrap::facts::Waiting;
use windlass_bootstrap::negotiated::Token;

use super::lineage::{Kind, Lineage};
use super::session_place::{self, SessionPlace};
use super::taken::{Ahead, ChildInit, Leaves};
use super::wanted::{Configured, Wanted};

/// What a communicator without a peer group keeps for its children. Its ranks wait for each other only where its own calls are blocking.
#[derive(Debug)]
pub struct ParentOnNccl {
    lineage: Arc<Lineage>,
    configuration: configuration::Kept,
}

impl ParentOnNccl {
    /// The record of a communicator. `name` is the same on all its ranks, and on no other communicator's.
    pub fn new(name: Token, rank: u32, ctas: Ctas, configuration: configuration::Kept) -> Arc<ParentOnNccl> {
        // Its children may be this process's first peer groups.
        at_exit::at_exit_too();
        Arc::new(ParentOnNccl { lineage: Lineage::of_parent_on_nccl(name, rank, ctas), configuration })
    }

    /// The record of a communicator that was made from an id. None where no child of it can have a peer group.
    pub fn of_request(
        request: &InitRequest,
        configuration: configuration::Kept,
    ) -> Option<Arc<ParentOnNccl>> {
        let (name, rank) = (request.name_of_parent()?, request.rank.max(0) as u32);
        Some(ParentOnNccl::new(name, rank, request.ctas, configuration))
    }

    /// The record of a child that has no peer group itself.
    pub fn of_child(child: &ChildInit, rank: u32, configured: &Configured) -> Arc<ParentOnNccl> {
        let ctas = configured.ctas.unwrap_or(child.lineage.ctas);
        ParentOnNccl::new(child.child(), rank, ctas, configured.configuration.clone())
    }

    /// Its configuration.
    pub fn configuration(&self) -> &configuration::Kept {
        &self.configuration
    }

    /// Enters the host-local rendezvous of this rank's child, before NCCL is asked. None if this rank will be in no child or does not wait:
    /// the other ranks then find that not all are there.
    pub fn enter_local(&self, wanted: &Wanted, waiting: Waiting) -> Option<LocalWait> {
        request::check_child(Some(waiting)).ok()?;
        let color = match wanted {
            Wanted::Split(color) => (*color)?,
            Wanted::Shrink(_) => 0,
        };
        let count = self.lineage.counted(self.kind(wanted), |_| ()).begun;
        let name = child(making(wanted, count).name(self.lineage.comm), color);
        Some(LocalWait {
            lineage: self.lineage.clone(),
            name,
            session: session_place::enter(&self.lineage, Some(name)),
        })
    }

    /// Counts the call. Called once NCCL has taken it, as on all ranks that make it.
    pub fn begun(&self, wanted: &Wanted) {
        self.lineage.counted(self.kind(wanted), |counted| counted.begun += 1);
    }

    fn kind(&self, wanted: &Wanted) -> Kind {
        Kind::of(&making(wanted, 0), self.lineage.comm)
    }

    /// Whether the parent has been ended. NCCL's part of it may be gone.
    pub fn has_ended(&self) -> bool {
        self.lineage.has_ended()
    }

    /// Ends all waits for children of this communicator.
    pub fn end(&self) {
        self.lineage.end();
    }
}

/// The call of its kind that came after `count` others.
fn making(wanted: &Wanted, count: u32) -> Making {
    match wanted {
        Wanted::Split(_) => Making::Split { count },
        Wanted::Shrink(excluded) => {
            let mut excluded: Vec<u32> = excluded.iter().map(|rank| *rank as u32).collect();
            excluded.sort_unstable();
            excluded.dedup();
            Making::Shrink { count, excluded }
        }
    }
}

/// A rank that has entered the roster of its host while NCCL makes its communicator.
#[derive(Debug)]
pub struct LocalWait {
    lineage: Arc<Lineage>,
    name: Token,
    session: SessionPlace,
}

impl LocalWait {
    /// Called once NCCL has made the communicator: this rank's init, which meets the other ranks.
    pub fn child_init(self) -> ChildInit {
        let LocalWait { lineage, name, session } = self;
        ChildInit {
            invitation: Invitation { process_listener: NOBODY, call: name, child: name, rank: lineage.rank },
            lineage,
            ranks: 0,
            parent: Parent::Built,
            color: Some(0),
            ahead: Ahead::Nccl,
            leaves: Leaves::ToNccl,
            session,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_bootstrap::outcome::FallbackReason;
    use windlass_bootstrap::place;

    fn world(rank: u32, name: Token) -> Arc<ParentOnNccl> {
        ParentOnNccl::new(name, rank, Ctas::UNSAID, configuration::Kept::Nothing)
    }

    /// All ranks of a color find each other, apart from other colors and later splits. A rank that does not wait is in no roster.
    #[test]
    fn local_rendezvous_by_color_and_count() {
        let name = place::random().unwrap();
        let world: Vec<Arc<ParentOnNccl>> = [5, 40, 900].map(|rank| world(rank, name)).into();
        let split = |colors: [i32; 3]| {
            let come = world.iter().zip(colors);
            let local_wait: Vec<LocalWait> = come
                .map(|(parent_on_nccl, color)| {
                    parent_on_nccl.enter_local(&Wanted::Split(Some(color)), Waiting::Blocking).unwrap()
                })
                .collect();
            world.iter().for_each(|parent_on_nccl| parent_on_nccl.begun(&Wanted::Split(Some(0))));
            local_wait
        };
        let calls = |local_wait: Vec<LocalWait>, ranks: u32| -> Vec<_> {
            // All have entered. No rank leaves before the others have asked.
            let child_inits: Vec<ChildInit> = local_wait.into_iter().map(LocalWait::child_init).collect();
            child_inits.iter().map(|one| one.invited(ranks).map(|to| (to.call, to.rank))).collect()
        };
        let all = calls(split([3, 3, 3]), 3);
        let call = all[0].as_ref().unwrap().0;
        assert_eq!(all, [Ok((call, 0)), Ok((call, 1)), Ok((call, 2))]);
        let again = calls(split([3, 3, 3]), 3);
        assert_ne!(again[0].as_ref().unwrap().0, call);
        let two = calls(split([3, 4, 3]), 2);
        assert_eq!(two[1], Err(FallbackReason::Apart));
        assert!(two[0].is_ok() && two[2].is_ok());
        assert_eq!(calls(split([3, 3, 3]), 17)[0], Err(FallbackReason::ManyRanks));
        assert_eq!(calls(split([1, 2, 3]), 1)[0], Err(FallbackReason::OneRank));
        assert!(world[0].enter_local(&Wanted::Split(Some(0)), Waiting::NonBlocking).is_none());
    }

    /// Survivors of a shrink find each other, in whatever order and however often they name the excluded ranks.
    #[test]
    fn shrinks() {
        let name = place::random().unwrap();
        let (one, two, excluded) = (world(1, name), world(2, name), world(7, name));
        let round = |first: &[i32], second: &[i32]| {
            let come = [(&one, first), (&two, second)];
            let entered = come.map(|(parent_on_nccl, excluded)| {
                let wanted = Wanted::Shrink(excluded.to_vec());
                let local_wait = parent_on_nccl.enter_local(&wanted, Waiting::Blocking).unwrap();
                parent_on_nccl.begun(&wanted);
                local_wait
            });
            // All have entered. No rank leaves before the others have asked.
            let child_inits = entered.map(LocalWait::child_init);
            child_inits.each_ref().map(|one| one.invited(2).map(|to| to.call))
        };
        let [first, other] = round(&[7, 0], &[0, 7, 7]);
        assert!(first.is_ok() && first == other);
        let [again, too] = round(&[0, 7], &[0, 7]);
        assert!(again.is_ok() && again == too && again != first);
        assert_eq!(round(&[0, 7], &[7])[0], Err(FallbackReason::Apart));
        assert!(excluded.enter_local(&Wanted::Split(None), Waiting::Blocking).is_none());
    }

    /// Children of a child are named by the child's own name.
    #[test]
    fn children_of_children() {
        let (name, first) = (place::random().unwrap(), world(0, place::random().unwrap()));
        let configured = Configured {
            waiting: None,
            ctas: None,
            configuration: configuration::Kept::Nothing,
            shares: false,
        };
        let local_wait = first.enter_local(&Wanted::Split(Some(1)), Waiting::Blocking).unwrap();
        let child = ParentOnNccl::of_child(&local_wait.child_init(), 0, &configured);
        assert_ne!(child.lineage.comm, first.lineage.comm);
        let other = world(0, name).enter_local(&Wanted::Split(Some(1)), Waiting::Blocking).unwrap();
        let other = ParentOnNccl::of_child(&other.child_init(), 0, &configured);
        assert_ne!(child.lineage.comm, other.lineage.comm);
        // The same holds for a child whose ranks meet and then find that they have no peer group: all use the same name.
        let name = place::random().unwrap();
        let both = [0, 1].map(|rank| world(rank, name));
        let entered = both.map(|parent_on_nccl| {
            parent_on_nccl.enter_local(&Wanted::Split(Some(1)), Waiting::Blocking).unwrap()
        });
        let comms = entered.map(|one| ParentOnNccl::of_child(&one.child_init(), 0, &configured).lineage.comm);
        assert_eq!(comms[0], comms[1]);
    }
}
