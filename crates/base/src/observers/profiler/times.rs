//! The device's times of calls that Windlass runs: two events of CUDA around each launch, which cost its kernel nothing. Calls of one launch
//! share its times. Windlass's worker asks whether the events are done, and tells plugins then, so no call waits.
//!
//! Times count from an event beside which the host's clock was read, so that a stop less its start is the device's own measure.

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::mem::{swap, take};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use once_cell::sync::OnceCell;

use super::{Profiled, calls};
use crate::gpu::capture::Relaxed;
use crate::gpu::stream::{Event, Ordering::Inside, Stream};
use crate::gpu::{Failure, Home, StreamHandle, opened};

/// While so many launches are not done, calls are told without times.
const PENDING_MAX: usize = 1 << 12;
/// Times further from the event from which they count are too coarse: CUDA gives milliseconds in 24 bits.
const NEAR_NS: i64 = 1_000_000_000;

/// A call that was told of, with a channel, and is not launched yet.
pub(super) struct Awaited {
    pub(super) profiled: Arc<Profiled>,
    /// The communicator's handle.
    pub(super) handle: usize,
    pub(super) rank: i32,
    /// Its collective's or message's event.
    pub(super) event: usize,
    pub(super) is_message: bool,
}

/// The calls that a launch runs.
#[derive(Clone, Copy, Debug)]
pub enum Launched {
    /// So many collectives, in the order in which they were told of.
    Collectives(usize),
    /// All messages.
    Messages,
}

/// A launch, which may not be done.
struct Pending {
    home: Home,
    events: [Event; 2],
    calls: Vec<Awaited>,
}

/// What gives the times of a device's context.
struct Clock {
    home: Home,
    /// Times count from here.
    base: Event,
    /// The host's clock then.
    base_ns: i64,
    /// Events that nobody uses.
    spare: Vec<[Event; 2]>,
}

/// Held while plugins are told. The other locks come after it.
static TELLING: Mutex<()> = Mutex::new(());
/// Launches in their order. Held for a few stores.
static PENDING: Mutex<VecDeque<Pending>> = Mutex::new(VecDeque::new());
/// Held across calls of the driver that do not wait.
static CLOCKS: Mutex<Vec<Clock>> = Mutex::new(Vec::new());
/// Wakes what calls [`settle`].
static WAKE: OnceCell<fn()> = OnceCell::new();

thread_local! {
    /// The communicator whose kernels this thread launches, and the calls that it has told of and not launched.
    static HERE: RefCell<(usize, Vec<Awaited>)> = const { RefCell::new((0, Vec::new())) };
}

/// An ending thread may have none.
fn here<T: Default>(with: impl FnOnce(&mut (usize, Vec<Awaited>)) -> T) -> T {
    HERE.try_with(|here| with(&mut here.borrow_mut())).unwrap_or_default()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Names what wakes the thread that calls [`settle`].
pub fn settle_by(wake: fn()) {
    let _ = WAKE.set(wake);
}

/// Whether launches are pending.
pub fn is_any_pending() -> bool {
    !lock(&PENDING).is_empty()
}

pub(super) fn has_room() -> bool {
    lock(&PENDING).len() < PENDING_MAX
}

pub(super) fn await_launch(call: Awaited) {
    here(|(_, awaited)| awaited.push(call));
}

/// The calls that this thread has told of are launched, or never will be.
pub(super) fn forget_launches() {
    here(|(_, awaited)| awaited.clear());
}

/// The kernels that this thread launches from now on are of this communicator.
pub fn launches(handle: usize) {
    here(|(of, _)| *of = handle);
}

/// Calls that another thread launches than the one that has told of them.
pub struct HandedOver(Vec<Awaited>);

/// Takes what this thread has told of and not launched.
pub fn hand_over() -> HandedOver {
    HandedOver(here(|(_, awaited)| take(awaited)))
}

impl HandedOver {
    /// Runs what launches the calls.
    pub fn run<T>(self, launch: impl FnOnce() -> T) -> T {
        here(|(_, awaited)| *awaited = self.0);
        let result = launch();
        forget_launches();
        result
    }
}

/// Launches a kernel on a stream that is not captured, or is: then nothing is timed. The context is current.
#[inline]
pub fn timed(
    home: &Home,
    stream: StreamHandle,
    is_captured: bool,
    what: Launched,
    launch: impl FnOnce() -> Result<(), Failure>,
) -> Result<(), Failure> {
    if !crate::observers::are_on() {
        return launch();
    }
    let begun = begin(home, stream, is_captured, what);
    launch()?;
    begun.into_iter().for_each(|begun| begun.end(stream));
    Ok(())
}

#[cold]
fn begin(home: &Home, stream: StreamHandle, is_captured: bool, what: Launched) -> Option<Pending> {
    let calls = taken(what);
    if is_captured || calls.is_empty() {
        return None;
    }
    let begin = || -> Result<Pending, Failure> {
        let events = pair(home)?;
        events[0].record(stream, Inside)?;
        Ok(Pending { home: *home, events, calls })
    };
    begin().inspect_err(|failure| log::debug!("no device time of a call: {failure}")).ok()
}

/// The calls of a launch that plugins hear of.
fn taken(what: Launched) -> Vec<Awaited> {
    let (is_message, mut left) = match what {
        Launched::Collectives(count) => (false, count),
        Launched::Messages => (true, usize::MAX),
    };
    here(|(of, awaited)| {
        let is_next = |call: &mut Awaited| {
            let is_next = left > 0 && call.handle == *of && call.is_message == is_message;
            left -= usize::from(is_next);
            is_next
        };
        awaited.extract_if(.., is_next).filter(|call| call.event != 0).collect()
    })
}

/// Two events of a context.
fn pair(home: &Home) -> Result<[Event; 2], Failure> {
    let mut clocks = lock(&CLOCKS);
    if let Some(clock) = clocks.iter_mut().find(|clock| clock.home.context() == home.context()) {
        return clock.spare.pop().map_or_else(|| new_pair(home), Ok);
    }
    let _relaxed = Relaxed::enter(home.driver)?;
    let (stream, base) = (Stream::new(home.driver)?, Event::timed(home.driver)?);
    let base_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as i64);
    base.record(stream.handle, Inside)?;
    let pair = new_pair(home)?;
    // A context that was reset has taken its events with it.
    clocks.retain(|clock| clock.home.is_there());
    clocks.push(Clock { home: *home, base, base_ns, spare: Vec::new() });
    Ok(pair)
}

fn new_pair(home: &Home) -> Result<[Event; 2], Failure> {
    Ok([Event::timed(home.driver)?, Event::timed(home.driver)?])
}

impl Pending {
    fn end(self, stream: StreamHandle) {
        if self.events[1].record(stream, Inside).is_err() {
            return;
        }
        let mut pending = lock(&PENDING);
        let is_first = pending.is_empty();
        pending.push_back(self);
        drop(pending);
        if is_first {
            WAKE.get().into_iter().for_each(|wake| wake());
        }
    }

    /// When the launch began and ended; none if it is not done.
    fn times(&mut self) -> Result<Option<[u64; 2]>, Failure> {
        let _entered = self.home.enter()?;
        let mut clocks = lock(&CLOCKS);
        let own = clocks.iter_mut().find(|clock| clock.home.context() == self.home.context());
        let none = || Failure::without_code("cuEventElapsedTime", "an event to count from", String::new());
        let clock = own.ok_or_else(none)?;
        if !self.events[1].is_done()? || !clock.base.is_done()? {
            return Ok(None);
        }
        let began = self.events[0].since(&clock.base)?;
        let start_ns = clock.base_ns + began;
        let stop_ns = start_ns + self.events[1].since(&self.events[0])?;
        if began > NEAR_NS {
            swap(&mut clock.base, &mut self.events[1]);
            clock.base_ns = stop_ns;
        }
        Ok(Some([start_ns as u64, stop_ns as u64]))
    }

    fn give_back(self) {
        let mut clocks = lock(&CLOCKS);
        if let Some(clock) = clocks.iter_mut().find(|clock| clock.home.context() == self.home.context()) {
            clock.spare.push(self.events);
        }
    }
}

/// Tells plugins of the launches that are done.
pub fn settle() {
    let _telling = lock(&TELLING);
    settle_now();
}

fn settle_now() {
    let pending = take(&mut *lock(&PENDING));
    let (mut remaining, mut behind) = (VecDeque::new(), BTreeSet::new());
    for mut one in pending {
        // A communicator's launches run one after the other.
        let profiled = Arc::as_ptr(&one.calls[0].profiled);
        match if behind.contains(&profiled) { Ok(None) } else { one.times() } {
            Ok(Some(times)) => {
                one.calls.iter().for_each(|call| calls::channel(call, times));
                one.give_back();
            }
            Ok(None) => {
                behind.insert(profiled);
                remaining.push_back(one);
            }
            Err(failure) => log::debug!("no device time of a call: {failure}"),
        }
    }
    let mut pending = lock(&PENDING);
    remaining.append(&mut pending);
    *pending = remaining;
}

/// A communicator ends: its launches are done, or were aborted. Plugins hear nothing of those. `is_last`: there is no other.
pub(super) fn ended(profiled: &Arc<Profiled>, is_last: bool) {
    if opened().is_none_or(|driver| driver.is_in_forked_child()) {
        return;
    }
    let _telling = lock(&TELLING);
    settle_now();
    let is_aborted = |one: &Pending| Arc::ptr_eq(&one.calls[0].profiled, profiled);
    let mut pending = lock(&PENDING);
    let (aborted, others): (VecDeque<_>, _) = take(&mut *pending).into_iter().partition(is_aborted);
    *pending = others;
    drop(pending);
    aborted.into_iter().for_each(Pending::give_back);
    if is_last {
        free();
    }
}

fn free() {
    take(&mut *lock(&CLOCKS)).into_iter().for_each(|clock| drop({ clock.home }.give_back(clock)));
}

/// The process ends: plugins may be gone.
pub fn end() {
    take(&mut *lock(&PENDING)).into_iter().for_each(|one| drop({ one.home }.give_back(one)));
    free();
}
