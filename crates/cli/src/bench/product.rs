//! A matrix product, as programs run beside their communication: by cuBLAS if it is installed, else by a plain kernel.

use crate::gpu::{Buffer, Gpu, Kernel};
use anyhow::{Result, bail};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use nccl_sys::types::cudaStream_t;
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;

/// Square matrices of `size` elements a side.
pub struct Product {
    size: usize,
    left: Buffer,
    right: Buffer,
    result: Buffer,
    by: By,
}

enum By {
    /// bfloat16 on tensor cores.
    Cublas(Cublas),
    /// float, one thread for each element.
    Plain(Kernel),
}

/// The plain kernel's size is a multiple of 64, the threads of a block, and small on the simulator.
pub const PLAIN_STEP: usize = 64;
const PLAIN_SIZE: usize = 768;
const SIMULATED_SIZE: usize = 64;
const CUBLAS_SIZE: usize = 4096;
const THREADS: u32 = PLAIN_STEP as u32;

impl Product {
    /// Makes matrices of `size` elements a side, a multiple of [`PLAIN_STEP`]; none: a usual size.
    pub fn new(gpu: &Gpu, simulated: bool, size: Option<usize>) -> Result<Self> {
        let cublas = if simulated { None } else { Cublas::open() };
        let (by, usual, element_bytes) = match cublas {
            Some(cublas) => (By::Cublas(cublas), CUBLAS_SIZE, 2),
            None if simulated => (By::Plain(gpu.kernel(PLAIN, PLAIN_NAME)?), SIMULATED_SIZE, 4),
            None => (By::Plain(gpu.kernel(PLAIN, PLAIN_NAME)?), PLAIN_SIZE, 4),
        };
        let size = size.unwrap_or(usual);
        let bytes = size * size * element_bytes;
        let stream = gpu.stream()?;
        let matrix = || -> Result<Buffer> {
            let buffer = gpu.buffer(bytes)?;
            buffer.upload(&stream, 0, &vec![0; bytes])?;
            Ok(buffer)
        };
        Ok(Self { size, left: matrix()?, right: matrix()?, result: matrix()?, by })
    }

    pub fn describe(&self) -> String {
        let by = match self.by {
            By::Cublas(_) => "bfloat16 by cuBLAS",
            By::Plain(_) => "float by a plain kernel: no cuBLAS was found",
        };
        format!("{0} x {0} elements, {by}", self.size)
    }

    pub fn issue(&self, stream: cudaStream_t) -> Result<()> {
        match &self.by {
            By::Cublas(cublas) => cublas.multiply(self, stream),
            By::Plain(kernel) => {
                let mut matrices = [self.left.at(0), self.right.at(0), self.result.at(0)];
                let [left, right, result] = matrices.each_mut().map(|matrix| (&raw mut *matrix).cast());
                let mut size = self.size as u32;
                let grid = [size / THREADS, size];
                // SAFETY: the kernel's four parameters; the matrices live as long as `self`, which outlives its work.
                unsafe {
                    kernel.launch(stream, grid, THREADS, &mut [left, right, result, (&raw mut size).cast()])
                }
            }
        }
    }
}

const PLAIN_NAME: &std::ffi::CStr = c"windlassBenchProduct";

/// `result[row][column]` = sum of `left[row][k] * right[k][column]`; a block has 64 columns of one row.
const PLAIN: &std::ffi::CStr = c".version 7.0
.target sm_70
.address_size 64
.visible .entry windlassBenchProduct(.param .u64 left, .param .u64 right, .param .u64 result, .param .u32 size)
{
  .reg .pred %more;
  .reg .f32 %sum, %l, %r;
  .reg .b32 %n, %k, %column, %row, %t, %b, %w;
  .reg .b64 %pl, %pr, %po, %offset, %step;
  ld.param.u64 %pl, [left];
  ld.param.u64 %pr, [right];
  ld.param.u64 %po, [result];
  ld.param.u32 %n, [size];
  cvta.to.global.u64 %pl, %pl;
  cvta.to.global.u64 %pr, %pr;
  cvta.to.global.u64 %po, %po;
  mov.u32 %t, %tid.x;
  mov.u32 %b, %ctaid.x;
  mov.u32 %w, %ntid.x;
  mad.lo.u32 %column, %b, %w, %t;
  mov.u32 %row, %ctaid.y;
  mul.lo.u32 %t, %row, %n;
  mul.wide.u32 %offset, %t, 4;
  add.u64 %pl, %pl, %offset;
  add.u64 %po, %po, %offset;
  mul.wide.u32 %offset, %column, 4;
  add.u64 %pr, %pr, %offset;
  add.u64 %po, %po, %offset;
  mul.wide.u32 %step, %n, 4;
  mov.f32 %sum, 0f00000000;
  mov.u32 %k, 0;
again:
  ld.global.f32 %l, [%pl];
  ld.global.f32 %r, [%pr];
  fma.rn.f32 %sum, %l, %r, %sum;
  add.u64 %pl, %pl, 4;
  add.u64 %pr, %pr, %step;
  add.u32 %k, %k, 1;
  setp.lt.u32 %more, %k, %n;
  @%more bra again;
  st.global.f32 [%po], %sum;
  ret;
}
";

type Handle = *mut c_void;
type SetStream = unsafe extern "C" fn(Handle, *mut c_void) -> c_int;
type Gemm = unsafe extern "C" fn(
    Handle,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;

/// cuBLAS, which stays open until the process ends, since it has memory and threads of its own.
struct Cublas {
    _library: ManuallyDrop<Library>,
    handle: Handle,
    set_stream: SetStream,
    gemm: Gemm,
}

/// `cublasOperation_t`, `cudaDataType_t`, `cublasComputeType_t` and `cublasGemmAlgo_t`.
const NOT_TRANSPOSED: c_int = 0;
const BFLOAT16: c_int = 14;
const COMPUTE_FLOAT: c_int = 68;
const ALGORITHM_DEFAULT: c_int = -1;

impl Cublas {
    /// None if the loader does not find cuBLAS, or it does not work.
    fn open() -> Option<Self> {
        let names = ["libcublas.so.13", "libcublas.so.12", "libcublas.so.11"];
        // SAFETY: NVIDIA's library; its constructors do what every program that uses it has them do.
        let library = names
            .into_iter()
            .find_map(|name| unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.ok())?;
        type Create = unsafe extern "C" fn(*mut Handle) -> c_int;
        // SAFETY: the signature is cublas_v2.h's.
        let create = unsafe { library.get::<Create>(b"cublasCreate_v2\0") }.ok()?;
        // SAFETY: as above.
        let set_stream = *unsafe { library.get::<SetStream>(b"cublasSetStream_v2\0") }.ok()?;
        // SAFETY: as above.
        let gemm = *unsafe { library.get::<Gemm>(b"cublasGemmEx\0") }.ok()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the output is a local; a context is current.
        let code = unsafe { create(&mut handle) };
        (code == 0).then(|| Self { _library: ManuallyDrop::new(library), handle, set_stream, gemm })
    }

    fn multiply(&self, product: &Product, stream: cudaStream_t) -> Result<()> {
        let size = product.size as c_int;
        let (one, zero) = (1.0_f32, 0.0_f32);
        // SAFETY: the handle is ours; the stream belongs to the caller, who keeps it until its work is done.
        let code = unsafe { (self.set_stream)(self.handle, stream.cast()) };
        if code != 0 {
            bail!("cublasSetStream answered {code}");
        }
        // SAFETY: matrices of `size` squared bfloat16 elements that outlive their work; factors are read at the call.
        let code = unsafe {
            (self.gemm)(
                self.handle,
                NOT_TRANSPOSED,
                NOT_TRANSPOSED,
                size,
                size,
                size,
                (&raw const one).cast(),
                product.left.at(0),
                BFLOAT16,
                size,
                product.right.at(0),
                BFLOAT16,
                size,
                (&raw const zero).cast(),
                product.result.at(0),
                BFLOAT16,
                size,
                COMPUTE_FLOAT,
                ALGORITHM_DEFAULT,
            )
        };
        if code != 0 {
            bail!("cublasGemmEx answered {code}");
        }
        Ok(())
    }
}
