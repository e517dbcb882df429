//! Keeps our calls of the driver from breaking captures that are under way.

use std::marker::PhantomData;

use crate::gpu::failure::Failure;
use crate::gpu::library::Driver;

const RELAXED: u32 = 2;

/// While it lives, no call of this thread can break a capture of anybody. Dropping it restores the mode before.
#[derive(Debug)]
pub struct Relaxed {
    driver: &'static Driver,
    before: u32,
    /// The mode belongs to the thread.
    _thread: PhantomData<*const ()>,
}

impl Relaxed {
    /// Makes this thread's capture mode relaxed.
    pub fn enter(driver: &'static Driver) -> Result<Relaxed, Failure> {
        let mut mode = RELAXED;
        // SAFETY: the mode is read and written in a local.
        let code = unsafe { (driver.calls.cuThreadExchangeStreamCaptureMode)(&mut mode) };
        driver.check("cuThreadExchangeStreamCaptureMode", code, || "mode relaxed".into())?;
        Ok(Relaxed { driver, before: mode, _thread: PhantomData })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        let mut mode = self.before;
        // SAFETY: as above.
        let code = unsafe { (self.driver.calls.cuThreadExchangeStreamCaptureMode)(&mut mode) };
        self.driver.note("cuThreadExchangeStreamCaptureMode", code, || format!("mode {}", self.before));
    }
}
