//! What only NVML answers, asked if `libnvidia-ml.so.1` is there: the driver's version, links between GPUs, power, memory that is taken.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use libloading::os::unix::Library;
use once_cell::sync::OnceCell;

/// A device of NVML's, valid as long as the library is open.
pub type Handle = *mut c_void;

/// `NVML_P2P_CAPS_INDEX_NVLINK`.
const CAPABILITY_NVLINK: c_int = 2;
/// `NVML_NVLINK_MAX_LINKS`.
const LINKS_MAX: c_uint = 18;

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
#[derive(Debug)]
pub struct Nvml(Library);

/// Calls a function, with the type of each argument behind it. False if the driver has no such function, or does not answer success.
macro_rules! succeeds {
    ($library:expr, $name:expr, ($($argument:expr => $type:ty),*)) => {
        // SAFETY: each call writes the signature of nvml.h.
        unsafe { $library.get::<unsafe extern "C" fn($($type),*) -> c_int>($name) }
            // SAFETY: handles are NVML's; answers go to locals of these types, and lengths are those of arrays.
            .is_ok_and(|function| unsafe { function($($argument),*) } == 0)
    };
}

impl Nvml {
    /// Opened at the first call, and never closed.
    pub fn opened() -> Option<&'static Nvml> {
        static NVML: OnceCell<Option<Nvml>> = OnceCell::new();
        NVML.get_or_init(Nvml::open).as_ref()
    }

    fn open() -> Option<Nvml> {
        // SAFETY: NVML's constructors do nothing.
        let library = unsafe { Library::open(Some("libnvidia-ml.so.1"), libc::RTLD_NOW) }.ok()?;
        // Others in the process may have done it, too: it counts.
        succeeds!(library, c"nvmlInit_v2", ()).then_some(Nvml(library))
    }

    /// The version of the kernel driver.
    pub fn driver(&self) -> Option<String> {
        let mut text = [0_u8; 96];
        let (at, length) = (text.as_mut_ptr().cast(), text.len() as c_uint);
        let name = c"nvmlSystemGetDriverVersion";
        succeeds!(self.0, name, (at => *mut c_char, length => c_uint)).then_some(())?;
        Some(CStr::from_bytes_until_nul(&text).ok()?.to_string_lossy().into_owned())
    }

    /// Whether NVLink joins two GPUs, named by PCI bus.
    pub fn nvlink(&self, from: &str, to: &str) -> Option<bool> {
        let (from, to, mut status) = (self.device(from)?, self.device(to)?, -1);
        let name = c"nvmlDeviceGetP2PStatus";
        let is_told = succeeds!(self.0, name, (from => Handle, to => Handle, CAPABILITY_NVLINK => c_int, &mut status => *mut c_int));
        is_told.then_some(status == 0)
    }

    /// How many NVLinks of a GPU are up. NVML answers an error for links that a GPU does not have.
    pub fn links(&self, device: Handle) -> Option<u32> {
        let name = c"nvmlDeviceGetNvLinkState";
        // SAFETY: only asks whether it is there.
        unsafe { self.0.get::<*const ()>(name) }.ok()?;
        let is_up = |link: &c_uint| {
            let mut state = 0;
            succeeds!(self.0, name, (device => Handle, *link => c_uint, &mut state => *mut c_uint))
                && state == 1
        };
        Some((0..LINKS_MAX).filter(is_up).count() as u32)
    }

    /// A GPU's power limit in watts.
    pub fn power_limit(&self, device: Handle) -> Option<u32> {
        let mut milliwatts = 0;
        let name = c"nvmlDeviceGetEnforcedPowerLimit";
        succeeds!(self.0, name, (device => Handle, &mut milliwatts => *mut c_uint))
            .then_some(milliwatts / 1000)
    }

    /// Every GPU, in NVML's order, which is that of the PCI buses.
    pub fn devices(&self) -> Vec<Handle> {
        let mut devices = 0;
        if !succeeds!(self.0, c"nvmlDeviceGetCount_v2", (&mut devices => *mut c_uint)) {
            return Vec::new();
        }
        let handle = |index| {
            let mut handle = std::ptr::null_mut();
            let name = c"nvmlDeviceGetHandleByIndex_v2";
            succeeds!(self.0, name, (index => c_uint, &mut handle => *mut Handle)).then_some(handle)
        };
        (0..devices).filter_map(handle).collect()
    }

    /// The bytes that are taken of a GPU's memory, by whomever.
    pub fn memory_used(&self, device: Handle) -> Option<u64> {
        let mut memory = Memory::default();
        let name = c"nvmlDeviceGetMemoryInfo";
        succeeds!(self.0, name, (device => Handle, &mut memory => *mut Memory)).then_some(memory.used)
    }

    /// How much of the last moments a GPU ran kernels, in percent.
    pub fn utilization(&self, device: Handle) -> Option<u32> {
        // nvmlUtilization_t is two numbers, of the processors and of the memory.
        let mut rates = [0; 2];
        let name = c"nvmlDeviceGetUtilizationRates";
        succeeds!(self.0, name, (device => Handle, &mut rates => *mut [c_uint; 2])).then_some(rates[0])
    }

    /// The processes that compute on a GPU, and the bytes that each has there, where the driver tells.
    pub fn processes(&self, device: Handle) -> Vec<(u32, Option<u64>)> {
        let mut processes = vec![Process::default(); PROCESSES_MAX];
        let mut count = 0;
        let mut is_told = |name: &CStr| {
            let at = processes.as_mut_ptr();
            // A failed call leaves what it would need.
            count = PROCESSES_MAX as c_uint;
            succeeds!(self.0, name, (device => Handle, &mut count => *mut c_uint, at => *mut Process))
        };
        // Older drivers have the second version alone.
        if !is_told(c"nvmlDeviceGetComputeRunningProcesses_v3")
            && !is_told(c"nvmlDeviceGetComputeRunningProcesses_v2")
        {
            return Vec::new();
        }
        let known = |used| Some(used).filter(|used| *used != NOT_AVAILABLE);
        processes.iter().take(count as usize).map(|process| (process.number, known(process.used))).collect()
    }

    /// A GPU by its PCI bus.
    pub fn device(&self, bus: &str) -> Option<Handle> {
        let bus = CString::new(bus).ok()?;
        let mut handle = std::ptr::null_mut();
        let name = c"nvmlDeviceGetHandleByPciBusId_v2";
        succeeds!(self.0, name, (bus.as_ptr() => *const c_char, &mut handle => *mut Handle)).then_some(handle)
    }
}
