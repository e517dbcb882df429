//! Host memory that a communicator's kernels read while they run, and reading the report that kernels leave in device memory. All `unsafe`
//! of the sequencer is here.

#![allow(unsafe_code)]

use std::ffi::{c_uint, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use windlass_kernels::launch::{CONTROL_RUN, Report};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use windlass_base::gpu::failure::SUCCESS;
use windlass_base::gpu::stream::Stream;
use windlass_base::gpu::{Address, Driver, Failure};

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`. The flags of `cuMemHostRegister` have the same values.
const FOR_ALL_DEVICES: c_uint = 3;
/// The control word has a cache line of its own, as the host writes it and devices write behind it.
const HEAD_BYTES: usize = 128;

/// Host memory that devices read and write: the control word, which tells kernels to leave, then room for those who make kernels. Zero at
/// first.
///
/// Where possible Windlass maps it and registers it with the driver, so that it outlives the context (`cudaDeviceReset`). The worker thread
/// may read it at any time, also of a communicator that was not destroyed before.
#[derive(Debug)]
pub struct HostMemory {
    driver: &'static Driver,
    base: NonNull<u8>,
    beside_bytes: usize,
    by: By,
}

/// Who made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Us,
    Driver,
}

// SAFETY: the word is an atomic; whoever uses the room beside says how.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates in the current context. On GPUs it took some 20 ms for 2 MiB, and waited for no kernel.
    pub fn new(driver: &'static Driver, beside_bytes: usize) -> Result<HostMemory, Failure> {
        let bytes = HEAD_BYTES + beside_bytes;
        if let Some(base) = registered(driver, bytes) {
            return Ok(HostMemory { driver, base, beside_bytes, by: By::Us });
        }
        let mut pointer = std::ptr::null_mut();
        // SAFETY: the output is a local.
        let code = unsafe { (driver.calls.cuMemHostAlloc)(&mut pointer, bytes, FOR_ALL_DEVICES) };
        let detail = || format!("bytes {bytes}");
        driver.check("cuMemHostAlloc", code, detail)?;
        let base = NonNull::new(pointer.cast::<u8>())
            .ok_or_else(|| Failure::without_code("cuMemHostAlloc", "null", detail()))?;
        // SAFETY: as many bytes as were allocated, which nobody else knows yet.
        unsafe { base.write_bytes(0, bytes) };
        Ok(HostMemory { driver, base, beside_bytes, by: By::Driver })
    }

    /// The control word, which tells kernels to leave.
    pub fn control(&self) -> &AtomicU32 {
        // SAFETY: within the allocation, which is aligned to a page; all use it as an atomic.
        unsafe { self.base.cast::<AtomicU32>().as_ref() }
    }

    /// The control word's address for devices: the same as on the host, as there is one address space.
    pub fn control_address(&self) -> Address {
        self.base.as_ptr() as Address
    }

    /// The room behind the control word: its address, aligned to 128 bytes, and its size in bytes.
    pub fn beside(&self) -> (NonNull<u8>, usize) {
        // SAFETY: within the allocation, or its end.
        (unsafe { self.base.add(HEAD_BYTES) }, self.beside_bytes)
    }

    /// Lets the next communicator's kernels run.
    pub fn reset(&self) {
        self.control().store(CONTROL_RUN, Ordering::Release);
    }
}

impl Drop for HostMemory {
    /// Frees in the current context; may wait for the device.
    fn drop(&mut self) {
        if self.driver.is_in_forked_child() {
            return;
        }
        let (bytes, pointer) = (HEAD_BYTES + self.beside_bytes, self.base.as_ptr().cast());
        let detail = || format!("bytes {bytes}");
        if self.by == By::Driver {
            // SAFETY: allocated by `new`; kernels that read it are done.
            let code = unsafe { (self.driver.calls.cuMemFreeHost)(pointer) };
            self.driver.note("cuMemFreeHost", code, detail);
            return;
        }
        // SAFETY: as above.
        let code = unsafe { (self.driver.calls.cuMemHostUnregister)(pointer) };
        self.driver.note("cuMemHostUnregister", code, detail);
        unmap(self.base, bytes);
    }
}

/// Maps memory that devices reach at the host's own addresses. None if their addresses differ, or the driver refuses.
/// The mapping is shared with forked children: the device would not see the copy that a write to a private mapping makes after a fork.
fn registered(driver: &Driver, bytes: usize) -> Option<NonNull<u8>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: new memory, nowhere in particular.
    let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED) };
    let base = NonNull::new(mapped.ok()?.cast::<u8>())?;
    let pointer: *mut c_void = base.as_ptr().cast();
    // SAFETY: as many bytes as are mapped.
    let code = unsafe { (driver.calls.cuMemHostRegister_v2)(pointer, bytes, FOR_ALL_DEVICES) };
    if code != SUCCESS {
        unmap(base, bytes);
        return None;
    }
    let mut seen: Address = 0;
    // SAFETY: the memory is registered; the output is a local.
    let code = unsafe { (driver.calls.cuMemHostGetDevicePointer_v2)(&mut seen, pointer, 0) };
    if code == SUCCESS && seen == pointer as Address {
        return Some(base);
    }
    // SAFETY: registered above.
    let code = unsafe { (driver.calls.cuMemHostUnregister)(pointer) };
    driver.note("cuMemHostUnregister", code, || format!("bytes {bytes}"));
    unmap(base, bytes);
    None
}

fn unmap(base: NonNull<u8>, bytes: usize) {
    // SAFETY: mapped by `registered`, with so many bytes; nobody uses it any more.
    if let Err(error) = unsafe { munmap(base.as_ptr().cast(), bytes) } {
        ::log::warn!("{bytes} bytes of memory for kernels stay mapped: {error}");
    }
}

/// Reads the report. Waits for `stream`, which is a stream of Windlass, and for no other.
pub(super) fn report(at: Address, stream: &Stream) -> Result<Report, Failure> {
    let mut report = Report::default();
    // SAFETY: the report lies in a region of the communicator; any bytes are a report.
    unsafe { stream.read((&raw mut report).cast(), at, size_of::<Report>())? };
    Ok(report)
}

/// Reads 64-bit words of a region, and waits in the same way.
pub(super) fn words(at: Address, words: &mut [u64], stream: &Stream) -> Result<(), Failure> {
    // SAFETY: callers pass words of a region that is mapped as long as the communicator is; any bytes are words.
    unsafe { stream.read(words.as_mut_ptr().cast(), at, size_of_val(words)) }
}
