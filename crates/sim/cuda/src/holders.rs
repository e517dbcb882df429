//! Tells whether another process still holds physical memory. An exported descriptor, a handle imported from it and a mapping of
//! that share one open file. Each such file carries a shared lock, which the maker of the memory looks for. The kernel drops the
//! lock with the last holder, also when its process dies. A forked child inherits neither: it has no mappings of the driver's, and
//! closes what its parent had imported.

use crate::code::{CUDA_ERROR_OPERATING_SYSTEM, Code};
use std::ffi::CString;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// `/proc`, opened when this library is loaded: a program may hide it later, and the real driver does not need it to share memory.
static PROC: AtomicI32 = AtomicI32::new(-1);

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = open_proc;

extern "C" fn open_proc() {
    // SAFETY: a string that ends with a zero.
    PROC.store(unsafe { libc::open(c"/proc".as_ptr(), libc::O_PATH | libc::O_CLOEXEC) }, Ordering::Relaxed);
}

fn name_of(file: &impl AsRawFd) -> CString {
    CString::new(format!("thread-self/fd/{}", file.as_raw_fd())).unwrap_or_default()
}

/// What a descriptor's link in `/proc` says.
pub fn link(file: &impl AsRawFd) -> Option<String> {
    let mut text = [0u8; 256];
    let (proc, name) = (PROC.load(Ordering::Relaxed), name_of(file));
    // SAFETY: a string, and room for as many bytes as it says.
    let bytes = unsafe { libc::readlinkat(proc, name.as_ptr(), text.as_mut_ptr().cast(), text.len()) };
    Some(String::from_utf8_lossy(text.get(..usize::try_from(bytes).ok()?)?).into_owned())
}

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
    let (proc, name) = (PROC.load(Ordering::Relaxed), name_of(file));
    // SAFETY: a string.
    let opened = unsafe { libc::openat(proc, name.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    if opened < 0 {
        return Err(CUDA_ERROR_OPERATING_SYSTEM);
    }
    // SAFETY: the call above opened it for this function.
    let opened = unsafe { OwnedFd::from_raw_fd(opened) };
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
