//! Memory of the operating system: anonymous files, reserved addresses, and mapping files there.

use crate::code::{CUDA_ERROR_OPERATING_SYSTEM, CUDA_ERROR_OUT_OF_MEMORY, Code};
use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

pub const PAGE: usize = 4096;

pub fn round_up(bytes: usize, unit: usize) -> Option<usize> {
    bytes.checked_add(unit - 1).map(|sum| sum / unit * unit)
}

/// Makes an anonymous file. The name shows in `/proc/<pid>/fd` and `maps`.
pub fn anonymous_file(name: &str, bytes: usize) -> Result<OwnedFd, Code> {
    let name = CString::new(name).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
    // SAFETY: the name is terminated and outlives the call.
    let descriptor = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(CUDA_ERROR_OPERATING_SYSTEM);
    }
    // SAFETY: a fresh descriptor that nobody else owns.
    let file = unsafe { OwnedFd::from_raw_fd(descriptor) };
    grow(&file, bytes)?;
    Ok(file)
}

pub fn grow(file: &OwnedFd, bytes: usize) -> Result<(), Code> {
    // SAFETY: ftruncate on a descriptor that we own touches no memory of this process.
    let result = unsafe { libc::ftruncate(file.as_raw_fd(), bytes as libc::off_t) };
    if result == 0 { Ok(()) } else { Err(CUDA_ERROR_OUT_OF_MEMORY) }
}

/// Gives the pages of a part of a file back to the system.
pub fn discard(file: &OwnedFd, offset: usize, bytes: usize) {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: fallocate on a descriptor that we own; nobody holds references into the punched part.
    unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as libc::off_t, bytes as libc::off_t) };
}

/// The inode and the size in bytes of a descriptor's file.
pub fn identity(file: BorrowedFd<'_>) -> Result<(u64, usize), Code> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: room for one `stat`.
    let result = unsafe { libc::fstat(file.as_raw_fd(), status.as_mut_ptr()) };
    if result != 0 {
        return Err(CUDA_ERROR_OPERATING_SYSTEM);
    }
    // SAFETY: fstat succeeded and filled it.
    let status = unsafe { status.assume_init() };
    Ok((status.st_ino, status.st_size as usize))
}

/// Reserved addresses between two pages that always fault; unmapped when dropped.
pub struct Reservation {
    whole: usize,
    whole_bytes: usize,
    pub base: usize,
    pub bytes: usize,
}

impl Reservation {
    /// `bytes` are a multiple of the page size; `alignment` is a power of two; `hint` is 0 or a hinted address.
    pub fn new(bytes: usize, alignment: usize, hint: usize) -> Result<Self, Code> {
        let alignment = alignment.max(PAGE);
        let slack = alignment.checked_add(2 * PAGE).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let whole_bytes = bytes.checked_add(slack).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let start = hint.saturating_sub(alignment);
        // SAFETY: without MAP_FIXED the kernel picks free addresses.
        let at = unsafe { libc::mmap(start as *mut _, whole_bytes, libc::PROT_NONE, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let whole = at as usize;
        let base = (whole + PAGE).next_multiple_of(alignment);
        Ok(Reservation { whole, whole_bytes, base, bytes })
    }

    /// Maps a part of a file over a part of the reservation.
    pub fn place(
        &self,
        at: usize,
        bytes: usize,
        file: &OwnedFd,
        offset: usize,
        protection: i32,
    ) -> Result<(), Code> {
        assert!(at >= self.base && at + bytes <= self.base + self.bytes, "mapping outside its reservation");
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: the addresses lie within the reservation, which is ours.
        let result = unsafe {
            libc::mmap(at as *mut _, bytes, protection, flags, file.as_raw_fd(), offset as libc::off_t)
        };
        if result == libc::MAP_FAILED { Err(CUDA_ERROR_OPERATING_SYSTEM) } else { Ok(()) }
    }

    /// Lets forked children inherit no mapping of this part, as with the real driver.
    pub fn keep_from_children(&self, at: usize, bytes: usize) {
        assert!(at >= self.base && at + bytes <= self.base + self.bytes, "mapping outside its reservation");
        // SAFETY: the addresses lie within the reservation, which is ours.
        unsafe { libc::madvise(at as *mut _, bytes, libc::MADV_DONTFORK) };
    }

    /// Unmaps a part of the reservation: it stays reserved, and accesses fault.
    pub fn clear(&self, at: usize, bytes: usize) {
        assert!(at >= self.base && at + bytes <= self.base + self.bytes, "unmapping outside its reservation");
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: the addresses lie within the reservation, which is ours.
        unsafe { libc::mmap(at as *mut _, bytes, libc::PROT_NONE, flags, -1, 0) };
    }

    pub fn protect(&self, at: usize, bytes: usize, protection: i32) -> Result<(), Code> {
        assert!(
            at >= self.base && at + bytes <= self.base + self.bytes,
            "protection outside its reservation"
        );
        // SAFETY: the addresses lie within the reservation, which is ours.
        let result = unsafe { libc::mprotect(at as *mut _, bytes, protection) };
        if result == 0 { Ok(()) } else { Err(CUDA_ERROR_OPERATING_SYSTEM) }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: this object owns the addresses; accesses from now on are the application's fault and shall fault.
        unsafe { libc::munmap(self.whole as *mut _, self.whole_bytes) };
    }
}
