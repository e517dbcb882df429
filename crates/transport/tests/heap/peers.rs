//! Tests of mappings of a peer's symmetric heap, with both ends in this process, where import works, too.

use std::os::fd::AsFd;

use windlass_transport::heap::{Announcement, Event, HeapError, Holds, Member, Peer, PeerHeap, Place};

use crate::application::*;

const THERE: [Member; 1] = [Member { rank: 1, process: 9 }];

/// A region is mapped once, whatever the device. Later ones are mapped behind it, and each is unmapped when it is over.
#[test]
fn mapped_once() {
    let application = Application::on(0);
    let owner = application.heap(64 * MIB);
    let (near, far) =
        (application.heap(MIB), windlass_transport::heap::Heap::open(application.driver, 1, MIB).unwrap());
    let peer = PeerHeap::new(application.driver);
    let regions = [lend(&owner, MIB), lend(&owner, MIB), lend(&owner, 20 * MIB)];
    let map = |region: &windlass_transport::heap::Region, local| {
        let Announcement { place, descriptor } = region.announce(&THERE).unwrap();
        peer.map(place, descriptor.as_fd(), local, &Holds::new()).unwrap()
    };
    let mut mapped = vec![map(&regions[0], &near)];
    assert_eq!(peer.mapped(), (1, 2 * MIB));
    mapped.push(map(&regions[1], &near));
    // A third device, if there is one, never has access.
    let third = application.driver.device_count().unwrap() > 2;
    let who = |address| [may_access(0, address), may_access(1, address), third && may_access(2, address)];
    assert_eq!(who(mapped[0].address), [true, false, false]);
    mapped.push(map(&regions[0], &far));
    assert_eq!(who(mapped[0].address), [true, true, false]);
    assert_eq!(peer.mapped(), (2, 4 * MIB));
    mapped.push(map(&regions[2], &far));
    assert_eq!(peer.mapped(), (3, 24 * MIB));
    assert_eq!(mapped[1].address - mapped[0].address, regions[1].address() - regions[0].address());
    assert_eq!(mapped[3].address - mapped[0].address, regions[2].address() - regions[0].address());
    assert_eq!(mapped[2].address, mapped[0].address);
    // Both addresses are of the same memory, in both directions.
    owner.store(regions[2].address(), 77).unwrap();
    far.probe(mapped[3].address, 77, mapped[3].address + 4, 78).unwrap();
    assert_eq!(owner.load(regions[2].address() + 4).unwrap(), 78);
    assert!(matches!(
        far.probe(mapped[3].address, 1, mapped[3].address, 2),
        Err(HeapError::Deaf { loaded: 77, .. })
    ));
    peer.settle();
    assert_eq!(peer.mapped().0, 3);
    drop(mapped.pop());
    peer.settle();
    assert_eq!(peer.mapped(), (2, 4 * MIB));
    drop(mapped);
    peer.settle();
    assert_eq!(peer.mapped(), (0, 0));
    owner.note(Event::Died(9));
    drop(regions);
    owner.settle().unwrap();
    assert_eq!(owner.counters().mapped_bytes, 0);
}

/// The owner uses offsets again for another chunk. The peer maps the new chunk once the old one is over for the peer, too.
#[test]
fn addresses_are_used_again() {
    let application = Application::on(0);
    let owner = application.heap(64 * MIB);
    let peer = PeerHeap::new(application.driver);
    let announce = || {
        let region = lend(&owner, MIB);
        (region.announce(&THERE).unwrap(), region)
    };
    let (first, region) = announce();
    let old = peer.map(first.place, first.descriptor.as_fd(), &owner, &Holds::new()).unwrap();
    // In error: the peer has not closed, and the owner takes it for dead.
    owner.note(Event::Died(9));
    drop(region);
    owner.settle().unwrap();
    let (second, region) = announce();
    assert_eq!(second.place.offset, first.place.offset);
    assert_ne!(second.place.chunk, first.place.chunk);
    let map = || peer.map(second.place, second.descriptor.as_fd(), &owner, &Holds::new());
    assert!(matches!(map(), Err(HeapError::Strange { .. })));
    drop(old);
    let new = map().unwrap();
    owner.store(region.address(), 5).unwrap();
    assert_eq!(owner.load(new.address).unwrap(), 5);
    drop(new);
    peer.settle();
    owner.note(Event::Died(9));
    drop(region);
    owner.settle().unwrap();
}

/// An unused symmetric heap was freed, and the device's next one lends the same offsets. A peer that has not unmapped yet does not
/// take the old memory for the new.
#[test]
fn a_later_heap_is_another() {
    let application = Application::on(0);
    let near = application.heap(MIB);
    let peer = PeerHeap::new(application.driver);
    let once = |word: u32| {
        let heap = application.heap(16 * MIB);
        let region = lend(&heap, MIB);
        heap.store(region.address(), word).unwrap();
        let Announcement { place, descriptor } = region.announce(&THERE).unwrap();
        let mapped = peer.map(place, descriptor.as_fd(), &near, &Holds::new()).unwrap();
        assert_eq!(near.load(mapped.address).unwrap(), word);
        let lease = region.lease;
        heap.note(Event::Died(9));
        drop((region, mapped));
        heap.settle().unwrap();
        assert_eq!(heap.counters().mapped_bytes, 0);
        (place, lease)
    };
    let ((first, old), (second, new)) = (once(1), once(2));
    assert_eq!((first.offset, first.bytes), (second.offset, second.bytes));
    assert!(first.chunk != second.chunk && old != new);
    peer.settle();
}

/// Devices of one process need no import: access is granted at the owner's own address.
#[test]
fn two_devices_of_one_process() {
    let application = Application::on(0);
    let heaps = [0, 1]
        .map(|device| windlass_transport::heap::Heap::open(application.driver, device, 64 * MIB).unwrap());
    let regions = [lend(&heaps[0], MIB), lend(&heaps[1], MIB)];
    assert!(!may_access(1, regions[0].address()));
    regions[0].allow(1).unwrap();
    regions[1].allow(0).unwrap();
    assert!(may_access(0, regions[0].address()) && may_access(1, regions[0].address()));
    for (here, there) in [(0, 1), (1, 0)] {
        let word = 100 + here as u32;
        heaps[there].store(regions[there].address(), word).unwrap();
        heaps[here].probe(regions[there].address(), word, regions[there].address() + 64, word + 1).unwrap();
        assert_eq!(heaps[there].load(regions[there].address() + 64).unwrap(), word + 1);
    }
    assert!(matches!(regions[0].allow(99), Err(HeapError::Cuda(_))));
    drop(regions);
    heaps.iter().for_each(|heap| heap.settle().unwrap());
}

/// A region of another rank of this process is used at its own address. No descriptor and no mapping is made, and the region stays
/// until that rank has closed. Another range is refused.
#[test]
fn reached_in_its_own_process() {
    let application = Application::on(0);
    let owner = windlass_transport::heap::Heap::of(0).unwrap();
    let near = windlass_transport::heap::Heap::open(application.driver, 1, MIB).unwrap();
    let region = lend(&owner, MIB);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let place = region.announce_here(&THERE).unwrap();
    assert!(!may_access(1, region.address()));
    let reached = windlass_transport::heap::reach(place, &near).unwrap();
    assert_eq!((reached.address, reached.bytes), (region.address(), region.bytes()));
    assert_eq!((descriptors(), windlass_transport::heap::test_support::counters().1.peers), (before, 0));
    owner.store(region.address(), 7).unwrap();
    near.probe(reached.address, 7, reached.address + 4, 8).unwrap();
    assert_eq!(owner.load(region.address() + 4).unwrap(), 8);
    for strange in [
        Place { offset: place.offset + place.bytes, ..place },
        Place { bytes: place.bytes + 1, ..place },
        Place { bytes: u64::MAX, ..place },
        Place { bytes: 0, ..place },
    ] {
        assert!(matches!(windlass_transport::heap::reach(strange, &near), Err(HeapError::Strange { .. })));
    }
    let gone = Place { chunk: place.chunk + 1000, ..place };
    assert_eq!(windlass_transport::heap::reach(gone, &near).unwrap_err(), HeapError::Gone);
    let lease = region.lease;
    drop(region);
    owner.settle().unwrap();
    assert_eq!(owner.counters().regions, 1, "the other rank has not closed");
    drop(reached);
    owner.note(Event::Closed(lease, 1));
    owner.settle().unwrap();
    assert_eq!(owner.counters().mapped_bytes, 0);
    drop(owner);
    windlass_transport::heap::settle();
}

/// The process's table has one symmetric heap for each device and one mapping for each peer. An unused one is freed, and made again
/// when needed.
#[test]
fn one_of_each_in_a_process() {
    let _application = Application::on(0);
    let heap = windlass_transport::heap::Heap::of(0).unwrap();
    assert!(std::sync::Arc::ptr_eq(&heap, &windlass_transport::heap::Heap::of(0).unwrap()));
    assert_eq!(heap.counters().mapped_bytes_limit, 8 << 30);
    let who = Peer { process: 9, device_uuid: [1; 16] };
    let peer = PeerHeap::of(who).unwrap();
    assert!(std::sync::Arc::ptr_eq(&peer, &PeerHeap::of(who).unwrap()));
    let region = lend(&heap, MIB);
    let Announcement { place, descriptor } = region.announce(&THERE).unwrap();
    let mapped = peer.map(place, descriptor.as_fd(), &heap, &Holds::new()).unwrap();
    let (heaps, peers) = windlass_transport::heap::test_support::counters();
    assert_eq!((heaps.len(), heaps[0].regions, peers.peers, peers.mapped_bytes), (1, 1, 1, 2 * MIB));
    heap.note(Event::Died(9));
    drop((region, mapped, peer, descriptor));
    // This test still holds the symmetric heap.
    windlass_transport::heap::settle();
    assert_eq!(windlass_transport::heap::test_support::counters().0.len(), 1);
    drop(heap);
    windlass_transport::heap::settle();
    let (heaps, peers) = windlass_transport::heap::test_support::counters();
    assert_eq!((heaps.len(), peers.peers), (0, 0));
    drop(lend(&windlass_transport::heap::Heap::of(0).unwrap(), MIB));
    windlass_transport::heap::settle();
}
