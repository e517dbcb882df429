//! Counts and flags that are set back when a value is dropped, also in a panic.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

/// Counts one more while it lives.
#[derive(Debug)]
pub struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    /// Counts one more.
    #[inline]
    pub fn by(count: &'a AtomicUsize) -> Counted<'a> {
        count.fetch_add(1, SeqCst);
        Counted(count)
    }
}

impl Drop for Counted<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// A flag that is up while it lives.
#[derive(Debug)]
pub struct Flagged<'a>(&'a AtomicBool);

impl<'a> Flagged<'a> {
    /// Raises the flag. None if it is up already.
    pub fn by(flag: &'a AtomicBool) -> Option<Flagged<'a>> {
        (!flag.swap(true, SeqCst)).then_some(Flagged(flag))
    }
}

impl Drop for Flagged<'_> {
    fn drop(&mut self) {
        self.0.store(false, SeqCst);
    }
}
