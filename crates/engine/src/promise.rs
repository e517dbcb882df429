//! A communicator that NCCL has not built yet, and may never: its ranks share a fabric, which serves what it can. The handle
//! that the application holds is ours. To honour the promise is to have NCCL build its communicator: only a call does
//! that which all ranks make; then this is where the two handles meet.
//!
//! One thread at a time calls on a communicator, as with NCCL; an abort, and the question for an error, may come from another.

mod arguments;
mod ending;
mod ends;
mod handle;
mod kept;
mod lost;
mod operators;
pub mod parked;
mod usage;
pub mod warming;

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nccl_sys::{
    ncclComm, ncclComm_t, ncclInternalError, ncclInvalidArgument, ncclInvalidUsage, ncclRemoteError,
    ncclResult_t, ncclSuccess,
};

use crate::call::Call;
use crate::error::refuse;
use crate::fabric::{self, Fabric, Standing};
use crate::forward::birth;
use crate::forward::known::{self, End};
use crate::gpu::{self, Home, Ordinal, StreamHandle};
use crate::guard;
use crate::process;
use crate::thread;

use ends::Ends;
use handle::Minted;
pub use kept::Registrations;
pub use operators::{Operator, Operators};
use parked::{Built, Kind};
pub use usage::Unfit;
use usage::{Usage, free_bytes};

/// A promise.
#[derive(Debug)]
pub struct Promise {
    handle: Minted,
    fabric: Arc<Fabric>,
    device: Ordinal,
    /// Where NCCL writes its handle, before it waits for the others.
    written: AtomicPtr<ncclComm>,
    /// NCCL's handle once it is honoured; null before.
    real: AtomicPtr<ncclComm>,
    /// What honours it, or has: an ended promise's, or what was built for this one. Held for a few stores, after `stage`.
    built: Mutex<Option<Built>>,
    is_reused: bool,
    usage: Usage,
    /// How many there were to have NCCL build it.
    attempts: AtomicU64,
    aborted: AtomicBool,
    finalized: AtomicBool,
    revoked: AtomicBool,
    /// Held for a few stores.
    stage: Mutex<Stage>,
    ends: Ends,
    operators: Operators,
    registrations: Registrations,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Promised,
    /// A thread is in NCCL.
    Honouring,
    /// It still is, and another has aborted NCCL's communicator.
    Aborting,
    Honoured,
}

/// What there is to do to honour it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Begun {
    /// Nothing: it has been honoured.
    Over,
    /// Nothing but to use what was taken at its birth.
    Taken,
    /// NCCL builds, with the id of this attempt.
    Attempt(u64),
}

/// What the application has said of its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Aborted {
    Nothing,
    /// NCCL's, too, is to be aborted.
    Real(ncclComm_t),
    /// NCCL's, which a thread is still making.
    Init(ncclComm_t),
}

/// Whether a handle is one of ours, in use or ended.
pub fn is_ours(communicator: ncclComm_t) -> bool {
    handle::is_ours(communicator as usize)
}

/// A promise that is being honoured on another thread.
#[derive(Debug)]
pub enum Beside {
    /// It was, or cannot be.
    Done(ncclResult_t),
    /// It is.
    Thread(JoinHandle<ncclResult_t>),
}

impl Beside {
    /// Whether waiting for it takes no time.
    pub fn is_over(&self) -> bool {
        match self {
            Beside::Done(_) => true,
            Beside::Thread(thread) => thread.is_finished(),
        }
    }

    /// Waits for it.
    pub fn wait(self) -> ncclResult_t {
        match self {
            Beside::Done(result) => result,
            Beside::Thread(thread) => thread.join().unwrap_or(ncclInternalError),
        }
    }
}

/// How long an abort lets NCCL's init come to its end: NCCL 2.28 frees what that still uses if it is aborted in the middle (seen:
/// double frees), but not while it waits for a rank that does not come, which is why it takes longer than this.
const INIT_WITHIN: Duration = Duration::from_secs(3);

impl Promise {
    /// A new one, which an ended one's communicator honours if all ranks have it. Nobody knows its handle yet.
    pub fn new(fabric: Arc<Fabric>, device: Ordinal, built: Option<Built>) -> Arc<Promise> {
        process::first_promise();
        let promise = Arc::new(Promise {
            handle: Minted::new(),
            fabric,
            device,
            written: AtomicPtr::new(null_mut()),
            real: AtomicPtr::new(null_mut()),
            is_reused: built.is_some(),
            built: Mutex::new(built),
            usage: Usage::default(),
            attempts: AtomicU64::new(0),
            aborted: AtomicBool::new(false),
            finalized: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            stage: Mutex::new(Stage::Promised),
            ends: Ends::default(),
            operators: Operators::default(),
            registrations: Registrations::default(),
        });
        lost::listen(&promise);
        promise
    }

    /// What the application holds.
    pub fn handle(&self) -> ncclComm_t {
        self.handle.address() as ncclComm_t
    }

    /// What serves it meanwhile, and later too.
    pub fn fabric(&self) -> &Arc<Fabric> {
        &self.fabric
    }

    /// This rank's device.
    pub fn device(&self) -> Ordinal {
        self.device
    }

    /// NCCL's own handle, once it has been honoured.
    pub fn real(&self) -> Option<ncclComm_t> {
        let real = self.real.load(Ordering::Acquire);
        (!real.is_null()).then_some(real)
    }

    /// User-defined reductions.
    pub fn operators(&self) -> &Operators {
        &self.operators
    }

    /// The application's registered buffers.
    pub fn registrations(&self) -> &Registrations {
        &self.registrations
    }

    /// NCCL's answer to the arguments of a call that it would refuse, before any other rank has a part in it.
    pub fn refusal(&self, call: &Call) -> Option<ncclResult_t> {
        arguments::refusal(call, self.fabric.contract().members.len(), &self.operators)
    }

    /// Honours it. Waits for all other ranks, as NCCL's own init does; outside groups only. NCCL's error leaves the promise as it
    /// was: what its fabric serves goes on.
    pub fn honour(&self) -> ncclResult_t {
        let begun = guard::or_else(|| Err(ncclInternalError), || self.begin());
        match begun {
            Ok(Begun::Attempt(attempt)) => {
                let result = self.build(attempt);
                let result = guard::call(|| self.finish(result, self.fabric.has_lost(attempt)));
                guard::call(|| self.tell(attempt, result))
            }
            Ok(Begun::Taken) => guard::call(|| self.finish(ncclSuccess, false)),
            Ok(Begun::Over) => ncclSuccess,
            Err(code) => code,
        }
    }

    /// Honours it on a thread of its own: this one may have a group open, and NCCL's groups are the thread's.
    pub fn honour_beside(self: &Arc<Promise>) -> Beside {
        if self.real().is_some() {
            return Beside::Done(ncclSuccess);
        }
        let promise = self.clone();
        match thread::spawn("windlass-honour", move || promise.honour()) {
            Ok(thread) => Beside::Thread(thread),
            Err(error) => {
                let why = format_args!("no thread to honour a promise on: {error}");
                Beside::Done(refuse(ncclInternalError, why))
            }
        }
    }

    fn begin(&self) -> Result<Begun, ncclResult_t> {
        let mut stage = self.stage();
        match *stage {
            Stage::Honoured => return Ok(Begun::Over),
            // Divergence: NCCL says nothing of two threads at once.
            Stage::Honouring | Stage::Aborting => {
                return Err(refuse(ncclInvalidUsage, format_args!("two threads call on one communicator")));
            }
            Stage::Promised if self.aborted.load(Ordering::Acquire) => return Err(ncclInvalidUsage),
            Stage::Promised => {}
        }
        let taken = self.built().as_ref().map(Built::handle);
        // All ranks have it, or none.
        let begun = match taken {
            Some(_) => Begun::Taken,
            None => Begun::Attempt(self.next_attempt()?),
        };
        *stage = Stage::Honouring;
        self.written.store(taken.unwrap_or(null_mut()), Ordering::Relaxed);
        Ok(begun)
    }

    /// NCCL's own init. Under no catch of panics: what NCCL throws goes on.
    fn build(&self, attempt: u64) -> ncclResult_t {
        guard::or_else(|| (), || fabric::make_room(Some(self.device())));
        let id = match self.fabric.id(0, attempt, &|| self.is_over(attempt)) {
            Ok(id) => id,
            Err(code) => return code,
        };
        let (ranks, rank) = (self.fabric.contract().members.len() as u32, self.fabric.rank());
        let configuration = self.fabric.configuration();
        let before = free_bytes(self.device);
        let result = on_device(self.device, || birth::build(&self.written, ranks, &id, rank, configuration));
        if result == ncclSuccess {
            before.into_iter().for_each(|before| self.usage.measured(self.device, before));
            let words = configuration.words();
            if words.is_none() {
                self.mark(Unfit::Here);
            }
            let configuration = words.unwrap_or_default();
            let kind = Kind { ranks, rank, device: self.device, configuration };
            *self.built() = Some(Built::new(kind, &id, self.written.load(Ordering::Acquire)));
        }
        result
    }

    fn finish(&self, result: ncclResult_t, is_lost: bool) -> ncclResult_t {
        let mut stage = self.stage();
        let written = self.written.load(Ordering::Acquire);
        let aborted = self.aborted.load(Ordering::Acquire);
        if aborted || is_lost || result != ncclSuccess {
            let is_ours = *stage == Stage::Honouring;
            *stage = Stage::Promised;
            self.written.store(null_mut(), Ordering::Relaxed);
            self.built().take();
            drop(stage);
            // Unless the abort could not wait.
            if is_ours && !written.is_null() {
                known::end(End::Abort, written);
            }
            if is_lost && !aborted {
                return refuse(ncclRemoteError, format_args!("{}", lost::WHY));
            }
            if result == ncclSuccess {
                return ncclInternalError;
            }
            return refuse(result, format_args!("NCCL did not build the communicator of a promise"));
        }
        drop(stage);
        if !self.registrations.is_empty() {
            self.mark(Unfit::Here);
        }
        self.registrations.replay(written);
        let mut stage = self.stage();
        if self.aborted.load(Ordering::Acquire) {
            let is_ours = *stage == Stage::Honouring;
            *stage = Stage::Promised;
            self.written.store(null_mut(), Ordering::Relaxed);
            self.built().take();
            drop(stage);
            if is_ours {
                known::end(End::Abort, written);
            }
            return ncclInternalError;
        }
        *stage = Stage::Honoured;
        self.real.store(written, Ordering::Release);
        ncclSuccess
    }

    /// How NCCL's communicator stands, for those made from this one.
    pub fn standing(&self) -> Standing {
        // What has been built was the last attempt.
        let attempt = self.attempts.load(Ordering::Relaxed).checked_sub(1);
        match self.real() {
            None => Standing::Promised,
            Some(_) if attempt.is_some_and(|attempt| self.fabric.has_lost(attempt)) => Standing::Lost,
            Some(_) => Standing::Built,
        }
    }

    /// Ends it as an abort does, from any thread: who is honouring it leaves. Gives NCCL's answer.
    pub fn abort(&self) -> ncclResult_t {
        if !guard::or_else(|| false, || self.ends.abort(INIT_WITHIN)) {
            return ending::ended();
        }
        match self.aborted_real() {
            Aborted::Nothing => ncclSuccess,
            Aborted::Real(real) => {
                self.let_go();
                known::end(End::Abort, real)
            }
            Aborted::Init(real) => {
                let real = real as usize;
                let end = || known::abort_init(real as ncclComm_t, || self.is_out());
                guard::call(|| ending::beside(end).unwrap_or(ncclInternalError))
            }
        }
    }

    fn aborted_real(&self) -> Aborted {
        let until = Instant::now() + INIT_WITHIN;
        loop {
            let mut stage = self.stage();
            self.aborted.store(true, Ordering::Release);
            let written = self.written.load(Ordering::Acquire);
            match (*stage, self.real()) {
                (_, Some(real)) => return Aborted::Real(real),
                (Stage::Honouring, None) if Instant::now() < until => {}
                (Stage::Honouring, None) if !written.is_null() => {
                    *stage = Stage::Aborting;
                    return Aborted::Init(written);
                }
                (Stage::Promised, None) => {
                    let taken = self.built().take();
                    return taken.map_or(Aborted::Nothing, |built| Aborted::Real(built.handle()));
                }
                _ => return Aborted::Nothing,
            }
            drop(stage);
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// From now on nobody honours it. Whether somebody is at it, who will find that and end what NCCL has built.
    fn is_never_built(&self) -> bool {
        let stage = self.stage();
        self.aborted.store(true, Ordering::Release);
        *stage == Stage::Honouring
    }

    /// Ends it, or prepares its end. Gives NCCL's answer.
    pub fn end(&self, how: End) -> ncclResult_t {
        match (how, self.real()) {
            (End::Abort, _) => self.abort(),
            (End::Finalize, _) if self.finalized.swap(true, Ordering::AcqRel) => refuse(
                ncclInvalidArgument,
                format_args!("ncclCommFinalize: called before on this communicator"),
            ),
            (End::Finalize, None) => ncclSuccess,
            (End::Finalize, Some(real)) => self.finalize(real),
            (End::Destroy, _) => self.destroy(),
        }
    }

    /// Whether an ended promise's communicator honours it, or will.
    pub fn is_reused(&self) -> bool {
        self.is_reused
    }

    /// What is done makes that nobody may have NCCL's communicator after this one.
    pub fn mark(&self, unfit: Unfit) {
        self.usage.mark(unfit);
    }

    /// A collective goes to NCCL on a stream; all ranks capture it, or none does.
    pub fn runs_on(&self, stream: StreamHandle) {
        self.usage.run_on(stream, Unfit::Everywhere);
    }

    /// A call of this rank's own goes to NCCL on a stream.
    pub fn runs_alone_on(&self, stream: StreamHandle) {
        self.usage.run_on(stream, Unfit::Here);
    }

    /// Before a call goes to NCCL: what is free on the device if it is the first, which makes connections. A call in a group
    /// makes them at the group's end only.
    pub fn measure(&self) -> Option<u64> {
        let fresh = !self.is_reused && self.usage.is_fresh();
        if fresh { free_bytes(self.device).ok() } else { None }
    }

    /// After it.
    pub fn measured(&self, before: Option<u64>) {
        before.into_iter().for_each(|before| self.usage.measured(self.device, before));
    }

    /// Stops its work. Gives NCCL's answer.
    pub fn revoke(&self, flags: c_int) -> ncclResult_t {
        let ended = self.finalized.load(Ordering::Acquire) || self.is_revoked();
        let result = match self.real() {
            _ if flags != 0 => {
                refuse(ncclInvalidArgument, format_args!("ncclCommRevoke: flags {flags}, expected 0"))
            }
            _ if ended => refuse(
                ncclInvalidArgument,
                format_args!("ncclCommRevoke: the communicator is ending, or revoked"),
            ),
            None => ncclSuccess,
            Some(real) => known::revoke(real, flags),
        };
        if result == ncclSuccess {
            self.revoked.store(true, Ordering::Release);
            // NCCL counts it as finalized, too.
            self.finalized.store(true, Ordering::Release);
        }
        result
    }

    /// Whether it was revoked.
    pub fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    /// The call as NCCL is to get it: its own handle, its own operator.
    pub fn translated(&self, call: &Call) -> Result<Call, ncclResult_t> {
        let Some(real) = self.real() else {
            return Err(refuse(ncclInternalError, format_args!("a promise that was not honoured")));
        };
        let mut call = *call;
        call.local.communicator = real;
        if let Some(operation) = call.shared.operation {
            let made = self.operators.real(operation, real).ok_or_else(|| {
                let name = call.shared.function.entry().description().name;
                let why = format_args!("{name}: reduction {} is unknown to this communicator", operation.0);
                refuse(ncclInvalidArgument, why)
            });
            call.shared.operation = Some(made?);
        }
        Ok(call)
    }

    fn built(&self) -> MutexGuard<'_, Option<Built>> {
        self.built.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Calls NCCL with a device as the current one. In relaxed capture mode: a capture may have begun since the birth, and NCCL's init
/// has nothing to do with it.
pub fn on_device(device: Ordinal, call: impl FnOnce() -> ncclResult_t) -> ncclResult_t {
    let home = gpu::driver().and_then(|driver| Home::of(driver, device));
    let home = match home {
        Ok(home) => home,
        Err(failure) => return refuse(ncclInternalError, format_args!("{failure}")),
    };
    let _entered = match home.enter() {
        Ok(entered) => entered,
        Err(failure) => return refuse(ncclInternalError, format_args!("{failure}")),
    };
    call()
}
