//! The peers' mapping of a registered receive buffer. In NCCL peers import the allocation at the buffer's first use, and write there
//! until the registration ends, even if the owner has mapped something else at its address. Here the rank itself maps the allocation
//! a second time in place of its peers. So forgotten registrations keep memory, and data arrives where NCCL's peers would write it.

use crate::driver::{Driver, Mapping, driver};
use crate::operation::Buffer;
use std::cell::Cell;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// Mappings that background threads are unmapping now.
static LEAVING: AtomicUsize = AtomicUsize::new(0);

pub struct Import(Mapping);

thread_local! {
    /// Whether this thread is in a host function, where the driver refuses calls.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Runs the body of a host function on a stream, in which [`unmap`] must not call the driver.
pub fn host_function(body: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    body();
    IN_HOST_FUNCTION.set(false);
}

impl Import {
    /// Imports the whole allocation that holds `address`; `None` for memory that NCCL cannot export.
    pub fn new(address: usize, device: i32) -> Option<Import> {
        let driver = driver().ok().filter(|driver| driver.is_exportable(address))?;
        driver.map_again(address, device).ok().map(Import)
    }

    /// The address at which peers write into `buffer`; `None` if it ends behind the imported allocation.
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

/// Calls `act`, which unmaps something, now; in a host function on a new thread without waiting. The last operation of an aborted
/// communicator drops its registrations in a host function.
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

/// Waits at exit, at most a second, for background threads that unmap, so that their mappings do not count as leaks.
pub fn wait_unmapped() {
    let began = Instant::now();
    while LEAVING.load(SeqCst) > 0 && began.elapsed() < Duration::from_secs(1) {
        std::thread::yield_now();
    }
}
