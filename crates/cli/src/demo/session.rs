//! A rank at work: issues calls, counts them, checks what came out.

use super::counters::Made;
use super::data;
use crate::collective::{Collective, Kind};
use crate::element::{Element, Reduction, SUM};
use crate::gpu::{self, Buffer, Gpu, Graph, Stream};
use crate::nccl::{Nccl, id_bytes, id_from_bytes, nccl_call};
use crate::ranks::Channel;
use anyhow::{Context, Result};
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
    pub made: Made,
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
        let mut session = Self {
            gpu,
            nccl,
            stream: gpu.stream()?,
            channel,
            made: Made::new(),
            passed: 0,
            failures: Vec::new(),
        };
        // What opening the library called.
        session.count("ncclGetVersion", 0);
        Ok(session)
    }

    /// Counts a call that moves so many bytes.
    pub fn count(&mut self, function: &str, bytes: u64) {
        let counted = self.made.entry(function.to_owned()).or_default();
        counted.calls += 1;
        counted.bytes += bytes;
    }

    /// Counts a call that moves no data, and gives its result.
    pub fn counted(&mut self, function: &str, result: Result<()>) -> Result<()> {
        self.count(function, 0);
        result
    }

    pub fn check(&mut self, passed: bool, failure: impl FnOnce() -> String) {
        if passed {
            self.passed += 1;
        } else {
            self.failures.push(failure());
        }
    }

    /// Checks that a buffer begins with what `from` sent: its values of `round`.
    pub fn check_message(
        &mut self,
        what: &str,
        buffer: &Buffer,
        (count, element): (usize, Element),
        (round, from): (usize, usize),
    ) -> Result<()> {
        let found = element.decode(&buffer.download(&self.stream, count * element.bytes())?);
        self.compare(0.0, what, &found, &data::values(SUM, round, from, count));
        Ok(())
    }

    /// Checks that a buffer begins with the result of a collective over the ranks' values of `round`.
    pub fn check_result(
        &mut self,
        what: &str,
        buffer: &Buffer,
        call: &Collective,
        round: usize,
        member: Member,
    ) -> Result<()> {
        let value = |rank, index| data::value(call.reduction, round, rank, index);
        let expected = call.expected(member.rank, member.ranks, value).unwrap_or_default();
        let found = buffer.download(&self.stream, expected.len() * call.element.bytes())?;
        let tolerance = data::tolerance(call.element, call.reduction, member.ranks);
        self.compare(tolerance, what, &call.element.decode(&found), &expected);
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
    pub fn filled(
        &self,
        reduction: Reduction,
        (count, element): (usize, Element),
        round: usize,
        rank: usize,
    ) -> Result<Buffer> {
        let buffer = self.gpu.buffer(count * element.bytes())?;
        buffer.upload(&self.stream, 0, &element.encode(&data::values(reduction, round, rank, count)))?;
        Ok(buffer)
    }

    /// A buffer of `count` elements that nobody has written yet.
    pub fn untouched(&self, (count, element): (usize, Element)) -> Result<Buffer> {
        let bytes = count * element.bytes();
        let buffer = self.gpu.buffer(bytes)?;
        buffer.upload(&self.stream, 0, &vec![UNTOUCHED; bytes])?;
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
        self.count(call.kind.function(), call.bytes(member.ranks));
        call.issue(self.nccl, send, receive, member.handle, self.stream.cu_stream().cast())
    }

    /// One collective in buffers of its own, checked.
    pub fn collective(&mut self, call: Collective, place: Place, member: Member) -> Result<()> {
        let layout = Layout::of(&call, place, member);
        let bytes = call.element.bytes();
        let values = data::values(call.reduction, 0, member.rank, call.elements_in(member.ranks));
        let receive = self.untouched((layout.elements, call.element))?;
        let apart = if layout.shared { None } else { Some(self.gpu.buffer(values.len() * bytes)?) };
        let send = apart.as_ref().unwrap_or(&receive);
        send.upload(&self.stream, layout.send_at * bytes, &call.element.encode(&values))?;
        let (send_at, receive_at) = (send.at(layout.send_at * bytes), receive.at(layout.receive_at * bytes));
        self.run(|session| session.issue(&call, send_at, receive_at, member))?;
        let found = receive.download(&self.stream, layout.elements * bytes)?;
        let what = describe(&call, &layout);
        let value = |rank, index| data::value(call.reduction, 0, rank, index);
        match call.expected(member.rank, member.ranks, value) {
            Some(expected) => {
                let received = &call.element.decode(&found)[layout.receive_at..][..expected.len()];
                let tolerance = data::tolerance(call.element, call.reduction, member.ranks);
                self.compare(tolerance, &what, received, &expected);
            }
            None if layout.shared => {}
            None => self.check(found.iter().all(|byte| *byte == UNTOUCHED), || {
                format!("{what}: wrote into the receive buffer of a rank that is not the root")
            }),
        }
        Ok(())
    }

    pub fn send(
        &mut self,
        buffer: *const c_void,
        (count, element): (usize, Element),
        peer: usize,
        to: Member,
    ) -> Result<()> {
        self.count("ncclSend", (count * element.bytes()) as u64);
        let stream = self.stream.cu_stream().cast();
        nccl_call!(self.nccl, ncclSend(buffer, count, element.code, peer as c_int, to.handle, stream))
    }

    pub fn receive(
        &mut self,
        buffer: *mut c_void,
        (count, element): (usize, Element),
        peer: usize,
        from: Member,
    ) -> Result<()> {
        self.count("ncclRecv", (count * element.bytes()) as u64);
        let stream = self.stream.cu_stream().cast();
        nccl_call!(self.nccl, ncclRecv(buffer, count, element.code, peer as c_int, from.handle, stream))
    }

    /// Runs `body` between `ncclGroupStart` and `ncclGroupEnd`.
    pub fn group(&mut self, body: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.counted("ncclGroupStart", nccl_call!(self.nccl, ncclGroupStart()))?;
        let outcome = body(self);
        outcome.and(self.counted("ncclGroupEnd", nccl_call!(self.nccl, ncclGroupEnd())))
    }

    /// What `body` issues, as a graph.
    pub fn capture(&mut self, body: impl FnOnce(&mut Self) -> Result<()>) -> Result<Graph> {
        let stream = self.stream.clone();
        gpu::capture(&stream, || body(self))
    }

    /// Runs `body` and waits for the stream.
    pub fn run(&mut self, body: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        body(self)?;
        self.stream.synchronize().context("cuStreamSynchronize")
    }

    /// A new id, made by rank 0; all ranks must call.
    pub fn shared_id(&mut self, rank: usize) -> Result<ncclUniqueId> {
        let mut own = Vec::new();
        if rank == 0 {
            self.count("ncclGetUniqueId", 0);
            own = id_bytes(&self.nccl.unique_id()?);
        }
        id_from_bytes(&self.channel.share_first(&own)?)
    }

    /// Joins a new communicator of `ranks` ranks under an id that rank 0 of this run handed out.
    pub fn join(&mut self, id: ncclUniqueId, rank: usize, ranks: usize) -> Result<Member> {
        self.count("ncclCommInitRank", 0);
        Ok(Member { handle: self.nccl.communicator(ranks, id, rank)?, rank, ranks })
    }

    /// This rank's place in the part of `parent` with its color; `None` for no color. Ranks keep their order.
    pub fn split(&mut self, parent: Member, color: Option<usize>) -> Result<Option<Member>> {
        let mut handle = std::ptr::null_mut();
        let code = color.map_or(NCCL_SPLIT_NOCOLOR, |color| color as c_int);
        let (key, none) = (parent.rank as c_int, std::ptr::null_mut());
        let split = nccl_call!(self.nccl, ncclCommSplit(parent.handle, code, key, &mut handle, none));
        self.counted("ncclCommSplit", split)?;
        if color.is_none() {
            self.check(handle.is_null(), || "ncclCommSplit without a color made a communicator".into());
            return Ok(None);
        }
        let (mut rank, mut ranks) = (-1, -1);
        self.counted("ncclCommUserRank", nccl_call!(self.nccl, ncclCommUserRank(handle, &mut rank)))?;
        self.counted("ncclCommCount", nccl_call!(self.nccl, ncclCommCount(handle, &mut ranks)))?;
        Ok(Some(Member { handle, rank: rank as usize, ranks: ranks as usize }))
    }

    pub fn destroy(&mut self, member: Member) -> Result<()> {
        self.counted("ncclCommDestroy", nccl_call!(self.nccl, ncclCommDestroy(member.handle)))
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
