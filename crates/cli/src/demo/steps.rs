//! What the ranks do, in order. Every rank runs the same steps with the same counts.

use super::data;
use super::session::{Member, Place, Session};
use crate::collective::{Collective, Kind};
use crate::element::{ELEMENTS, Element, REDUCTIONS, SUM, element};
use crate::gpu::Buffer;
use crate::nccl::nccl_call;
use anyhow::{Context, Result};
use nccl_sys::types::*;
use std::ffi::c_void;

type Step = fn(&mut Session, Member) -> Result<()>;

/// Every step.
pub fn all(session: &mut Session, world: Member) -> Result<()> {
    let steps: [(&str, Step); 11] = [
        ("what the communicator says of itself", questions),
        ("every collective, types and sizes", collectives),
        ("every reduction", reductions),
        ("collectives in place", in_place),
        ("a few training steps without a wait", training),
        ("send/recv rings", rings),
        ("a grouped all-to-all of uneven parts", uneven_all_to_all),
        ("nested groups of collectives and messages", nested_groups),
        ("sub-communicators", sub_communicators),
        ("a pair communicator", pair),
        ("a CUDA graph, replayed", graph),
    ];
    for (name, step) in steps {
        session.channel.progress(&name)?;
        step(session, world)?;
    }
    Ok(())
}

fn call(kind: Kind, count: usize, code: ncclDataType_t) -> Collective {
    Collective { kind, count, element: element(code), reduction: SUM, root: 0 }
}

fn questions(session: &mut Session, world: Member) -> Result<()> {
    let (nccl, handle) = (session.nccl, world.handle);
    let (mut ranks, mut rank, mut device, mut state) = (-1, -1, -1, ncclInternalError);
    session.counted("ncclCommCount", nccl_call!(nccl, ncclCommCount(handle, &mut ranks)))?;
    session.counted("ncclCommUserRank", nccl_call!(nccl, ncclCommUserRank(handle, &mut rank)))?;
    session.counted("ncclCommCuDevice", nccl_call!(nccl, ncclCommCuDevice(handle, &mut device)))?;
    session.counted("ncclCommGetAsyncError", nccl_call!(nccl, ncclCommGetAsyncError(handle, &mut state)))?;
    for (function, found, expected) in [
        ("ncclCommCount", ranks, world.ranks),
        ("ncclCommUserRank", rank, world.rank),
        ("ncclCommCuDevice", device, world.rank),
    ] {
        session
            .check(found as usize == expected, || format!("{function} gives {found}, expected {expected}"));
    }
    session.check(state == ncclSuccess, || format!("ncclCommGetAsyncError gives {}", state.0));
    Ok(())
}

fn collectives(session: &mut Session, world: Member) -> Result<()> {
    let nccl = session.nccl;
    for kind in Kind::ALL.into_iter().filter(|kind| kind.exists_in(nccl)) {
        for element in ELEMENTS {
            let call = Collective { element: *element, ..call(kind, 1023, ncclInt8) };
            session.collective(call, Place::Apart, world)?;
        }
        for count in [0, 1, 17, 4099, 1 << 18] {
            session.collective(call(kind, count, ncclFloat32), Place::Apart, world)?;
        }
        if kind.has_root() {
            let last = Collective { root: world.ranks - 1, ..call(kind, 4099, ncclBfloat16) };
            session.collective(last, Place::Apart, world)?;
        }
    }
    session.collective(call(Kind::AllReduce, 1 << 20, ncclFloat32), Place::Apart, world)?;
    session.collective(call(Kind::AllGather, (1 << 20) / world.ranks + 1, ncclBfloat16), Place::Apart, world)
}

fn reductions(session: &mut Session, world: Member) -> Result<()> {
    for kind in [Kind::AllReduce, Kind::Reduce, Kind::ReduceScatter] {
        for reduction in REDUCTIONS.iter().copied() {
            for code in [ncclFloat32, ncclBfloat16, ncclFloat16, ncclInt32, ncclUint8, ncclFloat64] {
                let call = Collective { reduction, ..call(kind, 1000, code) };
                session.collective(call, Place::Apart, world)?;
            }
        }
    }
    Ok(())
}

fn in_place(session: &mut Session, world: Member) -> Result<()> {
    for kind in [Kind::AllReduce, Kind::Broadcast, Kind::Reduce, Kind::AllGather, Kind::ReduceScatter] {
        for count in [5, 65_537] {
            session.collective(call(kind, count, ncclFloat32), Place::Same, world)?;
        }
    }
    Ok(())
}

/// Parameters gathered, gradients scattered, a loss summed, a seed handed round: all on one stream, checked at the end.
fn training(session: &mut Session, world: Member) -> Result<()> {
    const SHARD: usize = 50_001;
    const LAYERS: usize = 3;
    let Member { rank, ranks, .. } = world;
    let gather = call(Kind::AllGather, SHARD, ncclBfloat16);
    let scatter = call(Kind::ReduceScatter, SHARD, ncclFloat32);
    let loss = Collective { reduction: REDUCTIONS[4], ..call(Kind::AllReduce, 1, ncclFloat32) };
    let seed = call(Kind::Broadcast, 2, ncclInt64);
    let layer = |layer: usize| -> Result<[Buffer; 4]> {
        Ok([
            session.filled(SUM, (SHARD, gather.element), layer, rank)?,
            session.untouched((SHARD * ranks, gather.element))?,
            session.filled(SUM, (SHARD * ranks, scatter.element), layer, rank)?,
            session.untouched((SHARD, scatter.element))?,
        ])
    };
    let layers = (0..LAYERS).map(layer).collect::<Result<Vec<_>>>()?;
    let losses = session.filled(loss.reduction, (1, loss.element), 0, rank)?;
    let seeds = session.filled(SUM, (2, seed.element), 0, rank)?;
    session.run(|session| {
        session.issue(&seed, seeds.at(0), seeds.at(0), world)?;
        for [shard, whole, _, _] in &layers {
            session.issue(&gather, shard.at(0), whole.at(0), world)?;
        }
        for [_, _, gradient, part] in layers.iter().rev() {
            session.issue(&scatter, gradient.at(0), part.at(0), world)?;
        }
        session.issue(&loss, losses.at(0), losses.at(0), world)
    })?;
    for (layer, [_, whole, _, part]) in layers.iter().enumerate() {
        session.check_result(&format!("parameters of layer {layer}"), whole, &gather, layer, world)?;
        session.check_result(&format!("gradients of layer {layer}"), part, &scatter, layer, world)?;
    }
    session.check_result("the loss", &losses, &loss, 0, world)?;
    session.check_result("the seed", &seeds, &seed, 0, world)
}

/// To the next rank and from the previous one, in a group; a ring of one rank sends to itself.
fn ring(
    session: &mut Session,
    from: *const c_void,
    to: *mut c_void,
    what: (usize, Element),
    world: Member,
) -> Result<()> {
    session.group(|session| {
        session.send(from, what, (world.rank + 1) % world.ranks, world)?;
        session.receive(to, what, previous(world), world)
    })
}

fn previous(world: Member) -> usize {
    (world.rank + world.ranks - 1) % world.ranks
}

fn rings(session: &mut Session, world: Member) -> Result<()> {
    for (count, code) in [(0, ncclFloat32), (1, ncclUint8), (4099, ncclBfloat16), (1 << 19, ncclFloat32)] {
        let what = (count, element(code));
        let sent = session.filled(SUM, what, 0, world.rank)?;
        let received = session.untouched(what)?;
        session.run(|session| ring(session, sent.at(0), received.at(0), what, world))?;
        let words = format!("ring of {count} {}", what.1);
        session.check_message(&words, &received, what, (0, previous(world)))?;
    }
    Ok(())
}

/// What `from` sends to `to`: some parts are empty.
fn part(from: usize, to: usize) -> (usize, Element) {
    ((from * 3 + to * 5) % 7 * 1001, element(ncclFloat16))
}

fn uneven_all_to_all(session: &mut Session, world: Member) -> Result<()> {
    let Member { rank, ranks, .. } = world;
    let filled = |peer| session.filled(SUM, part(rank, peer), peer, rank);
    let sent = (0..ranks).map(filled).collect::<Result<Vec<_>>>()?;
    let received = (0..ranks).map(|peer| session.untouched(part(peer, rank))).collect::<Result<Vec<_>>>()?;
    session.run(|session| {
        session.group(|session| {
            (0..ranks).try_for_each(|peer| {
                session.send(sent[peer].at(0), part(rank, peer), peer, world)?;
                session.receive(received[peer].at(0), part(peer, rank), peer, world)
            })
        })
    })?;
    for (peer, received) in received.iter().enumerate() {
        session.check_message(&format!("part of rank {peer}"), received, part(peer, rank), (rank, peer))?;
    }
    Ok(())
}

fn nested_groups(session: &mut Session, world: Member) -> Result<()> {
    let sum = call(Kind::AllReduce, 3001, ncclFloat32);
    let max = Collective { reduction: REDUCTIONS[2], ..call(Kind::AllReduce, 77, ncclInt64) };
    let sums = session.filled(SUM, (sum.count, sum.element), 0, world.rank)?;
    let maxima = session.filled(max.reduction, (max.count, max.element), 1, world.rank)?;
    session.run(|session| {
        session.group(|session| {
            session.issue(&sum, sums.at(0), sums.at(0), world)?;
            session.group(|session| session.issue(&max, maxima.at(0), maxima.at(0), world))
        })
    })?;
    session.check_result("sum in a group", &sums, &sum, 0, world)?;
    session.check_result("maximum in an inner group", &maxima, &max, 1, world)
}

/// The ranks by parity, then again without the last one.
fn sub_communicators(session: &mut Session, world: Member) -> Result<()> {
    let by_parity = Some(world.rank % 2);
    let without_last = (world.rank + 1 < world.ranks).then_some(0);
    for (what, color, members) in [
        ("ranks of equal parity", by_parity, (world.rank % 2..world.ranks).step_by(2).collect::<Vec<_>>()),
        ("all ranks but the last", without_last, (0..world.ranks - 1).collect()),
    ] {
        let Some(part) = session.split(world, color)? else { continue };
        let place = members.iter().position(|member| *member == world.rank);
        session.check(Some(part.rank) == place && part.ranks == members.len(), || {
            format!("{what}: rank {} of {}, expected {place:?} of {}", part.rank, part.ranks, members.len())
        });
        session.collective(call(Kind::AllReduce, 10_007, ncclFloat32), Place::Apart, part)?;
        session.collective(call(Kind::AllGather, 511, ncclInt32), Place::Apart, part)?;
        session.destroy(part)?;
    }
    Ok(())
}

/// The first and the last rank, as pipeline stages have it: there, then back, outside of groups.
fn pair(session: &mut Session, world: Member) -> Result<()> {
    let id = session.shared_id(world.rank)?;
    let place = match world.rank {
        _ if world.ranks < 2 => return Ok(()),
        0 => 0,
        rank if rank == world.ranks - 1 => 1,
        _ => return Ok(()),
    };
    let pair = session.join(id, place, 2)?;
    let (peer, what) = (1 - place, (200_003, element(ncclBfloat16)));
    let sent = session.filled(SUM, what, 0, place)?;
    let received = session.untouched(what)?;
    session.run(|session| {
        if place == 0 {
            session.send(sent.at(0), what, peer, pair)?;
            session.receive(received.at(0), what, peer, pair)
        } else {
            session.receive(received.at(0), what, peer, pair)?;
            session.send(sent.at(0), what, peer, pair)
        }
    })?;
    session.check_message("message of the pair", &received, what, (0, peer))?;
    session.destroy(pair)
}

/// An all-reduce and a ring captured once and run with new data each time.
fn graph(session: &mut Session, world: Member) -> Result<()> {
    const REPLAYS: usize = 4;
    let sum = call(Kind::AllReduce, 6007, ncclFloat32);
    let what = (sum.count, sum.element);
    let [input, total, received] =
        [session.untouched(what)?, session.untouched(what)?, session.untouched(what)?];
    let graph = session.capture(|session| {
        session.issue(&sum, input.at(0), total.at(0), world)?;
        ring(session, input.at(0), received.at(0), what, world)
    })?;
    for round in 0..REPLAYS {
        let values = data::values(SUM, round, world.rank, sum.count);
        input.upload(&session.stream, 0, &sum.element.encode(&values))?;
        session.run(|_| graph.launch().context("cuGraphLaunch"))?;
        session.check_result("sum of a graph", &total, &sum, round, world)?;
        session.check_message("ring of a graph", &received, what, (round, previous(world)))?;
    }
    Ok(())
}
