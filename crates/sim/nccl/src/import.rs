//! A registered receive buffer as peers know it. NCCL's peers import its allocation when it is first used, and write there
//! until the registration ends, whatever lies at the owner's addresses meanwhile. Here the rank itself maps the allocation
//! once more in their stead: so forgotten registrations keep memory, and what peers send goes where NCCL's peers send it.

use crate::driver::{Driver, Mapping, driver};
use crate::operation::Buffer;
use std::cell::Cell;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// Imports that a thread of their own is unmapping.
static LEAVING: AtomicUsize = AtomicUsize::new(0);

pub struct Import(Mapping);

thread_local! {
    /// Whether this thread is in a host function, where the driver refuses calls.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Runs a host function of the driver's.
pub fn host_function(body: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    body();
    IN_HOST_FUNCTION.set(false);
}

impl Import {
    /// Imports the whole allocation that holds `address`; `None` where NCCL falls back on something else.
    pub fn new(address: usize, device: i32) -> Option<Import> {
        let driver = driver().ok().filter(|driver| driver.is_exportable(address))?;
        driver.map_again(address, device).ok().map(Import)
    }

    /// Where peers write what is for `buffer`; `None` beyond the allocation that they imported.
    pub fn place(&self, buffer: Buffer) -> Option<usize> {
        let Mapping { of, bytes, at } = self.0;
        let offset = buffer.address.checked_sub(of)?;
        (offset + buffer.bytes <= bytes).then_some(at + offset)
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        let mapping = self.0;
        unmap(move |driver| driver.unmap(mapping));
    }
}

/// Unmaps something now, or on a thread of its own in a host function: the last operation of an aborted communicator takes its
/// registrations with it.
pub fn unmap(act: impl FnOnce(&Driver) + Send + 'static) {
    let act = move || {
        if let Ok(driver) = driver() {
            act(driver);
        }
    };
    if IN_HOST_FUNCTION.get() {
        LEAVING.fetch_add(1, SeqCst);
        let later = move || {
            act();
            LEAVING.fetch_sub(1, SeqCst);
        };
        if std::thread::Builder::new().spawn(later).is_err() {
            LEAVING.fetch_sub(1, SeqCst);
        }
    } else {
        act();
    }
}

/// Waits, at exit, for what other threads are unmapping, so that nobody takes it for a leak. A second at most.
pub fn wait_unmapped() {
    let began = Instant::now();
    while LEAVING.load(SeqCst) > 0 && began.elapsed() < Duration::from_secs(1) {
        std::thread::yield_now();
    }
}
