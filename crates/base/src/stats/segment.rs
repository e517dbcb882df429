//! The memory in which a process counts: atomics at fixed places. Once the process has a communicator, they are in a
//! file of `/dev/shm`, so that `windlass stats` can read a running process.
//!
//! Before that, and where shared memory is off or fails, the same structure lies in this library's zeroed memory.
//! Readers copy the bytes, since others may truncate a file. Readers never write, and writers never wait.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path as FilePath, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;
use rustix::fs::OFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::call::{FUNCTIONS, Function};
use crate::lock::Mutex;
use crate::path::PATHS;
use crate::stats::calls::CallRing;
use crate::stats::files::{self, Held};
use crate::stats::resources::{Kept, Pooled, Registered};
use crate::stats::run::Run;

/// How many entry points fit. There is room for more than the list has, so that the layout changes seldom.
pub const ENTRIES_MAX: usize = 128;
/// Places for communicators: those that live and the last that ended. All others share place 0.
pub const COMMUNICATORS_MAX: usize = 256;
/// For so many communicators at once a file gets memory.
const PLACES_AT_ONCE: usize = 8;
/// How many communicators have a ring of calls: those that live and the last that ended.
pub const RINGS_MAX: usize = 64;
/// The functions that native collectives can serve come first.
const NATIVE_FUNCTIONS: usize = Function::ReduceScatter as usize + 1;
/// Sets of counters among which threads are spread for calls without a communicator.
pub const THREAD_SETS: usize = 16;

/// How many counts of registrations fit.
pub const REGISTRATIONS_MAX: usize = 32;
const _: () = assert!(Registered::NAMES.len() <= REGISTRATIONS_MAX);

/// How many counts of pool blocks fit.
pub const POOL_MAX: usize = 24;
const _: () = assert!(Pooled::NAMES.len() <= POOL_MAX);

/// How many counts of windows fit.
pub const WINDOWS_MAX: usize = 16;
const _: () = assert!(Kept::NAMES.len() <= WINDOWS_MAX);

/// The first word of a segment.
pub const MAGIC: u64 = 0x5753_4e41_4c44_4e57;

/// All counters of a process.
#[repr(C)]
#[derive(Debug)]
pub struct Segment {
    /// [`MAGIC`], written last.
    pub magic: AtomicU64,
    /// Bytes of this structure, by which readers see a segment of another build.
    pub size: AtomicU64,
    /// The process's number.
    pub process: AtomicU32,
    /// Version code of the real NCCL; 0 while unknown.
    pub nccl_version: AtomicI32,
    /// The process with communicators from which this one was forked; 0 for none. It is set when a communicator is asked for
    /// here.
    pub forked_from: AtomicU32,
    /// Whether the process has begun to exit by itself: then its communicators have ended, too.
    pub exited: AtomicU32,
    /// When counting in this segment began, nanoseconds since 1970.
    pub began_ns: AtomicU64,
    /// The real library's file, zero-padded.
    pub nccl_path: [AtomicU8; 256],
    /// The program's file name, zero-padded.
    pub program: [AtomicU8; 64],
    /// Whether fixed order is asked for: a number of [`crate::stats::order`].
    pub order: AtomicU64,
    /// How many of the last places for communicators have no memory yet.
    pub places_lacking: AtomicU64,
    /// Communicators made so far.
    pub communicators_made: AtomicU64,
    /// NCCL's communicators that are cached.
    pub cached: AtomicU64,
    /// Bytes of device memory that cached communicators keep, as far as is known.
    pub cached_bytes: AtomicU64,
    /// Kernels of Windlass that ran several collectives of a group each.
    pub fused_kernels: AtomicU64,
    /// Collectives that these kernels ran.
    pub fused_calls: AtomicU64,
    /// Counts of registrations, by [`crate::stats::registration`].
    pub registrations: [AtomicU64; REGISTRATIONS_MAX],
    /// Counts of blocks of `ncclMemAlloc`, by [`crate::stats::pool`].
    pub pool: [AtomicU64; POOL_MAX],
    /// Counts of kept windows, by [`crate::stats::windows`].
    pub windows: [AtomicU64; WINDOWS_MAX],
    /// Calls that the ABI layer passed on without Rust code, by entry point.
    pub passed: [AtomicU64; ENTRIES_MAX],
    /// Calls without a communicator, by entry point, in sets among which threads are spread.
    pub threads: [[AtomicU64; ENTRIES_MAX]; THREAD_SETS],
    /// For each ring, the place whose communicator has or had it last; 0 for a ring that has no memory yet.
    pub ring_owners: [AtomicU32; RINGS_MAX],
    /// The name of the socket at which this process answers others; zeros for none.
    pub request_socket: [AtomicU8; 16],
    /// Counters by communicator. Place 0 is for unknown handles, and for ended communicators whose place was taken.
    pub communicators: [Communicator; COMMUNICATORS_MAX],
    /// The last calls of communicators. A ring without an owner must not even be read.
    pub rings: [CallRing; RINGS_MAX],
}

/// The counters of one communicator.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Communicator {
    /// [`FREE`], [`LIVE`] or [`ENDED`].
    pub state: AtomicU32,
    /// This process's rank in it, -1 while unknown.
    pub rank: AtomicI32,
    /// The number of ranks, 0 while unknown.
    pub ranks: AtomicI32,
    /// The CUDA device, -1 while unknown.
    pub device: AtomicI32,
    /// The communicator's serial number in this process, from 1, in the order of init.
    pub serial: AtomicU64,
    /// Whether the communicator has a peer group: a number of [`crate::stats::peer_group`].
    pub peer_group: AtomicU32,
    /// The state of NCCL's part: a number of [`crate::stats::peer_group`].
    pub nccl: AtomicU32,
    /// What the peer group lacks: [`crate::stats::features::Lacks`].
    pub lacks: AtomicU32,
    /// The sources of the native collectives' limits: bits of [`crate::stats::limits::Source`].
    pub limits_from: AtomicU32,
    /// Below how many bytes native collectives serve a function, by function; 0 for those that they do not serve.
    pub native_below: [AtomicU64; NATIVE_FUNCTIONS],
    /// Where fixed order is asked for: reductions that round and ran in fixed order.
    pub in_fixed_order: AtomicU64,
    /// Where fixed order is asked for: reductions that round and that NCCL ran, or that were refused.
    pub not_in_fixed_order: AtomicU64,
    /// Calls that a graph capture recorded, as far as is known: see [`crate::stats::count::recorded`].
    pub recorded: AtomicU64,
    /// Bytes of this process's device memory that Windlass takes for it, or took before it went to sleep.
    pub memory_bytes: AtomicU64,
    /// Whether it sleeps.
    pub sleeps: AtomicU32,
    /// What all its ranks call it; 0 where they have no common name.
    pub name: AtomicU64,
    /// A half of its peer group's token, by which others ask this process about it; 0 without one.
    pub token: AtomicU64,
    /// The number of its ring, from 1; 0 if it has none.
    pub ring: AtomicU32,
    /// The rank whose reason `reason` is, -1 if none is named.
    pub reason_rank: AtomicI32,
    /// What a fallback reason says besides its number, or why a peer group's limits are guesses; in words, zero-padded.
    pub reason: [AtomicU8; 192],
    /// Calls by function and path.
    pub cells: [[Cell; PATHS]; FUNCTIONS],
}

/// The count of calls of one kind.
#[repr(C)]
#[derive(Debug)]
pub struct Cell {
    /// The number of calls.
    pub calls: AtomicU64,
    /// The bytes of the calls, as [`crate::call::Shared::bytes`] counts.
    pub bytes: AtomicU64,
}

/// No communicator has these counters.
pub const FREE: u32 = 0;
/// A living communicator has these counters.
pub const LIVE: u32 = 1;
/// A communicator that has ended had these counters; they stay until the place is needed.
pub const ENDED: u32 = 2;

// SAFETY: a structure of integers is valid when zeroed.
static EARLY: Segment = unsafe { std::mem::zeroed() };
/// This process's file.
static PATH: OnceCell<PathBuf> = OnceCell::new();
static CURRENT: AtomicPtr<Segment> = AtomicPtr::new((&raw const EARLY).cast_mut());

/// The segment to count in now.
#[inline]
pub fn current() -> &'static Segment {
    // SAFETY: the pointer is `EARLY`'s or that of a mapping that is never unmapped.
    unsafe { &*CURRENT.load(Ordering::Acquire) }
}

/// In a child just forked: counts from zero in the library's own memory. Takes no lock and allocates nothing.
pub fn restart_in_forked_child() {
    // The rings stay: a place without its mark has none.
    // SAFETY: the structure consists of atomics, and is as large as a whole number of words.
    let words = unsafe {
        let first = (&raw const EARLY).cast::<AtomicU64>();
        std::slice::from_raw_parts(first, bytes_of(COMMUNICATORS_MAX) / size_of::<AtomicU64>())
    };
    // Most words are 0, and a write would make the child copy their page.
    words
        .iter()
        .filter(|word| word.load(Ordering::Relaxed) != 0)
        .for_each(|word| word.store(0, Ordering::Relaxed));
    CURRENT.store((&raw const EARLY).cast_mut(), Ordering::Release);
}

// What pages say of a process's file.
const _: () = assert!(size_of::<Segment>() < 1 << 20);
const _: () = assert!(size_of::<Segment>().is_multiple_of(size_of::<AtomicU64>()));

/// Moves the counters into a new file, after it has removed the files of killed processes. Counts of other threads at this
/// very moment may be lost; before the first communicator none of them is of a communicator's call.
pub fn share(folder: &FilePath) -> io::Result<Held> {
    let removed = files::remove_ended(folder);
    if removed > 0 {
        ::log::info!("removed the counters of {removed} processes that were killed");
    }
    let began = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let held = Held::make(folder, Run::noted())?;
    let shared = fill(&held).inspect_err(|_| drop(std::fs::remove_file(&held.path)))?;
    copy(&EARLY, shared);
    shared.places_lacking.store((COMMUNICATORS_MAX - PLACES_AT_ONCE) as u64, Ordering::Relaxed);
    let _ = PATH.set(held.path.clone());
    shared.process.store(std::process::id(), Ordering::Relaxed);
    shared.size.store(size_of::<Segment>() as u64, Ordering::Relaxed);
    shared.began_ns.store(began.as_nanos() as u64, Ordering::Relaxed);
    shared.magic.store(MAGIC, Ordering::Release);
    CURRENT.store(std::ptr::from_ref(shared).cast_mut(), Ordering::Release);
    Ok(held)
}

/// The places that have memory. The others of a mapped file must not even be read: a hole would take memory then.
pub fn places(segment: &Segment) -> &[Communicator] {
    let lacking = segment.places_lacking.load(Ordering::Acquire) as usize;
    &segment.communicators[..COMMUNICATORS_MAX - lacking.min(COMMUNICATORS_MAX)]
}

/// Gets memory for more places of this process's file. Returns whether there are more now.
pub fn get_more_places() -> bool {
    static GROWING: Mutex<()> = Mutex::new(());
    // Also in a forked child, where another thread of the parent may have left the lock taken.
    if current().places_lacking.load(Ordering::Relaxed) == 0 {
        return false;
    }
    let _growing = GROWING.lock();
    let segment = current();
    let (now, Some(path)) = (places(segment).len(), PATH.get()) else { return false };
    let wanted = (now + PLACES_AT_ONCE).min(COMMUNICATORS_MAX);
    let more = wanted > now && reserve_in(path, 0, bytes_of(wanted)).is_ok();
    if more {
        segment.places_lacking.store((COMMUNICATORS_MAX - wanted) as u64, Ordering::Release);
    }
    more
}

/// Gives a ring to a new communicator: that of its place, else a new one, else that of the communicator that ended first. Without memory, and
/// where too many live, there is none.
pub fn begin_ring(index: usize) {
    let segment = current();
    let place = &segment.communicators[index];
    if place.ring.load(Ordering::Relaxed) == 0 {
        let take = |number: &usize, from: u32| {
            let owner = &segment.ring_owners[*number];
            owner.compare_exchange(from, index as u32, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let new =
            || (0..RINGS_MAX).find(|number| take(number, 0)).filter(|number| has_memory(segment, *number));
        let Some(number) = new().or_else(|| {
            oldest_ended(segment).filter(|(number, from)| take(number, *from)).map(|ended| ended.0)
        }) else {
            return;
        };
        place.ring.store(number as u32 + 1, Ordering::Release);
    }
    segment.rings[place.ring.load(Ordering::Relaxed) as usize - 1].clear();
}

/// Gets memory for a ring. A ring without memory goes back.
fn has_memory(segment: &Segment, number: usize) -> bool {
    let offset = std::mem::offset_of!(Segment, rings) + number * size_of::<CallRing>();
    let reserve = |path: &PathBuf| reserve_in(path, offset, size_of::<CallRing>()).is_ok();
    let has_memory = std::ptr::eq(segment, &raw const EARLY) || PATH.get().is_some_and(reserve);
    if !has_memory {
        segment.ring_owners[number].store(0, Ordering::Release);
    }
    has_memory
}

/// Takes the ring from the communicator that ended first. Returns the ring and the place.
fn oldest_ended(segment: &Segment) -> Option<(usize, u32)> {
    let owners = segment.ring_owners.iter().map(|owner| owner.load(Ordering::Acquire)).enumerate();
    let place = |owner: u32| &segment.communicators[owner as usize];
    let ended =
        owners.filter(|(_, owner)| *owner != 0 && place(*owner).state.load(Ordering::Acquire) == ENDED);
    let oldest = ended.min_by_key(|(_, owner)| place(*owner).serial.load(Ordering::Relaxed))?;
    place(oldest.1).ring.store(0, Ordering::Relaxed);
    Some(oldest)
}

/// Reserves memory of this process's file. A write into full shared memory kills the process, and so does exceeding the process's
/// limit of file sizes (SIGXFSZ). The file is opened by its name: the program may have closed the descriptor, and opened another file under its
/// number.
fn reserve_in(path: &FilePath, from: usize, bytes: usize) -> io::Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    Ok(rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), from as u64, bytes as u64)?)
}

/// The processor's clock, which all processes of a host share.
#[inline]
pub fn tick() -> u64 {
    // SAFETY: every x86-64 processor has the instruction.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// How fast the processor's clock goes, and what it says now.
#[derive(Debug, Default)]
pub struct Clock {
    now: u64,
    ticks_per_second: f64,
}

impl Clock {
    /// Measures the clock, which takes some milliseconds.
    pub fn measure() -> Clock {
        let (began, ticks) = (Instant::now(), tick());
        std::thread::sleep(Duration::from_millis(10));
        let (passed, now) = (began.elapsed(), tick());
        Clock { now, ticks_per_second: now.wrapping_sub(ticks) as f64 / passed.as_secs_f64() }
    }

    /// The time since a tick, 0 for one that is yet to come.
    pub fn seconds_since(&self, tick: u64) -> f64 {
        self.now.saturating_sub(tick) as f64 / self.ticks_per_second.max(1.0)
    }
}

fn fill(held: &Held) -> io::Result<&'static Segment> {
    let file = held.open()?;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    if limit.is_some_and(|limit| limit < size_of::<Segment>() as u64) {
        return Err(io::Error::from(io::ErrorKind::FileTooLarge));
    }
    file.set_len(size_of::<Segment>() as u64)?;
    reserve_in(&held.path, 0, bytes_of(PLACES_AT_ONCE))?;
    map(&file)
}

/// The open file of any process's segment, to read it. It can be read when its name is gone, too.
#[derive(Debug)]
pub struct Opened(File);

impl Opened {
    /// Opens a file. Any program may put anything into the folder: this neither follows a link nor waits for a pipe.
    pub fn open(path: &FilePath) -> io::Result<Opened> {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = File::options().read(true).custom_flags(flags.bits() as i32).open(path)?;
        let facts = file.metadata()?;
        if !facts.is_file() || facts.len() != size_of::<Segment>() as u64 {
            return Err(io::Error::other("written by another version of Windlass"));
        }
        Ok(Opened(file))
    }

    /// The segment as it is now.
    pub fn read(&self) -> io::Result<Box<Segment>> {
        // SAFETY: a structure of integers is valid when zeroed.
        let mut segment: Box<Segment> = unsafe { Box::new_zeroed().assume_init() };
        // SAFETY: the structure's own bytes, for which any values are valid.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut((&raw mut *segment).cast::<u8>(), size_of::<Segment>()) };
        self.0.read_exact_at(bytes, 0)?;
        match segment.magic.load(Ordering::Relaxed) {
            MAGIC => Ok(segment),
            _ => Err(io::Error::other("not complete yet, or not a segment of Windlass")),
        }
    }
}

/// Bytes of a segment up to the end of so many places.
const fn bytes_of(places: usize) -> usize {
    std::mem::offset_of!(Segment, communicators) + places * size_of::<Communicator>()
}

fn map(file: &File) -> io::Result<&'static Segment> {
    let (length, protection) = (size_of::<Segment>(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a fresh mapping at an address of the kernel's choice, of a file as long as the structure, which is
    // valid for any bytes; it is never unmapped. Others may write to it: all of it is atomics.
    unsafe {
        let address = rustix::mm::mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, file, 0)?;
        Ok(&*address.cast::<Segment>())
    }
}

fn copy(from: &Segment, to: &Segment) {
    let words = bytes_of(PLACES_AT_ONCE) / 8;
    // SAFETY: both are structures of atomics whose size is a multiple of 8 (their alignment is 64), read and
    // written here as relaxed words.
    let (from, to) = unsafe {
        (
            std::slice::from_raw_parts(std::ptr::from_ref(from).cast::<AtomicU64>(), words),
            std::slice::from_raw_parts(std::ptr::from_ref(to).cast::<AtomicU64>(), words),
        )
    };
    for (source, target) in from.iter().zip(to) {
        target.store(source.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Writes text into a padded field, up to the field's last byte but one.
pub fn write_text(field: &[AtomicU8], text: &[u8]) {
    for (index, byte) in field.iter().enumerate() {
        let last = index + 1 == field.len();
        byte.store(text.get(index).copied().filter(|_| !last).unwrap_or(0), Ordering::Relaxed);
    }
}

/// Reads text from a padded field. Control characters become `?`: others may have written it, and it is shown on a terminal.
pub fn read_text(field: &[AtomicU8]) -> String {
    let bytes: Vec<u8> =
        field.iter().map(|byte| byte.load(Ordering::Relaxed)).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).replace(char::is_control, "?")
}

const _: () = assert!(nccl_sys::slots::COUNT <= ENTRIES_MAX);

/// For tests in other files.
#[cfg(any(test, feature = "test-support"))]
pub mod test_support {
    use super::*;
    use crate::lock::Mutex;

    /// A segment with some words written, by place, for fuzzing.
    pub fn with_words<T>(written: &[(usize, u64)], read: impl FnOnce(&Segment) -> T) -> T {
        // SAFETY: a structure of integers is valid when zeroed.
        static SCRATCH: Mutex<Segment> = Mutex::new(unsafe { std::mem::zeroed() });
        let segment = &*SCRATCH.lock();
        let count = size_of::<Segment>() / 8;
        // SAFETY: as for `copy`.
        let words =
            unsafe { std::slice::from_raw_parts(std::ptr::from_ref(segment).cast::<AtomicU64>(), count) };
        let write = |place: &usize, word| words[place % count].store(word, Ordering::Relaxed);
        written.iter().for_each(|(place, word)| write(place, *word));
        let done = read(segment);
        written.iter().for_each(|(place, _)| write(place, 0));
        done
    }
}
