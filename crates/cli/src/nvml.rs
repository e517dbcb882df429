//! What only NVML answers, asked if `libnvidia-ml.so.1` is there: the driver's version, links between GPUs, memory that is taken.

use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

/// A device of NVML's, valid as long as the library is open.
pub type Handle = *mut c_void;

/// `NVML_P2P_CAPS_INDEX_NVLINK`.
const CAPABILITY_NVLINK: c_int = 2;

/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: u64 = u64::MAX;

/// Processes of a device that are looked at.
const PROCESSES_MAX: usize = 512;

/// `nvmlMemory_t`.
#[derive(Default)]
#[repr(C)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t`, of the second and third version of the call.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Process {
    number: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

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

    /// Every GPU, in NVML's order, which is that of the PCI buses.
    pub fn devices(&self) -> Vec<Handle> {
        type Count = unsafe extern "C" fn(*mut c_uint) -> c_int;
        type ByIndex = unsafe extern "C" fn(c_uint, *mut Handle) -> c_int;
        // SAFETY: the signature is nvml.h's.
        let count = unsafe { self.library.get::<Count>(c"nvmlDeviceGetCount_v2") };
        // SAFETY: the signature is nvml.h's.
        let by_index = unsafe { self.library.get::<ByIndex>(c"nvmlDeviceGetHandleByIndex_v2") };
        let (Ok(count), Ok(by_index)) = (count, by_index) else { return Vec::new() };
        let mut devices = 0;
        // SAFETY: the answer is one integer.
        if unsafe { count(&mut devices) } != 0 {
            return Vec::new();
        }
        let handle = |index| {
            let mut handle = std::ptr::null_mut();
            // SAFETY: the answer is one pointer.
            (unsafe { by_index(index, &mut handle) } == 0).then_some(handle)
        };
        (0..devices).filter_map(handle).collect()
    }

    /// The bytes that are taken of a GPU's memory, by whomever.
    pub fn memory_used(&self, device: Handle) -> Option<u64> {
        type Function = unsafe extern "C" fn(Handle, *mut Memory) -> c_int;
        // SAFETY: the signature is nvml.h's.
        let function = unsafe { self.library.get::<Function>(c"nvmlDeviceGetMemoryInfo") }.ok()?;
        let mut memory = Memory::default();
        // SAFETY: the handle is NVML's; the answer is the structure.
        (unsafe { function(device, &mut memory) } == 0).then_some(memory.used)
    }

    /// How much of the last moments a GPU ran kernels, in percent.
    pub fn utilization(&self, device: Handle) -> Option<u32> {
        type Function = unsafe extern "C" fn(Handle, *mut [c_uint; 2]) -> c_int;
        // SAFETY: the signature is nvml.h's: nvmlUtilization_t is two numbers, of the processors and of the memory.
        let function = unsafe { self.library.get::<Function>(c"nvmlDeviceGetUtilizationRates") }.ok()?;
        let mut rates = [0; 2];
        // SAFETY: the handle is NVML's; the answer is two numbers.
        (unsafe { function(device, &mut rates) } == 0).then_some(rates[0])
    }

    /// The processes that compute on a GPU, and the bytes that each has there, where the driver tells.
    pub fn processes(&self, device: Handle) -> Vec<(u32, Option<u64>)> {
        type Function = unsafe extern "C" fn(Handle, *mut c_uint, *mut Process) -> c_int;
        let names = [c"nvmlDeviceGetComputeRunningProcesses_v3", c"nvmlDeviceGetComputeRunningProcesses_v2"];
        // SAFETY: the signature is nvml.h's, of both.
        let function = names.iter().find_map(|name| unsafe { self.library.get::<Function>(*name) }.ok());
        let Some(function) = function else { return Vec::new() };
        let mut processes = vec![Process::default(); PROCESSES_MAX];
        let mut count = PROCESSES_MAX as c_uint;
        // SAFETY: the handle is NVML's; the count given is the list's.
        if unsafe { function(device, &mut count, processes.as_mut_ptr()) } != 0 {
            return Vec::new();
        }
        processes.truncate(count as usize);
        let known = |used| Some(used).filter(|used| *used != NOT_AVAILABLE);
        processes.iter().map(|process| (process.number, known(process.used))).collect()
    }

    /// A GPU by its PCI bus.
    pub fn device(&self, bus: &str) -> Option<Handle> {
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
