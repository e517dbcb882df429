//! Communicators and their handles.

use crate::driver::Context;
use crate::operators::Operators;
use crate::order::Order;
use crate::refusal::{Outcome, lock, refuse};
use crate::registration::Registrations;
use crate::rendezvous::Token;
use crate::segment::{Left, Segment, standing};
use crate::settings::settings;
use crate::window::Windows;
use crate::{dump, profiler, strict};
use nccl_sys::*;
use std::collections::HashMap;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

/// The first word of a communicator in NCCL; `MAGIC_GONE` marks one that has ended.
const MAGIC: u64 = 0x0280_0280_0280_0280;
const MAGIC_GONE: u64 = 0x0bad_0280_0bad_0280;

/// The fields of `ncclConfig_t` that the simulator uses.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub blocking: bool,
    pub split_share: bool,
    pub shrink_share: bool,
}

pub struct Communicator {
    pub rank: usize,
    pub ranks: usize,
    pub device: i32,
    pub context: Context,
    pub config: Config,
    pub token: Token,
    /// Shared with children made with splitShare.
    pub order: Arc<Order>,
    segment: OnceLock<Segment>,
    /// Set by abort and revoke: it ends all waits of this rank.
    pub leave: AtomicBool,
    /// Whether the init waits for the other ranks.
    pub is_being_made: AtomicBool,
    pub revoked: AtomicBool,
    pub finalized: AtomicBool,
    pub registrations: Mutex<Registrations>,
    pub windows: Mutex<Windows>,
    pub operators: Mutex<Operators>,
    /// Rounds of collectives that have begun, equal on all ranks.
    pub round: AtomicU64,
    pub operations: AtomicU64,
    /// Eager collectives over registered buffers that were issued.
    pub registered: AtomicU64,
    pub splits: AtomicU64,
    /// Whether the configuration of a child was refused: then NCCL 2.28.9 writes to freed memory in an abort.
    pub has_refused_child: AtomicBool,
    /// Shrinks done, by the set of surviving ranks: an excluded rank does not know of them.
    pub shrinks: Mutex<HashMap<i64, u64>>,
    /// The profiler's context. In NCCL, too, it lies behind the handle.
    pub profiler: &'static AtomicU64,
    /// Numbers of collectives, by function.
    pub numbers: Mutex<HashMap<&'static str, u64>>,
    words: &'static [AtomicU64; 3],
    state: Mutex<ncclResult_t>,
    state_changed: Condvar,
    /// Eager operations that were launched and have not finished.
    pending: Mutex<u64>,
    pending_changed: Condvar,
    /// The thread inside a call, 0 for none.
    caller: AtomicI32,
}

/// Parameters of a new communicator.
pub struct Init {
    pub rank: usize,
    pub ranks: usize,
    pub device: i32,
    pub context: Context,
    pub config: Config,
    pub token: Token,
    pub order: Arc<Order>,
}

impl Communicator {
    pub fn new(init: Init) -> Arc<Communicator> {
        let Init { rank, ranks, device, context, config, token, order } = init;
        order.join();
        // Never freed, so that use after the end is detected.
        let words: &'static [AtomicU64; 3] = Box::leak(Box::new([MAGIC, 0, 0].map(AtomicU64::new)));
        Arc::new(Communicator {
            rank,
            ranks,
            device,
            context,
            config,
            token,
            order,
            segment: OnceLock::new(),
            leave: AtomicBool::new(false),
            is_being_made: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            finalized: AtomicBool::new(false),
            registrations: Mutex::default(),
            windows: Mutex::default(),
            operators: Mutex::default(),
            round: AtomicU64::new(0),
            operations: AtomicU64::new(0),
            registered: AtomicU64::new(0),
            splits: AtomicU64::new(0),
            has_refused_child: AtomicBool::new(false),
            shrinks: Mutex::default(),
            profiler: &words[2],
            numbers: Mutex::default(),
            words,
            state: Mutex::new(ncclSuccess),
            state_changed: Condvar::new(),
            pending: Mutex::new(0),
            pending_changed: Condvar::new(),
            caller: AtomicI32::new(0),
        })
    }

    pub fn set_segment(&self, segment: Segment) {
        let _ = self.segment.set(segment);
    }

    /// The segment. Panics before the end of the init.
    pub fn segment(&self) -> &Segment {
        self.segment.get().expect("used after its init")
    }

    pub fn segment_if_made(&self) -> Option<&Segment> {
        self.segment.get()
    }

    pub fn name(&self) -> String {
        match self.segment.get() {
            Some(segment) => strict::name(segment, self.rank),
            None => {
                format!("communicator {} ({} ranks) rank {}", &self.token.name()[..8], self.ranks, self.rank)
            }
        }
    }

    pub fn state(&self) -> ncclResult_t {
        *lock(&self.state)
    }

    pub fn set_state(&self, code: ncclResult_t) {
        *lock(&self.state) = code;
        self.state_changed.notify_all();
    }

    /// Waits until no background thread works for this communicator, such as on its init.
    pub fn wait_settled(&self) {
        let mut state = lock(&self.state);
        while *state == ncclInProgress {
            state = self.state_changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// Fails while an earlier call is in progress, or if it has failed.
    pub fn ensure_ready(&self) -> Outcome {
        match self.state() {
            ncclSuccess => Ok(()),
            ncclInProgress => refuse(
                ncclInvalidArgument,
                "Attempt to use communicator before the previous operation returned ncclSuccess",
            ),
            code => Err(code),
        }
    }

    pub fn add_pending(&self) {
        *lock(&self.pending) += 1;
    }

    pub fn end_pending(&self) {
        *lock(&self.pending) -= 1;
        self.pending_changed.notify_all();
    }

    /// Waits until all launched eager operations have finished, or an abort. An operation that is stuck ends the process
    /// itself; this wait ends it only for operations that never start.
    pub fn wait_idle(&self, call: &str) {
        let mut pending = lock(&self.pending);
        let mut idle = Duration::ZERO;
        let mut last = *pending;
        while *pending > 0 && !self.leave.load(SeqCst) {
            let nap = Duration::from_millis(50);
            pending = self
                .pending_changed
                .wait_timeout(pending, nap)
                .unwrap_or_else(|poisoned| poisoned.into_inner())
                .0;
            idle = if *pending == last { idle + nap } else { Duration::ZERO };
            last = *pending;
            if let Some(segment) = self.segment.get()
                && segment.header().failed.load(SeqCst) != 0
            {
                strict::follow(segment, self.rank);
            }
            // Twice the limit: an operation that waits for a peer reports first, with more detail.
            if idle > settings().timeout * 2 {
                self.segment()
                    .rank(self.rank)
                    .waits_for
                    .set(&format!("{pending} operations to start, in {call}"));
                dump::stuck(self.segment(), self.rank);
            }
        }
    }

    /// Ends all waits of this rank in this communicator.
    pub fn make_leave(&self, how: u32) {
        self.leave.store(true, SeqCst);
        if let Some(segment) = self.segment.get() {
            segment.rank(self.rank).standing.store(how, SeqCst);
            segment.ring_bell(self.rank);
        }
        self.order.wake();
        self.pending_changed.notify_all();
    }

    /// Marks the calling thread as inside a call; a second thread is misuse.
    pub fn enter(&self, call: &str) -> Inside<'_> {
        // SAFETY: gettid has no preconditions.
        let thread = unsafe { libc::gettid() };
        match self.caller.compare_exchange(0, thread, SeqCst, SeqCst) {
            Ok(_) => Inside { communicator: Some(self) },
            Err(other) => {
                if other != thread && strict::enabled() {
                    let line = format!(
                        "threads {other} and {thread} are inside calls at once ({call} is the second)"
                    );
                    match self.segment.get() {
                        Some(segment) => strict::fail(segment, self.rank, &[line]),
                        None => {
                            strict::say(&format!("{}: {line}", self.name()));
                            strict::leave();
                        }
                    }
                }
                Inside { communicator: None }
            }
        }
    }

    /// Checks a wait for this rank's earlier operations: fails after an abort, ends the process after the time limit.
    pub fn still(&self, idle: Duration, text: &str) -> Result<(), Left> {
        if self.leave.load(SeqCst) {
            return Err(Left);
        }
        let segment = self.segment();
        if segment.header().failed.load(SeqCst) != 0 {
            strict::follow(segment, self.rank);
        }
        if idle > settings().timeout {
            let earlier = "an earlier operation of this rank that has not started";
            segment.rank(self.rank).waits_for.set(&format!("{earlier}, before {text}"));
            dump::stuck(segment, self.rank);
        }
        Ok(())
    }
}

/// A thread inside a call.
pub struct Inside<'a> {
    communicator: Option<&'a Communicator>,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if let Some(communicator) = self.communicator {
            communicator.caller.store(0, SeqCst);
        }
    }
}

/// Live communicators by handle, and texts of how ended ones ended.
#[derive(Default)]
struct Handles {
    live: HashMap<usize, Arc<Communicator>>,
    gone: HashMap<usize, String>,
}

static HANDLES: Mutex<Option<Handles>> = Mutex::new(None);

fn with_handles<T>(body: impl FnOnce(&mut Handles) -> T) -> T {
    body(lock(&HANDLES).get_or_insert_with(Handles::default))
}

/// Gives a communicator its handle.
pub fn publish(communicator: &Arc<Communicator>) -> ncclComm_t {
    let handle = communicator.words.as_ptr() as usize;
    with_handles(|handles| handles.live.insert(handle, communicator.clone()));
    handle as ncclComm_t
}

/// Ends the use of a handle; `how` says why, for the error of later calls.
pub fn withdraw(handle: ncclComm_t, how: &str) {
    let gone = with_handles(|handles| {
        let communicator = handles.live.remove(&(handle as usize))?;
        handles.gone.insert(handle as usize, format!("{} was {how}", communicator.name()));
        Some(communicator)
    });
    if gone.is_some() {
        // SAFETY: a live handle's words are never freed.
        unsafe { (*handle.cast::<AtomicU64>()).store(MAGIC_GONE, SeqCst) };
    }
    if let Some(communicator) = &gone {
        profiler::finalize(communicator);
        communicator.order.leave();
    }
    drop(gone);
}

/// The communicator behind a handle, with NCCL's checks.
pub fn find(handle: ncclComm_t, call: &str) -> Outcome<Arc<Communicator>> {
    if handle.is_null() {
        return refuse(ncclInvalidArgument, format!("{call} : comm argument is NULL"));
    }
    // SAFETY: NCCL reads the first word as well; callers pass readable memory.
    let magic = unsafe { handle.cast::<u64>().read_unaligned() };
    if magic == MAGIC_GONE {
        let how = with_handles(|handles| handles.gone.get(&(handle as usize)).cloned()).unwrap_or_default();
        return refuse(ncclInvalidArgument, format!("{call} : {how}"));
    }
    let live = with_handles(|handles| handles.live.get(&(handle as usize)).cloned());
    match live {
        Some(communicator) if magic == MAGIC => Ok(communicator),
        _ => refuse(ncclInvalidArgument, "Error: corrupted comm object detected"),
    }
}

/// The communicator behind a handle, or `None`. The handle may be any number.
pub fn look_for(handle: ncclComm_t) -> Option<Arc<Communicator>> {
    with_handles(|handles| handles.live.get(&(handle as usize)).cloned())
}

/// Like `find`, for operations. For a communicator that has ended, the process ends: NCCL would read freed memory.
pub fn find_for_operation(handle: ncclComm_t, call: &str) -> Outcome<Arc<Communicator>> {
    let gone = with_handles(|handles| handles.gone.get(&(handle as usize)).cloned());
    if let Some(how) = gone
        && strict::enabled()
    {
        strict::say(&format!("{how}, then used by {call}"));
        strict::leave();
    }
    find(handle, call)
}

/// All live communicators, for the report of leaks.
pub fn live() -> Vec<Arc<Communicator>> {
    with_handles(|handles| handles.live.values().cloned().collect())
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if let Some(segment) = self.segment.get() {
            let record = segment.rank(self.rank);
            let _ = record.standing.compare_exchange(standing::ALIVE, standing::DESTROYED, SeqCst, SeqCst);
        }
    }
}
