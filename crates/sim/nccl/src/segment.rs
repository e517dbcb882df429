//! The shared memory of one communicator, in which its ranks wait for each other. Each rank has a record and staging slots, each
//! directed pair (sender, receiver) has a ring.
//!
//! The file is sparse. A part is allocated with fallocate before its first use, so that a full /dev/shm is an error and never
//! SIGBUS.

use crate::refusal::{Outcome, refuse};
use crate::settings::settings;
use crate::{dump, strict};
use nccl_sys::*;
use std::ffi::CString;
use std::mem::size_of;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

pub const RANKS_MAX: usize = 24;
/// Bytes that one rank publishes in one round of a collective.
pub const SLOT_BYTES: usize = 256 << 10;
/// Rings are allocated and given back in blocks of this size.
pub const RING_BLOCK_BYTES: u64 = 256 << 10;
/// Messages of one directed pair that may be outstanding, as measured on NCCL.
pub const MESSAGES_MAX: u64 = 8;
pub const EXCHANGE_BYTES: usize = 64;

const PAGE_BYTES: usize = 4096;
const NAP: Duration = Duration::from_millis(100);

/// Text that other processes may read while it changes. Mixed text appears in dumps only.
#[repr(C)]
pub struct Text<const N: usize> {
    length: AtomicU32,
    bytes: [AtomicU8; N],
}

impl<const N: usize> Text<N> {
    pub fn set(&self, text: &str) {
        self.length.store(0, Relaxed);
        for (cell, byte) in self.bytes.iter().zip(text.bytes()) {
            cell.store(byte, Relaxed);
        }
        self.length.store(text.len().min(N) as u32, Release);
    }

    pub fn get(&self) -> String {
        let length = (self.length.load(Acquire) as usize).min(N);
        let bytes: Vec<u8> = self.bytes[..length].iter().map(|cell| cell.load(Relaxed)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Values of `RankRecord::standing`.
pub mod standing {
    pub const ABSENT: u32 = 0;
    pub const ALIVE: u32 = 1;
    pub const ABORTED: u32 = 2;
    pub const DESTROYED: u32 = 3;
    pub const REVOKED: u32 = 4;
}

#[repr(C, align(64))]
pub struct Header {
    pub ranks: AtomicU32,
    pub joined: AtomicU32,
    /// 1 + the rank that found misuse, 0 for none; the other ranks' processes end, too.
    pub failed: AtomicU32,
    pub dumped: AtomicU32,
    pub name: Text<64>,
}

/// The facts of a call that its ranks compare.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub struct CallFacts {
    pub kind: u32,
    pub datatype: i32,
    pub operator: i32,
    pub root: i32,
    pub count: u64,
    pub captured: u32,
    /// See `lookup::Coverage`.
    pub coverage: u32,
    /// 1 + the number of the window, 0 for none, and the offset in it.
    pub send_window: u64,
    pub send_offset: u64,
    pub receive_window: u64,
    pub receive_offset: u64,
}

#[repr(C, align(64))]
pub struct RankRecord {
    pub claimed: AtomicU32,
    pub standing: AtomicU32,
    pub process: AtomicI32,
    pub device: AtomicI32,
    pub bus_id: AtomicU64,
    /// Futex word, increased after every change that this rank may wait for.
    bell: AtomicU32,
    waiters: AtomicU32,
    /// Phases of collectives that this rank has completed.
    pub phase: AtomicU64,
    /// Exchanges for which this rank has written its note.
    pub exchanged: AtomicU64,
    /// Exchanges of which this rank has read all notes.
    pub exchange_read: AtomicU64,
    pub operation: AtomicU64,
    pub all_facts: [std::cell::UnsafeCell<CallFacts>; 2],
    pub notes: [std::cell::UnsafeCell<[u8; EXCHANGE_BYTES]>; 2],
    pub call: Text<400>,
    pub waits_for: Text<300>,
}

/// One message of a directed pair.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct MessageFacts {
    pub bytes: u64,
    pub covered: u32,
    pub captured: u32,
}

/// The FIFO of one directed pair. Positions count bytes and messages from init.
#[repr(C, align(64))]
pub struct PairRecord {
    pub written: AtomicU64,
    pub posted: AtomicU64,
    pub allocated: AtomicU64,
    _gap: [u64; 5],
    pub consumed: AtomicU64,
    pub finished: AtomicU64,
    pub messages: [std::cell::UnsafeCell<MessageFacts>; MESSAGES_MAX as usize],
}

/// An abort or revocation ended the wait.
#[derive(Debug)]
pub struct Left;

pub struct Segment {
    base: *mut u8,
    bytes: usize,
    file: i32,
    path: CString,
    ranks: usize,
    staging_ready: AtomicBool,
    complete: AtomicBool,
}

// SAFETY: the mapping is shared memory; fields are atomics, or cells whose turns the phase counters decide.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// Offsets of the parts, in bytes.
struct Layout {
    pairs: usize,
    staging: usize,
    rings: usize,
    total: usize,
}

/// Bytes that a pair's sends may move before the receiver takes any, as measured on NCCL.
pub fn absorbed_bytes(ranks: usize) -> u64 {
    if ranks <= 2 { 64 << 20 } else { 32 << 20 }
}

/// One block more than is absorbed: so the sender never writes into the block that the receiver is about to free.
fn ring_bytes(ranks: usize) -> u64 {
    absorbed_bytes(ranks) + RING_BLOCK_BYTES
}

fn layout(ranks: usize) -> Layout {
    let pairs = PAGE_BYTES + ranks * size_of::<RankRecord>();
    let staging = (pairs + ranks * ranks * size_of::<PairRecord>()).next_multiple_of(PAGE_BYTES);
    let rings = staging + 2 * (ranks + 1) * SLOT_BYTES;
    Layout { pairs, staging, rings, total: rings + ranks * ranks * ring_bytes(ranks) as usize }
}

impl Segment {
    /// Opens or creates the segment `name`.
    pub fn open(name: &str, ranks: usize) -> Outcome<Segment> {
        let path = CString::new(format!("/windlass-sim-nccl.{name}")).expect("names are hexadecimal");
        // SAFETY: the path is a C string.
        let file =
            unsafe { libc::shm_open(path.as_ptr(), libc::O_CREAT | libc::O_RDWR | libc::O_CLOEXEC, 0o600) };
        if file < 0 {
            return refuse(
                ncclSystemError,
                format!("shm_open {path:?}: {}", std::io::Error::last_os_error()),
            );
        }
        let Layout { staging, total, .. } = layout(ranks);
        let mut segment = Segment {
            base: std::ptr::null_mut(),
            bytes: total,
            file,
            path,
            ranks,
            staging_ready: AtomicBool::new(false),
            complete: AtomicBool::new(false),
        };
        segment.allocate(0, staging)?;
        // The file only grows: a segment of another number of ranks is detected by its header.
        // SAFETY: the descriptor is ours.
        let size = unsafe {
            let mut about: libc::stat = std::mem::zeroed();
            libc::fstat(file, &mut about);
            about.st_size as usize
        };
        // SAFETY: the descriptor is ours.
        if size < total && unsafe { libc::ftruncate(file, total as libc::off_t) } != 0 {
            return refuse(ncclSystemError, format!("ftruncate: {}", std::io::Error::last_os_error()));
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: a fresh mapping of our own file.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), total, protection, flags, file, 0) };
        if base == libc::MAP_FAILED {
            return refuse(ncclSystemError, format!("mmap: {}", std::io::Error::last_os_error()));
        }
        segment.base = base.cast();
        Ok(segment)
    }

    pub fn header(&self) -> &Header {
        // SAFETY: the first page holds the header; zero bytes are valid for it.
        unsafe { &*self.base.cast() }
    }

    pub fn rank(&self, rank: usize) -> &RankRecord {
        assert!(rank < self.ranks);
        // SAFETY: within the mapping by the assertion; zero bytes are valid.
        unsafe { &*self.base.add(PAGE_BYTES).cast::<RankRecord>().add(rank) }
    }

    pub fn pair(&self, sender: usize, receiver: usize) -> &PairRecord {
        assert!(sender < self.ranks && receiver < self.ranks);
        let index = sender * self.ranks + receiver;
        // SAFETY: within the mapping by the assertion; zero bytes are valid.
        unsafe { &*self.base.add(layout(self.ranks).pairs).cast::<PairRecord>().add(index) }
    }

    /// The staging slot of `rank` for even or odd rounds; `rank` = number of ranks is the slot for results.
    pub fn slot(&self, rank: usize, round: u64) -> *mut u8 {
        assert!(rank <= self.ranks);
        let index = 2 * rank + (round & 1) as usize;
        // SAFETY: within the mapping by the assertion.
        unsafe { self.base.add(layout(self.ranks).staging + index * SLOT_BYTES) }
    }

    /// The ring of a directed pair at byte position `position`, and how many bytes follow before it wraps.
    pub fn ring(&self, sender: usize, receiver: usize, position: u64) -> (*mut u8, u64) {
        let capacity = ring_bytes(self.ranks);
        let offset = self.ring_offset(sender, receiver) + (position % capacity) as usize;
        // SAFETY: within the mapping, see `layout`.
        (unsafe { self.base.add(offset) }, capacity - position % capacity)
    }

    fn ring_offset(&self, sender: usize, receiver: usize) -> usize {
        layout(self.ranks).rings + (sender * self.ranks + receiver) * ring_bytes(self.ranks) as usize
    }

    /// Allocates the block of a ring that holds `position`.
    pub fn allocate_ring_block(&self, sender: usize, receiver: usize, position: u64) -> Outcome {
        let within = position % ring_bytes(self.ranks) / RING_BLOCK_BYTES * RING_BLOCK_BYTES;
        self.allocate(self.ring_offset(sender, receiver) + within as usize, RING_BLOCK_BYTES as usize)
    }

    /// Gives back the block of a ring that holds `position`.
    pub fn free_ring_block(&self, sender: usize, receiver: usize, position: u64) {
        let within = position % ring_bytes(self.ranks) / RING_BLOCK_BYTES * RING_BLOCK_BYTES;
        let offset = self.ring_offset(sender, receiver) + within as usize;
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the descriptor is ours. A failure only keeps memory.
        unsafe { libc::fallocate(self.file, mode, offset as libc::off_t, RING_BLOCK_BYTES as libc::off_t) };
    }

    /// Allocates the staging area, at the first collective.
    pub fn prepare_staging(&self) -> Outcome {
        if !self.staging_ready.load(Acquire) {
            let Layout { staging, rings, .. } = layout(self.ranks);
            self.allocate(staging, rings - staging)?;
            self.staging_ready.store(true, Release);
        }
        Ok(())
    }

    fn allocate(&self, offset: usize, bytes: usize) -> Outcome {
        // SAFETY: the descriptor is ours.
        match unsafe { libc::posix_fallocate(self.file, offset as libc::off_t, bytes as libc::off_t) } {
            0 => Ok(()),
            code => {
                let error = std::io::Error::from_raw_os_error(code);
                refuse(ncclSystemError, format!("/dev/shm: {bytes} bytes of shared memory: {error}"))
            }
        }
    }

    /// Removes the file's name, once: all ranks have mapped the segment, or its init has failed.
    pub fn unlink(&self) {
        if !self.complete.swap(true, SeqCst) {
            // SAFETY: the path is a C string.
            unsafe { libc::shm_unlink(self.path.as_ptr()) };
        }
    }

    /// Makes [`Segment::unlink`] do nothing here: the rank that joined last removes the name.
    pub fn leave_name(&self) {
        self.complete.store(true, SeqCst);
    }

    pub fn ring_bell(&self, rank: usize) {
        let record = self.rank(rank);
        record.bell.fetch_add(1, SeqCst);
        if record.waiters.load(SeqCst) > 0 {
            futex(&record.bell, libc::FUTEX_WAKE, i32::MAX as u32, None);
        }
    }

    pub fn ring_all(&self) {
        (0..self.ranks).for_each(|rank| self.ring_bell(rank));
    }

    /// Blocks this rank until `ready`, or until `leave` is set. Ends the process after the time limit.
    pub fn wait(
        &self,
        rank: usize,
        leave: &AtomicBool,
        what: impl Fn() -> String,
        mut ready: impl FnMut() -> bool,
    ) -> Result<(), Left> {
        let record = self.rank(rank);
        let mut started = None;
        let mut told = Instant::now();
        loop {
            let bell = record.bell.load(SeqCst);
            if ready() {
                if started.is_some() {
                    record.waits_for.set("");
                }
                return Ok(());
            }
            if leave.load(SeqCst) {
                return Err(Left);
            }
            if self.header().failed.load(SeqCst) != 0 {
                strict::follow(self, rank);
            }
            let since = *started.get_or_insert_with(Instant::now);
            // Written again at times: what this rank waits for may change meanwhile.
            if told <= since || told.elapsed() > NAP / 2 {
                record.waits_for.set(&what());
                told = Instant::now();
            }
            if since.elapsed() > settings().timeout {
                record.waits_for.set(&what());
                dump::stuck(self, rank);
            }
            record.waiters.fetch_add(1, SeqCst);
            futex(&record.bell, libc::FUTEX_WAIT, bell, Some(NAP.min(settings().timeout)));
            record.waiters.fetch_sub(1, SeqCst);
        }
    }

    pub fn ranks(&self) -> usize {
        self.ranks
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.unlink();
        // SAFETY: nobody borrows from a segment that is dropped; the mapping and the descriptor are ours.
        unsafe {
            if !self.base.is_null() {
                libc::munmap(self.base.cast(), self.bytes);
            }
            libc::close(self.file);
        }
    }
}

fn futex(word: &AtomicU32, operation: i32, value: u32, timeout: Option<Duration>) {
    let limit = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word is live shared memory, the time limit null or live.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, limit) };
}
