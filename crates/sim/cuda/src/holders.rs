//! Tells whether another process still holds physical memory. An exported descriptor, a handle imported from it and a mapping of
//! that share one open file. Each such file carries a shared lock, which the maker of the memory looks for. The kernel drops the
//! lock with the last holder, also when its process dies.

use crate::code::{CUDA_ERROR_OPERATING_SYSTEM, Code};
use std::fs::OpenOptions;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};

/// Opens the memory of `file` a second time, marked as a holder.
pub fn open(file: &OwnedFd) -> Result<OwnedFd, Code> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
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
