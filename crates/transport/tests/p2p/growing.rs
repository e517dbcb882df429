//! Tests of growing rings: when a sender is stalled, when large messages come, while kernels spin, in graphs; once, and only where
//! possible.

use windlass_kernels::growth::ring_bytes;
use windlass_transport::TransportError;
use windlass_transport::heap::Region;
use windlass_transport::p2p::{Direction, Wants, Wire};
use windlass_transport::sequencer::Carries;

use crate::communicator::*;
use crate::support::*;
use crate::traffic::*;

const SLOTS: u32 = 32;
const WIRES: [Wire; 2] = [Wire::Ll128, Wire::Bulk];

/// Bytes of a message over this wire that is several first rings long (31 KB, 32 KiB).
fn long(wire: Wire) -> u64 {
    if wire == Wire::Ll128 { 39_999 } else { 120_000 }
}

/// A zeroed ring for messages to `to`, which `from` can write. Lent before kernels run; tests of the symmetric heap lend beside
/// kernels.
fn ring(devices: &[Device], ranks: &[Rank], from: usize, to: usize, wire: Wire) -> Region {
    let region = devices[to].heap.lend(ring_bytes(wire, &GEOMETRY, SLOTS), &ranks[to].holds).unwrap();
    region.wait_zeroed(soon()).unwrap();
    region.allow(devices[from].device).unwrap();
    region
}

/// Grows the ring on both sides, as the two hosts do once they have agreed.
fn grow(ranks: &[Rank], from: usize, to: usize, wire: Wire, ring: &Region) {
    ranks[to].p2p.grow(Direction::Receive, from as u32, wire, ring.address(), SLOTS).unwrap();
    ranks[from].p2p.grow(Direction::Send, to as u32, wire, ring.address(), SLOTS).unwrap();
}

/// Both ranks' buffers, each on its own device.
fn sides(devices: &[Device], messages: &[Message]) -> [Side; 2] {
    [0, 1].map(|rank| {
        devices[rank].make_current();
        Side::of(rank as u32, messages)
    })
}

fn wants(rank: &Rank, wire: Wire) -> u64 {
    let Wants { ll128, bulk } = rank.p2p.wants_growth();
    if wire == Wire::Ll128 { ll128 } else { bulk }
}

/// Both ranks send more than the first ring holds and only then receive. As with NCCL both finish, because rings grow while both
/// kernels wait for room.
#[test]
fn head_to_head() {
    let devices = devices(2);
    for wire in WIRES {
        let ranks = communicator(&devices);
        let rings = [ring(&devices, &ranks, 0, 1, wire), ring(&devices, &ranks, 1, 0, wire)];
        let messages: Vec<Message> =
            (0..2).flat_map(|_| [message(0, 1, long(wire)), message(1, 0, long(wire))]).collect();
        std::thread::scope(|scope| {
            let running: Vec<_> = devices
                .iter()
                .zip(&ranks)
                .map(|(device, rank)| {
                    let messages = &messages;
                    scope.spawn(move || {
                        let stream = device.stream();
                        let side = Side::of(rank.rank, messages);
                        for direction in [Direction::Send, Direction::Receive] {
                            for operation in side.operations.iter().filter(|o| o.direction == direction) {
                                rank.p2p.run(&[*operation], stream.handle()).unwrap();
                            }
                        }
                        stream.synchronize();
                        side.check();
                    })
                })
                .collect();
            // Wait for both before growing: a sender that may go on receives, and then the other need not ask any more.
            for from in [0, 1] {
                eventually("a stalled sender asks", || wants(&ranks[from], wire) == 1 << (1 - from));
                assert!(!running[from].is_finished());
            }
            for from in [0, 1] {
                grow(&ranks, from, 1 - from, wire, &rings[from]);
                assert_eq!(ranks[from].p2p.wants_growth(), Wants::default());
            }
        });
        for rank in &ranks {
            for progress in rank.p2p.progress().unwrap() {
                let grown = (progress.ll128_grown, progress.bulk_grown);
                assert_eq!(grown, (wire == Wire::Ll128, wire == Wire::Bulk), "{progress:?}");
            }
        }
        exchange(&devices, &ranks, &[message(0, 1, 300_000), message(1, 0, 39_000), message(0, 1, 5)], 3);
        end(ranks);
        drop(rings);
    }
}

/// Eight messages of several sizes on both wires are sent before their receiver comes.
#[test]
fn eight_deep() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    let rings = WIRES.map(|wire| ring(&devices, &ranks, 0, 1, wire));
    let messages: Vec<Message> =
        (0..8_u64).map(|index| message(0, 1, if index % 2 == 0 { 39_000 } else { 45_000 + index })).collect();
    let streams: Vec<AppStream> = devices.iter().map(Device::stream).collect();
    let sides = sides(&devices, &messages);
    for operation in &sides[0].operations {
        ranks[0].p2p.run(&[*operation], streams[0].handle()).unwrap();
    }
    for (wire, ring) in WIRES.iter().zip(&rings) {
        eventually("a stalled sender asks", || wants(&ranks[0], *wire) == 2);
        assert!(streams[0].is_busy());
        grow(&ranks, 0, 1, *wire, ring);
    }
    streams[0].synchronize();
    for operation in &sides[1].operations {
        ranks[1].p2p.run(&[*operation], streams[1].handle()).unwrap();
    }
    streams[1].synchronize();
    sides[1].check();
    drop((streams, sides));
    end(ranks);
}

/// A group that sends chunks asks for growth at once, until the sender's ring has grown; so does a captured group.
#[test]
fn large_messages_ask_early() {
    let devices = devices(3);
    let ranks = communicator(&devices);
    let bulk = |peers: u64| Wants { ll128: 0, bulk: peers };
    assert_eq!(ranks[0].p2p.asks_early(), bulk(0));
    let messages = [message(0, 1, 40_000), message(0, 2, 39_999), message(2, 0, 40_000)];
    exchange(&devices, &ranks, &messages, 1);
    let asked: Vec<Wants> = ranks.iter().map(|rank| rank.p2p.asks_early()).collect();
    assert_eq!(asked, [bulk(2), bulk(0), bulk(1)]);
    let rings = [ring(&devices, &ranks, 0, 1, Wire::Bulk), ring(&devices, &ranks, 2, 0, Wire::Bulk)];
    grow(&ranks, 0, 1, Wire::Bulk, &rings[0]);
    grow(&ranks, 2, 0, Wire::Bulk, &rings[1]);
    ranks.iter().for_each(|rank| assert_eq!(rank.p2p.asks_early(), bulk(0)));
    exchange(&devices, &ranks, &messages, 3);
    let moved = |rank: usize, peer: u32| {
        let all = ranks[rank].p2p.progress().unwrap();
        all.iter().filter(|p| p.peer == peer && p.bulk_grown).map(|p| p.direction).collect::<Vec<_>>()
    };
    assert_eq!((moved(0, 1), moved(1, 0)), (vec![Direction::Send], vec![Direction::Receive]));
    assert_eq!(moved(1, 2), []);
    end(ranks);
}

/// A graph captured before the growth uses the grown rings: then its sends end without a receiver.
#[test]
fn graphs_see_it() {
    let devices = devices(2);
    for wire in WIRES {
        let ranks = communicator(&devices);
        let streams: Vec<AppStream> = devices.iter().map(Device::stream).collect();
        let messages = [message(0, 1, long(wire)), message(0, 1, 100)];
        let sides = sides(&devices, &messages);
        let graphs: Vec<usize> = (0..2)
            .map(|index| {
                devices[index].make_current();
                captured(&streams[index], || {
                    ranks[index].p2p.run(&sides[index].operations, streams[index].handle()).unwrap()
                })
            })
            .collect();
        let replay = |index: usize| ok(cuGraphLaunch(graphs[index], streams[index].0));
        let both = || {
            replay(0);
            replay(1);
            streams[1].synchronize();
            sides[1].check();
            sides[1].clear();
        };
        both();
        replay(0);
        eventually("a stalled sender asks", || wants(&ranks[0], wire) == 2);
        let ring = ring(&devices, &ranks, 0, 1, wire);
        grow(&ranks, 0, 1, wire, &ring);
        streams[0].synchronize();
        replay(1);
        streams[1].synchronize();
        sides[1].check();
        sides[1].clear();
        for _ in 0..5 {
            both();
        }
        graphs.iter().for_each(|graph| ok(cuGraphExecDestroy(*graph)));
        drop((streams, sides));
        ranks.iter().for_each(|rank| eventually("graphs let go", || rank.holds.are_none()));
        end(ranks);
        drop(ring);
    }
}

/// An abort ends a stalled sender whose grown ring is full, too. The report says where it was.
#[test]
fn abort_in_a_grown_ring() {
    let devices = devices(2);
    for wire in WIRES {
        let ranks = communicator(&devices);
        let ring = ring(&devices, &ranks, 0, 1, wire);
        let stream = devices[0].stream();
        let messages: Vec<Message> = (0..12).map(|_| message(0, 1, long(wire))).collect();
        let side = Side::of(0, &messages);
        ranks[0].p2p.run(&side.operations, stream.handle()).unwrap();
        eventually("a stalled sender asks", || wants(&ranks[0], wire) == 2);
        grow(&ranks, 0, 1, wire, &ring);
        std::thread::sleep(std::time::Duration::from_millis(500));
        assert!(stream.is_busy());
        ranks[0].p2p.sequencer().abort();
        stream.synchronize();
        let stuck = ranks[0].p2p.sequencer().stuck().unwrap();
        assert!(!stuck.waits.is_empty());
        for wait in &stuck.waits {
            assert_eq!((wait.direction, wait.carries), (Direction::Send, Carries::Messages(wire)), "{stuck}");
            assert_eq!((wait.seen, wait.sequence), (0, u64::from(SLOTS)), "{stuck}");
        }
        drop((stream, side));
        end(ranks);
        drop(ring);
    }
}

/// A ring grows once for each peer, direction and wire, and only to a size that a channel can use. The next communicator begins
/// with small rings.
#[test]
fn refusals() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    let p2p = &ranks[0].p2p;
    let no_growth = |result: Result<(), TransportError>| {
        let refusal = result.unwrap_err();
        assert!(matches!(refusal, TransportError::NoGrowth { peer: 1, wire: Wire::Ll128, .. }), "{refusal}");
        assert_eq!(refusal.result().name(), Some("ncclInternalError"));
    };
    for (address, slots) in [(0, 32), (64, 32), (1 << 20, 33), (1 << 20, GEOMETRY.ll128_slots)] {
        no_growth(p2p.grow(Direction::Send, 1, Wire::Ll128, address, slots));
        no_growth(p2p.grow(Direction::Receive, 1, Wire::Ll128, address, slots));
    }
    for peer in [0, 2] {
        let refusal = p2p.grow(Direction::Send, peer, Wire::Bulk, 1 << 20, 32).unwrap_err();
        assert_eq!(refusal, TransportError::NoRank { peer, ranks: 2 });
    }
    p2p.grow(Direction::Receive, 1, Wire::Ll128, 1 << 20, 32).unwrap();
    no_growth(p2p.grow(Direction::Receive, 1, Wire::Ll128, 1 << 20, 32));
    assert!(p2p.growth_bytes(Wire::Ll128) >= 64 << 20 && p2p.growth_bytes(Wire::Bulk) >= 16 << 20);
    end(ranks);
    let ranks = communicator(&devices);
    assert!(ranks[0].p2p.progress().unwrap().iter().all(|p| !p.ll128_grown && !p.bulk_grown));
    exchange(&devices, &ranks, &[message(0, 1, 39_000), message(1, 0, 90_000)], 2);
    end(ranks);
}
