//! Collectives, sends and receives: from the call to the host function on the user's stream.

use crate::communicator::{Communicator, find_for_operation};
use crate::driver::{Captured, driver};
use crate::operators::{self, Recipe};
use crate::order::Place;
use crate::refusal::{Outcome, lock, outcome, refuse};
use crate::registration::Use;
use crate::segment::CallFacts;
use crate::settings::settings;
use crate::{
    agreement, arguments, collective, group, import, lookup, p2p, profiler, reentry, sorting, strict, window,
    work,
};
use nccl_sys::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AlltoAll,
    Gather,
    Scatter,
    Send,
    Recv,
}

impl Kind {
    /// NCCL's name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "AllReduce",
            Kind::Broadcast => "Broadcast",
            Kind::Reduce => "Reduce",
            Kind::AllGather => "AllGather",
            Kind::ReduceScatter => "ReduceScatter",
            Kind::AlltoAll => "AlltoAll",
            Kind::Gather => "Gather",
            Kind::Scatter => "Scatter",
            Kind::Send => "Send",
            Kind::Recv => "Recv",
        }
    }

    pub fn reduces(self) -> bool {
        matches!(self, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter)
    }

    pub fn has_root(self) -> bool {
        matches!(self, Kind::Broadcast | Kind::Reduce | Kind::Gather | Kind::Scatter)
    }

    pub fn is_message(self) -> bool {
        matches!(self, Kind::Send | Kind::Recv)
    }
}

/// One call as plain data. `root` is the peer of a send or receive.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub kind: Kind,
    pub send: usize,
    pub receive: usize,
    pub count: usize,
    pub datatype: ncclDataType_t,
    pub operator: ncclRedOp_t,
    pub root: i32,
    pub stream: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    pub address: usize,
    pub bytes: usize,
}

impl Call {
    pub fn element_bytes(&self) -> usize {
        self.datatype.size_bytes().unwrap_or(1)
    }

    /// The bytes of `count` elements.
    pub fn bytes(&self) -> usize {
        self.count * self.element_bytes()
    }

    /// The buffers that this rank reads and writes; `None` where it does not.
    pub fn buffers(&self, rank: usize, ranks: usize) -> (Option<Buffer>, Option<Buffer>) {
        let (one, all) = (self.bytes(), self.bytes() * ranks);
        let is_root = rank as i32 == self.root;
        let (send, receive) = match self.kind {
            Kind::AllReduce => (Some(one), Some(one)),
            Kind::Broadcast => (is_root.then_some(one), Some(one)),
            Kind::Reduce => (Some(one), is_root.then_some(one)),
            Kind::AllGather => (Some(one), Some(all)),
            Kind::ReduceScatter => (Some(all), Some(one)),
            Kind::AlltoAll => (Some(all), Some(all)),
            Kind::Gather => (Some(one), is_root.then_some(all)),
            Kind::Scatter => (is_root.then_some(all), Some(one)),
            Kind::Send => (Some(one), None),
            Kind::Recv => (None, Some(one)),
        };
        let buffer = |address, bytes: Option<usize>| bytes.map(|bytes| Buffer { address, bytes });
        (buffer(self.send, send), buffer(self.receive, receive))
    }

    /// The call with its arguments, for people.
    pub fn describe(&self) -> String {
        let datatype = CODES[2].values.iter().find(|(_, value)| *value == self.datatype.0);
        let datatype = datatype.map_or("unknown", |(name, _)| name);
        let (name, count, stream) = (self.kind.name(), self.count, self.stream);
        let (send, receive) = (self.send, self.receive);
        match self.kind {
            Kind::Send => format!(
                "Send(buff {send:#x}, count {count}, {datatype}, peer {}, stream {stream:#x})",
                self.root
            ),
            Kind::Recv => {
                format!(
                    "Recv(buff {receive:#x}, count {count}, {datatype}, peer {}, stream {stream:#x})",
                    self.root
                )
            }
            kind => {
                let root = if kind.has_root() { format!(", root {}", self.root) } else { String::new() };
                let operator = CODES[1].values.iter().find(|(_, value)| *value == self.operator.0);
                let operator = operator
                    .map_or_else(|| format!("operator {}", self.operator.0), |(name, _)| (*name).into());
                let operator = if kind.reduces() { format!(", {operator}") } else { String::new() };
                format!(
                    "{name}(sendbuff {send:#x}, recvbuff {receive:#x}, count {count}, {datatype}{operator}{root}, stream {stream:#x})"
                )
            }
        }
    }
}

/// A checked call that waits for the end of its group.
pub struct Queued {
    pub communicator: Arc<Communicator>,
    pub call: Call,
    recipe: Option<Recipe>,
    /// The profiler's event of the program's call.
    api: usize,
}

/// A collective with the result of looking up its buffers.
pub struct Collective {
    pub call: Call,
    pub recipe: Option<Recipe>,
    pub facts: CallFacts,
    /// The address at which peers write, see `lookup::Found`.
    pub arrives: Option<usize>,
}

/// All calls of one group on one communicator: one operation in its total order.
struct Operation {
    communicator: Arc<Communicator>,
    collectives: Vec<Collective>,
    messages: Vec<p2p::Message>,
    uses: Vec<Use>,
    windows: Vec<window::Use>,
    captured: bool,
    ticket: Option<u64>,
    text: String,
    events: Vec<usize>,
}

/// Checks a call and launches it when the outermost group ends; at once if none is open.
pub fn enqueue(handle: ncclComm_t, call: Call) -> Outcome {
    let communicator = group::note(find_for_operation(handle, call.kind.name()))?;
    if settings().log {
        strict::say(&format!("{}: {}", communicator.name(), call.describe()));
    }
    let inside = communicator.enter(call.kind.name());
    group::start();
    let held = check(&communicator, call).and_then(|queued| queued.map_or(Ok(()), group::hold));
    drop(inside);
    let held = group::note(held);
    held.and(group::end())?;
    if communicator.config.blocking { Ok(()) } else { ask_state(handle) }
}

/// The state of a nonblocking communicator, which NCCL returns from calls, read through the public `ncclCommGetAsyncError`.
fn ask_state(handle: ncclComm_t) -> Outcome {
    let mut state = ncclSuccess;
    if let Some(get_async_error) = reentry::get_async_error() {
        // SAFETY: the handle was found just now, the place is writable.
        outcome(unsafe { get_async_error(handle, &mut state) })?;
    }
    outcome(state)
}

fn check(communicator: &Arc<Communicator>, call: Call) -> Outcome<Option<Queued>> {
    arguments::check(communicator, &call)?;
    if call.count == 0 && !call.kind.is_message() {
        return Ok(None);
    }
    let recipe = match call.kind.reduces() {
        true => Some(operators::recipe(communicator, call.operator, call.datatype)?),
        false => None,
    };
    let api = match profiler::is_off() {
        true => 0,
        false => profiler::called(communicator, &call, group::depth(), driver()?.is_capturing(call.stream)?),
    };
    Ok(Some(Queued { communicator: communicator.clone(), call, recipe, api }))
}

/// The first release whose groups run their communicators in the same order on all ranks (`ncclGroupCommJoin`).
const ORDERED_SINCE: i32 = 22_602;

/// Launches the calls of an ended group, communicator by communicator.
pub fn launch_all(mut queued: Vec<Queued>) -> Outcome {
    if settings().version >= ORDERED_SINCE {
        // Calls of one communicator, and ranks of one init, stay in order.
        queued.sort_by_key(|entry| entry.communicator.token);
    }
    while let Some(first) = queued.first() {
        let communicator = first.communicator.clone();
        let (mine, rest) =
            queued.into_iter().partition(|entry| Arc::ptr_eq(&entry.communicator, &communicator));
        queued = rest;
        group::in_context_of(&communicator, || launch(&communicator, mine))?;
    }
    Ok(())
}

fn launch(communicator: &Arc<Communicator>, queued: Vec<Queued>) -> Outcome {
    let _inside = communicator.enter("ncclGroupEnd");
    if communicator.finalized.load(SeqCst) && !communicator.leave.load(SeqCst) && strict::enabled() {
        let line = format!("{} after ncclCommFinalize or ncclCommDestroy", queued[0].call.describe());
        strict::fail(communicator.segment(), communicator.rank, &[line]);
    }
    let driver = driver()?;
    let mut streams: Vec<usize> = Vec::new();
    for entry in &queued {
        if !streams.contains(&entry.call.stream) {
            streams.push(entry.call.stream);
        }
    }
    let captured = driver.is_capturing(streams[0])?;
    let calls: Vec<Call> = queued.iter().map(|entry| entry.call).collect();
    let texts: Vec<String> = calls.iter().map(Call::describe).collect();
    let mut operation = Operation {
        communicator: communicator.clone(),
        collectives: Vec::new(),
        messages: Vec::new(),
        uses: Vec::new(),
        windows: Vec::new(),
        captured,
        ticket: None,
        text: texts.join(" + "),
        events: Vec::new(),
    };
    let profiled: Vec<(Call, usize)> = queued.iter().map(|entry| (entry.call, entry.api)).collect();
    let mut registered = 0;
    for Queued { call, recipe, .. } in as_they_run(queued, communicator.ranks) {
        let buffers = call.buffers(communicator.rank, communicator.ranks);
        let lookup::Found { coverage, registered: is_registered, uses, windows, arrives } =
            lookup::look_up(communicator, &call, buffers, captured);
        operation.uses.extend(uses);
        operation.windows.extend(windows);
        registered += u64::from(is_registered);
        if call.kind.is_message() {
            operation.messages.push(p2p::Message::new(&call, coverage, captured));
        } else {
            let facts = agreement::facts(communicator, &call, recipe.as_ref(), buffers, coverage, captured);
            operation.collectives.push(Collective { call, recipe, facts, arrives });
        }
    }
    p2p::check_self(communicator, &operation.messages)?;
    if !operation.collectives.is_empty() && communicator.ranks > 1 {
        communicator.segment().prepare_staging()?;
    }
    for stream in &streams[1..] {
        driver.order(*stream, streams[0])?;
    }
    let mut place = Place::Eager;
    if captured {
        let (now, last) = (driver.captured(streams[0])?, *lock(&communicator.order.captured));
        let capture = |captured: Option<Captured>| captured.map(|captured| captured.capture);
        place = if capture(now) == capture(last) { Place::InCapture } else { Place::FirstOfCapture };
        if let (Some(now), Some(Captured { capture, node: Some(node) })) = (now, last)
            && now.capture == capture
            && now.node != Some(node)
        {
            driver.order_behind(node, streams[0])?;
        }
    }
    communicator.order.before(place, streams[0], communicator.context)?;
    if !captured {
        driver.need_stack(stack_bytes(&operation))?;
        operation.ticket = Some(communicator.order.ticket());
        communicator.add_pending();
    }
    let is_counted = !captured && !operation.collectives.is_empty();
    let (ticket, order) = (operation.ticket, communicator.order.clone());
    // A captured operation lives as long as the process: the library is not told when its last graph is destroyed.
    let function = if captured { run_captured } else { run_eager };
    let work = work::of(&calls, communicator.ranks, registered == calls.len() as u64);
    let launched = profiler::launch(communicator, &profiled, captured, |events| {
        operation.events = events;
        let data = Box::into_raw(Box::new(operation));
        driver.launch(streams[0], function, data.cast(), &work.into()).inspect_err(|_| {
            // SAFETY: the driver did not take it.
            drop(unsafe { Box::from_raw(data) });
        })
    });
    if let Err(code) = launched {
        if !captured {
            order.skip(ticket);
            communicator.end_pending();
        }
        return Err(code);
    }
    communicator.registered.fetch_add(registered, SeqCst);
    communicator.order.after(place, streams[0])?;
    if captured {
        *lock(&communicator.order.captured) = driver.captured(streams[0])?;
    }
    streams[1..].iter().try_for_each(|stream| driver.order(streams[0], *stream))?;
    if is_counted { fail_if_asked() } else { Ok(()) }
}

fn as_they_run(queued: Vec<Queued>, ranks: usize) -> Vec<Queued> {
    if queued.len() < 2 || settings().version < sorting::SORTED_SINCE {
        return queued;
    }
    let calls: Vec<Call> = queued.iter().map(|entry| entry.call).collect();
    let mut queued: Vec<Option<Queued>> = queued.into_iter().map(Some).collect();
    sorting::places(&calls, ranks).into_iter().filter_map(|place| queued[place].take()).collect()
}

/// Returns an error for launches of `WINDLASS_SIM_FAILED_LAUNCHES`, which run in spite of it.
fn fail_if_asked() -> Outcome {
    static LAUNCHES: AtomicU64 = AtomicU64::new(0);
    match settings().failed_launches.contains(&(LAUNCHES.fetch_add(1, SeqCst) + 1)) {
        true => refuse(ncclSystemError, "a launch failed, as WINDLASS_SIM_FAILED_LAUNCHES asks"),
        false => Ok(()),
    }
}

/// Bytes of stack a thread of NCCL 2.28.9's kernels for sm_90: those for messages need most.
fn stack_bytes(operation: &Operation) -> usize {
    if operation.messages.is_empty() { 1736 } else { 1976 }
}

extern "C" fn run_eager(data: *mut libc::c_void) {
    // SAFETY: `launch` made the box; an eager host function runs once.
    let operation = unsafe { Box::from_raw(data.cast::<Operation>()) };
    import::host_function(|| {
        profiler::run(&operation.communicator, &operation.events, || run(&operation));
        let Operation { communicator, uses, windows, .. } = *operation;
        drop((uses, windows));
        communicator.end_pending();
    });
}

extern "C" fn run_captured(data: *mut libc::c_void) {
    // SAFETY: `launch` leaked the box of a captured operation.
    let operation = unsafe { &*data.cast::<Operation>() };
    run(operation);
}

fn run(operation: &Operation) {
    if catch_unwind(AssertUnwindSafe(|| run_in_order(operation))).is_err() {
        // The operation has not ended in its order, so peers would hang silently.
        strict::fail(
            operation.communicator.segment(),
            operation.communicator.rank,
            &[format!("internal error of the simulator in {}", operation.text)],
        );
    }
}

fn run_in_order(operation: &Operation) {
    let Operation { communicator, collectives, messages, captured, ticket, text, .. } = operation;
    let segment = communicator.segment();
    let record = segment.rank(communicator.rank);
    if *captured
        && communicator.finalized.load(SeqCst)
        && !communicator.leave.load(SeqCst)
        && strict::enabled()
    {
        let line = format!("a graph replays {text} after the communicator was destroyed");
        strict::fail(segment, communicator.rank, &[line]);
    }
    if communicator.order.begin(*ticket, |idle| communicator.still(idle, text)).is_err() {
        communicator.order.skip(*ticket);
        return;
    }
    record.operation.store(communicator.operations.fetch_add(1, SeqCst) + 1, SeqCst);
    record.call.set(text);
    let _ = collectives
        .iter()
        .try_for_each(|collective| collective::run(communicator, collective))
        .and_then(|()| p2p::run(communicator, messages));
    record.call.set("");
    record.waits_for.set("");
    communicator.order.end(*ticket);
}
