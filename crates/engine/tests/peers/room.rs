//! Tests of communicators made right after others end, where the device has no room for one more.

use windlass_engine::peers::{self, InitOutcome, Laziness, PeerGroup, Went};
use windlass_transport::p2p::{Direction, Operation};
use windlass_transport::sequencer::Joins;

use crate::inits::{nothing_is_left, three_devices};
use crate::support::*;

/// Communicators of the first two devices.
fn pair() -> Result<Vec<InitOutcome>, String> {
    let outcomes = peers::all_here(&[0, 1], Laziness::None);
    let missing = outcomes
        .iter()
        .find(|outcome| !matches!(outcome, InitOutcome::PeerGroup(_)))
        .map(|outcome| format!("{outcome:?}"));
    missing.map_or(Ok(outcomes), Err)
}

fn peer_group(outcome: &InitOutcome) -> &PeerGroup {
    let InitOutcome::PeerGroup(peer_group) = outcome else { panic!("{outcome:?}") };
    peer_group
}

/// Rank 0 starts a receive to which no rank sends.
fn waits(pair: &[InitOutcome], stream: &AppStream, address: u64) {
    let operation = Operation { address, bytes: 8, peer: 1, direction: Direction::Receive };
    assert_eq!(
        peer_group(&pair[0]).run(&[], &[operation], stream.handle(), Joins::default()),
        Ok(Went::ToStream)
    );
}

/// Makes pairs one right after the other and drops every second one with a kernel in flight: each has a peer group.
fn pairs_in_a_row(device: &Primary, first: Vec<InitOutcome>) {
    device.make_current();
    let (stream, mut address, mut last) = (AppStream::new(), 0, first);
    ok(cuMemAlloc_v2(&mut address, 8));
    for round in 0..10 {
        if round % 2 == 0 {
            waits(&last, &stream, address);
        }
        drop(last);
        last = pair().unwrap_or_else(|why| panic!("round {round}: {why}"));
    }
    drop(last);
    stream.synchronize();
    ok(cuMemFree_v2(address));
}

/// A new communicator gets the memory of communicators whose kernels have not left yet or which are just being dropped, where the
/// symmetric heap may hold only one communicator's region.
#[test]
fn memory_of_what_ends() {
    // SAFETY: nextest gives this test a process of its own, and nothing else in it reads the environment now.
    unsafe { std::env::set_var("WINDLASS_HEAP_MAX", "24M") };
    let Some(devices) = three_devices() else { return };
    let first = pair().unwrap();
    assert!(pair().unwrap_err().contains("WINDLASS_HEAP_MAX"), "there is room for one");
    pairs_in_a_row(&devices[0], first);
    nothing_is_left();
}
