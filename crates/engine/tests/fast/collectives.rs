//! Every collective gives what NCCL's would, eager and from graphs.

use windlass_engine::fast::Kind;

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
        Kind::AlltoAll,
    ]
}

/// All kinds one after the other, sizes of every family of kernels and none, nobody waiting on the host in between.
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
                rank.fast.run(&part.task, stream.handle()).unwrap();
            }
            stream.synchronize();
            parts.iter().for_each(Part::check);
        });
        end(ranks);
    }
}

/// Graphs and eager collectives by turns on two streams.
#[test]
fn graphs_among_eager() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    all(&devices, &ranks, |device, rank| {
        let streams = [device.stream(), device.stream()];
        let part = |kind, count| Part::of(kind, count, rank.rank, 2);
        let parts = [part(Kind::AllReduce, 100), part(Kind::AllGather, 30_000), part(Kind::AlltoAll, 70)];
        let graph = captured(&streams[1], || {
            rank.fast.run(&parts[1].task, streams[1].handle()).unwrap();
            rank.fast.run(&parts[2].task, streams[1].handle()).unwrap();
        });
        for turn in 0..6 {
            ok(cuGraphLaunch(graph, streams[turn % 2].0));
            rank.fast.run(&parts[0].task, streams[turn / 2 % 2].handle()).unwrap();
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
