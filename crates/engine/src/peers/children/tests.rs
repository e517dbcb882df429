//! Tests of calls for child communicators whose ranks are all in this process.

#![cfg(test)]

use std::sync::Arc;

use super::*;
use crate::forward::configuration::Kept;
use crate::forward::init::Ctas;
use windlass_bootstrap::children::NOBODY;
use windlass_bootstrap::children::plan::{ChildPlan, LazyVote, Parent};
use windlass_bootstrap::facts::Waiting;
use windlass_bootstrap::negotiated::{Device, Member, NegotiatedConfig, Token, Version, capability};
use windlass_bootstrap::outcome::{Failure, FallbackReason};
use windlass_bootstrap::place;
use windlass_transport::sequencer::Graphs;

/// A parent of so many ranks, all in this process.
fn parent(ranks: u32, capabilities: u64) -> Vec<Arc<Lineage>> {
    let process_listener = windlass_bootstrap::process().unwrap().process_listener;
    let member = |rank| Member {
        rank,
        process: Token([2; 16]),
        process_id: 1,
        device: Device { uuid: [rank as u8; 16], pci: (0, 0, 0), capability: 90, multiprocessors: 132 },
        descriptor_socket: NOBODY,
        process_listener,
        cells: Vec::new(),
        attachment: Vec::new(),
    };
    let negotiated = NegotiatedConfig {
        comm: place::random().unwrap(),
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

/// A split that can wait.
fn split(color: Option<i32>) -> ChildRequest {
    ChildRequest {
        color,
        excluded: Vec::new(),
        key: 0,
        vote: LazyVote::InPair,
        parent: Parent::Built,
        is_refused: false,
        is_in_group: false,
        device: Some(0),
        waiting: Waiting::Blocking,
        is_nonblocking: false,
        ctas: None,
        configuration: Kept::Nothing,
        shares: false,
    }
}

fn shrink(excluded: &[i32]) -> ChildRequest {
    ChildRequest { excluded: excluded.to_vec(), ..split(Some(0)) }
}

fn in_group(request: ChildRequest) -> ChildRequest {
    ChildRequest { is_in_group: true, ..request }
}

fn call(lineage: &Arc<Lineage>, request: ChildRequest) -> ChildCall {
    ChildCall::of(lineage, request).unwrap()
}

/// The plan of each rank, when all begin at once.
fn all(calls: Vec<ChildCall>) -> Vec<Result<ChildPlan, Failure>> {
    std::thread::scope(|scope| {
        let wait = |mut call: ChildCall| scope.spawn(move || call.begin());
        let threads: Vec<_> = calls.into_iter().map(wait).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn round(lineages: &[Arc<Lineage>], color: impl Fn(u32) -> Option<i32>) -> Vec<Result<ChildPlan, Failure>> {
    all(lineages.iter().map(|lineage| call(lineage, split(color(lineage.rank)))).collect())
}

fn meet(rank: u32, ranks: [u32; 2], is_lazy: bool) -> Result<ChildPlan, Failure> {
    Ok(ChildPlan::Meet { rank, ranks: ranks.to_vec(), is_lazy, splits_too: false })
}

const MAY: u64 = capability::LAZY_CHILDREN;

/// Pairs need no NCCL. A rank that cannot wait sends all ranks to NCCL, and the next round is as if that had not happened.
#[test]
fn rounds_in_order() {
    let lineages = parent(4, MAY);
    let pairs = |rank| Some(rank as i32 / 2);
    let lazy = [meet(0, [0, 1], true), meet(1, [0, 1], true), meet(0, [2, 3], true), meet(1, [2, 3], true)];
    assert_eq!(round(&lineages, pairs), lazy);
    for hurried in [3, 0] {
        let mut hurries = call(&lineages[hurried], in_group(split(Some(9))));
        assert_eq!(hurries.begin(), Ok(ChildPlan::Nccl));
        let waiting: Vec<_> =
            lineages.iter().filter(|lineage| lineage.rank != hurried as u32).cloned().collect();
        assert_eq!(round(&waiting, pairs), vec![Ok(ChildPlan::Nccl); 3]);
        // NCCL has taken the call.
        hurries.begun();
        assert_eq!(round(&lineages, pairs), lazy);
    }
}

/// NCCL refuses the call of a rank that went there, and the rank tries again: its earlier message still counts, and is sent once.
#[test]
fn refused_and_tried_again() {
    let lineages = parent(2, MAY);
    let tried = [0, 1].map(|_| call(&lineages[1], in_group(split(Some(0)))).begin());
    assert_eq!(tried, [Ok(ChildPlan::Nccl), Ok(ChildPlan::Nccl)]);
    let mut waits = call(&lineages[0], split(Some(0)));
    // Outside a group now.
    let mut again = call(&lineages[1], split(Some(0)));
    assert_eq!([waits.begin(), again.begin()], [Ok(ChildPlan::Nccl), Ok(ChildPlan::Nccl)]);
    again.begun();
    assert!(matches!(round(&lineages, |_| Some(0))[0], Ok(ChildPlan::Meet { is_lazy: true, .. })));
}

/// A rank that gives its call up before its message ends the round for the others. A call that NCCL refuses does not count.
#[test]
fn given_up() {
    let lineages = parent(2, MAY);
    let refused = ChildRequest { is_refused: true, ..split(Some(0)) };
    assert_eq!(call(&lineages[1], refused).begin(), Ok(ChildPlan::Refused));
    call(&lineages[1], split(Some(0))).begun();
    assert_eq!(round(&lineages[..1], |_| Some(0)), [Err(Failure::Absent { rank: 1 })]);
    assert!(matches!(round(&lineages, |_| Some(0))[0], Ok(ChildPlan::Meet { is_lazy: true, .. })));
}

/// The end of the parent ends its rank's wait, and a wait that begins later.
#[test]
fn parent_ends() {
    let lineages = parent(3, MAY);
    let mut waits = call(&lineages[1], split(Some(0)));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| waits.begin());
        lineages[1].end();
        assert_eq!(waiting.join().unwrap(), Err(Failure::Aborted));
    });
    assert_eq!(round(&lineages[1..2], |_| Some(0)), [Err(Failure::Aborted)]);
}

/// Where no child can be lazy, no rank waits for another.
#[test]
fn without_a_round() {
    let lineages = parent(3, !MAY);
    assert_eq!(round(&lineages[1..2], |_| Some(0)), [Ok(ChildPlan::Nccl)]);
    assert_eq!(call(&lineages[1], in_group(split(Some(0)))).begin(), Ok(ChildPlan::Nccl));
}

/// The survivors of a shrink have a round, too, at the process listener of the lowest one. Splits and other shrinks count
/// separately, and a message that was sent stands for the next call of its kind.
#[test]
fn shrinks() {
    let lineages = parent(3, MAY);
    let both = || all(vec![call(&lineages[1], shrink(&[0])), call(&lineages[2], shrink(&[0]))]);
    let lazy = [meet(0, [1, 2], true), meet(1, [1, 2], true)];
    assert_eq!(both(), lazy);
    for request in [shrink(&[0]), shrink(&[0]), split(None)] {
        assert_eq!(call(&lineages[2], in_group(request)).begin(), Ok(ChildPlan::Nccl));
    }
    let [mut waits, mut again] = [1, 2].map(|rank: usize| call(&lineages[rank], shrink(&[0, 0])));
    assert_eq!([waits.begin(), again.begin()], [Ok(ChildPlan::Nccl), Ok(ChildPlan::Nccl)]);
    again.begun();
    assert_eq!(both(), lazy);
    // A rank without a built parent, and with a configuration that only NCCL knows, does not wait. A rank with a built one learns that.
    let unreadable =
        ChildRequest { parent: Parent::Unbuildable, configuration: Kept::Unknown, ..shrink(&[0]) };
    let (mut waits, mut away) = (call(&lineages[1], shrink(&[0])), call(&lineages[2], unreadable));
    assert_eq!(away.begin(), Ok(ChildPlan::StayAway { rank: 1, ranks: vec![1, 2] }));
    assert_eq!(waits.begin(), meet(0, [1, 2], false));
    // A rank that is left alone waits for no other.
    let alone = call(&lineages[2], shrink(&[0, 1])).begin();
    assert_eq!(alone, Ok(ChildPlan::Nccl));
}

fn world(rank: u32, name: Token) -> Arc<Lineage> {
    Lineage::on_nccl(name, rank, Ctas::UNSAID, Kept::Nothing)
}

/// A call that has entered its roster, and that NCCL has taken.
fn taken(lineage: &Arc<Lineage>, request: ChildRequest) -> ChildCall {
    let mut call = call(lineage, ChildRequest { device: None, ..request });
    assert_eq!(call.begin(), Ok(ChildPlan::Nccl));
    call.begun();
    call
}

/// All ranks of a color find each other, apart from other colors and later splits. A rank that does not wait is in no roster.
#[test]
fn local_rendezvous_by_color_and_count() {
    let name = place::random().unwrap();
    let world: Vec<Arc<Lineage>> = [5, 40, 900].map(|rank| world(rank, name)).into();
    let calls = |colors: [i32; 3], ranks: u32| -> Vec<_> {
        // All have entered. No rank leaves before the others have asked.
        let entered: Vec<ChildCall> =
            world.iter().zip(colors).map(|(parent, color)| taken(parent, split(Some(color)))).collect();
        entered.iter().map(|one| one.invited(ranks).map(|to| (to.call, to.rank))).collect()
    };
    let all = calls([3, 3, 3], 3);
    let first = all[0].as_ref().unwrap().0;
    assert_eq!(all, [Ok((first, 0)), Ok((first, 1)), Ok((first, 2))]);
    let again = calls([3, 3, 3], 3);
    assert_ne!(again[0].as_ref().unwrap().0, first);
    let two = calls([3, 4, 3], 2);
    assert_eq!(two[1], Err(FallbackReason::Apart));
    assert!(two[0].is_ok() && two[2].is_ok());
    assert_eq!(calls([3, 3, 3], 17)[0], Err(FallbackReason::ManyRanks));
    assert_eq!(calls([1, 2, 3], 1)[0], Err(FallbackReason::OneRank));
    let not_followed = [
        ChildRequest { waiting: Waiting::NonBlocking, ..split(Some(0)) },
        in_group(split(Some(0))),
        split(None),
    ];
    assert!(not_followed.into_iter().all(|request| !taken(&world[0], request).meets()));
}

/// Survivors of a shrink find each other, in whatever order and however often they name the excluded ranks.
#[test]
fn shrinks_of_a_world() {
    let name = place::random().unwrap();
    let (one, two) = (world(1, name), world(2, name));
    let round = |first: &[i32], second: &[i32]| {
        let entered =
            [(&one, first), (&two, second)].map(|(parent, excluded)| taken(parent, shrink(excluded)));
        // All have entered. No rank leaves before the others have asked.
        entered.each_ref().map(|one| one.invited(2).map(|to| to.call))
    };
    let [first, other] = round(&[7, 0], &[0, 7, 7]);
    assert!(first.is_ok() && first == other);
    let [again, too] = round(&[0, 7], &[0, 7]);
    assert!(again.is_ok() && again == too && again != first);
    assert_eq!(round(&[0, 7], &[7])[0], Err(FallbackReason::Apart));
}

/// Children of a child are named by the child's own name.
#[test]
fn children_of_children() {
    let names = [0, 1].map(|_| place::random().unwrap());
    let worlds = [world(0, names[0]), world(0, names[1]), world(1, names[1])];
    let [first, second, third] = worlds.each_ref().map(|parent| {
        let call = taken(parent, split(Some(1)));
        call.lineage_of_child(0).comm
    });
    assert!(first != names[0] && first != second);
    // The same holds for a child whose ranks meet and then find that they have no peer group: all use the same name.
    assert_eq!(second, third);
}
