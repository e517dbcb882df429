//! Tests of regions whose memory goes and comes back at the same addresses.

use std::os::fd::AsFd;

use windlass_transport::heap::{Announcement, Event, Heap, HeapError, Holds, Member, PeerHeap, Region};

use crate::application::*;
use crate::support::*;

const THERE: [Member; 1] = [Member { rank: 1, process: 9 }];

fn zeroed(region: &Region) {
    region.wait_zeroed(soon()).unwrap();
    assert!(holds(region, 0));
}

/// The memory of one region goes, also with a peer's mapping of it, while others stay. Nobody gets its addresses meanwhile. It comes back with
/// zeros, and is another memory: its former descriptor shows nothing of it.
#[test]
fn one_of_three() {
    let application = Application::on(0);
    let heap = application.heap(64 * MIB);
    let (peer, near) = (PeerHeap::new(application.driver), application.heap(MIB));
    let regions = [lend(&heap, MIB), lend(&heap, 16 * MIB), lend(&heap, MIB)];
    let announced: Vec<Announcement> = regions.iter().map(|one| one.announce(&THERE).unwrap()).collect();
    let mapped: Vec<_> = announced
        .iter()
        .map(|one| peer.map(one.place, one.descriptor.as_fd(), &near, &Holds::new()).unwrap())
        .collect();
    regions.iter().for_each(|region| fill(region, 7));
    let (addresses, free) = ([regions[1].address(), mapped[1].address], application.free_bytes());
    let former = announced.into_iter().nth(1).unwrap();
    mapped[1].let_go();
    regions[1].let_go().unwrap();
    assert_eq!((heap.counters().mapped_bytes, peer.mapped()), (4 * MIB, (2, 4 * MIB)));
    let descriptor = former.descriptor;
    heap.settle().unwrap();
    peer.settle();
    let other = lend(&heap, 16 * MIB);
    assert!(!addresses.contains(&other.address()));
    drop(other);
    heap.settle().unwrap();
    regions[1].take_again().unwrap();
    assert!(!matches!(regions[1].announce(&THERE), Err(HeapError::Gone)));
    zeroed(&regions[1]);
    assert!(holds(&regions[0], 7) && holds(&regions[2], 7));
    let again = regions[1].announce(&THERE).unwrap();
    assert_eq!(again.place, former.place);
    mapped[1].map_again(again.place, again.descriptor.as_fd(), &near).unwrap();
    assert_eq!([regions[1].address(), mapped[1].address], addresses);
    heap.store(regions[1].address(), 77).unwrap();
    near.probe(mapped[1].address, 77, mapped[1].address + 4, 78).unwrap();
    drop((descriptor, again));
    assert!(on_a_gpu() || application.free_bytes() == free);
    drop(mapped);
    peer.settle();
    assert_eq!(peer.mapped(), (0, 0));
    heap.note(Event::Died(9));
    drop(regions);
    heap.settle().unwrap();
    assert_eq!(heap.counters().mapped_bytes, 0);
}

/// A peer whose only region sleeps keeps its addresses, whatever is settled, and also where mapping it again fails at first.
#[test]
fn addresses_stay() {
    let application = Application::on(0);
    let heap = application.heap(64 * MIB);
    let peer = PeerHeap::new(application.driver);
    let region = lend(&heap, MIB);
    let announced = region.announce(&THERE).unwrap();
    let mapped = peer.map(announced.place, announced.descriptor.as_fd(), &heap, &Holds::new()).unwrap();
    let address = mapped.address;
    for _ in 0..3 {
        mapped.let_go();
        peer.settle();
        assert_eq!(peer.mapped(), (0, 0));
        // Others that reserve addresses now do not get these.
        let others: Vec<_> = (0..8).map(|_| application.heap(64 * MIB)).collect();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(mapped.map_again(announced.place, socket.as_fd(), &heap).is_err());
        mapped.map_again(announced.place, announced.descriptor.as_fd(), &heap).unwrap();
        assert_eq!(mapped.address, address);
        heap.store(region.address(), 5).unwrap();
        assert_eq!(heap.load(address).unwrap(), 5);
        drop(others);
    }
    // Once it has ended, also while it sleeps, the addresses go.
    mapped.let_go();
    drop(mapped);
    peer.settle();
    heap.note(Event::Died(9));
    region.let_go().unwrap();
    drop(region);
    heap.settle().unwrap();
    assert_eq!((heap.counters().regions, heap.counters().mapped_bytes), (0, 0));
}

/// The same for a peer's region, which this process maps once for its devices.
#[test]
fn access_to_a_peer() {
    let application = Application::on(0);
    let heap = application.heap(64 * MIB);
    let locals = [0, 1].map(|device| Heap::open(application.driver, device, MIB).unwrap());
    let (peer, region) = (PeerHeap::new(application.driver), lend(&heap, MIB));
    let announced = region.announce(&THERE).unwrap();
    let map =
        |local: &_| peer.map(announced.place, announced.descriptor.as_fd(), local, &Holds::new()).unwrap();
    let mapped = locals.each_ref().map(|local| map(local));
    let devices = || [0, 1].map(|device| may_access(device, mapped[0].address));
    assert_eq!(devices(), [true, true]);
    mapped.iter().for_each(|one| one.let_go());
    for (device, (one, local)) in mapped.iter().zip(&locals).enumerate().rev() {
        one.map_again(announced.place, announced.descriptor.as_fd(), local).unwrap();
        assert_eq!(devices(), [device == 0, true]);
    }
    drop((mapped, announced));
    peer.settle();
    heap.note(Event::Died(9));
    drop(region);
    heap.settle().unwrap();
}

/// Access is given to each device again that had it, by the rank of that device; until then it has none.
#[test]
fn access_of_each_device() {
    let application = Application::on(0);
    let owner = Heap::of(0).unwrap();
    let near = Heap::open(application.driver, 1, MIB).unwrap();
    let region = lend(&owner, MIB);
    let reached = windlass_transport::heap::reach(region.announce_here(&THERE).unwrap(), &near).unwrap();
    let devices = || [0, 1].map(|device| may_access(device, region.address()));
    assert_eq!(devices(), [true, true]);
    reached.let_go();
    region.let_go().unwrap();
    region.take_again().unwrap();
    zeroed(&region);
    assert_eq!(devices(), [true, false]);
    let again = windlass_transport::heap::reach(region.announce_here(&THERE).unwrap(), &near).unwrap();
    assert_eq!(again.address, region.address());
    assert_eq!(devices(), [true, true]);
    let lease = region.lease;
    owner.note(Event::Closed(lease, 1));
    drop((region, reached, again));
    owner.settle().unwrap();
    drop(owner);
    windlass_transport::heap::settle();
}

/// A larger ring ends at once, although a graph holds its communicator's memory: graphs have no address of it.
#[test]
fn rings_end() {
    let application = Application::on(0);
    let heap = application.heap(8 * MIB);
    let (peer, holds) = (PeerHeap::new(application.driver), Holds::new());
    let stream = AppStream::new();
    let graph = capture(&stream, || {
        let capture = application.driver.capture_of(stream.handle()).unwrap().unwrap();
        holds.hold(application.driver, capture).unwrap();
    });
    for _ in 0..5 {
        let ring = heap.lend_as_it_is(6 * MIB, &holds).unwrap();
        let announced = ring.announce(&THERE).unwrap();
        let mapped = peer.map(announced.place, announced.descriptor.as_fd(), &heap, &holds).unwrap();
        mapped.end();
        ring.end().unwrap();
        peer.settle();
        assert_eq!((heap.counters().regions, heap.counters().mapped_bytes, peer.mapped()), (0, 0, (0, 0)));
    }
    assert!(!holds.are_none());
    ok(cuGraphDestroy(graph));
    eventually("the destructor ran", || holds.are_none());
}

/// Without memory a region stays as it was, and may try again. What has ended meanwhile makes room.
#[test]
fn no_memory() {
    if on_a_gpu() {
        return;
    }
    // SAFETY: as in `start`.
    unsafe { std::env::set_var("WINDLASS_SIM_DEVICE_MEMORY", "30") };
    let application = Application::on(0);
    let heap = application.heap(1 << 30);
    let region = lend(&heap, 20 * MIB);
    let address = region.address();
    region.let_go().unwrap();
    let taken = lend(&heap, 20 * MIB);
    for _ in 0..3 {
        let refusal = region.take_again().unwrap_err();
        assert!(refusal.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{refusal}");
    }
    drop(taken);
    region.take_again().unwrap();
    zeroed(&region);
    assert_eq!(region.address(), address);
    drop(region);
    heap.settle().unwrap();
    assert_eq!(application.free_bytes(), 30 * MIB);
}
