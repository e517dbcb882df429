//! Tests of captured groups: replayed, mixed with eager ones, over several streams, and after the end of the p2p transport.

use std::sync::Arc;

use crate::communicator::*;
use crate::support::*;
use crate::traffic::*;
use windlass_transport::p2p::Operation;

/// Graphs and eager groups in turn on two streams, many times without a wait of the host between.
#[test]
fn interleaved_with_eager() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    all(&devices, &ranks, |device, rank| {
        let streams = [device.stream(), device.stream()];
        let sides: Vec<Side> = [3000, 41_000, 100]
            .into_iter()
            .map(|bytes| Side::of(rank.rank, &[message(0, 1, bytes), message(1, 0, bytes + 1)]))
            .collect();
        rank.p2p.run(&sides[0].operations, streams[0].handle()).unwrap();
        // Two operations in one graph. A capture runs nothing.
        let graph = captured(&streams[1], || {
            rank.p2p.run(&sides[1].operations, streams[1].handle()).unwrap();
            rank.p2p.run(&sides[2].operations, streams[1].handle()).unwrap();
        });
        for turn in 0..6 {
            ok(cuGraphLaunch(graph, streams[turn % 2].0));
            rank.p2p.run(&sides[0].operations, streams[turn / 2 % 2].handle()).unwrap();
            streams.iter().for_each(AppStream::synchronize);
            sides.iter().for_each(Side::check);
            sides.iter().for_each(Side::clear);
        }
        for turn in 0..6 {
            ok(cuGraphLaunch(graph, streams[turn % 2].0));
            rank.p2p.run(&sides[0].operations, streams[(turn + 1) % 2].handle()).unwrap();
        }
        streams.iter().for_each(AppStream::synchronize);
        sides.iter().for_each(Side::check);
        ok(cuGraphExecDestroy(graph));
    });
    for rank in &ranks {
        eventually("graphs let go", || rank.holds.are_none());
    }
    end(ranks);
}

/// Two graphs on two streams run side by side; each keeps its own lists.
#[test]
fn two_graphs_with_lists() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    all(&devices, &ranks, |device, rank| {
        let streams = [device.stream(), device.stream()];
        let many =
            |step: u64| -> Vec<Message> { (0..260).map(|index| message(0, 1, index % 9 * step)).collect() };
        let sides =
            [Side::of(rank.rank, &many(3)), Side::of(rank.rank, &many(50)), Side::of(rank.rank, &many(7))];
        let graphs = [0, 1].map(|index| {
            captured(&streams[index], || {
                rank.p2p.run(&sides[index].operations, streams[index].handle()).unwrap();
            })
        });
        for _ in 0..4 {
            ok(cuGraphLaunch(graphs[0], streams[0].0));
            ok(cuGraphLaunch(graphs[1], streams[1].0));
            rank.p2p.run(&sides[2].operations, streams[0].handle()).unwrap();
            streams.iter().for_each(AppStream::synchronize);
            sides.iter().for_each(Side::check);
            sides.iter().for_each(Side::clear);
        }
        graphs.iter().for_each(|graph| ok(cuGraphExecDestroy(*graph)));
    });
    for rank in &ranks {
        eventually("graphs let go", || rank.holds.are_none());
    }
    end(ranks);
}

/// Host memory for lists grows with the living graphs, and lists of destroyed graphs are used again. More operations than a list has are
/// refused, and nothing grows.
#[test]
fn lists_come_back() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    let stream = devices[0].stream();
    let side = Side::of(0, &[message(0, 1, 1); 3000]);
    let too_many = side.operations.repeat(22);
    let run = |operations: &[Operation]| ranks[0].p2p.run(operations, stream.handle());
    for _ in 0..3 {
        // Each graph takes 3 of a slab's 64 parts.
        let graphs: Vec<usize> =
            (0..50).map(|_| captured(&stream, || run(&side.operations).unwrap())).collect();
        ok(cuStreamBeginCapture_v2(stream.0, 0));
        let refusal = run(&too_many).unwrap_err();
        assert_eq!(refusal.result().name(), Some("ncclSystemError"), "{refusal}");
        ok(cuGraphDestroy(made(|out| cuStreamEndCapture(stream.0, out))));
        let rooms = format!("{:?}", devices[0].device_resources).matches("Room").count();
        assert_eq!(rooms, 3, "slabs for 50 graphs");
        exchange(&devices, &ranks, &[message(0, 1, 3); 3000], 1);
        graphs.iter().for_each(|graph| ok(cuGraphExecDestroy(*graph)));
        eventually("graphs let go", || ranks[0].holds.are_none());
    }
    drop((side, stream));
    end(ranks);
}

/// Groups of one capture on two of its streams run one after the other.
#[test]
fn streams_of_one_capture() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    all(&devices, &ranks, |device, rank| {
        use windlass_base::gpu::stream::{Event, Ordering};
        let (one, two) = (device.stream(), device.stream());
        let (fork, join) = (Event::new(device.driver).unwrap(), Event::new(device.driver).unwrap());
        let sides = [3000, 90_000, 70]
            .map(|bytes| Side::of(rank.rank, &[message(0, 1, bytes), message(1, 0, 2 * bytes)]));
        let graph = captured(&one, || {
            fork.record(one.handle(), Ordering::Inside).unwrap();
            device.driver.wait(two.handle(), &fork, Ordering::Inside).unwrap();
            rank.p2p.run(&sides[0].operations, one.handle()).unwrap();
            rank.p2p.run(&sides[1].operations, two.handle()).unwrap();
            rank.p2p.run(&sides[2].operations, one.handle()).unwrap();
            join.record(two.handle(), Ordering::Inside).unwrap();
            device.driver.wait(one.handle(), &join, Ordering::Inside).unwrap();
        });
        for _ in 0..5 {
            ok(cuGraphLaunch(graph, one.0));
        }
        one.synchronize();
        sides.iter().for_each(Side::check);
        ok(cuGraphExecDestroy(graph));
    });
    for rank in &ranks {
        eventually("graphs let go", || rank.holds.are_none());
    }
    end(ranks);
}

/// A call delayed on one stream of a capture delays a later call on another stream.
#[test]
fn order_within_a_capture() {
    use windlass_base::gpu::stream::{Event, Ordering};
    let devices = devices(2);
    let ranks = communicator(&devices);
    let (device, rank) = (&devices[0], &ranks[0]);
    let (one, two) = (device.stream(), device.stream());
    let (fork, join) = (Event::new(device.driver).unwrap(), Event::new(device.driver).unwrap());
    let sides = [Side::of(0, &[message(0, 0, 50)]), Side::of(0, &[message(0, 0, 60)])];
    let mut gate = None;
    let graph = captured(&one, || {
        fork.record(one.handle(), Ordering::Inside).unwrap();
        device.driver.wait(two.handle(), &fork, Ordering::Inside).unwrap();
        gate = Some(Gate::on(&one));
        rank.p2p.run(&sides[0].operations, one.handle()).unwrap();
        rank.p2p.run(&sides[1].operations, two.handle()).unwrap();
        join.record(two.handle(), Ordering::Inside).unwrap();
        device.driver.wait(one.handle(), &join, Ordering::Inside).unwrap();
    });
    ok(cuGraphLaunch(graph, one.0));
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!sides[1].has_arrived());
    gate.unwrap().open();
    one.synchronize();
    sides.iter().for_each(Side::check);
    ok(cuGraphExecDestroy(graph));
    drop((sides, one, two, fork, join));
    end(ranks);
}

/// A graph can run after its p2p transport and regions were dropped, and what it held is freed after it.
#[test]
fn a_graph_outlives_its_p2p() {
    let devices = devices(2);
    let mut ranks = communicator(&devices);
    let streams: Vec<AppStream> = devices.iter().map(Device::stream).collect();
    let messages: Vec<Message> = (0..250).map(|_| message(0, 1, 100)).collect();
    // Buffers are made on the current device.
    let sides = [0, 1].map(|rank| {
        devices[rank].make_current();
        Side::of(rank as u32, &messages)
    });
    let graphs: Vec<usize> = (0..2)
        .map(|index| {
            devices[index].make_current();
            let rank = &ranks[index];
            captured(&streams[index], || {
                rank.p2p.run(&sides[index].operations, streams[index].handle()).unwrap()
            })
        })
        .collect();
    let holds: Vec<_> = ranks.iter().map(|rank| Arc::clone(&rank.holds)).collect();
    ranks.iter().for_each(|rank| rank.p2p.sequencer().wait_idle(soon()).unwrap());
    ranks.clear();
    for device in &devices {
        device.heap.settle().unwrap();
        assert_eq!(device.heap.counters().regions, 1, "the graph holds it");
    }
    // A communicator made meanwhile has its own words for abort and reports.
    let others = communicator(&devices);
    others[0].p2p.sequencer().abort();
    for _ in 0..3 {
        for ((graph, stream), device) in graphs.iter().zip(&streams).zip(&devices) {
            device.make_current();
            ok(cuGraphLaunch(*graph, stream.0));
        }
        streams.iter().for_each(AppStream::synchronize);
        sides[1].check();
        sides[1].clear();
    }
    graphs.iter().for_each(|graph| ok(cuGraphExecDestroy(*graph)));
    holds.iter().for_each(|holds| eventually("graphs let go", || holds.are_none()));
    drop((sides, streams));
    end(others);
}
