//! Tests of two processes and their symmetric heaps. Tests named `child_…` are ignored; their parents run them in a new process.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use windlass_transport::heap::{Event, Holds, Member, PeerHeap};

use crate::application::*;
use crate::support::*;

/// One of two ranks, with its device: every region is announced, mapped and probed both ways, and all is freed at the end.
fn rank(me: u32, socket: &UnixStream) {
    let application = Application::on(me as i32);
    let heap = application.heap(256 * MIB);
    let peer = PeerHeap::new(application.driver);
    let other = [Member { rank: 1 - me, process: u64::from(1 - me) }];
    let mut all = Vec::new();
    for (turn, bytes) in [MIB, MIB, 48 * MIB].into_iter().enumerate() {
        let region = lend(&heap, bytes);
        let word = |rank: u32| 1000 * (turn as u32 + 1) + rank;
        heap.store(region.address(), word(me)).unwrap();
        tell(socket, &region.announce(&other).unwrap());
        let (place, descriptor) = hear(socket);
        let mapped = peer.map(place, descriptor.as_fd(), &heap, &Holds::new()).unwrap();
        assert_eq!(mapped.bytes, region.bytes());
        let last = mapped.address + mapped.bytes - 4;
        heap.probe(mapped.address, word(1 - me), last, word(me) + 10).unwrap();
        meet(socket);
        assert_eq!(heap.load(region.address() + region.bytes() - 4).unwrap(), word(1 - me) + 10);
        all.push((region, mapped));
    }
    assert_eq!(peer.mapped(), (3, 52 * MIB));
    let leases: Vec<_> = all.iter().map(|(region, _)| region.lease).collect();
    drop(all);
    heap.settle().unwrap();
    assert_eq!(heap.counters().waiting_bytes, 52 * MIB, "the other may still touch them");
    peer.settle();
    assert_eq!(peer.mapped(), (0, 0));
    meet(socket);
    leases.into_iter().for_each(|lease| heap.note(Event::Closed(lease, 1 - me)));
    heap.settle().unwrap();
    assert_eq!(heap.counters().mapped_bytes, 0);
    assert!(on_a_gpu() || application.free_bytes() == 1 << 30);
}

/// Both processes see each other's stores, in every region.
#[test]
fn two_processes() {
    let (here, there) = UnixStream::pair().unwrap();
    let mut process = child("child_rank", &there);
    drop(there);
    rank(0, &here);
    assert!(process.wait().unwrap().success());
}

#[test]
#[ignore = "a child process of the test above"]
fn child_rank() {
    rank(1, &inherited());
}

/// A killed peer counts as closed, and the regions that it had mapped are freed. Its own memory stays readable here until this
/// process unmaps it.
#[test]
fn a_peer_is_killed() {
    let application = Application::on(0);
    let heap = application.heap(64 * MIB);
    let peer = PeerHeap::new(application.driver);
    let (here, there) = UnixStream::pair().unwrap();
    let mut process = child("child_that_is_killed", &there);
    drop(there);
    let region = lend(&heap, MIB);
    tell(&here, &region.announce(&[Member { rank: 1, process: 7 }]).unwrap());
    let (place, descriptor) = hear(&here);
    let mapped = peer.map(place, descriptor.as_fd(), &heap, &Holds::new()).unwrap();
    drop(descriptor);
    process.kill().unwrap();
    assert!(!process.wait().unwrap().success());
    assert_eq!(heap.load(mapped.address).unwrap(), 77);
    drop((region, mapped));
    heap.settle().unwrap();
    assert_eq!(heap.counters().waiting_bytes, 2 * MIB);
    heap.note(Event::Died(7));
    heap.settle().unwrap();
    peer.settle();
    assert_eq!((heap.counters().mapped_bytes, peer.mapped().0), (0, 0));
}

#[test]
#[ignore = "a child process of the test above"]
fn child_that_is_killed() {
    let socket = inherited();
    let application = Application::on(1);
    let heap = application.heap(64 * MIB);
    let peer = PeerHeap::new(application.driver);
    let (place, descriptor) = hear(&socket);
    let _mapped = peer.map(place, descriptor.as_fd(), &heap, &Holds::new()).unwrap();
    let region = lend(&heap, MIB);
    heap.store(region.address(), 77).unwrap();
    tell(&socket, &region.announce(&[Member { rank: 0, process: 6 }]).unwrap());
    // Waits until it is killed.
    let _ = (&socket).read(&mut [0]);
    unreachable!("the parent lives");
}

/// The strict simulator detects a leak: a region that no member closes fails its process.
#[test]
fn leaks_are_seen() {
    if on_a_gpu() {
        return;
    }
    let (_here, there) = UnixStream::pair().unwrap();
    let mut process = child("child_that_leaks", &there);
    assert_eq!(process.wait().unwrap().code(), Some(86));
}

#[test]
#[ignore = "a child process of the test above"]
fn child_that_leaks() {
    let application = Application::on(0);
    std::mem::forget(lend(&application.heap(16 * MIB), MIB));
}
