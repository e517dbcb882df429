//! Tests of inits that fail, aborts, and ends with work in flight.

use windlass_bootstrap::awaited::Awaited;
use windlass_transport::TransportError;
use windlass_transport::native::{self, Kind, Limits, Native, NativeParts, Tuning};
use windlass_transport::p2p::Direction;
use windlass_transport::sequencer::{Carries, Joins};

use crate::communicator::*;
use crate::numbers::*;
use crate::support::*;

/// A rank whose peer does not come is ended by an abort. The report names the peer, and later calls are refused.
#[test]
fn abort_in_the_middle() {
    let devices = devices(2);
    for (kind, count, carries) in
        [(Kind::AllReduce, 10, Carries::Ll), (Kind::AllGather, 40_000, Carries::Ll128)]
    {
        let ranks = communicator(&devices);
        let stream = devices[0].stream();
        let part = Part::of(kind, count, 0, 2);
        ranks[0].native.run(&part.task, stream.handle()).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(stream.is_busy());
        ranks[0].sequencer.abort();
        stream.synchronize();
        let stuck = ranks[0].sequencer.stuck().unwrap();
        assert!(!stuck.waits.is_empty());
        for wait in &stuck.waits {
            assert_eq!((wait.peer, wait.carries), (1, carries), "{stuck}");
        }
        assert!(stuck.waits.iter().any(|wait| wait.direction == Direction::Receive) || count > 10, "{stuck}");
        let refused = ranks[0].native.run(&part.task, stream.handle()).unwrap_err();
        assert_eq!(refused, TransportError::Aborted { rank: 0 });
        drop((part, stream));
        end(ranks);
    }
}

/// An abort in the middle of a turn, as while a host waits for room for a list: issued work still ends, and then the sequencer is
/// idle.
#[test]
fn abort_within_a_turn() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    let streams = [devices[0].stream(), devices[0].stream()];
    let part = Part::of(Kind::AllReduce, 10, 0, 2);
    let sequencer = &ranks[0].sequencer;
    let gate = Gate::on(&streams[0]);
    let taken = sequencer.take(
        streams[0].handle(),
        Joins { before: &[streams[1].handle()], after: &[streams[1].handle()] },
        |turn| {
            ranks[0].native.launch(turn, &part.task).unwrap();
            sequencer.abort();
            Err(TransportError::Aborted { rank: 0 })
        },
    );
    assert_eq!(taken, Err(TransportError::Aborted { rank: 0 }));
    assert!(!sequencer.is_doubtful());
    assert!(!sequencer.is_idle().unwrap(), "the kernel has not even begun");
    gate.open();
    sequencer.wait_idle(std::time::Duration::from_secs(20)).unwrap();
    streams.iter().for_each(AppStream::synchronize);
    assert!(sequencer.is_idle().unwrap());
    drop((part, streams));
    end(ranks);
}

/// Inconsistent parameters are refused at init.
#[test]
fn inits_that_fail() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    let init = |geometry: native::Geometry, regions: Vec<u64>| {
        let (kernels, sequencer) = (devices[0].native.kernels(2).unwrap(), ranks[0].sequencer.clone());
        let tuning = Tuning::default();
        let limits = Limits { blocks_max: BLOCKS, clusters: true };
        Native::new(NativeParts { kernels, sequencer, geometry, tuning, limits, regions }).map(drop)
    };
    let aligned = vec![1 << 20; 2];
    assert_eq!(init(geometry(2, 0), aligned.clone()), Ok(()));
    let regions = Err(TransportError::Regions { regions: 2, ranks: 2 });
    assert_eq!(init(geometry(2, 0), vec![1 << 20, 100]), regions);
    assert_eq!(init(geometry(2, 0), vec![1 << 20, 0]), regions);
    assert_eq!(init(geometry(3, 0), aligned.clone()), Err(TransportError::Regions { regions: 2, ranks: 3 }));
    assert!(matches!(init(geometry(2, 2), aligned.clone()), Err(TransportError::Arranged(_))));
    let no_channels = native::Geometry { channels: 0, ..geometry(2, 0) };
    assert!(matches!(init(no_channels, aligned), Err(TransportError::Arranged(_))));
    end(ranks);
}

/// While kernels run a rank can say for whom it waits, of launches over LL and in one shot. A rank that has not come, or waits for nobody, says
/// nothing. Nor does a rank that waits in an uneven launch.
#[test]
fn awaited() {
    let devices = devices(3);
    let ranks = communicator(&devices);
    let of = |rank: usize| ranks[rank].native.awaited().unwrap();
    let streams: Vec<_> = devices.iter().map(|device| device.stream()).collect();
    let run = |rank: usize, kind, count| {
        devices[rank].make_current();
        let part = Part::of(kind, count, rank as u32, 3);
        ranks[rank].native.run(&part.task, streams[rank].handle()).unwrap();
        part
    };
    for launch in 0..5 {
        for (wire, count) in [(0, 10), (1, 8_000)] {
            assert!((0..3).all(|rank| of(rank).is_empty()));
            let waits = |ranks| Awaited { wire, launch, ranks };
            let third = run(2, Kind::AllReduce, count);
            eventually("rank 2 waits", || of(2) == [waits(0b011)]);
            let first = run(0, Kind::AllReduce, count);
            eventually("rank 0 waits", || of(0) == [waits(0b010)]);
            eventually("rank 2 waits for rank 1 alone", || of(2) == [waits(0b010)]);
            assert_eq!(of(1), []);
            let second = run(1, Kind::AllReduce, count);
            streams.iter().for_each(|stream| stream.synchronize());
            drop((first, second, third));
        }
        let root = run(0, Kind::Broadcast { root: 1 }, 10);
        assert!((0..3).all(|rank| of(rank).is_empty()));
        let others = [run(1, Kind::Broadcast { root: 1 }, 10), run(2, Kind::Broadcast { root: 1 }, 10)];
        streams.iter().for_each(|stream| stream.synchronize());
        drop((root, others));
    }
    drop(streams);
    end(ranks);
}
