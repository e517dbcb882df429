//! Tests of communicators made from one with a peer group, before NCCL has made them.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use windlass_bootstrap::negotiated::NegotiatedConfig;
use windlass_bootstrap::outcome::Failure;
use windlass_engine::forward::configuration::Kept;
use windlass_engine::peers::{
    self, ChildCall, Configured, Course, InitOutcome, Laziness, NewCommunicator, Others, Standing, Waiting,
    Wanted,
};

use crate::inits::{nothing_is_left, three_devices};

const CONFIGURED: Configured =
    Configured { waiting: Some(Waiting::Blocking), ctas: None, configuration: Kept::Nothing, shares: false };
const LAZY: Laziness = Laziness::AsConfigured;

fn negotiated(outcome: &InitOutcome) -> &NegotiatedConfig {
    let InitOutcome::PeerGroup(peer_group) = outcome else { panic!("{outcome:?}") };
    peer_group.negotiated()
}

/// A rank's call: its parent, its device, the split or shrink, its key, and its laziness.
type Call<'a> = (&'a InitOutcome, i32, Wanted, i32, Laziness);

/// The course that a rank takes, and its outcome if that is lazy.
fn make((parent, device, wanted, key, laziness): Call<'_>) -> (Course, Option<InitOutcome>) {
    let InitOutcome::PeerGroup(peer_group) = parent else { panic!("{parent:?}") };
    let mut child_init = ChildCall::of(peer_group.lineage(), &wanted, Standing::Built).unwrap().begun();
    let course = child_init.round(key, laziness.vote()).unwrap();
    let Course::Lazy { rank, ranks, .. } = &course else {
        return (course, None);
    };
    let new_communicator = NewCommunicator { device, rank: *rank, ranks: ranks.len() as u32 };
    let asked = child_init.ask_lazy(new_communicator, CONFIGURED).unwrap();
    (course, peers::complete(vec![asked]).pop())
}

/// Runs each rank's call on its own thread.
fn all(calls: Vec<Call<'_>>) -> Vec<(Course, Option<InitOutcome>)> {
    thread::scope(|scope| {
        let threads: Vec<_> = calls.into_iter().map(|call| scope.spawn(move || make(call))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn lazy_course(rank: u32, ranks: [u32; 2]) -> Course {
    Course::Lazy { rank, ranks: ranks.to_vec(), others: Others::Nothing }
}

/// The survivors of a shrink get a lazy communicator if all of them want one, else they go to NCCL.
#[test]
fn shrinks() {
    let Some(_devices) = three_devices() else { return };
    let parents = peers::all_here(&[0, 1, 2], Laziness::None);
    let shrink = |laziness: [Laziness; 2]| {
        let call = |(rank, laziness): (usize, Laziness)| {
            (&parents[rank], rank as i32, Wanted::Shrink(vec![1]), 0, laziness)
        };
        all([0, 2].into_iter().zip(laziness).map(call).collect())
    };
    let lazy = shrink([LAZY, LAZY]);
    assert_eq!([&lazy[0].0, &lazy[1].0], [&lazy_course(0, [0, 2]), &lazy_course(1, [0, 2])]);
    let negotiated_configs = [0, 1].map(|rank: usize| negotiated(lazy[rank].1.as_ref().unwrap()));
    assert_eq!(negotiated_configs[0], negotiated_configs[1]);
    assert!(negotiated_configs[0].is_lazy());
    assert_eq!(negotiated_configs[0].members[1].device, negotiated(&parents[0]).members[2].device);
    let mixed = shrink([LAZY, Laziness::None]);
    assert!(mixed.iter().all(|(course, _)| *course == Course::Nccl));
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
    let split = |colors: [Option<i32>; 3], keys: [i32; 3]| {
        let call = |rank: usize| (&parents[rank], rank as i32, Wanted::Split(colors[rank]), keys[rank], LAZY);
        all((0..3).map(call).collect())
    };
    let pair = split([Some(4), None, Some(4)], [9, 0, 1]);
    let courses: Vec<&Course> = pair.iter().map(|(course, _)| course).collect();
    assert_eq!(courses, [&lazy_course(1, [2, 0]), &Course::Nothing, &lazy_course(0, [2, 0])]);
    let outcomes: Vec<InitOutcome> = pair.into_iter().filter_map(|(_, outcome)| outcome).collect();
    assert_eq!(negotiated(&outcomes[0]), negotiated(&outcomes[1]));
    assert!(negotiated(&outcomes[0]).is_lazy() && negotiated(&outcomes[0]).may_have_lazy_children());
    assert_eq!(negotiated(&outcomes[0]).members[0].device, negotiated(&parents[0]).members[2].device);

    let call = |(outcome, device)| (outcome, device, Wanted::Split(Some(0)), 0, LAZY);
    let nested = all([(&outcomes[0], 0), (&outcomes[1], 2)].map(call).to_vec());
    assert!(nested.iter().all(|(_, outcome)| negotiated(outcome.as_ref().unwrap()).is_lazy()));
    // Three ranks are no pair, and one rank is none either.
    let three = split([Some(0); 3], [0; 3]);
    assert!(three.iter().all(|(course, _)| *course == Course::Nccl));
    let alone = split([Some(0), Some(0), Some(1)], [0; 3]);
    assert_eq!(alone[2].0, Course::Nccl);
    assert!(matches!(alone[0].0, Course::Lazy { rank: 0, others: Others::Nccl, .. }));
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
        let peer_group = |rank: usize| match &parents[rank] {
            InitOutcome::PeerGroup(peer_group) => peer_group,
            other => panic!("{other:?}"),
        };
        let round = |rank: usize| {
            let call = ChildCall::of(peer_group(rank).lineage(), &Wanted::Shrink(vec![1]), Standing::Built);
            call.unwrap().begun().round(0, LAZY.vote())
        };
        thread::scope(|scope| {
            let waits = scope.spawn(|| round(ended));
            thread::sleep(Duration::from_millis(100));
            assert!(!waits.is_finished());
            peer_group(ended).lineage().end();
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
    let child_call = |rank: usize| match &parents[rank] {
        InitOutcome::PeerGroup(peer_group) => {
            ChildCall::of(peer_group.lineage(), &Wanted::Split(Some(0)), Standing::Built).unwrap()
        }
        other => panic!("{other:?}"),
    };
    child_call(1).go_to_nccl();
    let made = Barrier::new(3);
    let call = |rank: usize| {
        let mut child_init = child_call(rank).begun();
        assert_eq!(child_init.round(0, LAZY.vote()), Ok(Course::Nccl));
        made.wait();
        let new_communicator = NewCommunicator { device: rank as i32, rank: rank as u32, ranks: 3 };
        child_init.ask(new_communicator, CONFIGURED).map(|asked| peers::complete(vec![asked]))
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
