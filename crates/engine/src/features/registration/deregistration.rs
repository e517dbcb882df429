//! Deregisters buffers: when their memory was freed, and at a communicator's end.
//!
//! NCCL asks the peers' processes to unmap the memory, and waits without limit. A peer that hangs must not block the background worker, a
//! free or an abort. So [side threads](crate::background::side_thread) deregister, and their callers wait only as long as they want.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::features::registration::cache::Cache;
use windlass_base::gate::{Closed, Gate};
use windlass_base::gpu::Address;
use windlass_base::lock::Mutex;
use windlass_base::range::Range;
use windlass_base::stats::count;
use windlass_base::stats::resources::Registered;
use windlass_base::thread;

use crate::background::{side_thread, worker};
use crate::features::registration::aliases::{Alias, Aliases};
use crate::features::registration::registering::{self, EVERYTHING, End, Progress, Registering, State};

/// How long an abort waits for deregistration. A peer's process that responds takes milliseconds.
const PEERS_ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// How long a free waits, as a free of NCCL's may take as long.
const FREE_WAITS: Duration = Duration::from_millis(200);
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// The state of one communicator's release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Release {
    Ended(End),
    /// Registered calls still run, for as long as they take.
    Running,
    /// Another thread is inside a call or has the state locked.
    InUse,
}

/// Deregisters memory that the program is about to free. Waits up to [`FREE_WAITS`] if the memory is registered, and for no other rank.
pub(crate) fn memory_is_freed(address: Address) {
    registering::alive().for_each(|one| one.is_freed(address));
}

impl Registering {
    /// Deregisters registered memory that has been freed, on a side thread. Does not wait.
    pub(crate) fn look(self: &Arc<Self>) {
        let driver = self.driver;
        let has_gone = move |cache: &Cache<Alias>| cache.has_gone(|base| driver.buffer_id(base));
        let Some(state) = self.state.try_lock() else { return };
        let is_any = state.end.is_none() && has_gone(&state.cache);
        drop(state);
        if is_any {
            self.beside(None, move |own| {
                own.give_back(has_gone, move |cache, aliases| {
                    cache.look(aliases, |base| driver.buffer_id(base));
                })
            });
        }
    }

    /// Deregisters the memory at this address before the program frees it. Waits up to [`FREE_WAITS`].
    fn is_freed(self: &Arc<Self>, address: Address) {
        let range = Range { base: address, bytes: 1 };
        let Some(state) = self.state.try_lock() else { return };
        let is_any = state.end.is_none() && state.cache.overlaps(range);
        drop(state);
        if is_any {
            self.beside(Some(FREE_WAITS), move |own| {
                own.give_back(
                    move |cache| cache.overlaps(range),
                    move |cache, aliases| {
                        cache.freed(aliases, range);
                    },
                )
            });
        }
    }

    /// Runs `give` on the cache if `is_any`, unless a call is inside.
    fn give_back(
        &self,
        is_any: impl FnOnce(&Cache<Alias>) -> bool,
        give: impl FnOnce(&mut Cache<Alias>, &mut Aliases<'_>),
    ) {
        // The gate comes before the state: a call passes the gate before it locks the state.
        let Some(_closed) = self.gate().and_then(|gate| gate.try_close()) else { return };
        if self.is_shared() {
            return;
        }
        let mut state = self.state.lock();
        let State { home, real: Some(real), cache, staging, end: None, .. } = &mut *state else { return };
        if is_any(cache) {
            give(cache, &mut Aliases::new(home, *real, staging.handle_types, &self.is_left));
        }
    }

    /// Runs `act` on a side thread, and waits for it for as long as `within`.
    fn beside<T: Send + 'static>(
        self: &Arc<Self>,
        within: Option<Duration>,
        act: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Option<T> {
        let own = self.clone();
        side_thread::run(within, move || act(&own))
    }

    /// Begins the communicator's end: waits for registered calls, as NCCL's own end does, and deregisters all of this rank. An abort
    /// waits for no call, ends other threads' waits here, and leaves everything registered if a call is in NCCL.
    pub fn end(self: &Arc<Self>, aborts: bool) -> End {
        if aborts {
            self.is_aborted.store(true, Ordering::Release);
            if let Some(end) = self.end_if_nothing() {
                return end;
            }
            let ended = self.beside(Some(PEERS_ANSWER_WITHIN), |own| {
                let _closed = own.gate().and_then(close)?;
                own.try_end(&mut own.state.lock())
            });
            // The side thread failed or is not done. Unless a call or that thread has the state, no deregistration begins from now on.
            let left = || Some(*self.state.try_lock()?.end.get_or_insert(End::Left));
            let end = ended.flatten().or_else(left).unwrap_or(End::Left);
            self.is_left.store(end == End::Left, Ordering::Release);
            return end;
        }
        let ended = || self.try_end(&mut self.state.lock());
        thread::look_until(Duration::MAX, LOOK_EVERY, ended).unwrap_or(End::Left)
    }

    /// Ends the registrations while the communicator lives. Waits for no thread.
    pub(crate) fn release(&self) -> Release {
        // Without a gate no call knows the communicator yet.
        let closed = self.gate().map(|gate| gate.try_close());
        let Some(mut state) = self.state.try_lock().filter(|_| !matches!(closed, Some(None))) else {
            return Release::InUse;
        };
        // Calls of communicators that share its resources pass other gates, so those may be running.
        let is_any = state.cache.registrations() > 0 || !state.staging.is_empty();
        if self.is_shared() && state.end.is_none() && is_any {
            return Release::Ended(End::Left);
        }
        self.take_back(&mut state);
        self.try_end(&mut state).map_or(Release::Running, Release::Ended)
    }

    fn end_if_nothing(&self) -> Option<End> {
        let mut state = self.state.try_lock()?;
        if state.end.is_none() && state.cache.registrations() == 0 && state.staging.is_empty() {
            state.end = Some(End::Clean);
        }
        state.end
    }

    fn try_end(&self, state: &mut State) -> Option<End> {
        if state.end.is_none() {
            let is_clean = match state.progress() {
                Progress::Over => give_all_back(state, &self.is_left),
                Progress::Running if !self.is_aborted.load(Ordering::Acquire) => return None,
                Progress::Running | Progress::Lost => false,
            };
            state.end = Some(if is_clean { End::Clean } else { End::Left });
        }
        state.end
    }
}

/// Closes the gate of a communicator that is being aborted. None if a call is inside. Waits for a thread of Windlass inside, which soon leaves.
fn close(gate: &'static Gate) -> Option<Closed<'static>> {
    let close = || {
        let was_closed = gate.is_closed();
        let closed = gate.try_close();
        (closed.is_some() || !was_closed).then_some(closed)
    };
    thread::look_until(Duration::MAX, LOOK_EVERY, close).flatten()
}

/// Deregisters everything. Returns whether nothing is left.
fn give_all_back(state: &mut State, is_left: &AtomicBool) -> bool {
    let State { home, real: Some(real), cache, staging, .. } = state else { return true };
    cache.freed(&mut Aliases::new(home, *real, staging.handle_types, is_left), EVERYTHING);
    // The thread that waited may have given up meanwhile, and NCCL's communicator may be stopped.
    !is_left.load(Ordering::Acquire) && staging.end(home, *real) && cache.registrations() == 0
}

/// The registrations that NCCL kept at a communicator's end, held until this rank's kernels have left. Then this rank unmaps
/// the memory. Peers' processes have imported it and keep it to their ends, as NCCL's communicator is not freed.
#[derive(Debug)]
pub(crate) struct Remains(State);

impl Remains {
    fn is_over(&self) -> bool {
        self.0.has_left()
    }
}

impl Drop for Remains {
    fn drop(&mut self) {
        let home = self.0.home;
        let Ok(_entered) = home.enter() else { return };
        self.0.cache.close().for_each(drop);
        self.0.staging.free();
    }
}

/// Locked across event queries.
static REMAINS: Mutex<Vec<Remains>> = Mutex::new(Vec::new());

/// Unmaps the remains that no kernel uses any more. Returns whether there are more.
pub(crate) fn look_at_remains() -> bool {
    let over: Vec<Remains> = REMAINS.lock().extract_if(.., |one| one.is_over()).collect();
    drop(over);
    !REMAINS.lock().is_empty()
}

/// Forgets the remains when the process ends: the driver stops what still runs.
pub(crate) fn forget() {
    std::mem::forget(std::mem::take(&mut *REMAINS.lock()));
}

impl Drop for Registering {
    fn drop(&mut self) {
        let state = self.take_state();
        // An abort that could not lock the state has also left everything registered.
        let left = self.is_left.load(Ordering::Acquire).then_some(End::Left);
        let end = state.end.or(left);
        if end == Some(End::Left) {
            let bytes = state.cache.bytes() + state.staging.bytes();
            count::registered(Registered::LeftBytes, bytes);
            log::warn!(
                "device {}: {bytes} bytes stay registered: peers keep them to their ends",
                state.home.device
            );
        }
        match (end, state.progress()) {
            (Some(End::Clean), _) => {}
            // NCCL's communicator was stopped, so its kernels leave.
            (Some(End::Left), Progress::Over | Progress::Running) => {
                REMAINS.lock().push(Remains(state));
                worker::wake();
            }
            // The communicator was not ended, or the driver answers nothing any more.
            (None, _) | (_, Progress::Lost) => std::mem::forget(state),
        }
    }
}
