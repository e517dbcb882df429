//! Descriptors that are ours: closed by an exec (close-on-exec) and by [`close_in_child`] after a fork.
//!
//! A forked child that kept them would hold connections open for a dead parent: nobody would see it die. Which
//! numbers are ours stands in a table of bits that the child can read without a lock, at any moment of the parent.

#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, Result};

/// Descriptors above this are refused: Linux's default ceiling for one process.
const NUMBERS_MAX: usize = 1 << 20;

static NUMBERS: [AtomicU64; NUMBERS_MAX / 64] = [const { AtomicU64::new(0) }; NUMBERS_MAX / 64];

/// A descriptor of ours.
#[derive(Debug)]
pub struct Ours(OwnedFd);

impl Ours {
    /// Enters a descriptor. One whose number is out of the table's range is closed and refused.
    pub fn new(fd: OwnedFd) -> Result<Ours> {
        let number = fd.as_raw_fd() as usize;
        let word = NUMBERS.get(number / 64).ok_or(Errno::MFILE)?;
        word.fetch_or(1 << (number % 64), Ordering::Relaxed);
        Ok(Ours(fd))
    }
}

impl Drop for Ours {
    /// Leaves the table before the number is free for another's descriptor. A fork between the two leaks one into the
    /// child, which is harmless beside closing another's.
    fn drop(&mut self) {
        let number = self.0.as_raw_fd() as usize;
        NUMBERS[number / 64].fetch_and(!(1 << (number % 64)), Ordering::Relaxed);
    }
}

impl AsFd for Ours {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// How many descriptors are ours now.
pub fn open() -> usize {
    NUMBERS.iter().map(|word| word.load(Ordering::Relaxed).count_ones() as usize).sum()
}

/// Whether this process could open so many more now. Opens and closes them: 1 to 2 us each.
pub fn are_free(count: usize) -> bool {
    let opened: Result<Vec<OwnedFd>> = (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC)).collect();
    opened.is_ok()
}

/// Descriptors that are held in reserve, by their numbers; -1 where there is none. No lock: a forked child begins without.
static RESERVED: [AtomicI32; 2] = [const { AtomicI32::new(-1) }; 2];

/// How long descriptors are waited for: they come back, but others may wait for what needs them.
pub const WANTED_FOR: Duration = Duration::from_secs(3);

/// Whether an operation failed as this process, or the whole system, has no descriptor left, or no memory for one.
pub fn is_want(error: Errno) -> bool {
    matches!(error, Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
}

/// How many are missing of the reserve: they are taken as soon as they are free.
pub fn missing_of_reserve() -> usize {
    RESERVED.iter().filter(|place| place.load(Ordering::Relaxed) < 0).count()
}

/// Opens what is missing of the reserve. Whether it is whole.
pub fn fill_reserve() -> bool {
    RESERVED.iter().all(|place| {
        if place.load(Ordering::Relaxed) >= 0 {
            return true;
        }
        let Ok(one) = eventfd(0, EventfdFlags::CLOEXEC).and_then(Ours::new) else { return false };
        let number = one.0.as_raw_fd();
        // Another thread may have filled it.
        let is_kept = place.compare_exchange(-1, number, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if is_kept {
            std::mem::forget(one);
        }
        true
    })
}

/// Opens one, if need be in place of one of the reserve: for a connection by which a rank hears or says that it cannot go on.
/// Others would wait for it.
pub fn even_of_reserve<T>(mut open: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match open() {
            Err(error) if is_want(error) && give_up_one() => {}
            result => return result,
        }
    }
}

fn give_up_one() -> bool {
    let numbers = RESERVED.iter().map(|place| place.swap(-1, Ordering::AcqRel));
    // SAFETY: the number of an `Ours` that was forgotten, and that only this thread has now.
    let one =
        numbers.into_iter().find(|number| *number >= 0).map(|number| unsafe { OwnedFd::from_raw_fd(number) });
    one.map(Ours).is_some()
}

/// In a child just forked, which will never run our code again: closes what it got from us. Takes no lock and
/// allocates nothing.
pub fn close_in_child() {
    RESERVED.iter().for_each(|place| place.store(-1, Ordering::Relaxed));
    for (index, word) in NUMBERS.iter().enumerate() {
        // Most words are none, and lie in pages that the child would else copy.
        if word.load(Ordering::Relaxed) == 0 {
            continue;
        }
        let mut bits = word.swap(0, Ordering::Relaxed);
        while bits != 0 {
            let number = (index * 64) as RawFd + bits.trailing_zeros() as RawFd;
            bits &= bits - 1;
            // SAFETY: the number was ours in the parent when it forked; the child's owners of it are never dropped,
            // since no thread of ours lives there and every entry of the ABI layer only forwards.
            unsafe { libc::close(number) };
        }
    }
}
