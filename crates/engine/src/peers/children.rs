//! Child communicators, made by a split or shrink of a parent with a peer group. [`parent_on_nccl`] is for parents without one.
//!
//! Without a round: [`ChildCall::of`] and [`enter`](ChildCall::enter) come before the real call. NCCL makes the children. Their ranks find
//! each other at the roster they have entered ([`windlass_bootstrap::local_rendezvous`]), and go on as in any init.
//! [`ChildCall::begun`] comes once NCCL has taken the call: equally often and in the same order on all ranks, as NCCL counts calls alike.
//! [`ChildInit::ask`] or `refuse` comes when NCCL has made the child. Dropping a [`ChildInit`] without either says that this rank does not come.
//!
//! With a round ([`ChildCall::has_round`], where children may be lazy): the ranks first tell each other where they go, so they know which
//! of them need NCCL. [`ChildCall::begun`] and [`ChildInit::round`] then come before the real call, and the ranks of a lazy child meet at
//! their first rank ([`ChildInit::ask_lazy`]). A rank that cannot wait, or whose call NCCL may refuse, calls [`ChildCall::go_to_nccl`].
//! NCCL then makes all children of that call.

mod asking;
mod lineage;
mod parent_on_nccl;
mod session_place;
mod taken;
mod wanted;

pub use asking::ChildCall;
pub(super) use lineage::Lineage;
pub(super) use lineage::Wait;
pub use parent_on_nccl::{LocalWait, ParentOnNccl};
pub use taken::ChildInit;
pub use wanted::{Configured, NewCommunicator, Standing, Wanted};

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::session_place::SessionPlace;
    use super::*;
    use crate::peers::setup::hosting::bootstrap;
    use windlass_bootstrap::children::NOBODY;
    use windlass_bootstrap::colors::{Course, LazyVote, Others, Parent};
    use windlass_bootstrap::negotiated::{Device, Member, NegotiatedConfig, Token, Version, capability};
    use windlass_bootstrap::outcome::{Failure, FallbackReason};
    use windlass_transport::sequencer::Graphs;

    /// A parent of so many ranks, all in this process.
    fn parent(ranks: u32, capabilities: u64) -> Vec<Arc<Lineage>> {
        let process_listener = bootstrap().unwrap().process_listener();
        let member = |rank| Member {
            rank,
            process: Token([2; 16]),
            process_id: 1,
            device: Device { uuid: [rank as u8; 16], pci: (0, 0, 0), capability: 90, multiprocessors: 132 },
            descriptor_socket: NOBODY,
            process_listener,
            cells: Vec::new(),
            checks: false,
            attachment: Vec::new(),
        };
        let negotiated = NegotiatedConfig {
            comm: Token([7; 16]),
            version: Version::THIS,
            host: NOBODY,
            capabilities,
            options: 0,
            ctas_max: 0,
            members: (0..ranks).map(member).collect(),
        };
        let negotiated = Arc::new(negotiated);
        (0..ranks).map(|rank| Lineage::of_peer_group(&negotiated, rank, Vec::new(), Graphs::Mixed)).collect()
    }

    fn child_call(lineage: &Arc<Lineage>, color: Option<i32>) -> ChildCall {
        ChildCall {
            lineage: lineage.clone(),
            process_listener: bootstrap().unwrap().process_listener(),
            hosts: 0,
            ranks: (1 << lineage.among(u64::MAX).1.len()) - 1,
            shrinks: None,
            parent: Parent::Built,
            color,
            session: SessionPlace::Nowhere,
        }
    }

    /// The course of each rank that waits in a round.
    fn round(lineages: &[Arc<Lineage>], color: impl Fn(u32) -> Option<i32>) -> Vec<Result<Course, Failure>> {
        let begun = lineages.iter().map(|lineage| child_call(lineage, color(lineage.rank)).begun());
        let child_inits: Vec<ChildInit> = begun.collect();
        std::thread::scope(|scope| {
            let wait = |mut child_init: ChildInit| scope.spawn(move || child_init.round(0, LazyVote::InPair));
            let threads: Vec<_> = child_inits.into_iter().map(wait).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    const MAY: u64 = capability::LAZY_CHILDREN;

    /// Pairs need no NCCL. A rank that cannot wait sends all ranks to NCCL, and the next round is as if that had not happened.
    #[test]
    fn rounds_in_order() {
        let lineages = parent(4, MAY);
        let pairs = |rank| Some(rank as i32 / 2);
        let lazy_course =
            |rank, ranks: [u32; 2]| Ok(Course::Lazy { rank, ranks: ranks.to_vec(), others: Others::Nothing });
        let lazy_communicators = vec![
            lazy_course(0, [0, 1]),
            lazy_course(1, [0, 1]),
            lazy_course(0, [2, 3]),
            lazy_course(1, [2, 3]),
        ];
        assert_eq!(round(&lineages, pairs), lazy_communicators);
        for hurried in [3, 0] {
            let hurries = child_call(&lineages[hurried], Some(9));
            hurries.go_to_nccl();
            let waiting: Vec<_> =
                lineages.iter().filter(|lineage| lineage.rank != hurried as u32).cloned().collect();
            assert_eq!(round(&waiting, pairs), vec![Ok(Course::Nccl); 3]);
            // NCCL has taken the call.
            assert_eq!(hurries.begun().round(0, LazyVote::Always), Ok(Course::Nccl));
            assert_eq!(round(&lineages, pairs), lazy_communicators);
        }
    }

    /// NCCL refuses the call of a rank that went there, and the rank tries again: its earlier message still counts, and is sent once.
    #[test]
    fn refused_and_tried_again() {
        let lineages = parent(2, MAY);
        child_call(&lineages[1], Some(0)).go_to_nccl();
        child_call(&lineages[1], Some(0)).go_to_nccl();
        assert_eq!(round(&lineages, |_| Some(0)), vec![Ok(Course::Nccl); 2]);
        assert!(matches!(round(&lineages, |_| Some(0))[0], Ok(Course::Lazy { .. })));
    }

    /// A rank that gives its call up before its message ends the round for the others. A rank that is told that its communicator
    /// has no peer group goes to NCCL.
    #[test]
    fn given_up() {
        let lineages = parent(2, MAY);
        child_call(&lineages[1], Some(0)).begun().fail();
        assert_eq!(round(&lineages[..1], |_| Some(0)), [Err(Failure::Absent { rank: 1 })]);
        child_call(&lineages[1], Some(0)).begun().refuse(FallbackReason::Grouped);
        assert_eq!(round(&lineages[..1], |_| Some(0)), [Ok(Course::Nccl)]);
    }

    /// The end of the parent ends its rank's wait, and a wait that begins later.
    #[test]
    fn parent_ends() {
        let lineages = parent(3, MAY);
        let mut child_init = child_call(&lineages[1], Some(0)).begun();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| child_init.round(0, LazyVote::Always));
            lineages[1].end();
            assert_eq!(waiting.join().unwrap(), Err(Failure::Aborted));
        });
        assert_eq!(round(&lineages[1..2], |_| Some(0)), [Err(Failure::Aborted)]);
    }

    /// Where no child can be lazy, no rank waits for another.
    #[test]
    fn without_a_round() {
        let lineages = parent(3, !MAY);
        let split = child_call(&lineages[1], Some(0));
        assert!(!split.has_round());
        split.go_to_nccl();
        assert_eq!(split.begun().round(0, LazyVote::Always), Ok(Course::Nccl));
    }

    /// The survivors of a shrink have a round, too, at the process listener of the lowest one. Splits and other shrinks count
    /// separately, and a message that was sent stands for the next call of its kind.
    #[test]
    fn shrinks() {
        let lineages = parent(3, MAY);
        let shrink = |rank: usize| ChildCall {
            hosts: 1,
            ranks: 0b110,
            shrinks: Some(vec![0]),
            ..child_call(&lineages[rank], Some(0))
        };
        let both = || {
            let child_inits = [shrink(1).begun(), shrink(2).begun()];
            std::thread::scope(|scope| {
                let wait =
                    |mut child_init: ChildInit| scope.spawn(move || child_init.round(0, LazyVote::InPair));
                child_inits.map(wait).map(|thread| thread.join().unwrap())
            })
        };
        let lazy_course = |rank| Ok(Course::Lazy { rank, ranks: vec![1, 2], others: Others::Nothing });
        assert_eq!(both(), [lazy_course(0), lazy_course(1)]);
        shrink(2).go_to_nccl();
        shrink(2).go_to_nccl();
        child_call(&lineages[2], None).go_to_nccl();
        assert_eq!(both(), [Ok(Course::Nccl), Ok(Course::Nccl)]);
        assert_eq!(both(), [lazy_course(0), lazy_course(1)]);
        // A rank without a built parent goes without it in any case. A rank with one learns that.
        let without = |rank| ChildCall { parent: Parent::Unbuildable, ..shrink(rank) };
        let apart = |rank| Ok(Course::Apart { rank, ranks: vec![1, 2] });
        without(2).go_to_nccl();
        let (waits, mut hurried) = (shrink(1).begun(), without(2).begun());
        assert_eq!({ waits }.round(0, LazyVote::InPair), apart(0));
        assert_eq!((hurried.alone(), hurried.round(0, LazyVote::InPair)), (apart(1).unwrap(), apart(1)));
        // A rank that is left alone waits for no other.
        let alone = ChildCall {
            hosts: 2,
            ranks: 0b100,
            shrinks: Some(vec![0, 1]),
            ..child_call(&lineages[2], Some(0))
        };
        assert_eq!(alone.begun().round(0, LazyVote::Always), Ok(Course::Nccl));
    }
}
