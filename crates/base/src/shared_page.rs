//! A few pages of host memory that processes share. One process makes them and passes a descriptor on; the others map
//! it.
//!
//! The file is sealed: it can neither shrink nor grow, so no process can make another's access fault. The content is only
//! as trustworthy as the processes that write it. A forked child inherits the mapping; Windlass does not run there.

#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, memfd_create,
};
use rustix::io::{Errno, Result};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::process::{Resource, getrlimit};

use crate::descriptor::Ours;

/// The smallest size in bytes; others are multiples of it.
pub const BYTES: usize = 4096;
/// The words of the smallest size.
pub const WORDS: usize = BYTES / size_of::<AtomicU64>();

/// Mapped pages. Any thread may use them.
#[derive(Debug)]
pub struct SharedPage {
    address: NonNull<AtomicU64>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the process, and its words are atomics.
unsafe impl Send for SharedPage {}
// SAFETY: as above.
unsafe impl Sync for SharedPage {}

impl SharedPage {
    /// Makes `bytes` bytes of zeros, a multiple of [`BYTES`], and a descriptor by which other processes open them.
    pub fn create(bytes: usize) -> Result<(SharedPage, Ours)> {
        let file = Ours::open(new_file)?;
        // Reserves the memory now. Exceeding the process's limit of file sizes would kill the process (SIGXFSZ).
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < bytes as u64) {
            return Err(Errno::FBIG);
        }
        fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)?;
        fcntl_add_seals(&file, sealed() | SealFlags::SEAL)?;
        Ok((SharedPage::map(file.as_fd(), bytes)?, file))
    }

    /// Maps the pages behind a descriptor from another process; the descriptor may be closed then. Refuses a file of another
    /// length, or one that may change its length.
    pub fn open(file: BorrowedFd<'_>, bytes: usize) -> Result<SharedPage> {
        let is_page = rustix::fs::fstat(file)?.st_size == bytes as i64;
        if !is_page || !fcntl_get_seals(file)?.contains(sealed()) {
            return Err(Errno::INVAL);
        }
        SharedPage::map(file, bytes)
    }

    fn map(file: BorrowedFd<'_>, bytes: usize) -> Result<SharedPage> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let address = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0)? };
        NonNull::new(address.cast()).map(|address| SharedPage { address, bytes }).ok_or(Errno::NOMEM)
    }
}

/// The seals that keep the file's length.
fn sealed() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW
}

fn new_file() -> Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Some systems allow only files with this flag; kernels before 6.3 do not know it.
    match memfd_create("windlass-page", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => memfd_create("windlass-page", flags),
        made => made,
    }
}

impl AsRef<[AtomicU64]> for SharedPage {
    fn as_ref(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is that long, aligned to a page, and lives as long as `self`; the file keeps its length. Any
        // bytes are a valid word, and other processes write whole words only as atomics.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.bytes / size_of::<AtomicU64>()) }
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        // SAFETY: our own mapping, to which no reference is left.
        let unmapped = unsafe { munmap(self.address.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::atomic::Ordering;
    use std::time::{Duration, Instant};

    use super::*;

    const DESCRIPTOR: &str = "ENGINE_TEST_PAGE";

    fn wait_for(word: &AtomicU64, value: u64) {
        let until = Instant::now() + Duration::from_secs(60);
        while word.load(Ordering::Acquire) != value {
            assert!(Instant::now() < until, "{value} never came");
            std::thread::yield_now();
        }
    }

    /// Two processes see each other's words, at both ends of the pages; the mapping outlives the descriptor.
    #[test]
    fn two_processes() {
        use std::os::fd::AsRawFd;
        let (page, file) = SharedPage::create(3 * BYTES).unwrap();
        let words = page.as_ref();
        assert!(words.iter().all(|word| word.load(Ordering::Relaxed) == 0) && words.len() == 3 * WORDS);
        let given = rustix::io::dup(&file).unwrap();
        rustix::io::fcntl_setfd(&given, rustix::io::FdFlags::empty()).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "shared_page::tests::other_process", "--ignored"]);
        let mut child = command.env(DESCRIPTOR, given.as_raw_fd().to_string()).spawn().unwrap();
        drop((file, given));
        words[0].store(7, Ordering::Release);
        wait_for(&words[3 * WORDS - 1], 8);
        words[0].store(9, Ordering::Release);
        assert!(child.wait().unwrap().success());
        assert_eq!(words[1].load(Ordering::Relaxed), 10);
    }

    /// The second process of the test above.
    #[test]
    #[ignore = "run by two_processes"]
    fn other_process() {
        use std::os::fd::FromRawFd;
        let number = std::env::var(DESCRIPTOR).unwrap().parse().unwrap();
        // SAFETY: inherited for this purpose; nobody else in this process knows it.
        let file = unsafe { OwnedFd::from_raw_fd(number) };
        let page = SharedPage::open(file.as_fd(), 3 * BYTES).unwrap();
        drop(file);
        let words = page.as_ref();
        wait_for(&words[0], 7);
        words[3 * WORDS - 1].store(8, Ordering::Release);
        wait_for(&words[0], 9);
        words[1].store(10, Ordering::Relaxed);
    }

    /// A shared page keeps its length, whoever has the descriptor; a file that may change its length is refused.
    #[test]
    fn seals() {
        let (_page, file) = SharedPage::create(BYTES).unwrap();
        for length in [0, 2 * BYTES as u64] {
            assert_eq!(rustix::fs::ftruncate(&file, length), Err(Errno::PERM));
        }
        assert!(SharedPage::open(file.as_fd(), BYTES).is_ok());
        assert_eq!(SharedPage::open(file.as_fd(), 2 * BYTES).unwrap_err(), Errno::INVAL);
        assert_eq!(fcntl_add_seals(&file, SealFlags::WRITE), Err(Errno::PERM));

        let unsealed = new_file().unwrap();
        rustix::fs::ftruncate(&unsealed, BYTES as u64).unwrap();
        assert_eq!(SharedPage::open(unsealed.as_fd(), BYTES).unwrap_err(), Errno::INVAL);
        fcntl_add_seals(&unsealed, sealed()).unwrap();
        assert!(SharedPage::open(unsealed.as_fd(), BYTES).is_ok());
        let short = new_file().unwrap();
        fcntl_add_seals(&short, sealed()).unwrap();
        assert_eq!(SharedPage::open(short.as_fd(), BYTES).unwrap_err(), Errno::INVAL);
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(SharedPage::open(null.as_fd(), BYTES).is_err());
    }

    /// The descriptor is closed by an exec.
    #[test]
    fn descriptor_is_ours() {
        let (_page, file) = SharedPage::create(BYTES).unwrap();
        assert!(rustix::io::fcntl_getfd(&file).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
}
