//! Mappings of a peer's arena, with both ends in this process: import works there too.

use std::os::fd::AsFd;

use windlass_engine::arena::{Announcement, Event, Holds, Member, Peer, PeerArena, Place, Refusal};

use crate::application::*;

const THERE: [Member; 1] = [Member { rank: 1, process: 9 }];

/// Slices of one chunk map it once, whatever the communicator and the device; later chunks are appended; all that is
/// over is unmapped.
#[test]
fn mapped_once() {
    let application = Application::on(0);
    let owner = application.arena(64 * MIB);
    let (near, far) =
        (application.arena(MIB), windlass_engine::arena::Arena::open(application.driver, 1, MIB).unwrap());
    let peer = PeerArena::new(application.driver);
    let slices = [lend(&owner, MIB), lend(&owner, MIB), lend(&owner, 20 * MIB)];
    let map = |slice: &windlass_engine::arena::Slice, local| {
        let Announcement { place, descriptor } = slice.announce(&THERE).unwrap();
        peer.map(place, descriptor.as_fd(), local, &Holds::new()).unwrap()
    };
    let mut mapped = vec![map(&slices[0], &near)];
    assert_eq!(peer.mapped(), (1, 4 * MIB));
    mapped.push(map(&slices[1], &near));
    // A third device, where there is one, never gets in.
    let third = application.driver.device_count().unwrap() > 2;
    let who = |address| [may_access(0, address), may_access(1, address), third && may_access(2, address)];
    assert_eq!(who(mapped[0].address()), [true, false, false]);
    mapped.push(map(&slices[0], &far));
    assert_eq!(who(mapped[0].address()), [true, true, false]);
    assert_eq!(peer.mapped(), (1, 4 * MIB));
    mapped.push(map(&slices[2], &far));
    assert_eq!(peer.mapped(), (2, 24 * MIB));
    assert_eq!(mapped[1].address() - mapped[0].address(), slices[1].address() - slices[0].address());
    assert_eq!(mapped[3].address() - mapped[0].address(), slices[2].address() - slices[0].address());
    assert_eq!(mapped[2].address(), mapped[0].address());
    // Both ways, by another address of the same memory.
    owner.store(slices[2].address(), 77).unwrap();
    far.probe(mapped[3].address(), 77, mapped[3].address() + 4, 78).unwrap();
    assert_eq!(owner.load(slices[2].address() + 4).unwrap(), 78);
    assert!(matches!(
        far.probe(mapped[3].address(), 1, mapped[3].address(), 2),
        Err(Refusal::Deaf { loaded: 77, .. })
    ));
    peer.settle();
    assert_eq!(peer.mapped().0, 2);
    drop(mapped.pop());
    peer.settle();
    assert_eq!(peer.mapped(), (1, 4 * MIB));
    drop(mapped);
    peer.settle();
    assert_eq!(peer.mapped(), (0, 0));
    owner.note(Event::Died(9));
    drop(slices);
    owner.settle().unwrap();
    assert_eq!(owner.counters().mapped_bytes, 0);
}

/// The owner uses addresses again for another chunk: the peer maps the new one, once the old one is over for it too.
#[test]
fn addresses_are_used_again() {
    let application = Application::on(0);
    let owner = application.arena(64 * MIB);
    let peer = PeerArena::new(application.driver);
    let announce = || {
        let slice = lend(&owner, MIB);
        (slice.announce(&THERE).unwrap(), slice)
    };
    let (first, slice) = announce();
    let old = peer.map(first.place, first.descriptor.as_fd(), &owner, &Holds::new()).unwrap();
    // Wrongly so: the peer has not closed, and the owner believes it dead.
    owner.note(Event::Died(9));
    drop(slice);
    owner.settle().unwrap();
    let (second, slice) = announce();
    assert_eq!(second.place.offset, first.place.offset);
    assert_ne!(second.place.chunk, first.place.chunk);
    let map = || peer.map(second.place, second.descriptor.as_fd(), &owner, &Holds::new());
    assert!(matches!(map(), Err(Refusal::Strange { .. })));
    drop(old);
    let new = map().unwrap();
    owner.store(slice.address(), 5).unwrap();
    assert_eq!(owner.load(new.address()).unwrap(), 5);
    drop(new);
    peer.settle();
    owner.note(Event::Died(9));
    drop(slice);
    owner.settle().unwrap();
}

/// An arena that nobody used went, and the device's next one lends the same offsets: a peer that has not unmapped yet
/// does not take the old memory for the new.
#[test]
fn a_later_arena_is_another() {
    let application = Application::on(0);
    let near = application.arena(MIB);
    let peer = PeerArena::new(application.driver);
    let once = |word: u32| {
        let arena = application.arena(16 * MIB);
        let slice = lend(&arena, MIB);
        arena.store(slice.address(), word).unwrap();
        let Announcement { place, descriptor } = slice.announce(&THERE).unwrap();
        let mapped = peer.map(place, descriptor.as_fd(), &near, &Holds::new()).unwrap();
        assert_eq!(near.load(mapped.address()).unwrap(), word);
        let lease = slice.lease();
        arena.note(Event::Died(9));
        drop((slice, mapped));
        arena.settle().unwrap();
        assert_eq!(arena.counters().mapped_bytes, 0);
        (place, lease)
    };
    let ((first, old), (second, new)) = (once(1), once(2));
    assert_eq!((first.offset, first.chunk_bytes), (second.offset, second.chunk_bytes));
    assert!(first.chunk != second.chunk && old != new);
    peer.settle();
}

/// Devices of one process need no import: access is set, and holds at the owner's own address.
#[test]
fn two_devices_of_one_process() {
    let application = Application::on(0);
    let arenas = [0, 1]
        .map(|device| windlass_engine::arena::Arena::open(application.driver, device, 64 * MIB).unwrap());
    let slices = [lend(&arenas[0], MIB), lend(&arenas[1], MIB)];
    assert!(!may_access(1, slices[0].address()));
    slices[0].allow(1).unwrap();
    slices[1].allow(0).unwrap();
    assert!(may_access(0, slices[0].address()) && may_access(1, slices[0].address()));
    for (here, there) in [(0, 1), (1, 0)] {
        let word = 100 + here as u32;
        arenas[there].store(slices[there].address(), word).unwrap();
        arenas[here].probe(slices[there].address(), word, slices[there].address() + 64, word + 1).unwrap();
        assert_eq!(arenas[there].load(slices[there].address() + 64).unwrap(), word + 1);
    }
    assert!(matches!(slices[0].allow(99), Err(Refusal::Cuda(_))));
    drop(slices);
    arenas.iter().for_each(|arena| arena.settle().unwrap());
}

/// A slice of another rank of this process is reached where it lies: no descriptor is made and nothing mapped, and it
/// stays until that rank has closed. What its chunk does not hold is refused.
#[test]
fn reached_in_its_own_process() {
    let application = Application::on(0);
    let owner = windlass_engine::arena::Arena::of(0).unwrap();
    let near = windlass_engine::arena::Arena::open(application.driver, 1, MIB).unwrap();
    let slice = lend(&owner, MIB);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let place = slice.announce_here(&THERE).unwrap();
    assert!(!may_access(1, slice.address()));
    let reached = windlass_engine::arena::reach(place, &near).unwrap();
    assert_eq!((reached.address(), reached.bytes()), (slice.address(), slice.bytes()));
    assert_eq!((descriptors(), windlass_engine::arena::counters().1.peers), (before, 0));
    owner.store(slice.address(), 7).unwrap();
    near.probe(reached.address(), 7, reached.address() + 4, 8).unwrap();
    assert_eq!(owner.load(slice.address() + 4).unwrap(), 8);
    for strange in [
        Place { offset: place.chunk_offset + place.chunk_bytes, ..place },
        Place { bytes: place.chunk_bytes + 1, ..place },
        Place { bytes: u64::MAX, ..place },
        Place { bytes: 0, ..place },
    ] {
        assert!(matches!(windlass_engine::arena::reach(strange, &near), Err(Refusal::Strange { .. })));
    }
    let gone = Place { chunk: place.chunk + 1000, ..place };
    assert_eq!(windlass_engine::arena::reach(gone, &near).unwrap_err(), Refusal::Gone);
    let lease = slice.lease();
    drop(slice);
    owner.settle().unwrap();
    assert_eq!(owner.counters().slices, 1, "the other rank has not closed");
    drop(reached);
    owner.note(Event::Closed(lease, 1));
    owner.settle().unwrap();
    assert_eq!(owner.counters().mapped_bytes, 0);
    drop(owner);
    windlass_engine::arena::settle();
}

/// The process's own table: one arena a device, one mapping a peer, gone when nobody uses them, and made again.
#[test]
fn one_of_each_in_a_process() {
    let _application = Application::on(0);
    let arena = windlass_engine::arena::Arena::of(0).unwrap();
    assert!(std::sync::Arc::ptr_eq(&arena, &windlass_engine::arena::Arena::of(0).unwrap()));
    assert_eq!(arena.counters().mapped_bytes_limit, 8 << 30);
    let who = Peer { process: 9, device_uuid: [1; 16] };
    let peer = PeerArena::of(who).unwrap();
    assert!(std::sync::Arc::ptr_eq(&peer, &PeerArena::of(who).unwrap()));
    let slice = lend(&arena, MIB);
    let Announcement { place, descriptor } = slice.announce(&THERE).unwrap();
    let mapped = peer.map(place, descriptor.as_fd(), &arena, &Holds::new()).unwrap();
    let (arenas, peers) = windlass_engine::arena::counters();
    assert_eq!((arenas.len(), arenas[0].slices, peers.peers, peers.mapped_bytes), (1, 1, 1, 4 * MIB));
    arena.note(Event::Died(9));
    drop((slice, mapped, peer, descriptor));
    // In use: this test still has the arena.
    windlass_engine::arena::settle();
    assert_eq!(windlass_engine::arena::counters().0.len(), 1);
    drop(arena);
    windlass_engine::arena::settle();
    let (arenas, peers) = windlass_engine::arena::counters();
    assert_eq!((arenas.len(), peers.peers), (0, 0));
    drop(lend(&windlass_engine::arena::Arena::of(0).unwrap(), MIB));
    windlass_engine::arena::settle();
}
