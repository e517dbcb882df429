//! Tests that a communicator's operations on a GPU run one after the other on any streams.

use windlass_transport::sequencer::Afterwards;

use crate::communicator::*;
use crate::support::*;
use crate::traffic::*;

/// Many operations on two streams in turn, without a wait of the host: each message has its own bytes.
#[test]
fn two_streams_in_turn() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    all(&devices, &ranks, |device, rank| {
        let streams = [device.stream(), device.stream()];
        let sides: Vec<Side> = (0..12)
            .map(|index| {
                Side::of(rank.rank, &[message(0, 1, 3000 + index * 999), message(1, 0, 45_000 + index)])
            })
            .collect();
        for (index, side) in sides.iter().enumerate() {
            rank.p2p.run(&side.operations, streams[index % 2].handle()).unwrap();
        }
        streams.iter().for_each(AppStream::synchronize);
        sides.iter().for_each(Side::check);
    });
    end(ranks);
}

/// A call delayed on one stream delays a later call on another stream, and no earlier work of that other stream.
#[test]
fn a_later_stream_waits() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    let (one, two) = (devices[0].stream(), devices[0].stream());
    let sides = [Side::of(0, &[message(0, 1, 100)]), Side::of(0, &[message(0, 1, 200)])];
    let gate = Gate::on(&one);
    ranks[0].p2p.run(&sides[0].operations, one.handle()).unwrap();
    let afterwards = ranks[0].p2p.sequencer().before_nccl(one.handle(), true);
    assert_eq!(afterwards, Ok(Afterwards::Nothing), "there are no graphs");
    two.synchronize();
    ranks[0].p2p.run(&sides[1].operations, two.handle()).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(30));
    assert!(two.is_busy(), "credits are there, so only the order holds it up");
    gate.open();
    two.synchronize();
    assert!(ranks[0].p2p.sequencer().is_idle().unwrap());
    // Now the other rank receives both.
    let stream = devices[1].stream();
    let sides = [Side::of(1, &[message(0, 1, 100)]), Side::of(1, &[message(0, 1, 200)])];
    for side in &sides {
        ranks[1].p2p.run(&side.operations, stream.handle()).unwrap();
    }
    stream.synchronize();
    sides.iter().for_each(Side::check);
    drop((one, two, stream));
    end(ranks);
}

/// A change of streams records nothing late on the old stream: other communicators' work there delays no call.
#[test]
fn communicators_are_not_linked() {
    let devices = devices(2);
    let (a, b) = (communicator(&devices), communicator(&devices));
    let small = [message(0, 1, 64)];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            devices[0].make_current();
            let (one, two) = (devices[0].stream(), devices[0].stream());
            let (a1, a2) = (Side::of(0, &small), Side::of(0, &small));
            let b1 = Side::of(0, &[message(1, 0, 64)]);
            a[0].p2p.run(&a1.operations, one.handle()).unwrap();
            b[0].p2p.run(&b1.operations, one.handle()).unwrap();
            a[0].p2p.run(&a2.operations, two.handle()).unwrap();
            one.synchronize();
            two.synchronize();
            b1.check();
        });
        scope.spawn(|| {
            devices[1].make_current();
            let stream = devices[1].stream();
            let sides = [Side::of(1, &small), Side::of(1, &small)];
            for side in &sides {
                a[1].p2p.run(&side.operations, stream.handle()).unwrap();
            }
            stream.synchronize();
            sides.iter().for_each(Side::check);
            let b1 = Side::of(1, &[message(1, 0, 64)]);
            b[1].p2p.run(&b1.operations, stream.handle()).unwrap();
            stream.synchronize();
        });
    });
    end(a);
    end(b);
}
