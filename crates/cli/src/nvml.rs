//! The two questions that only NVML answers, asked if `libnvidia-ml.so.1` is there.

use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

type Handle = *mut c_void;

/// `NVML_P2P_CAPS_INDEX_NVLINK`.
const CAPABILITY_NVLINK: c_int = 2;

/// An initialised NVML.
pub struct Nvml {
    library: Library,
}

impl Nvml {
    pub fn open() -> Option<Self> {
        // SAFETY: NVML's constructors do nothing.
        let library = unsafe { Library::new("libnvidia-ml.so.1") }.ok()?;
        // SAFETY: the signature is nvml.h's.
        let init = unsafe { library.get::<unsafe extern "C" fn() -> c_int>(c"nvmlInit_v2") }.ok()?;
        // SAFETY: takes nothing; `drop` undoes it.
        (unsafe { init() } == 0).then_some(())?;
        Some(Self { library })
    }

    /// The version of the kernel driver.
    pub fn driver(&self) -> Option<String> {
        type Function = unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;
        // SAFETY: the signature is nvml.h's.
        let function = unsafe { self.library.get::<Function>(c"nvmlSystemGetDriverVersion") }.ok()?;
        let mut text = [0; 96];
        // SAFETY: the length given is the array's.
        (unsafe { function(text.as_mut_ptr(), text.len() as c_uint) } == 0).then_some(())?;
        // SAFETY: NVML ends the text with a zero within the array.
        Some(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Whether NVLink joins two GPUs, named by PCI bus.
    pub fn nvlink(&self, from: &str, to: &str) -> Option<bool> {
        type Function = unsafe extern "C" fn(Handle, Handle, c_int, *mut c_int) -> c_int;
        // SAFETY: the signature is nvml.h's.
        let function = unsafe { self.library.get::<Function>(c"nvmlDeviceGetP2PStatus") }.ok()?;
        let (from, to) = (self.device(from)?, self.device(to)?);
        let mut status = -1;
        // SAFETY: both handles are NVML's; the answer is one integer.
        (unsafe { function(from, to, CAPABILITY_NVLINK, &mut status) } == 0).then_some(status == 0)
    }

    fn device(&self, bus: &str) -> Option<Handle> {
        type Function = unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int;
        // SAFETY: the signature is nvml.h's.
        let function = unsafe { self.library.get::<Function>(c"nvmlDeviceGetHandleByPciBusId_v2") }.ok()?;
        let bus = CString::new(bus).ok()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the text ends with a zero; the answer is one pointer.
        (unsafe { function(bus.as_ptr(), &mut handle) } == 0).then_some(handle)
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: the signature is nvml.h's.
        if let Ok(shutdown) = unsafe { self.library.get::<unsafe extern "C" fn() -> c_int>(c"nvmlShutdown") }
        {
            // SAFETY: initialised once in `open`.
            unsafe { shutdown() };
        }
    }
}
