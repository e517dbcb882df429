//! Tells whether another process still holds physical memory. An exported descriptor, a handle imported from it and a mapping of
//! that share one open file. Each such file carries a shared lock, which the maker of the memory looks for. The kernel drops the
//! lock with the last holder, also when its process dies. A forked child inherits neither: it has no mappings of the driver's, and
//! closes what its parent had imported.

use crate::code::{CUDA_ERROR_OPERATING_SYSTEM, Code};
use std::fs::OpenOptions;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// The numbers of imported descriptors, one bit each; a higher number stays open in forked children.
static IMPORTED: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

/// Notes a descriptor that a forked child is to close.
pub fn enter(file: &OwnedFd) {
    let number = file.as_raw_fd() as usize;
    IMPORTED.get(number / 64).map(|word| word.fetch_or(1 << (number % 64), Ordering::Relaxed));
}

/// Forgets a descriptor that is about to be closed.
pub fn leave(file: &OwnedFd) {
    let number = file.as_raw_fd() as usize;
    IMPORTED.get(number / 64).map(|word| word.fetch_and(!(1 << (number % 64)), Ordering::Relaxed));
}

/// In a child just forked: closes what its parent had imported. Takes no lock and allocates nothing.
pub fn close_in_child() {
    for (index, word) in IMPORTED.iter().enumerate().filter(|(_, word)| word.load(Ordering::Relaxed) != 0) {
        let bits = word.load(Ordering::Relaxed);
        for bit in (0..64).filter(|bit| bits & (1 << bit) != 0) {
            // SAFETY: the child makes no calls of the driver, so it never uses or closes the parent's descriptor.
            unsafe { libc::close((64 * index + bit) as i32) };
        }
    }
}

/// Opens the memory of `file` a second time, marked as a holder.
pub fn open(file: &OwnedFd) -> Result<OwnedFd, Code> {
    let path = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    let opened = OpenOptions::new().read(true).write(true).open(path);
    let opened = OwnedFd::from(opened.map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?);
    hold(&opened)?;
    Ok(opened)
}

/// Marks an open file as a holder, until its last duplicate and mapping have gone.
pub fn hold(file: &OwnedFd) -> Result<(), Code> {
    let mut lock = lock_of(libc::F_RDLCK);
    // SAFETY: room for one lock; the descriptor is ours.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) };
    if result == 0 { Ok(()) } else { Err(CUDA_ERROR_OPERATING_SYSTEM) }
}

/// Whether any open file holds the memory; `file` itself must not be marked as a holder.
pub fn exist(file: &OwnedFd) -> bool {
    let mut lock = lock_of(libc::F_WRLCK);
    // SAFETY: room for one lock; the descriptor is ours.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    result == 0 && i32::from(lock.l_type) != libc::F_UNLCK
}

/// A lock request for the whole file.
fn lock_of(kind: i32) -> libc::flock {
    // SAFETY: numbers only, for which zero is valid; the kernel wants a zero for the process.
    let mut lock: libc::flock = unsafe { MaybeUninit::zeroed().assume_init() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock
}
