//! A rank at work: issues calls, counts them, checks what came out.

use super::counters::Counters;
use super::data;
use crate::collective::{Collective, Kind};
use crate::element::{Element, Reduction, SUM};
use crate::gpu::{Buffer, Gpu, Graph, Stream};
use crate::nccl::{Nccl, nccl_call};
use crate::ranks::Channel;
use anyhow::Result;
use nccl_sys::types::*;
use std::ffi::{c_int, c_void};
use std::time::Instant;

/// Bytes that buffers hold before a call, so that bytes never written are seen.
const UNTOUCHED: u8 = 0xee;

/// Everything that a step needs.
pub struct Session<'a> {
    pub gpu: &'a Gpu,
    pub nccl: &'a Nccl,
    pub stream: Stream,
    pub channel: &'a mut Channel,
    pub counters: Counters,
    pub passed: usize,
    pub failures: Vec<String>,
}

/// A communicator and this rank's place in it.
#[derive(Clone, Copy)]
pub struct Member {
    pub handle: ncclComm_t,
    pub rank: usize,
    pub ranks: usize,
}

impl<'a> Session<'a> {
    pub fn new(gpu: &'a Gpu, nccl: &'a Nccl, channel: &'a mut Channel) -> Result<Self> {
        let mut counters = Counters::default();
        // What opening the library called.
        counters.add("ncclGetVersion", 0);
        Ok(Self { gpu, nccl, stream: gpu.stream()?, channel, counters, passed: 0, failures: Vec::new() })
    }

    pub fn check(&mut self, passed: bool, failure: impl FnOnce() -> String) {
        if passed {
            self.passed += 1;
        } else {
            self.failures.push(failure());
        }
    }

    /// Checks the beginning of a buffer against values.
    pub fn check_data(
        &mut self,
        what: &str,
        buffer: &Buffer,
        element: Element,
        reduction: Option<Reduction>,
        expected: &[f64],
    ) -> Result<()> {
        let bytes = buffer.download(&self.stream, expected.len() * element.bytes())?;
        let found = element.decode(&bytes);
        let difference = data::first_difference(element, reduction, &found, expected);
        self.check(difference.is_none(), || {
            let (index, found, expected) = difference.unwrap_or_default();
            format!("{what}: element {index} is {found}, expected {expected}")
        });
        Ok(())
    }

    /// A buffer with this rank's values of `round` in its first `count` elements.
    pub fn filled(&self, count: usize, element: Element, round: usize, rank: usize) -> Result<Buffer> {
        self.filled_for(SUM, count, element, round, rank)
    }

    pub fn filled_for(
        &self,
        reduction: Reduction,
        count: usize,
        element: Element,
        round: usize,
        rank: usize,
    ) -> Result<Buffer> {
        let values: Vec<f64> = (0..count).map(|index| data::value(reduction, round, rank, index)).collect();
        let buffer = self.gpu.buffer(count * element.bytes())?;
        buffer.upload(&self.stream, &element.encode(&values))?;
        Ok(buffer)
    }

    /// A buffer of `count` elements that nobody has written yet.
    pub fn untouched(&self, count: usize, element: Element) -> Result<Buffer> {
        let bytes = count * element.bytes();
        let buffer = self.gpu.buffer(bytes)?;
        buffer.upload(&self.stream, &vec![UNTOUCHED; bytes])?;
        Ok(buffer)
    }

    /// Issues a collective on this session's stream and counts it.
    pub fn issue(
        &mut self,
        call: &Collective,
        send: *const c_void,
        receive: *mut c_void,
        member: Member,
    ) -> Result<()> {
        self.counters.add(call.kind.function(), call.bytes(member.ranks));
        call.issue(self.nccl, send, receive, member.handle, self.stream.as_nccl())
    }

    /// One collective in buffers of its own, checked.
    pub fn collective(&mut self, call: Collective, place: Place, member: Member) -> Result<()> {
        let Member { rank, ranks, .. } = member;
        let (elements_in, elements_out) = (call.elements_in(ranks), call.elements_out(ranks));
        let in_place = place == Place::Same || call.kind == Kind::Bcast;
        let receive;
        let (send_at, receive_at, sent);
        if in_place {
            // As NCCL's manual has it: the block of this rank lies where the call would put or look for it.
            let (send_offset, receive_offset) = in_place_offsets(&call, rank);
            let bytes = call.element.bytes();
            receive = self.untouched(elements_in.max(elements_out), call.element)?;
            let values: Vec<f64> =
                (0..elements_in).map(|index| data::value(call.reduction, 0, rank, index)).collect();
            let mut whole = vec![UNTOUCHED; elements_in.max(elements_out) * bytes];
            whole[send_offset * bytes..][..elements_in * bytes]
                .copy_from_slice(&call.element.encode(&values));
            receive.upload(&self.stream, &whole)?;
            send_at = receive.at(send_offset * bytes);
            receive_at = receive.at(receive_offset * bytes);
            sent = None;
        } else {
            receive = self.untouched(elements_out, call.element)?;
            let send = self.filled_for(call.reduction, elements_in, call.element, 0, rank)?;
            send_at = send.at(0);
            receive_at = receive.at(0);
            sent = Some(send);
        }
        let started = Instant::now();
        self.issue(&call, send_at, receive_at, member)?;
        self.stream.synchronize()?;
        self.counters.add_seconds(call.kind.function(), started.elapsed().as_secs_f64());
        drop(sent);

        let what = format!(
            "{} of {} {} {}{}{}",
            call.kind.function(),
            call.count,
            call.element,
            if call.kind.reduces() { call.reduction.name } else { "" },
            if call.kind.has_root() { format!(" root {}", call.root) } else { String::new() },
            if in_place { " in place" } else { "" }
        );
        let reduction = call.kind.reduces().then_some(call.reduction);
        if let Some(expected) =
            call.expected(rank, ranks, |rank, index| data::value(call.reduction, 0, rank, index))
        {
            let offset = (receive_at as usize - receive.at(0) as usize) / call.element.bytes();
            let bytes = receive.download(&self.stream, (offset + expected.len()) * call.element.bytes())?;
            let found = call.element.decode(&bytes[offset * call.element.bytes()..]);
            let difference = data::first_difference(call.element, reduction, &found, &expected);
            self.check(difference.is_none(), || {
                let (index, found, expected) = difference.unwrap_or_default();
                format!("{what}: element {index} is {found}, expected {expected}")
            });
        } else if !in_place {
            let bytes = receive.download(&self.stream, elements_out * call.element.bytes())?;
            let untouched = bytes.iter().all(|byte| *byte == UNTOUCHED);
            self.check(untouched, || {
                format!("{what}: wrote into the receive buffer of a rank that is not the root")
            });
        }
        Ok(())
    }

    pub fn send(
        &mut self,
        buffer: *const c_void,
        count: usize,
        element: Element,
        peer: usize,
        to: Member,
    ) -> Result<()> {
        self.counters.add("ncclSend", (count * element.bytes()) as u64);
        let stream = self.stream.as_nccl();
        nccl_call!(self.nccl, ncclSend(buffer, count, element.code, peer as c_int, to.handle, stream))
    }

    pub fn receive(
        &mut self,
        buffer: *mut c_void,
        count: usize,
        element: Element,
        peer: usize,
        from: Member,
    ) -> Result<()> {
        self.counters.add("ncclRecv", (count * element.bytes()) as u64);
        let stream = self.stream.as_nccl();
        nccl_call!(self.nccl, ncclRecv(buffer, count, element.code, peer as c_int, from.handle, stream))
    }

    /// Runs `body` between `ncclGroupStart` and `ncclGroupEnd`.
    pub fn group(&mut self, body: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.counters.add("ncclGroupStart", 0);
        nccl_call!(self.nccl, ncclGroupStart())?;
        let outcome = body(self);
        self.counters.add("ncclGroupEnd", 0);
        let ended = nccl_call!(self.nccl, ncclGroupEnd());
        outcome.and(ended)
    }

    /// What `body` issues, as a graph.
    pub fn capture(&mut self, body: impl FnOnce(&mut Self) -> Result<()>) -> Result<Graph> {
        self.stream.begin_capture()?;
        let outcome = body(self);
        let graph = self.stream.end_capture();
        outcome.and(graph)
    }

    /// Runs `body`, waits for the stream, and counts the time for `functions`.
    pub fn timed(&mut self, functions: &[&str], body: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let started = Instant::now();
        body(self)?;
        self.stream.synchronize()?;
        let seconds = started.elapsed().as_secs_f64();
        for function in functions {
            self.counters.add_seconds(function, seconds);
        }
        Ok(())
    }

    /// Joins a new communicator of `ranks` ranks under an id that rank 0 of this run handed out.
    pub fn join(&mut self, id: ncclUniqueId, rank: usize, ranks: usize) -> Result<Member> {
        let started = Instant::now();
        self.counters.add("ncclCommInitRank", 0);
        let handle = self.nccl.communicator(ranks, id, rank)?;
        self.counters.add_seconds("ncclCommInitRank", started.elapsed().as_secs_f64());
        Ok(Member { handle, rank, ranks })
    }

    /// This rank's place in the part of `parent` with its color; `None` for no color. Ranks keep their order.
    pub fn split(&mut self, parent: Member, color: Option<usize>) -> Result<Option<Member>> {
        let started = Instant::now();
        self.counters.add("ncclCommSplit", 0);
        let mut handle = std::ptr::null_mut();
        let code = color.map_or(NCCL_SPLIT_NOCOLOR, |color| color as c_int);
        let key = parent.rank as c_int;
        let none = std::ptr::null_mut();
        nccl_call!(self.nccl, ncclCommSplit(parent.handle, code, key, &mut handle, none))?;
        self.counters.add_seconds("ncclCommSplit", started.elapsed().as_secs_f64());
        if color.is_none() {
            self.check(handle.is_null(), || "ncclCommSplit without a color made a communicator".into());
            return Ok(None);
        }
        let (mut rank, mut ranks) = (-1, -1);
        self.counters.add("ncclCommUserRank", 0);
        self.counters.add("ncclCommCount", 0);
        nccl_call!(self.nccl, ncclCommUserRank(handle, &mut rank))?;
        nccl_call!(self.nccl, ncclCommCount(handle, &mut ranks))?;
        Ok(Some(Member { handle, rank: rank as usize, ranks: ranks as usize }))
    }

    pub fn destroy(&mut self, member: Member) -> Result<()> {
        let started = Instant::now();
        self.counters.add("ncclCommDestroy", 0);
        nccl_call!(self.nccl, ncclCommDestroy(member.handle))?;
        self.counters.add_seconds("ncclCommDestroy", started.elapsed().as_secs_f64());
        Ok(())
    }
}

/// Whether a collective works in one buffer or two.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Same,
    Apart,
}

/// Where the send and the receive part begin within one buffer, in elements.
fn in_place_offsets(call: &Collective, rank: usize) -> (usize, usize) {
    match call.kind {
        Kind::AllGather | Kind::Gather => (rank * call.count, 0),
        Kind::ReduceScatter | Kind::Scatter => (0, rank * call.count),
        _ => (0, 0),
    }
}
