//! Tests that collectives and messages of a communicator run one after the other on any streams.

use windlass_transport::native::Kind;
use windlass_transport::p2p::Direction;
use windlass_transport::sequencer::Joins;

use crate::communicator::*;
use crate::numbers::*;
use crate::support::*;

/// Calls in turn on two streams, without a wait of the host.
#[test]
fn messages_between() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    all(&devices, &ranks, |device, rank| {
        let streams = [device.stream(), device.stream()];
        let peer = 1 - rank.rank;
        let rounds: Vec<_> = (0..8)
            .map(|round| {
                let sent = Numbers::new(vec![round * 10 + rank.rank as i32]);
                (Part::of(Kind::AllReduce, 50, rank.rank, 2), sent, Numbers::new(vec![0]))
            })
            .collect();
        for (round, (part, sent, received)) in rounds.iter().enumerate() {
            rank.native.run(&part.task, streams[round % 2].handle()).unwrap();
            let messages =
                [message(sent, peer, Direction::Send), message(received, peer, Direction::Receive)];
            rank.p2p.run(&messages, streams[round / 2 % 2].handle()).unwrap();
        }
        streams.iter().for_each(AppStream::synchronize);
        for (round, (part, _, received)) in (0..).zip(&rounds) {
            part.check();
            assert_eq!(received.get(), [round * 10 + peer as i32]);
        }
    });
    end(ranks);
}

/// A call delayed on one stream delays the next call on another stream, also between collectives and messages.
#[test]
fn a_later_stream_waits() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    let (one, two) = (devices[0].stream(), devices[0].stream());
    let part = Part::of(Kind::Broadcast { root: 0 }, 4, 0, 2);
    let sent = Numbers::new(vec![5]);
    let gate = Gate::on(&one);
    ranks[0].native.run(&part.task, one.handle()).unwrap();
    ranks[0].p2p.run(&[message(&sent, 1, Direction::Send)], two.handle()).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(30));
    assert!(two.is_busy(), "credits are there, so only the order holds it up");
    gate.open();
    two.synchronize();
    let stream = devices[1].stream();
    let theirs = Part::of(Kind::Broadcast { root: 0 }, 4, 1, 2);
    let received = Numbers::new(vec![0]);
    ranks[1].native.run(&theirs.task, stream.handle()).unwrap();
    ranks[1].p2p.run(&[message(&received, 0, Direction::Receive)], stream.handle()).unwrap();
    stream.synchronize();
    theirs.check();
    assert_eq!(received.get(), [5]);
    one.synchronize();
    devices[0].make_current();
    drop((part, sent));
    devices[1].make_current();
    drop((theirs, received));
    drop((one, two, stream));
    end(ranks);
}

/// Several calls in one turn: two collectives and a group's messages run after the work on a second stream.
#[test]
fn one_turn_of_many() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    all(&devices, &ranks, |device, rank| {
        let streams = [device.stream(), device.stream()];
        let peer = 1 - rank.rank;
        let parts =
            [Part::of(Kind::AllGather, 20, rank.rank, 2), Part::of(Kind::ReduceScatter, 5000, rank.rank, 2)];
        let (sent, received) = (Numbers::new(vec![3]), Numbers::new(vec![0]));
        let gate = Gate::on(&streams[1]);
        let messages = [message(&sent, peer, Direction::Send), message(&received, peer, Direction::Receive)];
        let turn = rank.sequencer.take(
            streams[0].handle(),
            Joins { before: &[streams[1].handle()], after: &[streams[1].handle()] },
            |turn| {
                for part in &parts {
                    rank.native.launch(turn, &part.task).unwrap();
                }
                rank.p2p.launch(turn, &messages).unwrap();
                Ok(())
            },
        );
        turn.unwrap();
        assert!(streams[0].is_busy());
        gate.open();
        // Later work of the second stream comes after.
        streams[1].synchronize();
        parts.iter().for_each(Part::check);
        assert_eq!(received.get(), [3]);
    });
    end(ranks);
}
