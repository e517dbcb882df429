//! A rank at work: issues calls, counts them, checks what came out.

use super::counters::Counters;
use super::data;
use crate::collective::{Collective, Kind};
use crate::element::{Element, Reduction, SUM};
use crate::gpu::{Buffer, Gpu, Graph, Stream};
use crate::nccl::{Nccl, id_bytes, id_from_bytes, nccl_call};
use crate::ranks::Channel;
use anyhow::Result;
use nccl_sys::types::*;
use std::ffi::{c_int, c_void};

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

    /// Checks the beginning of a buffer against values, exactly.
    pub fn check_data(
        &mut self,
        what: &str,
        buffer: &Buffer,
        element: Element,
        expected: &[f64],
    ) -> Result<()> {
        self.check_within(0.0, what, buffer, element, expected)
    }

    /// Checks the beginning of a buffer against values; `tolerance` is relative.
    pub fn check_within(
        &mut self,
        tolerance: f64,
        what: &str,
        buffer: &Buffer,
        element: Element,
        expected: &[f64],
    ) -> Result<()> {
        let bytes = buffer.download(&self.stream, expected.len() * element.bytes())?;
        self.compare(tolerance, what, &element.decode(&bytes), expected);
        Ok(())
    }

    fn compare(&mut self, tolerance: f64, what: &str, found: &[f64], expected: &[f64]) {
        let difference = data::first_difference(found, expected, tolerance);
        self.check(difference.is_none(), || {
            let (index, found, expected) = difference.unwrap_or_default();
            format!("{what}: element {index} is {found}, expected {expected}")
        });
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
        let layout = Layout::of(&call, place, member);
        let values: Vec<f64> = (0..call.elements_in(member.ranks))
            .map(|index| data::value(call.reduction, 0, member.rank, index))
            .collect();
        let bytes = call.element.bytes();
        let receive = self.untouched(layout.elements, call.element)?;
        let send = self.gpu.buffer(values.len() * bytes)?;
        let send_at = if layout.shared {
            let mut whole = vec![UNTOUCHED; layout.elements * bytes];
            whole[layout.send_at * bytes..][..values.len() * bytes]
                .copy_from_slice(&call.element.encode(&values));
            receive.upload(&self.stream, &whole)?;
            receive.at(layout.send_at * bytes)
        } else {
            send.upload(&self.stream, &call.element.encode(&values))?;
            send.at(0)
        };
        let receive_at = receive.at(layout.receive_at * bytes);
        self.run(|session| session.issue(&call, send_at, receive_at, member))?;
        self.check_collective(&call, &layout, &receive, member)
    }

    fn check_collective(
        &mut self,
        call: &Collective,
        layout: &Layout,
        receive: &Buffer,
        member: Member,
    ) -> Result<()> {
        let Member { rank, ranks, .. } = member;
        let what = describe(call, layout);
        let bytes = receive.download(&self.stream, layout.elements * call.element.bytes())?;
        match call.expected(rank, ranks, |rank, index| data::value(call.reduction, 0, rank, index)) {
            Some(expected) => {
                let received = &call.element.decode(&bytes)[layout.receive_at..][..expected.len()];
                let tolerance = if call.kind.reduces() {
                    data::tolerance(call.element, call.reduction, ranks)
                } else {
                    0.0
                };
                self.compare(tolerance, &what, received, &expected);
            }
            None if layout.shared => {}
            None => {
                let untouched = bytes.iter().all(|byte| *byte == UNTOUCHED);
                self.check(untouched, || {
                    format!("{what}: wrote into the receive buffer of a rank that is not the root")
                });
            }
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

    /// Runs `body` and waits for the stream.
    pub fn run(&mut self, body: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        body(self)?;
        self.stream.synchronize()
    }

    /// A new id, made by rank 0; all ranks must call.
    pub fn shared_id(&mut self, rank: usize) -> Result<ncclUniqueId> {
        let mut own = Vec::new();
        if rank == 0 {
            self.counters.add("ncclGetUniqueId", 0);
            own = id_bytes(&self.nccl.unique_id()?);
        }
        id_from_bytes(&self.channel.share_first(&own)?)
    }

    /// Joins a new communicator of `ranks` ranks under an id that rank 0 of this run handed out.
    pub fn join(&mut self, id: ncclUniqueId, rank: usize, ranks: usize) -> Result<Member> {
        self.counters.add("ncclCommInitRank", 0);
        let handle = self.nccl.communicator(ranks, id, rank)?;
        Ok(Member { handle, rank, ranks })
    }

    /// This rank's place in the part of `parent` with its color; `None` for no color. Ranks keep their order.
    pub fn split(&mut self, parent: Member, color: Option<usize>) -> Result<Option<Member>> {
        self.counters.add("ncclCommSplit", 0);
        let mut handle = std::ptr::null_mut();
        let code = color.map_or(NCCL_SPLIT_NOCOLOR, |color| color as c_int);
        let key = parent.rank as c_int;
        let none = std::ptr::null_mut();
        nccl_call!(self.nccl, ncclCommSplit(parent.handle, code, key, &mut handle, none))?;
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
        self.counters.add("ncclCommDestroy", 0);
        nccl_call!(self.nccl, ncclCommDestroy(member.handle))?;
        Ok(())
    }
}

/// Whether a collective works in one buffer or two.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Same,
    Apart,
}

/// Where a collective finds and leaves its data, in elements.
struct Layout {
    /// Whether both lie in one buffer.
    shared: bool,
    /// Length of the receive buffer, or of the one buffer.
    elements: usize,
    send_at: usize,
    receive_at: usize,
}

impl Layout {
    /// In place, the block of a rank lies where the call would put it or look for it, as NCCL's manual has it.
    fn of(call: &Collective, place: Place, member: Member) -> Self {
        let (elements_in, elements_out) = (call.elements_in(member.ranks), call.elements_out(member.ranks));
        if place == Place::Apart && call.kind != Kind::Bcast {
            return Self { shared: false, elements: elements_out, send_at: 0, receive_at: 0 };
        }
        let block = member.rank * call.count;
        let (send_at, receive_at) = match call.kind {
            Kind::AllGather | Kind::Gather => (block, 0),
            Kind::ReduceScatter | Kind::Scatter => (0, block),
            _ => (0, 0),
        };
        Self { shared: true, elements: elements_in.max(elements_out), send_at, receive_at }
    }
}

/// A call in words.
fn describe(call: &Collective, layout: &Layout) -> String {
    let mut words = format!("{} of {} {}", call.kind.function(), call.count, call.element);
    if call.kind.reduces() {
        words += &format!(" {}", call.reduction);
    }
    if call.kind.has_root() {
        words += &format!(" root {}", call.root);
    }
    if layout.shared {
        words += " in place";
    }
    words
}
