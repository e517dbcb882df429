//! Measures what a communicator costs before it works: its init and the first message to each new peer, in time and
//! memory.

use super::worker::{Job, communicator};
use crate::gpu::{Buffer, Gpu, Stream};
use crate::nccl::{Nccl, nccl_call};
use crate::ranks::Channel;
use crate::text;
use anyhow::Result;
use nccl_sys::types::{ncclComm_t, ncclUint8};
use serde::{Deserialize, Serialize};
use std::ffi::c_int;
use std::time::Instant;

/// Communicators of each side, one after the other. The first also has the costs of the process's first use.
pub const INITS: usize = 3;
/// Bytes of the first messages.
const BYTES: usize = 64 << 10;

/// One number of both sides: the time of the slowest rank, or the memory of the rank that lost most.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FirstUse {
    pub what: What,
    /// 0 for the first communicator of the process.
    pub init: usize,
    pub plain: f64,
    pub windlass: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    InitMs,
    FirstMessageMs,
    SecondPeerMs,
    NextMessageMs,
    InitMib,
    FirstMessageMib,
    SecondPeerMib,
}

const ALL: [(What, &str); 7] = [
    (What::InitMs, "init, ms"),
    (What::FirstMessageMs, "first message to a peer, ms"),
    (What::SecondPeerMs, "first message to another peer, ms"),
    (What::NextMessageMs, "next message to it, ms"),
    (What::InitMib, "memory at init, MiB"),
    (What::FirstMessageMib, "memory at the first message, MiB"),
    (What::SecondPeerMib, "memory at the first to another peer, MiB"),
];

/// Measures both sides in turns; the side that begins alternates. All ranks get the same.
pub fn measure(channel: &mut Channel, gpu: &Gpu, sides: [&Nccl; 2], job: &Job) -> Result<Vec<FirstUse>> {
    let mut found = Vec::new();
    for init in 0..job.inits {
        let mut numbers = [Vec::new(), Vec::new()];
        for turn in 0..2 {
            let side = (init + turn) % 2;
            let own = one(channel, gpu, sides[side], job)?;
            let all = channel.exchange(&own)?;
            numbers[side] = (0..own.len())
                .map(|index| all.iter().map(|numbers| numbers[index]).fold(f64::NEG_INFINITY, f64::max))
                .collect();
        }
        found.extend(ALL.iter().enumerate().map(|(index, (what, _))| FirstUse {
            what: *what,
            init,
            plain: numbers[0][index],
            windlass: numbers[1][index],
        }));
    }
    Ok(found)
}

/// This rank's numbers for one communicator, in the order of [`ALL`].
fn one(channel: &mut Channel, gpu: &Gpu, nccl: &Nccl, job: &Job) -> Result<Vec<f64>> {
    let stream = gpu.stream()?;
    let (send, receive) = (gpu.buffer(BYTES)?, gpu.buffer(BYTES)?);
    let ms = |since: Instant| since.elapsed().as_secs_f64() * 1e3;
    let mut free = gpu.free_bytes()?;
    let mut lost_mib = || -> Result<f64> {
        let before = std::mem::replace(&mut free, gpu.free_bytes()?);
        Ok((before as f64 - free as f64) / f64::from(1 << 20))
    };
    channel.exchange(&0)?;
    let began = Instant::now();
    let communicator = communicator(channel, nccl, job)?;
    let init = (ms(began), lost_mib()?);
    let exchange = Exchange { nccl, communicator, stream: &stream, send: &send, receive: &receive, job };
    let mut message = |distance: usize| -> Result<(f64, f64)> {
        // All ranks wait for each other, so that a late rank does not add to the time.
        channel.exchange(&0)?;
        let began = Instant::now();
        exchange.run(distance)?;
        Ok((ms(began), lost_mib()?))
    };
    let first = message(1)?;
    // With two ranks, the second peer is the rank itself.
    let second = message(2)?;
    let next = message(2)?;
    nccl_call!(nccl, ncclCommDestroy(communicator))?;
    Ok(vec![init.0, first.0, second.0, next.0, init.1, first.1, second.1])
}

struct Exchange<'a> {
    nccl: &'a Nccl,
    communicator: ncclComm_t,
    stream: &'a Stream,
    send: &'a Buffer,
    receive: &'a Buffer,
    job: &'a Job,
}

impl Exchange<'_> {
    /// Sends to the rank `distance` further, receives from the rank `distance` before, and waits for the data.
    fn run(&self, distance: usize) -> Result<()> {
        let Self { nccl, communicator, stream, job, .. } = *self;
        let to = ((job.rank + distance) % job.ranks) as c_int;
        let from = ((job.rank + job.ranks - distance % job.ranks) % job.ranks) as c_int;
        let cuda = stream.cu_stream().cast();
        nccl_call!(nccl, ncclGroupStart())?;
        nccl_call!(nccl, ncclSend(self.send.at(0), BYTES, ncclUint8, to, communicator, cuda))?;
        nccl_call!(nccl, ncclRecv(self.receive.at(0), BYTES, ncclUint8, from, communicator, cuda))?;
        nccl_call!(nccl, ncclGroupEnd())?;
        Ok(stream.synchronize()?)
    }
}

/// A table of the first communicator's numbers and the last one's.
pub fn table(measured: &[FirstUse]) -> String {
    let head = ["first use", "NCCL, first", "windlass, first", "NCCL, last", "windlass, last"];
    let mut rows = Vec::new();
    for (what, words) in ALL {
        let of = |init: usize| measured.iter().find(|one| one.what == what && one.init == init);
        let last = measured.iter().map(|one| one.init).max().unwrap_or(0);
        let (Some(first), Some(last)) = (of(0), of(last)) else { continue };
        let numbers = [first.plain, first.windlass, last.plain, last.windlass];
        rows.push(
            std::iter::once(words.to_owned()).chain(numbers.map(|number| format!("{number:.2}"))).collect(),
        );
    }
    text::table(&head, rows, &[1, 2, 3, 4])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// There is one line for each number, with the first and the last communicator.
    #[test]
    fn tables() {
        let of = |init, plain| FirstUse { what: What::InitMs, init, plain, windlass: 1.5 };
        let text = table(&[of(0, 20.0), of(1, 3.0), of(2, 2.0)]);
        let cells: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(cells, ["init,", "ms", "20.00", "1.50", "2.00", "1.50"]);
        assert_eq!(table(&[]).lines().count(), 1);
    }
}
