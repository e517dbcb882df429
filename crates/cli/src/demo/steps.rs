//! What the ranks do, in order. Every rank runs the same steps with the same counts.

use super::data;
use super::session::{Member, Place, Session};
use crate::collective::{Collective, Kind};
use crate::element::{ELEMENTS, Element, REDUCTIONS, SUM, element};
use crate::nccl::nccl_call;
use anyhow::Result;
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
        session.channel.progress(name)?;
        step(session, world)?;
    }
    Ok(())
}

fn call(kind: Kind, count: usize, code: ncclDataType_t) -> Collective {
    Collective { kind, count, element: element(code), reduction: SUM, root: 0 }
}

fn questions(session: &mut Session, world: Member) -> Result<()> {
    for function in ["ncclCommCount", "ncclCommUserRank", "ncclCommCuDevice", "ncclCommGetAsyncError"] {
        session.counters.add(function, 0);
    }
    let (mut ranks, mut rank, mut device) = (-1, -1, -1);
    nccl_call!(session.nccl, ncclCommCount(world.handle, &mut ranks))?;
    nccl_call!(session.nccl, ncclCommUserRank(world.handle, &mut rank))?;
    nccl_call!(session.nccl, ncclCommCuDevice(world.handle, &mut device))?;
    let mut state = ncclInternalError;
    nccl_call!(session.nccl, ncclCommGetAsyncError(world.handle, &mut state))?;
    session.check(ranks as usize == world.ranks, || {
        format!("ncclCommCount gives {ranks}, expected {}", world.ranks)
    });
    session.check(rank as usize == world.rank, || {
        format!("ncclCommUserRank gives {rank}, expected {}", world.rank)
    });
    session.check(device as usize == world.rank, || {
        format!("ncclCommCuDevice gives {device}, expected {}", world.rank)
    });
    session.check(state == ncclSuccess, || format!("ncclCommGetAsyncError gives {}", state.0));
    Ok(())
}

fn collectives(session: &mut Session, world: Member) -> Result<()> {
    let kinds = Kind::ALL.into_iter().filter(|kind| kind.exists_in(session.nccl)).collect::<Vec<_>>();
    for kind in kinds {
        for element in ELEMENTS {
            session.collective(
                Collective { element: *element, ..call(kind, 1023, ncclInt8) },
                Place::Apart,
                world,
            )?;
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
        for reduction in REDUCTIONS {
            for code in [ncclFloat32, ncclBfloat16, ncclFloat16, ncclInt32, ncclUint8, ncclFloat64] {
                let reduction = *reduction;
                session.collective(
                    Collective { reduction, ..call(kind, 1000, code) },
                    Place::Apart,
                    world,
                )?;
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
    let mut layers = Vec::new();
    for layer in 0..LAYERS {
        layers.push((
            session.filled(SHARD, gather.element, layer, rank)?,
            session.untouched(SHARD * ranks, gather.element)?,
            session.filled(SHARD * ranks, scatter.element, layer, rank)?,
            session.untouched(SHARD, scatter.element)?,
        ));
    }
    let losses = session.filled_for(loss.reduction, 1, loss.element, 0, rank)?;
    let seeds = session.filled(2, seed.element, 0, rank)?;
    session.run(|session| {
        session.issue(&seed, seeds.at(0), seeds.at(0), world)?;
        for (shard, whole, _, _) in &layers {
            session.issue(&gather, shard.at(0), whole.at(0), world)?;
        }
        for (_, _, gradient, part) in layers.iter().rev() {
            session.issue(&scatter, gradient.at(0), part.at(0), world)?;
        }
        session.issue(&loss, losses.at(0), losses.at(0), world)
    })?;
    for (layer, (_, whole, _, part)) in layers.iter().enumerate() {
        let value = |rank, index| data::value(SUM, layer, rank, index);
        let expected = gather.expected(rank, ranks, value).unwrap_or_default();
        session.check_data(&format!("parameters of layer {layer}"), whole, gather.element, &expected)?;
        let expected = scatter.expected(rank, ranks, value).unwrap_or_default();
        session.check_data(&format!("gradients of layer {layer}"), part, scatter.element, &expected)?;
    }
    let expected = loss.expected(rank, ranks, |rank, index| data::value(loss.reduction, 0, rank, index));
    let tolerance = data::tolerance(loss.element, loss.reduction, ranks);
    session.check_within(tolerance, "the loss", &losses, loss.element, &expected.unwrap_or_default())?;
    let expected = seed.expected(rank, ranks, |rank, index| data::value(SUM, 0, rank, index));
    session.check_data("the seed", &seeds, seed.element, &expected.unwrap_or_default())
}

/// To the next rank and from the previous one, in a group; a ring of one rank sends to itself.
fn ring(
    session: &mut Session,
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    element: Element,
    world: Member,
) -> Result<()> {
    let (next, previous) = ((world.rank + 1) % world.ranks, (world.rank + world.ranks - 1) % world.ranks);
    session.group(|session| {
        session.send(from, count, element, next, world)?;
        session.receive(to, count, element, previous, world)
    })
}

fn rings(session: &mut Session, world: Member) -> Result<()> {
    let previous = (world.rank + world.ranks - 1) % world.ranks;
    for (count, code) in [(0, ncclFloat32), (1, ncclUint8), (4099, ncclBfloat16), (1 << 19, ncclFloat32)] {
        let element = element(code);
        let sent = session.filled(count, element, 0, world.rank)?;
        let received = session.untouched(count, element)?;
        session.run(|session| ring(session, sent.at(0), received.at(0), count, element, world))?;
        let expected: Vec<f64> = (0..count).map(|index| data::value(SUM, 0, previous, index)).collect();
        session.check_data(&format!("ring of {count} {element}"), &received, element, &expected)?;
    }
    Ok(())
}

/// Elements that `from` sends to `to`: some parts are empty.
fn part(from: usize, to: usize) -> usize {
    (from * 3 + to * 5) % 7 * 1001
}

fn uneven_all_to_all(session: &mut Session, world: Member) -> Result<()> {
    let element = element(ncclFloat16);
    let Member { rank, ranks, .. } = world;
    let mut sent = Vec::new();
    let mut received = Vec::new();
    for peer in 0..ranks {
        sent.push(session.filled(part(rank, peer), element, peer, rank)?);
        received.push(session.untouched(part(peer, rank), element)?);
    }
    session.run(|session| {
        session.group(|session| {
            for peer in 0..ranks {
                session.send(sent[peer].at(0), part(rank, peer), element, peer, world)?;
                session.receive(received[peer].at(0), part(peer, rank), element, peer, world)?;
            }
            Ok(())
        })
    })?;
    for (peer, received) in received.iter().enumerate() {
        let expected: Vec<f64> =
            (0..part(peer, rank)).map(|index| data::value(SUM, rank, peer, index)).collect();
        session.check_data(&format!("part of rank {peer}"), received, element, &expected)?;
    }
    Ok(())
}

fn nested_groups(session: &mut Session, world: Member) -> Result<()> {
    let Member { rank, ranks, .. } = world;
    let sum = call(Kind::AllReduce, 3001, ncclFloat32);
    let max = Collective { reduction: REDUCTIONS[2], ..call(Kind::AllReduce, 77, ncclInt64) };
    let sums = session.filled(sum.count, sum.element, 0, rank)?;
    let maxima = session.filled(max.count, max.element, 1, rank)?;
    session.run(|session| {
        session.group(|session| {
            session.issue(&sum, sums.at(0), sums.at(0), world)?;
            session.group(|session| session.issue(&max, maxima.at(0), maxima.at(0), world))
        })
    })?;
    let expected =
        sum.expected(rank, ranks, |rank, index| data::value(SUM, 0, rank, index)).unwrap_or_default();
    session.check_data("sum in a group", &sums, sum.element, &expected)?;
    let expected =
        max.expected(rank, ranks, |rank, index| data::value(SUM, 1, rank, index)).unwrap_or_default();
    session.check_data("maximum in an inner group", &maxima, max.element, &expected)
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
        0 => 0,
        rank if rank == world.ranks - 1 => 1,
        _ => return Ok(()),
    };
    if world.ranks < 2 {
        return Ok(());
    }
    let pair = session.join(id, place, 2)?;
    let peer = 1 - place;
    let (count, element) = (200_003, element(ncclBfloat16));
    let sent = session.filled(count, element, 0, place)?;
    let received = session.untouched(count, element)?;
    session.run(|session| {
        if place == 0 {
            session.send(sent.at(0), count, element, peer, pair)?;
            session.receive(received.at(0), count, element, peer, pair)
        } else {
            session.receive(received.at(0), count, element, peer, pair)?;
            session.send(sent.at(0), count, element, peer, pair)
        }
    })?;
    let expected: Vec<f64> = (0..count).map(|index| data::value(SUM, 0, peer, index)).collect();
    session.check_data("message of the pair", &received, element, &expected)?;
    session.destroy(pair)
}

/// An all-reduce and a ring captured once and run with new data each time.
fn graph(session: &mut Session, world: Member) -> Result<()> {
    const REPLAYS: usize = 4;
    let Member { rank, ranks, .. } = world;
    let sum = call(Kind::AllReduce, 6007, ncclFloat32);
    let (count, float) = (sum.count, sum.element);
    let input = session.gpu.buffer(count * float.bytes())?;
    let total = session.untouched(count, float)?;
    let received = session.untouched(count, float)?;
    let graph = session.capture(|session| {
        session.issue(&sum, input.at(0), total.at(0), world)?;
        ring(session, input.at(0), received.at(0), count, float, world)
    })?;
    for round in 0..REPLAYS {
        let values: Vec<f64> = (0..count).map(|index| data::value(SUM, round, rank, index)).collect();
        input.upload(&session.stream, &float.encode(&values))?;
        session.run(|session| graph.launch(&session.stream))?;
        let expected = sum.expected(rank, ranks, |rank, index| data::value(SUM, round, rank, index));
        session.check_data("sum of a graph", &total, float, &expected.unwrap_or_default())?;
        let previous = (rank + ranks - 1) % ranks;
        let expected: Vec<f64> = (0..count).map(|index| data::value(SUM, round, previous, index)).collect();
        session.check_data("ring of a graph", &received, float, &expected)?;
    }
    Ok(())
}
