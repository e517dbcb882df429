//! What the mailbox asks of the driver beside [`crate::gpu`]: copies, host memory, the launch. All `unsafe` of the
//! mailbox is here.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use windlass_kernels::arrange::Direction;
use windlass_kernels::growth::Wire;
use windlass_kernels::launch::{Launch, Operation, Report, WISHES_PER_WIRE};

use crate::gpu::failure::Code;
use crate::gpu::module::{Function, Module, Shape};
use crate::gpu::stream::Stream;
use crate::gpu::{Address, Driver, Failure, Home, StreamHandle};

/// What the mailbox calls beside what [`crate::gpu`] does.
#[allow(non_snake_case, missing_docs)]
#[derive(Clone, Copy, Debug)]
pub struct Calls {
    pub cuMemcpyHtoDAsync_v2: unsafe extern "C" fn(Address, *const c_void, usize, usize) -> Code,
    pub cuMemHostAlloc: unsafe extern "C" fn(*mut *mut c_void, usize, c_uint) -> Code,
    pub cuMemFreeHost: unsafe extern "C" fn(*mut c_void) -> Code,
}

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
const FOR_ALL_DEVICES: c_uint = 3;
/// `CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN`.
const SHARED_BYTES_OPTIN: c_uint = 97;

impl Calls {
    /// The driver's.
    pub fn of(driver: &Driver) -> Calls {
        let calls = &driver.calls;
        Calls {
            cuMemcpyHtoDAsync_v2: calls.cuMemcpyHtoDAsync_v2,
            cuMemHostAlloc: calls.cuMemHostAlloc,
            cuMemFreeHost: calls.cuMemFreeHost,
        }
    }
}

/// Memory of the host that devices read and write: the head, then room for lists. Zero at first.
#[derive(Debug)]
pub(super) struct HostMemory {
    driver: &'static Driver,
    calls: Calls,
    base: NonNull<u8>,
    list_bytes: usize,
}

/// Before the lists. What one side writes shares no line with what the other does.
#[repr(C)]
struct Head {
    control: AtomicU32,
    aside: [u8; 124],
    /// Written by the kernel: by wire and peer.
    wishes: [[AtomicU8; WISHES_PER_WIRE]; 2],
    /// Words for larger rings: by direction, peer and wire.
    growth: [[[AtomicU64; 2]; PEERS_MAX]; 2],
}

/// Ranks of a communicator; fewer fit a launch.
pub(super) const PEERS_MAX: usize = WISHES_PER_WIRE;
const HEAD_BYTES: usize = size_of::<Head>();
const _: () = assert!(HEAD_BYTES.is_multiple_of(128));

// SAFETY: the head has only atomics; whoever writes to a list owns that part of it.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// In the current context. May wait for the device: at birth only.
    pub fn new(driver: &'static Driver, calls: Calls, list_bytes: usize) -> Result<HostMemory, Failure> {
        let bytes = HEAD_BYTES + list_bytes;
        let mut pointer = std::ptr::null_mut();
        // SAFETY: the output is a local.
        let code = unsafe { (calls.cuMemHostAlloc)(&mut pointer, bytes, FOR_ALL_DEVICES) };
        let detail = || format!("bytes {bytes}");
        driver.check("cuMemHostAlloc", code, detail)?;
        let base = NonNull::new(pointer.cast::<u8>())
            .ok_or_else(|| Failure::without_code("cuMemHostAlloc", "null", detail()))?;
        // SAFETY: as many bytes as were allocated, which nobody else knows yet.
        unsafe { base.write_bytes(0, bytes) };
        Ok(HostMemory { driver, calls, base, list_bytes })
    }

    /// The word that tells the kernel to leave.
    pub fn control(&self) -> &AtomicU32 {
        &self.head().control
    }

    fn head(&self) -> &Head {
        // SAFETY: within the allocation, which is aligned to a page; any bytes are a head, and all use it as atomics.
        unsafe { self.base.cast::<Head>().as_ref() }
    }

    /// Where devices find the word: the same address as on the host, as all memory has one address.
    pub fn control_address(&self) -> Address {
        self.base.as_ptr() as Address
    }

    /// Where the kernel says that it wants larger rings.
    pub fn wishes_address(&self) -> Address {
        self.head().wishes.as_ptr() as Address
    }

    /// The peers for whom the kernel wants one, a bit each.
    pub fn wishes(&self, wire: Wire) -> u64 {
        let bytes = self.head().wishes[wire as usize].iter().enumerate();
        bytes.fold(0, |mask, (peer, byte)| mask | u64::from(byte.load(Ordering::Relaxed) != 0) << peer)
    }

    /// The word that tells the kernel of a larger ring. Released by whoever stores it, once.
    pub fn growth(&self, direction: Direction, peer: u32, wire: Wire) -> &AtomicU64 {
        &self.growths(direction, peer)[wire as usize]
    }

    /// Where the kernel finds the words of both wires.
    pub fn growth_address(&self, direction: Direction, peer: u32) -> Address {
        self.growths(direction, peer).as_ptr() as Address
    }

    fn growths(&self, direction: Direction, peer: u32) -> &[AtomicU64; 2] {
        &self.head().growth[direction as usize][peer as usize]
    }

    /// Writes a list and lets a stream copy it to the device. The bytes from `offset` on are the caller's until the copy,
    /// and every replay of it, is done.
    pub fn copy_list(
        &self,
        offset: usize,
        operations: &[Operation],
        to: Address,
        stream: StreamHandle,
    ) -> Result<(), Failure> {
        let bytes = size_of_val(operations);
        let detail = || format!("bytes {bytes} at {offset} of {}", self.list_bytes);
        if !offset.is_multiple_of(16) || offset + bytes > self.list_bytes {
            return Err(Failure::without_code("a list", "no room", detail()));
        }
        // SAFETY: within the allocation and aligned, see above; the caller owns this part.
        let from = unsafe {
            let from = self.base.as_ptr().add(HEAD_BYTES + offset).cast::<Operation>();
            from.copy_from_nonoverlapping(operations.as_ptr(), operations.len());
            from
        };
        // SAFETY: the list lies in our slice; both stay until the copy is done.
        let code = unsafe { (self.calls.cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes, stream.0) };
        self.driver.check("cuMemcpyHtoDAsync_v2", code, detail)
    }

    /// Lets the next communicator's kernels run.
    pub fn reset(&self) {
        let head = self.head();
        head.wishes.iter().flatten().for_each(|byte| byte.store(0, Ordering::Relaxed));
        head.growth.iter().flatten().flatten().for_each(|word| word.store(0, Ordering::Relaxed));
        head.control.store(windlass_kernels::launch::CONTROL_RUN, Ordering::Release);
    }
}

impl Drop for HostMemory {
    /// In the current context; may wait for the device.
    fn drop(&mut self) {
        if self.driver.is_in_forked_child() {
            return;
        }
        // SAFETY: allocated by `new`; kernels that read it are done.
        let code = unsafe { (self.calls.cuMemFreeHost)(self.base.as_ptr().cast()) };
        self.driver.note("cuMemFreeHost", code, || format!("bytes {}", self.list_bytes));
    }
}

/// Loads code in the current context.
pub(super) fn load(driver: &'static Driver, image: &'static [u8]) -> Result<Module, Failure> {
    // SAFETY: images of the kernels crate are whole; tests pass whole ones.
    unsafe { Module::load(driver, image) }
}

/// Shared memory that a block of this device may have, bytes.
pub(super) fn shared_bytes_max(home: &Home) -> Result<u32, Failure> {
    let mut bytes: c_int = 0;
    // SAFETY: the output is a local.
    let code =
        unsafe { (home.driver.calls.cuDeviceGetAttribute)(&mut bytes, SHARED_BYTES_OPTIN, home.device) };
    home.driver.check("cuDeviceGetAttribute", code, || {
        format!("attribute {SHARED_BYTES_OPTIN}, device {}", home.device)
    })?;
    Ok(bytes.max(0) as u32)
}

/// Launches the kernel. The launch is copied by the driver.
pub(super) fn launch(
    driver: &Driver,
    function: Function,
    stream: StreamHandle,
    shape: &Shape,
    launch: &mut Launch,
) -> Result<(), Failure> {
    // SAFETY: the kernel has this one parameter. Mailboxes, word and report stay while it runs: the mailbox's owner
    // keeps the slices, the kit the word; the application vouches for its buffers.
    unsafe { driver.launch(function, stream, shape, &mut [(&raw mut *launch).cast()]) }
}

/// Reads the report: waits for `stream`, which is ours, and for no other.
pub(super) fn report(driver: &Driver, at: Address, stream: &Stream) -> Result<Report, Failure> {
    let mut report = Report::default();
    // SAFETY: the report lies in our slice; any bytes are a report.
    unsafe { read(driver, at, (&raw mut report).cast(), size_of::<Report>(), stream)? };
    Ok(report)
}

/// Reads 64-bit words of a slice, likewise.
pub(super) fn words(driver: &Driver, at: Address, words: &mut [u64], stream: &Stream) -> Result<(), Failure> {
    // SAFETY: the words lie in a slice that is mapped as long as the mailbox is; any bytes are words.
    unsafe { read(driver, at, words.as_mut_ptr().cast(), size_of_val(words), stream) }
}

/// # Safety
/// `bytes` bytes are mapped at `at`, and may be written at `to`.
unsafe fn read(
    driver: &Driver,
    at: Address,
    to: *mut c_void,
    bytes: usize,
    stream: &Stream,
) -> Result<(), Failure> {
    let detail = || format!("address {at:#x}, bytes {bytes}");
    // SAFETY: the caller's promise; the copy ends before this returns, as the stream is waited for.
    let code = unsafe { (driver.calls.cuMemcpyDtoHAsync_v2)(to, at, bytes, stream.handle.0) };
    driver.check("cuMemcpyDtoHAsync_v2", code, detail)?;
    // SAFETY: the stream is alive.
    let code = unsafe { (driver.calls.cuStreamSynchronize)(stream.handle.0) };
    driver.check("cuStreamSynchronize", code, detail)
}
