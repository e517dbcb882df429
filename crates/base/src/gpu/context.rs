//! Chooses the context in which our own work of a device runs, and makes it current for a while.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;

use crate::gpu::capture::Relaxed;
use crate::gpu::{Driver, Failure, Ordinal, driver};
use crate::lock::Mutex;

/// A context: streams, events and modules live in it and end with it. Handles come again: a primary context that was reset
/// (`cudaDeviceReset`) has the same handle in its next life, so the id tells which context it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Context {
    handle: usize,
    id: u64,
}

/// The context of our streams, events and modules of a device. It is the primary context, which we retain, if the application uses it (all
/// that use CUDA's runtime do). Otherwise it is the application's own context, if one of this device is current: a primary context beside it
/// would cost hundreds of megabytes. The application must keep its own context longer than we use it.
#[derive(Clone, Copy, Debug)]
pub struct Home {
    /// The driver.
    pub driver: &'static Driver,
    /// The device.
    pub device: Ordinal,
    /// The context. What was made in it must not be used once it [is gone](Driver::is_there).
    pub context: Context,
}

/// The primary context of each device that was retained last. Locked across no call of the driver.
static RETAINED: Mutex<BTreeMap<Ordinal, Context>> = Mutex::new(BTreeMap::new());

/// While it lives, our context is current on this thread and its capture mode is relaxed. Dropping it restores both.
#[derive(Debug)]
pub struct Entered<'home> {
    _current: Current<'home>,
    _relaxed: Relaxed,
}

/// While it lives, our context is current on this thread. Dropping it restores the one before.
#[derive(Debug)]
pub struct Current<'home> {
    /// Set if another context was current.
    pushed_by: Option<&'home Home>,
}

impl Home {
    /// Chooses the context of a device.
    pub fn of(driver: &'static Driver, device: Ordinal) -> Result<Home, Failure> {
        let _relaxed = Relaxed::enter(driver)?;
        if !driver.is_primary_active(device)? && driver.current_device()? == Some(device) {
            return Ok(Home { driver, device, context: driver.current_context()? });
        }
        Ok(Home { driver, device, context: driver.primary_context(device)? })
    }

    /// The device's primary context, if there is one; none is made. For looks that the background thread takes, also just after a reset.
    pub fn if_primary(driver: &'static Driver, device: Ordinal) -> Option<Home> {
        let known = driver.retained_context(device).map(|context| Home { driver, device, context });
        known.or_else(|| driver.has_primary_context(device).then(|| Home::of(driver, device).ok())?)
    }

    /// Whether the context is still there.
    pub fn is_there(&self) -> bool {
        self.driver.is_there(self.context)
    }

    /// Makes the context current and the capture mode relaxed. Fails if the context is gone, even if another has its handle.
    pub fn enter(&self) -> Result<Entered<'_>, Failure> {
        if !self.is_there() {
            let detail = format!("device {}, context {}", self.device, self.context.id);
            return Err(Failure::without_code("cuCtxGetId", "that the context is gone", detail));
        }
        let relaxed = Relaxed::enter(self.driver)?;
        Ok(Entered { _current: self.be_current()?, _relaxed: relaxed })
    }

    /// Drops what calls the driver when dropped, in the context in which it was made. If that context is gone, `mine` went with it. In a forked
    /// child `mine` stays, and if the context cannot be entered, which is the error.
    pub fn give_back<T>(&self, mine: T) -> Result<(), Failure> {
        let mine = ManuallyDrop::new(mine);
        if self.driver.is_in_forked_child() || !self.is_there() {
            return Ok(());
        }
        let _entered = self.enter()?;
        drop(ManuallyDrop::into_inner(mine));
        Ok(())
    }

    /// Makes the context current for good, as CUDA's runtime does at a thread's first call.
    pub fn stay_current(&self) -> Result<(), Failure> {
        self.be_current().map(std::mem::forget)
    }

    /// Makes the context current. Enough for calls that may be part of a capture, or that cannot break one.
    pub fn be_current(&self) -> Result<Current<'_>, Failure> {
        if self.driver.current_handle()? == self.context.handle {
            return Ok(Current { pushed_by: None });
        }
        // SAFETY: the context is alive: retained, or guaranteed by `of`.
        let code = unsafe { (self.driver.calls.cuCtxPushCurrent_v2)(self.context.handle) };
        self.driver.check("cuCtxPushCurrent_v2", code, || format!("device {}", self.device))?;
        Ok(Current { pushed_by: Some(self) })
    }
}

/// The context of our work on a device now; the default one if the driver gives none.
pub fn on(device: Ordinal) -> Context {
    driver().and_then(|driver| Home::of(driver, device)).map(|home| home.context).unwrap_or_default()
}

impl Driver {
    /// The context that is current on this thread.
    pub fn current_context(&self) -> Result<Context, Failure> {
        self.context(self.current_handle()?)
    }

    fn current_handle(&self) -> Result<usize, Failure> {
        // SAFETY: the output is a local.
        self.output("cuCtxGetCurrent", |handle| unsafe { (self.calls.cuCtxGetCurrent)(handle) }, String::new)
    }

    /// Makes a context current on this thread for good, if it is one.
    pub fn stay_current(&self, context: Context) {
        if context.handle != 0 {
            // SAFETY: the driver checks the handle.
            let code = unsafe { (self.calls.cuCtxPushCurrent_v2)(context.handle) };
            self.note("cuCtxPushCurrent_v2", code, || format!("context {:#x}", context.handle));
        }
    }

    /// Whether a context still exists. True for no context, which cannot go.
    pub fn is_there(&self, context: Context) -> bool {
        context.handle == 0 || self.context(context.handle).is_ok_and(|now| now.id == context.id)
    }

    fn context(&self, handle: usize) -> Result<Context, Failure> {
        // SAFETY: the output is a local. The driver knows handles of contexts that are gone.
        let ask = |id: &mut u64| unsafe { (self.calls.cuCtxGetId)(handle, id) };
        let id = self.output("cuCtxGetId", ask, || format!("context {handle:#x}"))?;
        Ok(Context { handle, id })
    }

    /// Waits until all work of the current context is done, on all its streams.
    pub fn synchronize(&self) -> Result<(), Failure> {
        // SAFETY: no arguments.
        let code = unsafe { (self.calls.cuCtxSynchronize)() };
        self.check("cuCtxSynchronize", code, String::new)
    }

    /// The device that is current on this thread, if there is one.
    pub fn current_device(&self) -> Result<Option<Ordinal>, Failure> {
        if self.current_handle()? == 0 {
            return Ok(None);
        }
        // SAFETY: the output is a local.
        let ask = |device: &mut Ordinal| unsafe { (self.calls.cuCtxGetDevice)(device) };
        self.output("cuCtxGetDevice", ask, String::new).map(Some)
    }

    /// Whether a device's primary context exists. Retaining one that does not exist would make it.
    pub fn has_primary_context(&self, device: Ordinal) -> bool {
        self.is_primary_active(device).unwrap_or(false)
    }

    fn is_primary_active(&self, device: Ordinal) -> Result<bool, Failure> {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the outputs are locals.
        let code = unsafe { (self.calls.cuDevicePrimaryCtxGetState)(device, &mut flags, &mut active) };
        self.check("cuDevicePrimaryCtxGetState", code, || format!("device {device}"))?;
        Ok(active != 0)
    }

    /// The device's primary context, made if there is none. It is retained once and never released, as CUDA's runtime does below NCCL. The
    /// application could reset it between a look at it and the release, which would then release another's reference.
    fn primary_context(&self, device: Ordinal) -> Result<Context, Failure> {
        if let Some(context) = self.retained_context(device) {
            return Ok(context);
        }
        // SAFETY: the output is a local.
        let retain = |handle: &mut usize| unsafe { (self.calls.cuDevicePrimaryCtxRetain)(handle, device) };
        let handle = self.output("cuDevicePrimaryCtxRetain", retain, || format!("device {device}"))?;
        let context = self.context(handle)?;
        RETAINED.lock().insert(device, context);
        Ok(context)
    }

    /// The primary context that was retained last, if it has not gone since.
    fn retained_context(&self, device: Ordinal) -> Option<Context> {
        let context = RETAINED.lock().get(&device).copied();
        context.filter(|context| self.is_there(*context))
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let Some(home) = self.pushed_by else { return };
        let mut popped = 0;
        // SAFETY: takes off what `be_current` pushed; guards nest, so it is on top.
        let code = unsafe { (home.driver.calls.cuCtxPopCurrent_v2)(&mut popped) };
        home.driver.note("cuCtxPopCurrent_v2", code, || format!("device {}", home.device));
    }
}
