//! Tests of two processes with a rank each, over symmetric heaps that are announced and mapped. Tests named `child_…` are ignored;
//! their parents run them in a new process.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use windlass_kernels::launch::Geometry;
use windlass_transport::heap::{Event, Holds, Member, PeerHeap};
use windlass_transport::p2p::{Direction, Layout};

use crate::communicator::*;
use crate::support::*;
use crate::traffic::*;

/// One of two ranks, with its device: made over the socket, `body`, and an end that frees all.
fn live(me: u32, socket: &UnixStream, body: impl FnOnce(&Device, &Rank)) {
    let other = 1 - me;
    let device = Device::new(me as i32);
    device.make_current();
    let holds = Holds::new();
    let region = device.heap.lend(Layout::of(2, &GEOMETRY).bytes, &holds).unwrap();
    region.wait_zeroed(soon()).unwrap();
    tell(socket, &region.announce(&[Member { rank: other, process: u64::from(other) }]).unwrap());
    let peer = PeerHeap::new(device.driver);
    let (place, descriptor) = hear(socket);
    let mapped = peer.map(place, descriptor.as_fd(), &device.heap, &holds).unwrap();
    drop(descriptor);
    let mut regions = vec![region.address(); 2];
    regions[other as usize] = mapped.address;
    let p2p = p2p(&device, Geometry { rank: me, ..GEOMETRY }, regions, &holds);
    let rank = Rank { rank: me, p2p, region, holds };
    meet(socket);
    body(&device, &rank);
    eventually("idle", || rank.p2p.sequencer().is_idle().unwrap());
    drop((rank, mapped));
    device.heap.note(Event::Died(u64::from(other)));
    peer.settle();
    assert_eq!(peer.mapped(), (0, 0));
}

fn exchanges(me: u32, socket: &UnixStream) {
    live(me, socket, |device, rank| {
        let stream = device.stream();
        for bytes in [1, 1920, 31_000, 90_001, 400_000] {
            let messages =
                [message(0, 1, bytes), message(1, 0, bytes / 2), message(0, 1, 17), message(me, me, 5)];
            let side = Side::of(me, &messages);
            for _ in 0..3 {
                rank.p2p.run(&side.operations, stream.handle()).unwrap();
            }
            stream.synchronize();
            side.check();
        }
        // Neither unmaps before both have finished.
        meet(socket);
    });
}

/// Ranks in processes of their own exchange messages on both wires, larger than the rings, and free all.
#[test]
fn two_processes() {
    let (here, there) = UnixStream::pair().unwrap();
    let mut process = child("child_rank", &there);
    drop(there);
    exchanges(0, &here);
    assert!(process.wait().unwrap().success());
}

#[test]
#[ignore = "a child process of the test above"]
fn child_rank() {
    exchanges(1, &inherited());
}

/// A peer is killed in the middle of a transfer: the operation waits, an abort ends it, and the report names the peer.
#[test]
fn a_peer_is_killed() {
    let (here, there) = UnixStream::pair().unwrap();
    let mut process = child("child_that_is_killed", &there);
    drop(there);
    live(0, &here, |device, rank| {
        let stream = device.stream();
        let side = Side::of(0, &[message(1, 0, 8), message(1, 0, 300_000)]);
        rank.p2p.run(&side.operations, stream.handle()).unwrap();
        meet(&here);
        process.kill().unwrap();
        assert!(!process.wait().unwrap().success());
        std::thread::sleep(Duration::from_millis(20));
        assert!(stream.is_busy());
        rank.p2p.sequencer().abort();
        stream.synchronize();
        let stuck = rank.p2p.sequencer().stuck().unwrap();
        assert!(!stuck.waits.is_empty());
        assert!(
            stuck.waits.iter().all(|wait| wait.peer == 1 && wait.direction == Direction::Receive),
            "{stuck}"
        );
    });
}

#[test]
#[ignore = "a child process of the test above"]
fn child_that_is_killed() {
    let socket = inherited();
    live(1, &socket, |device, rank| {
        let stream = device.stream();
        let side = Side::of(1, &[message(1, 0, 8)]);
        rank.p2p.run(&side.operations, stream.handle()).unwrap();
        stream.synchronize();
        meet(&socket);
        // Waits until it is killed.
        let _ = (&socket).read(&mut [0]);
        unreachable!("the parent lives");
    });
}
