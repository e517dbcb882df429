//! Describes a driver call that did not succeed.

use std::ffi::{CStr, c_char};
use std::fmt;

use nccl_sys::{ncclResult_t, ncclUnhandledCudaError};

use crate::gpu::library::Driver;

/// `CUresult`, transparent: newer drivers have codes that we do not know.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub u32);

/// `CUDA_SUCCESS`.
pub const SUCCESS: Code = Code(0);
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: Code = Code(2);
/// `CUDA_ERROR_DEINITIALIZED`: the process is exiting and the driver has gone first.
pub const DEINITIALIZED: Code = Code(4);
/// `CUDA_ERROR_NOT_READY`.
pub const NOT_READY: Code = Code(600);

/// A call, the code that it returned, and the arguments that matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The driver's function, or what was tried instead of one.
    pub call: &'static str,
    /// The code that it returned; none if the driver itself could not be called.
    pub code: Option<Code>,
    /// The driver's name of the code.
    pub name: String,
    /// Arguments and numbers.
    pub detail: String,
}

impl Failure {
    /// A call that answered `code`.
    pub fn of(driver: &Driver, call: &'static str, code: Code, detail: String) -> Failure {
        Failure { call, code: Some(code), name: name(driver, code), detail }
    }

    /// A failure before the driver could return a code.
    pub fn without_code(call: &'static str, name: &str, detail: String) -> Failure {
        Failure { call, code: None, name: name.into(), detail }
    }

    /// NCCL's code for it.
    pub fn result(&self) -> ncclResult_t {
        ncclUnhandledCudaError
    }

    /// Whether the device had no memory left.
    pub fn is_out_of_memory(&self) -> bool {
        self.code == Some(OUT_OF_MEMORY)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} answered {}", self.call, self.name)?;
        if let Some(code) = self.code {
            write!(out, " ({})", code.0)?;
        }
        if self.detail.is_empty() { Ok(()) } else { write!(out, ": {}", self.detail) }
    }
}

impl std::error::Error for Failure {}

fn name(driver: &Driver, code: Code) -> String {
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: the driver writes a pointer to a constant of its own, or null for a code that it does not know.
    let known = unsafe { (driver.calls.cuGetErrorName)(code, &mut text) };
    if known != SUCCESS || text.is_null() {
        return "an unknown code".into();
    }
    // SAFETY: a terminated constant of the driver, which stays mapped.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
