//! Tests that every byte arrives, in any pattern.

use windlass_transport::TransportError;

use crate::communicator::*;
use crate::support::*;
use crate::traffic::*;

/// Sizes around the limits of a packet, a ring, a chunk and the change of wires.
const SIZES: &[u64] = &[1, 8, 1919, 1920, 1921, 7680, 31_000, 39_999, 40_000, 50_001, 200_000];

/// Each rank sends each size to the next rank several times, so that ring slots are used again.
#[test]
fn ring() {
    if !has_devices(3) {
        return;
    }
    let devices = devices(3);
    let ranks = communicator(&devices);
    for bytes in SIZES {
        let messages: Vec<_> = (0..3).map(|rank| message(rank, (rank + 1) % 3, *bytes)).collect();
        exchange(&devices, &ranks, &messages, 2);
    }
    end(ranks);
}

/// All-to-all with different sizes, also of zero bytes and to oneself, at any alignment.
#[test]
fn all_to_all() {
    if !has_devices(4) {
        return;
    }
    let devices = devices(4);
    let ranks = communicator(&devices);
    let mut messages = Vec::new();
    for (from, to) in (0..4).flat_map(|from| (0..4).map(move |to| (from, to))) {
        let bytes = u64::from(from * 4 + to) % 5 * 13_001;
        messages.push(Message { from, to, bytes, offset: u64::from(from + to) % 16 });
    }
    exchange(&devices, &ranks, &messages, 2);
    end(ranks);
}

/// Several messages to one peer in one group keep their order, small and large mixed, both ways.
#[test]
fn several_to_one_peer() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    let messages: Vec<_> = [100, 90_000, 0, 5000, 60_000, 1, 39_000]
        .into_iter()
        .flat_map(|bytes| [message(0, 1, bytes), message(1, 0, bytes / 2)])
        .collect();
    exchange(&devices, &ranks, &messages, 2);
    end(ranks);
}

/// More operations than the kernel's parameters hold, again and again: lists are taken and freed.
#[test]
fn three_hundred() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    let messages: Vec<_> =
        (0..300).map(|index| message(index % 2, 1 - index % 2, u64::from(index) * 7)).collect();
    all(&devices, &ranks, |device, rank| {
        let stream = device.stream();
        let side = Side::of(rank.rank, &messages);
        // More groups than there are lists, with no wait between.
        for _ in 0..10 {
            rank.p2p.run(&side.operations, stream.handle()).unwrap();
        }
        stream.synchronize();
        side.check();
    });
    end(ranks);
}

/// Messages to oneself are copied in pairs and in order, also alone. A copy in place does nothing. An unmatched message is NCCL's
/// error and leaves nothing behind.
#[test]
fn to_itself() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    exchange(&devices, &ranks, &[message(0, 0, 5000), message(0, 0, 1), message(1, 1, 100_000)], 2);
    all(&devices, &ranks, |device, rank| {
        let stream = device.stream();
        let buffer = Buffer::new(100, 3);
        buffer.fill(9);
        let (out, back) = (send(&buffer, rank.rank), receive(&buffer, rank.rank));
        rank.p2p.run(&[out, back], stream.handle()).unwrap();
        let refusal = rank.p2p.run(&[out, back, out], stream.handle()).unwrap_err();
        assert_eq!(refusal, TransportError::Unmatched { rank: rank.rank, sends: 2, receives: 1 });
        assert_eq!(refusal.result().name(), Some("ncclInvalidUsage"));
        let refusal = rank.p2p.run(&[send(&buffer, 2)], stream.handle()).unwrap_err();
        assert_eq!(refusal, TransportError::NoRank { peer: 2, ranks: 2 });
        assert_eq!(refusal.result().name(), Some("ncclInvalidArgument"));
        stream.synchronize();
        buffer.holds(9);
    });
    exchange(&devices, &ranks, &[message(0, 1, 5000)], 1);
    // Beside messages to others, in the same kernel.
    exchange(&devices, &ranks, &[message(0, 0, 3 << 20), message(0, 1, 5000), message(1, 1, 1 << 20)], 3);
    end(ranks);
}

/// Empty groups and messages of zero bytes launch nothing, and need no peer.
#[test]
fn nothing() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    let stream = devices[0].stream();
    let buffer = Buffer::new(0, 0);
    let gate = Gate::on(&stream);
    ranks[0].p2p.run(&[], stream.handle()).unwrap();
    ranks[0].p2p.run(&[send(&buffer, 1), receive(&buffer, 1)], stream.handle()).unwrap();
    assert!(ranks[0].p2p.sequencer().is_idle().unwrap(), "nothing was issued");
    gate.open();
    stream.synchronize();
    drop((buffer, stream));
    end(ranks);
}

/// Two communicators over the same ranks, in opposite order on the two ranks, on two streams: neither waits for the other.
#[test]
fn two_communicators() {
    let devices = devices(2);
    let (first, second) = (communicator(&devices), communicator(&devices));
    let large = [message(0, 1, 300_000), message(1, 0, 20_000)];
    std::thread::scope(|scope| {
        for (index, device) in devices.iter().enumerate() {
            let (first, second) = (&first[index], &second[index]);
            scope.spawn(move || {
                let streams = [device.stream(), device.stream()];
                let sides = [Side::of(index as u32, &large), Side::of(index as u32, &large)];
                for turn in 0..3 {
                    let order = if (index + turn) % 2 == 0 { [0, 1] } else { [1, 0] };
                    for which in order {
                        let rank = [first, second][which];
                        rank.p2p.run(&sides[which].operations, streams[which].handle()).unwrap();
                    }
                }
                streams.iter().for_each(AppStream::synchronize);
                sides.iter().for_each(Side::check);
            });
        }
    });
    end(first);
    end(second);
}
