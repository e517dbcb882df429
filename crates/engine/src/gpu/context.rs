//! The context that our own work of a device lives in, and being in it for a while.

use std::ffi::c_int;

use crate::gpu::capture::Relaxed;
use crate::gpu::device::Ordinal;
use crate::gpu::failure::{Failure, SUCCESS};
use crate::gpu::library::Driver;

/// Where our streams, events and modules of a device live: its primary context, which we retain, where the
/// application uses it (all that use CUDA's runtime do). Otherwise the application's own context, if one of this
/// device is current: making a primary context beside it would cost hundreds of megabytes. That one must outlive us.
#[derive(Debug)]
pub struct Home {
    /// The driver.
    pub driver: &'static Driver,
    /// The device.
    pub device: Ordinal,
    context: usize,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Primary,
    Borrowed,
}

/// Our context is current on this thread and its capture mode relaxed; both come back after.
#[derive(Debug)]
pub struct Entered<'home> {
    _current: Current<'home>,
    _relaxed: Relaxed,
}

/// Our context is current on this thread; what was current comes back after.
#[derive(Debug)]
pub struct Current<'home> {
    /// Set if that was another.
    pushed_by: Option<&'home Home>,
}

impl Home {
    /// Chooses the context of a device.
    pub fn of(driver: &'static Driver, device: Ordinal) -> Result<Home, Failure> {
        let _relaxed = Relaxed::enter(driver)?;
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the outputs are locals.
        let code = unsafe { (driver.calls.cuDevicePrimaryCtxGetState)(device, &mut flags, &mut active) };
        driver.check("cuDevicePrimaryCtxGetState", code, || format!("device {device}"))?;
        if active == 0
            && let Some(context) = driver.current_context_of(device)?
        {
            return Ok(Home { driver, device, context, kind: Kind::Borrowed });
        }
        let mut context = 0;
        // SAFETY: the output is a local; dropping gives this reference back.
        let code = unsafe { (driver.calls.cuDevicePrimaryCtxRetain)(&mut context, device) };
        driver.check("cuDevicePrimaryCtxRetain", code, || format!("device {device}"))?;
        Ok(Home { driver, device, context, kind: Kind::Primary })
    }

    /// Makes the context current and the capture mode relaxed.
    pub fn enter(&self) -> Result<Entered<'_>, Failure> {
        let relaxed = Relaxed::enter(self.driver)?;
        Ok(Entered { _current: self.be_current()?, _relaxed: relaxed })
    }

    /// Makes the context current: enough for calls that may be part of a capture, and for what cannot break one.
    pub fn be_current(&self) -> Result<Current<'_>, Failure> {
        let mut current = 0;
        // SAFETY: the output is a local.
        let code = unsafe { (self.driver.calls.cuCtxGetCurrent)(&mut current) };
        self.driver.check("cuCtxGetCurrent", code, String::new)?;
        if current == self.context {
            return Ok(Current { pushed_by: None });
        }
        // SAFETY: the context is alive: retained, or promised by `of`.
        let code = unsafe { (self.driver.calls.cuCtxPushCurrent_v2)(self.context) };
        self.driver.check("cuCtxPushCurrent_v2", code, || format!("device {}", self.device))?;
        Ok(Current { pushed_by: Some(self) })
    }
}

impl Driver {
    /// The device that is current on this thread, if there is one.
    pub fn current_device(&self) -> Result<Option<Ordinal>, Failure> {
        let mut context = 0;
        // SAFETY: the output is a local.
        self.check("cuCtxGetCurrent", unsafe { (self.calls.cuCtxGetCurrent)(&mut context) }, String::new)?;
        if context == 0 {
            return Ok(None);
        }
        let mut device: c_int = 0;
        // SAFETY: the output is a local.
        self.check("cuCtxGetDevice", unsafe { (self.calls.cuCtxGetDevice)(&mut device) }, String::new)?;
        Ok(Some(device))
    }

    /// Whether a device's primary context exists: to retain one that does not makes it.
    pub fn has_primary_context(&self, device: Ordinal) -> bool {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the outputs are locals.
        let code = unsafe { (self.calls.cuDevicePrimaryCtxGetState)(device, &mut flags, &mut active) };
        code == SUCCESS && active != 0
    }

    fn current_context_of(&self, device: Ordinal) -> Result<Option<usize>, Failure> {
        if self.current_device()? != Some(device) {
            return Ok(None);
        }
        let mut context = 0;
        // SAFETY: the output is a local.
        self.check("cuCtxGetCurrent", unsafe { (self.calls.cuCtxGetCurrent)(&mut context) }, String::new)?;
        Ok(Some(context))
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if self.kind == Kind::Borrowed || self.driver.is_in_forked_child() {
            return;
        }
        // SAFETY: gives back the one reference that `of` took.
        let code = unsafe { (self.driver.calls.cuDevicePrimaryCtxRelease_v2)(self.device) };
        self.driver.note("cuDevicePrimaryCtxRelease_v2", code, || format!("device {}", self.device));
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
