//! The device's times of calls that Windlass runs: two events of CUDA around each launch, which cost its kernel nothing. Calls of one launch
//! share its times. Windlass's worker asks whether the events are done, and tells plugins then, so no call waits.
//!
//! Times count from an event beside which the host's clock was read, so that a stop less its start is the device's own measure.

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::mem::{swap, take};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use once_cell::sync::OnceCell;

use super::{KNOWN, Profiled, calls};
use crate::gpu::capture::Relaxed;
use crate::gpu::stream::{Event, Ordering::Inside, Stream};
use crate::gpu::{Failure, Home, StreamHandle, opened};
use crate::lock::Mutex;

/// While so many launches are not done, calls are told without times.
const PENDING_MAX: usize = 1 << 12;
/// Times further from the event from which they count are too coarse: CUDA gives milliseconds in 24 bits.
const NEAR_NS: i64 = 1_000_000_000;

/// A call that was told of, with a channel, and is not launched yet.
pub(super) struct ToldCall {
    pub(super) profiled: Arc<Profiled>,
    /// The communicator's handle.
    pub(super) handle: usize,
    pub(super) rank: i32,
    /// Its collective's or message's event.
    pub(super) event: usize,
    pub(super) is_message: bool,
}

/// A launch, which may not be done.
struct TimedLaunch {
    home: Home,
    events: [Event; 2],
    calls: Vec<ToldCall>,
}

/// What gives the times of a device's context.
struct DeviceClock {
    home: Home,
    /// Times count from here; and the host's clock then.
    base: Arc<(Event, i64)>,
    /// Events that nobody uses.
    spare: Vec<[Event; 2]>,
}

/// Held while plugins are told. The other locks come after it.
static TELLING: Mutex<()> = Mutex::new(());
/// Launches in their order. Held for a few stores.
static PENDING: Mutex<VecDeque<TimedLaunch>> = Mutex::new(VecDeque::new());
/// Held across calls of the driver that do not wait.
static CLOCKS: Mutex<Vec<DeviceClock>> = Mutex::new(Vec::new());
/// Wakes what calls [`settle`].
static WAKE: OnceCell<fn()> = OnceCell::new();

thread_local! {
    /// The communicator whose kernels this thread launches, and the calls that it has told of and not launched.
    static HERE: RefCell<(usize, Vec<ToldCall>)> = const { RefCell::new((0, Vec::new())) };
}

/// An ending thread may have none.
fn here<T: Default>(with: impl FnOnce(&mut (usize, Vec<ToldCall>)) -> T) -> T {
    HERE.try_with(|here| with(&mut here.borrow_mut())).unwrap_or_default()
}

/// Names what wakes the thread that calls [`settle`].
pub fn settle_by(wake: fn()) {
    let _ = WAKE.set(wake);
}

/// How many launches are pending.
pub fn pending() -> usize {
    PENDING.lock().len()
}

pub(super) fn has_room() -> bool {
    pending() < PENDING_MAX
}

pub(super) fn await_launch(call: ToldCall) {
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
pub struct HandedOver(Vec<ToldCall>);

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

/// Launches a kernel on a stream, in its context. It runs so many collectives, in the order in which they were told of, or else all messages.
/// Nothing that is captured has times.
#[inline]
pub fn timed(
    home: &Home,
    stream: StreamHandle,
    is_captured: bool,
    collectives: Option<usize>,
    launch: impl FnOnce() -> Result<(), Failure>,
) -> Result<(), Failure> {
    if !crate::observers::are_on() {
        return launch();
    }
    let begun = begin(home, stream, is_captured, collectives);
    launch()?;
    begun.into_iter().for_each(|begun| begun.end(stream));
    Ok(())
}

#[cold]
fn begin(
    home: &Home,
    stream: StreamHandle,
    is_captured: bool,
    collectives: Option<usize>,
) -> Option<TimedLaunch> {
    let calls = taken(collectives);
    if is_captured || calls.is_empty() {
        return None;
    }
    let begin = || -> Result<TimedLaunch, Failure> {
        let events = pair(home)?;
        events[0].record(stream, Inside)?;
        Ok(TimedLaunch { home: *home, events, calls })
    };
    begin().inspect_err(|failure| log::debug!("no device time of a call: {failure}")).ok()
}

/// The calls of a launch that plugins hear of.
fn taken(collectives: Option<usize>) -> Vec<ToldCall> {
    let mut left = collectives.unwrap_or(usize::MAX);
    here(|(of, told)| {
        let is_next = |call: &mut ToldCall| {
            let is_next = left > 0 && call.handle == *of && call.is_message == collectives.is_none();
            left -= usize::from(is_next);
            is_next
        };
        told.extract_if(.., is_next).filter(|call| call.event != 0).collect()
    })
}

fn clock_of<'clocks>(clocks: &'clocks mut [DeviceClock], home: &Home) -> Option<&'clocks mut DeviceClock> {
    clocks.iter_mut().find(|clock| clock.home.context == home.context)
}

/// Two events of a context.
fn pair(home: &Home) -> Result<[Event; 2], Failure> {
    let mut clocks = CLOCKS.lock();
    if let Some(spare) = clock_of(&mut clocks, home).and_then(|clock| clock.spare.pop()) {
        return Ok(spare);
    }
    let _relaxed = Relaxed::enter(home.driver)?;
    if clock_of(&mut clocks, home).is_none() {
        let (stream, base) = (Stream::new(home.driver)?, Event::timed(home.driver)?);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        base.record(stream.handle, Inside)?;
        // A context that was reset has taken its events with it.
        clocks.retain(|clock| clock.home.is_there());
        let base = Arc::new((base, now.as_nanos() as i64));
        clocks.push(DeviceClock { home: *home, base, spare: Vec::new() });
    }
    Ok([Event::timed(home.driver)?, Event::timed(home.driver)?])
}

impl TimedLaunch {
    fn end(self, stream: StreamHandle) {
        if self.events[1].record(stream, Inside).is_err() {
            return;
        }
        let mut pending = PENDING.lock();
        let is_first = pending.is_empty();
        pending.push_back(self);
        drop(pending);
        if is_first {
            WAKE.get().into_iter().for_each(|wake| wake());
        }
    }

    /// When the launch began and ended; none if it is not done. Launching threads do not wait for the driver's answers.
    fn times(&mut self) -> Result<Option<[u64; 2]>, Failure> {
        let _entered = self.home.enter()?;
        let none = || Failure::without_code("cuEventElapsedTime", "an event to count from", String::new());
        let base = clock_of(&mut CLOCKS.lock(), &self.home).ok_or_else(none)?.base.clone();
        let (Some(took), Some(began)) =
            (self.events[1].since(&self.events[0])?, self.events[0].since(&base.0)?)
        else {
            return Ok(None);
        };
        let start_ns = base.1 + began;
        let times = [start_ns as u64, (start_ns + took) as u64];
        if began > NEAR_NS {
            drop(base);
            let mut clocks = CLOCKS.lock();
            let base = clock_of(&mut clocks, &self.home).and_then(|clock| Arc::get_mut(&mut clock.base));
            base.into_iter().for_each(|(event, at_ns)| {
                swap(event, &mut self.events[1]);
                *at_ns = times[1] as i64;
            });
        }
        Ok(Some(times))
    }

    /// Frees the events as far as their context is there, and what the calls hold in any case: a plugin's context ends with its last call.
    fn forget(self) {
        let TimedLaunch { home, events, calls } = self;
        drop(home.give_back(events));
        drop(calls);
    }

    fn give_back(self) {
        let mut clocks = CLOCKS.lock();
        if let Some(clock) = clock_of(&mut clocks, &self.home) {
            clock.spare.push(self.events);
        }
    }
}

/// Tells plugins of the launches that are done.
pub fn settle() {
    let _telling = TELLING.lock();
    settle_all(None);
}

/// A communicator ends: its launches are done, or were aborted. Plugins hear nothing of those.
pub(super) fn ended(profiled: &Arc<Profiled>) {
    if opened().is_none_or(|driver| driver.is_in_forked_child()) {
        return;
    }
    let _telling = TELLING.lock();
    settle_all(Some(profiled));
    let known = KNOWN.lock();
    // Nobody is left who needs these: a communicator is known before its first launch, and one that ends beside this one has its launches here.
    let is_last = known.ours.is_empty() && pending() == 0;
    let unused = if is_last { take(&mut *CLOCKS.lock()) } else { Vec::new() };
    drop(known);
    free(unused);
}

fn settle_all(ending: Option<&Arc<Profiled>>) {
    let pending = take(&mut *PENDING.lock());
    let (mut remaining, mut behind) = (VecDeque::new(), BTreeSet::new());
    for mut one in pending {
        let profiled = Arc::as_ptr(&one.calls[0].profiled);
        let is_ending = ending.is_some_and(|ending| Arc::as_ptr(ending) == profiled);
        // A communicator's launches run one after the other. Whoever ends one waits for what plugins make of its own alone.
        let waits = behind.contains(&profiled) || ending.is_some() && !is_ending;
        match if waits { Ok(None) } else { one.times() } {
            Ok(None) if !is_ending => {
                behind.insert(profiled);
                remaining.push_back(one);
            }
            Ok(times) => {
                times.iter().for_each(|times| one.calls.iter().for_each(|call| calls::channel(call, *times)));
                one.give_back();
            }
            Err(failure) => {
                log::debug!("no device time of a call: {failure}");
                one.forget();
            }
        }
    }
    let mut pending = PENDING.lock();
    remaining.append(&mut pending);
    *pending = remaining;
}

/// Frees all events, when nobody is left who would be told.
pub fn end() {
    let (pending, clocks) = (take(&mut *PENDING.lock()), take(&mut *CLOCKS.lock()));
    pending.into_iter().for_each(TimedLaunch::forget);
    free(clocks);
}

fn free(clocks: Vec<DeviceClock>) {
    clocks.into_iter().for_each(|clock| drop({ clock.home }.give_back(clock)));
}
