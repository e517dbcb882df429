//! Owns Windlass's file descriptors: an exec closes them (close-on-exec), and [`close_in_child`] does after a fork.
//!
//! If a forked child kept them, it would hold connections open for a dead parent, whose peers would not see its end.
//! A table of bits has the numbers of Windlass's descriptors. The child can read it without a lock, whatever the
//! parent was doing.

#![allow(unsafe_code)]

pub mod fork_lock;

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, Result};

use fork_lock::without_forks;

/// Descriptors above this are refused: Linux's default ceiling for one process.
const NUMBERS_MAX: usize = 1 << 20;

static NUMBERS: [AtomicU64; NUMBERS_MAX / 64] = [const { AtomicU64::new(0) }; NUMBERS_MAX / 64];

/// A descriptor of Windlass's, whose number is in the table.
#[derive(Debug)]
pub struct Ours(ManuallyDrop<OwnedFd>);

impl Ours {
    /// Opens a descriptor and enters it into the table, with no fork in between. `open` may neither wait nor allocate.
    pub fn open(open: impl FnOnce() -> Result<OwnedFd>) -> Result<Ours> {
        without_forks(|| Ours::new(open()?))
    }

    /// Opens two as [`Ours::open`] does.
    pub fn open_pair(open: impl FnOnce() -> Result<(OwnedFd, OwnedFd)>) -> Result<(Ours, Ours)> {
        without_forks(|| {
            let (one, other) = open()?;
            Ok((Ours::new(one)?, Ours::new(other)?))
        })
    }

    /// Enters a descriptor into the table. A child forked after it was opened, and before this call, keeps it. A descriptor whose number is
    /// beyond the table is closed and refused with `EMFILE`.
    pub fn new(fd: OwnedFd) -> Result<Ours> {
        let number = fd.as_raw_fd() as usize;
        let word = NUMBERS.get(number / 64).ok_or(Errno::MFILE)?;
        word.fetch_or(1 << (number % 64), Ordering::Relaxed);
        Ok(Ours(ManuallyDrop::new(fd)))
    }
}

impl Drop for Ours {
    /// Leaves the table before the close, since the program may get the number at once. No child is forked in between.
    fn drop(&mut self) {
        let number = self.0.as_raw_fd() as usize;
        without_forks(|| {
            NUMBERS[number / 64].fetch_and(!(1 << (number % 64)), Ordering::Relaxed);
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        });
    }
}

impl AsFd for Ours {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// How many descriptors Windlass has now.
#[cfg(any(test, feature = "test-support"))]
pub fn open() -> usize {
    NUMBERS.iter().map(|word| word.load(Ordering::Relaxed).count_ones() as usize).sum()
}

/// Whether this process could open `count` more descriptors now. Opens and closes them: 1 to 2 us each. To look which numbers are open would
/// not do: a thread that waits in an accept has a number that nobody sees.
pub fn are_free(count: usize) -> bool {
    let open = || Ours::open(|| eventfd(0, EventfdFlags::CLOEXEC));
    let opened: Result<Vec<Ours>> = (0..count).map(|_| open()).collect();
    opened.is_ok()
}

/// The numbers of descriptors held in reserve; -1 is an empty place. There is no lock, since a forked child could find it
/// locked.
static RESERVED: [AtomicI32; 2] = [const { AtomicI32::new(-1) }; 2];

/// How long an operation waits for a descriptor to become free. Not longer, since other ranks may wait for the
/// operation.
pub const WANTED_FOR: Duration = Duration::from_secs(3);

/// Whether an operation failed because this process or the whole system has no descriptor left, or no memory for one.
pub fn is_want(error: Errno) -> bool {
    matches!(error, Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
}

/// How many descriptors the reserve lacks. They are taken as soon as descriptors are free.
pub fn missing_of_reserve() -> usize {
    RESERVED.iter().filter(|place| place.load(Ordering::Relaxed) < 0).count()
}

/// Opens the descriptors that the reserve lacks. Gives whether the reserve is full.
pub fn fill_reserve() -> bool {
    RESERVED.iter().all(|place| {
        if place.load(Ordering::Relaxed) >= 0 {
            return true;
        }
        let Ok(one) = Ours::open(|| eventfd(0, EventfdFlags::CLOEXEC)) else { return false };
        let number = one.0.as_raw_fd();
        // Another thread may have filled the place.
        let is_kept = place.compare_exchange(-1, number, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if is_kept {
            std::mem::forget(one);
        }
        true
    })
}

/// Opens a descriptor, if need be in the place of one of the reserve. It is for connections by which a rank hears or says
/// that it cannot go on: other ranks would wait for it.
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
    one.map(|one| Ours(ManuallyDrop::new(one))).is_some()
}

/// In a child just forked: closes all descriptors inherited from Windlass. Takes no lock and allocates nothing.
pub fn close_in_child() {
    RESERVED.iter().for_each(|place| place.store(-1, Ordering::Relaxed));
    for (index, word) in NUMBERS.iter().enumerate() {
        // Most words are 0, and a write would make the child copy their page.
        if word.load(Ordering::Relaxed) == 0 {
            continue;
        }
        let mut bits = word.swap(0, Ordering::Relaxed);
        while bits != 0 {
            let number = (index * 64) as RawFd + bits.trailing_zeros() as RawFd;
            bits &= bits - 1;
            // SAFETY: the number was Windlass's in the parent when it forked. The child never drops the parent's
            // owner of it: the child has no thread of Windlass's, and what it makes anew is its own (`ForkLocal`).
            unsafe { libc::close(number) };
        }
    }
}
