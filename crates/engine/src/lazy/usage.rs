//! Notes what was done with NCCL's communicator behind a lazy one: whether it may be cached, and how much memory it took.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use windlass_base::gpu::{self, Failure, Home, Ordinal, StreamHandle};

/// Why NCCL's communicator must not be cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// By what this rank did, perhaps alone: other ranks may cache theirs.
    Here = 1,
    /// By what all ranks do.
    Everywhere = 2,
}

/// What was done with NCCL's communicator.
#[derive(Debug, Default)]
pub(super) struct Usage {
    unfit: AtomicU8,
    has_run: AtomicBool,
    /// Bytes by which the device's free memory fell when NCCL built it and ran its first call, which makes connections. Allocations of
    /// the application and other communicators may be among them.
    bytes: AtomicU64,
}

impl Usage {
    pub(super) fn mark(&self, unfit: Unfit) {
        self.unfit.fetch_or(unfit as u8, Ordering::Relaxed);
    }

    /// The reason that counts, if there is any.
    pub(super) fn unfit(&self) -> Option<Unfit> {
        match self.unfit.load(Ordering::Relaxed) {
            0 => None,
            1 => Some(Unfit::Here),
            _ => Some(Unfit::Everywhere),
        }
    }

    /// Notes that a call goes to NCCL on a stream. If the stream is captured, marks `whose`, as the graph may run at any later time.
    pub(super) fn run_on(&self, stream: StreamHandle, whose: Unfit) {
        self.has_run.store(true, Ordering::Relaxed);
        if self.unfit().is_none() {
            match gpu::driver().and_then(|driver| driver.capture_of(stream)) {
                Ok(None) => {}
                Ok(Some(_)) => self.mark(whose),
                Err(_) => self.mark(Unfit::Here),
            }
        }
    }

    /// Whether work may be in flight.
    pub(super) fn has_run(&self) -> bool {
        self.has_run.load(Ordering::Relaxed) || self.unfit().is_some()
    }

    /// Whether no call has gone to NCCL yet.
    pub(super) fn is_fresh(&self) -> bool {
        !self.has_run.load(Ordering::Relaxed)
    }

    /// Adds the bytes by which the device's free memory has fallen since `before`.
    pub(super) fn measured(&self, device: Ordinal, before: u64) {
        let after = free_bytes(device).unwrap_or(before);
        self.bytes.fetch_add(before.saturating_sub(after), Ordering::Relaxed);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// Bytes that are free on a device.
pub(super) fn free_bytes(device: Ordinal) -> Result<u64, Failure> {
    let driver = gpu::driver()?;
    let home = Home::of(driver, device)?;
    let _entered = home.enter()?;
    driver.free_bytes()
}
