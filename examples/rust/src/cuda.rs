//! The part of CUDA's driver interface that the program calls, as `cuda.h` names it.

use std::ffi::{c_int, c_uint, c_void};
use std::process::exit;
use std::ptr::null_mut;

/// `CUstream`.
pub type Stream = *mut c_void;

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

#[link(name = "libcuda.so.1", modifiers = "+verbatim")]
unsafe extern "C" {
    fn cuInit(flags: c_uint) -> c_int;
    fn cuDeviceGetCount(count: *mut c_int) -> c_int;
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int;
    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> c_int;
    fn cuCtxSetCurrent(context: *mut c_void) -> c_int;
    fn cuStreamCreate(stream: *mut Stream, flags: c_uint) -> c_int;
    fn cuStreamSynchronize(stream: Stream) -> c_int;
    fn cuStreamDestroy_v2(stream: Stream) -> c_int;
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int;
    fn cuMemFree_v2(address: u64) -> c_int;
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: Stream) -> c_int;
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: Stream) -> c_int;
}

fn must(code: c_int, what: &str) {
    if code != 0 {
        eprintln!("{what}: code {code}");
        exit(1);
    }
}

/// How many GPUs there are.
pub fn count_devices() -> usize {
    let mut count = 0;
    // SAFETY: `count` outlives the call.
    unsafe {
        must(cuInit(0), "cuInit");
        must(cuDeviceGetCount(&mut count), "cuDeviceGetCount");
    }
    count as usize
}

/// A stream of a GPU, which is this thread's from then on.
pub struct Gpu {
    stream: Stream,
}

impl Gpu {
    /// Makes GPU `ordinal` the thread's.
    pub fn take(ordinal: usize) -> Self {
        let (mut device, mut context, mut stream) = (0, null_mut(), null_mut());
        // SAFETY: the outputs outlive the calls, and each call gets what the one before it gave.
        unsafe {
            must(cuDeviceGet(&mut device, ordinal as c_int), "cuDeviceGet");
            must(cuDevicePrimaryCtxRetain(&mut context, device), "cuDevicePrimaryCtxRetain");
            must(cuCtxSetCurrent(context), "cuCtxSetCurrent");
            must(cuStreamCreate(&mut stream, NON_BLOCKING), "cuStreamCreate");
        }
        Self { stream }
    }

    /// For NCCL's calls.
    pub fn stream(&self) -> Stream {
        self.stream
    }

    /// Waits until all that was launched is done.
    pub fn wait(&self) {
        // SAFETY: the stream lives as long as `self`.
        unsafe { must(cuStreamSynchronize(self.stream), "cuStreamSynchronize") };
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: nobody else has the stream.
        unsafe { must(cuStreamDestroy_v2(self.stream), "cuStreamDestroy") };
    }
}

/// Numbers in a GPU's memory.
pub struct Buffer {
    address: u64,
    count: usize,
}

impl Buffer {
    /// Of the thread's GPU, without contents.
    pub fn new(count: usize) -> Self {
        let mut address = 0;
        // SAFETY: `address` outlives the call.
        unsafe { must(cuMemAlloc_v2(&mut address, count * size_of::<f32>()), "cuMemAlloc") };
        Self { address, count }
    }

    /// For NCCL's calls.
    pub fn pointer(&self) -> *mut c_void {
        self.address as *mut c_void
    }

    /// Writes it on the GPU's stream.
    pub fn write(&self, gpu: &Gpu, values: &[f32]) {
        assert_eq!(values.len(), self.count);
        // SAFETY: both sides have that many bytes; CUDA has read pageable memory when it returns.
        let code = unsafe {
            cuMemcpyHtoDAsync_v2(self.address, values.as_ptr().cast(), size_of_val(values), gpu.stream)
        };
        must(code, "cuMemcpyHtoDAsync");
    }

    /// What it holds once the GPU's stream has come here.
    pub fn read(&self, gpu: &Gpu) -> Vec<f32> {
        let mut values = vec![0.0f32; self.count];
        let bytes = size_of_val(values.as_slice());
        // SAFETY: both sides have that many bytes, and `values` is there until the copy has ended.
        let code =
            unsafe { cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), self.address, bytes, gpu.stream) };
        must(code, "cuMemcpyDtoHAsync");
        gpu.wait();
        values
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: nobody else has the memory, and all that used it was waited for.
        unsafe { must(cuMemFree_v2(self.address), "cuMemFree") };
    }
}
