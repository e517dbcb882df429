//! Tests of communicators made from one with a peer group, before NCCL has made them.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use windlass_base::stats::count::Identity;
use windlass_bootstrap::negotiated::NegotiatedConfig;
use windlass_bootstrap::outcome::Failure;
use windlass_engine::forward::configuration::Kept;
use windlass_engine::peers::{
    self, ChildCall, ChildPlan, ChildRequest, InitOutcome, Laziness, Parent, PeerGroup, Waiting,
};

use crate::inits::{nothing_is_left, three_devices};

const LAZY: Laziness = Laziness::AsConfigured;

/// A split that can wait.
pub fn split(color: Option<i32>) -> ChildRequest {
    ChildRequest {
        color,
        excluded: Vec::new(),
        key: 0,
        vote: LAZY.vote(),
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

fn shrink(excluded: i32) -> ChildRequest {
    ChildRequest { excluded: vec![excluded], ..split(Some(0)) }
}

fn negotiated(outcome: &InitOutcome) -> &NegotiatedConfig {
    peer_group(outcome).negotiated()
}

fn peer_group(outcome: &InitOutcome) -> &PeerGroup {
    let InitOutcome::PeerGroup(peer_group) = outcome else { panic!("{outcome:?}") };
    peer_group
}

/// A rank's call: its parent, its device, and what it asks for.
type Call<'a> = (&'a InitOutcome, i32, ChildRequest);

/// The plan of a rank, and its outcome if that is lazy.
fn make((parent, device, request): Call<'_>) -> (ChildPlan, Option<InitOutcome>) {
    let mut call = ChildCall::of(&peer_group(parent).lineage, request).unwrap();
    let plan = call.begin().unwrap();
    let ChildPlan::Meet { rank, ranks, is_lazy: true, .. } = &plan else {
        return (plan, None);
    };
    let new = Identity { device, rank: *rank as i32, ranks: ranks.len() as i32 };
    let asked = call.ask(new, LAZY).unwrap();
    (plan, Some(peers::complete_one(asked)))
}

/// Runs each rank's call on its own thread.
fn all(calls: Vec<Call<'_>>) -> Vec<(ChildPlan, Option<InitOutcome>)> {
    thread::scope(|scope| {
        let threads: Vec<_> = calls.into_iter().map(|call| scope.spawn(move || make(call))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn lazy_pair(rank: u32, ranks: [u32; 2]) -> ChildPlan {
    ChildPlan::Meet { rank, ranks: ranks.to_vec(), is_lazy: true, splits_too: false }
}

/// The survivors of a shrink get a lazy communicator if all of them want one, else they go to NCCL.
#[test]
fn shrinks() {
    let Some(_devices) = three_devices() else { return };
    let parents = peers::all_here(&[0, 1, 2], Laziness::None);
    let both = |laziness: [Laziness; 2]| {
        let call = |(rank, laziness): (usize, Laziness)| {
            (&parents[rank], rank as i32, ChildRequest { vote: laziness.vote(), ..shrink(1) })
        };
        all([0, 2].into_iter().zip(laziness).map(call).collect())
    };
    let lazy = both([LAZY, LAZY]);
    assert_eq!([&lazy[0].0, &lazy[1].0], [&lazy_pair(0, [0, 2]), &lazy_pair(1, [0, 2])]);
    let negotiated_configs = [0, 1].map(|rank: usize| negotiated(lazy[rank].1.as_ref().unwrap()));
    assert_eq!(negotiated_configs[0], negotiated_configs[1]);
    assert!(negotiated_configs[0].is_lazy());
    assert_eq!(negotiated_configs[0].members[1].device, negotiated(&parents[0]).members[2].device);
    let mixed = both([LAZY, Laziness::None]);
    assert!(mixed.iter().all(|(plan, _)| *plan == ChildPlan::Nccl));
    drop((lazy, parents));
    nothing_is_left();
}

/// In a split two ranks get a lazy communicator and the third has no color: no rank needs NCCL, and keys give the order of ranks.
/// The same works from the new communicator.
#[test]
fn splits() {
    let Some(_devices) = three_devices() else { return };
    let parents = peers::all_here(&[0, 1, 2], Laziness::None);
    assert!(parents.iter().all(|parent| negotiated(parent).may_have_lazy_children()));
    let three_call = |colors: [Option<i32>; 3], keys: [i32; 3]| {
        let request = |rank: usize| ChildRequest { key: keys[rank], ..split(colors[rank]) };
        all((0..3).map(|rank| (&parents[rank], rank as i32, request(rank))).collect())
    };
    let pair = three_call([Some(4), None, Some(4)], [9, 0, 1]);
    let plans: Vec<&ChildPlan> = pair.iter().map(|(plan, _)| plan).collect();
    assert_eq!(plans, [&lazy_pair(1, [2, 0]), &ChildPlan::Nothing, &lazy_pair(0, [2, 0])]);
    let outcomes: Vec<InitOutcome> = pair.into_iter().filter_map(|(_, outcome)| outcome).collect();
    assert_eq!(negotiated(&outcomes[0]), negotiated(&outcomes[1]));
    assert!(negotiated(&outcomes[0]).is_lazy() && negotiated(&outcomes[0]).may_have_lazy_children());
    assert_eq!(negotiated(&outcomes[0]).members[0].device, negotiated(&parents[0]).members[2].device);

    let call = |(outcome, device)| (outcome, device, split(Some(0)));
    let nested = all([(&outcomes[0], 0), (&outcomes[1], 2)].map(call).to_vec());
    assert!(nested.iter().all(|(_, outcome)| negotiated(outcome.as_ref().unwrap()).is_lazy()));
    // Three ranks are no pair, and one rank is none either.
    let three = three_call([Some(0); 3], [0; 3]);
    assert!(three.iter().all(|(plan, _)| *plan == ChildPlan::Nccl));
    let alone = three_call([Some(0), Some(0), Some(1)], [0; 3]);
    assert_eq!(alone[2].0, ChildPlan::Nccl);
    assert!(matches!(alone[0].0, ChildPlan::Meet { rank: 0, is_lazy: true, splits_too: true, .. }));
    drop((parents, outcomes, nested, three, alone));
    nothing_is_left();
}

/// Another thread ends a rank's parent while the rank waits in a round, after its message. The rank tells the others. Else they
/// would have all messages, and wait for this rank's session as long as its process lives.
#[test]
fn parent_ends_in_a_round() {
    let Some(_devices) = three_devices() else { return };
    // Either of two ranks, as one of them hosts.
    for (ended, other) in [(2, 0), (0, 2)] {
        let parents = peers::all_here(&[0, 1, 2], Laziness::None);
        let lineage = |rank: usize| &peer_group(&parents[rank]).lineage;
        let round = |rank: usize| ChildCall::of(lineage(rank), shrink(1)).unwrap().begin();
        thread::scope(|scope| {
            let waits = scope.spawn(|| round(ended));
            thread::sleep(Duration::from_millis(100));
            assert!(!waits.is_finished());
            lineage(ended).end();
            assert_eq!(waits.join().unwrap(), Err(Failure::Aborted));
        });
        assert!(matches!(round(other), Err(Failure::Absent { .. })));
    }
    nothing_is_left();
}

/// A rank says that it goes to NCCL, which refuses its call. When it calls again its message is already sent. NCCL makes all
/// communicators, and then all ranks meet.
#[test]
fn refused_after_its_message() {
    let Some(_devices) = three_devices() else { return };
    let parents = peers::all_here(&[0, 1, 2], Laziness::None);
    let child_call =
        |rank: usize, request| ChildCall::of(&peer_group(&parents[rank]).lineage, request).unwrap();
    let in_group = ChildRequest { is_in_group: true, ..split(Some(0)) };
    assert_eq!(child_call(1, in_group).begin(), Ok(ChildPlan::Nccl));
    let made = Barrier::new(3);
    let call = |rank: usize| {
        let mut call = child_call(rank, split(Some(0)));
        assert_eq!(call.begin(), Ok(ChildPlan::Nccl));
        made.wait();
        call.begun();
        let new = Identity { device: rank as i32, rank: rank as i32, ranks: 3 };
        call.ask(new, Laziness::None).map(|asked| peers::complete(vec![asked]))
    };
    thread::scope(|scope| {
        let threads = [0, 1, 2].map(|rank| {
            let call = &call;
            scope.spawn(move || call(rank))
        });
        for thread in threads {
            let outcomes = thread.join().unwrap().unwrap();
            assert!(matches!(outcomes[..], [InitOutcome::PeerGroup(_)]), "{outcomes:?}");
        }
    });
    drop(parents);
    nothing_is_left();
}
