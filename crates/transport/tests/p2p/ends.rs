//! Tests of inits that fail, aborts, and ends with work in flight.

use std::time::{Duration, Instant};

use windlass_kernels::launch::Geometry;
use windlass_transport::TransportError;
use windlass_transport::p2p::{Direction, P2p, P2pParts, Progress, Wire};
use windlass_transport::sequencer::{self, Carries, Sequencer, SequencerParts};

use crate::communicator::*;
use crate::support::*;
use crate::traffic::*;

/// A receive from a rank that never sends is ended by an abort from another thread. The report names that rank.
#[test]
fn abort_in_the_middle() {
    if !has_devices(3) {
        return;
    }
    let devices = devices(3);
    let ranks = communicator(&devices);
    exchange(&devices, &ranks, &[message(2, 0, 1920 * 4)], 1);
    let stream = devices[0].stream();
    // Rank 1's message arrives, rank 2's does not.
    let side = Side::of(0, &[message(1, 0, 8), message(2, 0, 8)]);
    ranks[0].p2p.run(&side.operations, stream.handle()).unwrap();
    let other = devices[1].stream();
    let sent = Side::of(1, &[message(1, 0, 8)]);
    ranks[1].p2p.run(&sent.operations, other.handle()).unwrap();
    other.synchronize();
    assert!(stream.is_busy());
    assert!(matches!(
        ranks[0].p2p.sequencer().wait_idle(Duration::from_millis(20)),
        Err(TransportError::Busy { rank: 0, .. })
    ));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let began = Instant::now();
            ranks[0].p2p.sequencer().abort();
            assert!(began.elapsed() < Duration::from_secs(20));
        });
    });
    devices[0].make_current();
    stream.synchronize();
    let stuck = ranks[0].p2p.sequencer().stuck().unwrap();
    assert_eq!((stuck.rank, stuck.waits.len(), stuck.dropped), (0, 1, 0), "{stuck}");
    let wait = stuck.waits[0];
    assert_eq!(
        (wait.peer, wait.direction, wait.carries),
        (2, Direction::Receive, Carries::Messages(Wire::Ll128))
    );
    // Two packets went before over each of the two channels of the first virtual block.
    assert_eq!((wait.channel, wait.message, wait.sequence), (0, 0, 2), "{stuck}");
    let refusal = ranks[0].p2p.run(&side.operations, stream.handle()).unwrap_err();
    assert_eq!(refusal, TransportError::Aborted { rank: 0 });
    assert_eq!(ranks[1].p2p.sequencer().stuck().unwrap().waits, []);
    drop((stream, other, side, sent));
    end(ranks);
}

/// While kernels run both sides can read the progress of a connection: the packets and chunks that were consumed.
#[test]
fn progress() {
    if !has_devices(3) {
        return;
    }
    let devices = devices(3);
    let ranks = communicator(&devices);
    exchange(&devices, &ranks, &[message(0, 1, 1921), message(0, 1, 40_960), message(1, 2, 8)], 2);
    let stream = devices[0].stream();
    let side = Side::of(0, &[message(2, 0, 8)]);
    ranks[0].p2p.run(&side.operations, stream.handle()).unwrap();
    for (rank, peer, direction, packets, chunks) in [
        (0, 1, Direction::Send, 4, 20),
        (1, 0, Direction::Receive, 4, 20),
        (1, 2, Direction::Send, 2, 0),
        (0, 2, Direction::Receive, 0, 0),
    ] {
        let all = ranks[rank].p2p.progress().unwrap();
        assert_eq!(all.len(), 4);
        let (ll128_grown, bulk_grown) = (false, false);
        let expected = Progress { peer, direction, packets, chunks, ll128_grown, bulk_grown };
        assert!(all.contains(&expected), "{expected:?} among {all:?}");
    }
    ranks[0].p2p.sequencer().abort();
    devices[0].make_current();
    stream.synchronize();
    drop((stream, side));
    end(ranks);
}

/// The report also names a sender whose ring is full, on both wires.
#[test]
fn abort_of_senders() {
    let devices = devices(2);
    for (bytes, wire) in [(39_999, Wire::Ll128), (200_000, Wire::Bulk)] {
        let ranks = communicator(&devices);
        let stream = devices[0].stream();
        let side = Side::of(0, &[message(0, 1, bytes), message(0, 1, bytes)]);
        ranks[0].p2p.run(&side.operations, stream.handle()).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert!(stream.is_busy());
        ranks[0].p2p.sequencer().abort();
        stream.synchronize();
        let stuck = ranks[0].p2p.sequencer().stuck().unwrap();
        assert!(!stuck.waits.is_empty());
        for wait in &stuck.waits {
            assert_eq!(
                (wait.peer, wait.direction, wait.carries),
                (1, Direction::Send, Carries::Messages(wire)),
                "{stuck}"
            );
        }
        drop((stream, side));
        end(ranks);
    }
}

/// An abort ends a host's wait for room for lists.
#[test]
fn abort_of_a_full_queue() {
    const GROUPS: usize = 20;
    let devices = devices(2);
    let ranks = communicator(&devices);
    let stream = devices[0].stream();
    step("buffers");
    let side = Side::of(0, &(0..300).map(|_| message(1, 0, 8)).collect::<Vec<_>>());
    std::thread::scope(|scope| {
        let issuing = scope.spawn(|| {
            devices[0].make_current();
            (0..GROUPS).find_map(|group| {
                step(format!("group {group}"));
                ranks[0].p2p.run(&side.operations, stream.handle()).err()
            })
        });
        std::thread::sleep(Duration::from_millis(100));
        if issuing.is_finished() {
            ranks[0].p2p.sequencer().abort();
            panic!("the host never waited: {:?}, stream busy {}", issuing.join(), stream.is_busy());
        }
        ranks[0].p2p.sequencer().abort();
        assert_eq!(issuing.join().unwrap(), Some(TransportError::Aborted { rank: 0 }));
    });
    devices[0].make_current();
    step("the stream's end");
    stream.synchronize();
    step("freeing the buffers");
    drop((stream, side));
    step("the communicator's end");
    end(ranks);
    step("the devices' end");
}

/// A p2p transport dropped with work in flight ends its kernels. The next communicator of the device is not aborted.
#[test]
fn dropped_in_flight() {
    let devices = devices(2);
    let mut ranks = communicator(&devices);
    let stream = devices[0].stream();
    let side = Side::of(0, &[message(1, 0, 8)]);
    ranks[0].p2p.run(&side.operations, stream.handle()).unwrap();
    let Rank { p2p, region, .. } = ranks.remove(0);
    drop(p2p);
    stream.synchronize();
    drop((region, side, stream));
    end(ranks);
    let ranks = communicator(&devices);
    exchange(&devices, &ranks, &[message(0, 1, 50_000), message(1, 0, 100)], 2);
    end(ranks);
}

/// Parameters that cannot work are refused at init: channels that do not fit, inconsistent values.
#[test]
fn inits_that_fail() {
    let devices = devices(1);
    let init = |geometry: Geometry, ranks: usize, address: u64| {
        let sequencer = Sequencer::new(SequencerParts {
            device_resources: devices[0].sequencer.clone(),
            rank: geometry.rank,
            report: address,
            hold: Box::new(|_, _| Ok(())),
            graphs: sequencer::Graphs::Mixed,
        });
        let (sequencer, regions) = (sequencer.unwrap(), vec![address; ranks]);
        P2p::new(P2pParts {
            device_resources: devices[0].device_resources.clone(),
            sequencer,
            geometry,
            regions,
        })
        .map(drop)
    };
    assert!(init(GEOMETRY, 2, 1 << 20).is_ok());
    assert!(matches!(init(Geometry::default(), 2, 1 << 20), Err(TransportError::Strange { .. })));
    assert!(matches!(
        init(Geometry { rank: 2, ..GEOMETRY }, 2, 1 << 20),
        Err(TransportError::Strange { .. })
    ));
    assert!(matches!(init(GEOMETRY, 2, 100), Err(TransportError::Strange { .. })));
    // More channels than virtual blocks have state for.
    let many = Geometry { ll128_channels: 60_000, ..Geometry::recommended(1, 0) };
    assert!(matches!(init(many, 8, 1 << 20), Err(TransportError::Channels { .. })));
    assert!([1, 32].iter().all(|blocks| init(Geometry::recommended(*blocks, 0), 8, 1 << 20).is_ok()));
}

/// A kernel may begin early only if one communicator alone launches kernels on its device.
#[test]
fn one_communicator_is_alone() {
    let devices = devices(2);
    let first = communicator(&devices);
    assert!(devices.iter().all(|device| device.sequencer.is_of_one()));
    let second = communicator(&devices[..1]);
    assert_eq!(devices.iter().map(|device| device.sequencer.is_of_one()).collect::<Vec<_>>(), [false, true]);
    end(second);
    assert!(devices[0].sequencer.is_of_one());
    end(first);
    assert!(!devices[0].sequencer.is_of_one());
}

/// A group begins while the kernels are asked who waits, and its peer is there. The group either reports that it has left, or does
/// all of its part. Copy warps take so long for a chunk here that the warp that posts chunks is idle meanwhile.
#[test]
fn asked_as_it_begins() {
    let devices = devices(2);
    (0..2).for_each(|_| asked(&devices));
}

fn asked(devices: &[Device]) {
    let ranks = communicator_of(devices, Geometry { bulk_chunk_bytes: 8 << 20, bulk_slots: 2, ..GEOMETRY });
    let (first, next) = ([message(0, 1, 30 << 20)], [message(0, 1, 8), message(0, 1, 30 << 20)]);
    let side = |rank: usize, messages: &[Message]| {
        devices[rank].make_current();
        (Side::of(rank as u32, messages), devices[rank].stream())
    };
    let run = |rank: usize, (side, stream): &(Side, AppStream)| {
        devices[rank].make_current();
        ranks[rank].p2p.run(&side.operations[side.operations.len() - 1..], stream.handle()).unwrap();
    };
    let (receives, sends, more) = (side(1, &first), side(0, &first), side(0, &next));
    let sequencer = ranks[0].p2p.sequencer();
    sequencer.ask_who_waits();
    run(1, &receives);
    run(0, &sends);
    devices[0].make_current();
    sends.1.synchronize();
    sequencer.ask_no_more();
    assert!(sequencer.stuck().unwrap().is_empty(), "nobody waits");
    sequencer.have_asked();
    std::thread::sleep(Duration::from_millis(500));
    if receives.1.is_busy() {
        eprintln!("what was sent has not arrived, and the kernel that sent it has ended without a word");
        run(0, &more);
    }
    devices[1].make_current();
    receives.1.synchronize();
    receives.0.check();
    devices[0].make_current();
    more.1.synchronize();
    drop((receives, sends, more));
    end(ranks);
}
