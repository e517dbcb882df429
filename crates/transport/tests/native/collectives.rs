//! Tests that every collective gives NCCL's results, eager and from graphs.

use windlass_transport::native::{Kind, Task};

use crate::communicator::*;
use crate::numbers::*;
use crate::support::*;

fn kinds(ranks: u32) -> Vec<Kind> {
    let last = ranks - 1;
    vec![
        Kind::AllReduce,
        Kind::Broadcast { root: last },
        Kind::Reduce { root: 0 },
        Kind::AllGather,
        Kind::ReduceScatter,
    ]
}

/// All kinds one after the other, of sizes for every family of kernels and of none, without a wait of the host between.
#[test]
fn each_of_every_size() {
    for count in [2, 3] {
        if !has_devices(count) {
            continue;
        }
        let devices = devices(count as usize);
        let ranks = communicator(&devices);
        all(&devices, &ranks, |device, rank| {
            let stream = device.stream();
            let of = |(kind, count)| Part::of(kind, count, rank.rank, ranks.len() as u32);
            let sizes = [1, 0, 1000, 40_000, 3, 90_000];
            let calls =
                sizes.iter().flat_map(|size| kinds(ranks.len() as u32).into_iter().map(|kind| (kind, *size)));
            let parts: Vec<Part> = calls.map(of).collect();
            for part in &parts {
                rank.native.run(&part.task, stream.handle()).unwrap();
            }
            stream.synchronize();
            parts.iter().for_each(Part::check);
        });
        end(ranks);
    }
}

/// Several collectives as one kernel, eager and from a graph, between single ones.
#[test]
fn several_as_one() {
    for count in [2, 3] {
        if !has_devices(count) {
            continue;
        }
        let devices = devices(count as usize);
        let ranks = communicator(&devices);
        all(&devices, &ranks, |device, rank| {
            let stream = device.stream();
            let of = |kind, count| Part::of(kind, count, rank.rank, ranks.len() as u32);
            let sizes = [1, 700, 3, 4000, 64, 65, 2000];
            let reductions: Vec<Part> = [Kind::AllReduce, Kind::ReduceScatter]
                .into_iter()
                .flat_map(|kind| sizes.map(|size| of(kind, size)))
                .collect();
            let copies: Vec<Part> = sizes.into_iter().map(|size| of(Kind::AllGather, size)).collect();
            let alone = of(Kind::AllReduce, 50);
            let (sums, moves) = (batch(&reductions), batch(&copies));
            let graph = captured(&stream, || {
                rank.native.run(&sums, stream.handle()).unwrap();
                rank.native.run(&moves, stream.handle()).unwrap();
            });
            for _ in 0..3 {
                rank.native.run(&moves, stream.handle()).unwrap();
                rank.native.run(&alone.task, stream.handle()).unwrap();
                rank.native.run(&sums, stream.handle()).unwrap();
                stream.synchronize();
                let parts = || reductions.iter().chain(&copies).chain([&alone]);
                parts().for_each(Part::check);
                parts().for_each(Part::clear);
                ok(cuGraphLaunch(graph, stream.0));
                stream.synchronize();
                reductions.iter().chain(&copies).for_each(Part::check);
            }
            ok(cuGraphExecDestroy(graph));
        });
        for rank in &ranks {
            eventually("graphs let go", || rank.holds.are_none());
        }
        end(ranks);
    }
}

fn batch(parts: &[Part]) -> Task {
    let one = |part: &Part| match &part.task {
        Task::One(collective) => *collective,
        other => panic!("{other:?}"),
    };
    Task::Batch(parts.iter().map(one).collect())
}

/// Graphs and eager collectives in turn on two streams.
#[test]
fn graphs_among_eager() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    all(&devices, &ranks, |device, rank| {
        let streams = [device.stream(), device.stream()];
        let part = |kind, count| Part::of(kind, count, rank.rank, 2);
        let parts =
            [part(Kind::AllReduce, 100), part(Kind::AllGather, 30_000), part(Kind::ReduceScatter, 70)];
        let graph = captured(&streams[1], || {
            rank.native.run(&parts[1].task, streams[1].handle()).unwrap();
            rank.native.run(&parts[2].task, streams[1].handle()).unwrap();
        });
        for turn in 0..6 {
            ok(cuGraphLaunch(graph, streams[turn % 2].0));
            rank.native.run(&parts[0].task, streams[turn / 2 % 2].handle()).unwrap();
            streams.iter().for_each(AppStream::synchronize);
            parts.iter().for_each(Part::check);
            parts.iter().for_each(Part::clear);
        }
        ok(cuGraphExecDestroy(graph));
    });
    for rank in &ranks {
        eventually("graphs let go", || rank.holds.are_none());
    }
    end(ranks);
}
