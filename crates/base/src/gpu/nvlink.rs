//! Finds out whether NVLink joins two GPUs: over PCIe a line of 128 bytes may arrive in parts. The driver tells it of GPUs that this process
//! sees, NVML of all others, if NVML is there.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};

use libloading::os::unix::Library;
use once_cell::sync::OnceCell;

use crate::gpu::device::Ordinal;
use crate::gpu::library::Driver;

/// `NVML_P2P_CAPS_INDEX_NVLINK`.
const CAPABILITY_NVLINK: c_int = 2;
/// `NVML_NVLINK_MAX_LINKS`.
const LINKS_MAX: c_uint = 18;

impl Driver {
    /// Whether NVLink joins a device of this process to a GPU by UUID and PCI address (domain, bus, device). None if neither can tell.
    pub fn nvlink(&self, from: Ordinal, uuid: &[u8; 16], pci: (u32, u8, u8)) -> Option<bool> {
        match self.ordinal_of(uuid) {
            Some(to) => self.reach(from, to).ok().map(|reach| reach.access && reach.native_atomics),
            None => {
                let (domain, bus, device) = pci;
                Nvml::opened()?
                    .nvlink(&self.pci(from).ok()?, &format!("{domain:08x}:{bus:02x}:{device:02x}.0"))
            }
        }
    }

    /// Whether no NVLink joins a device to any other, as far as the driver or NVML can say.
    pub fn is_unlinked(&self, ordinal: Ordinal) -> bool {
        let others: Vec<Ordinal> =
            (0..self.device_count().unwrap_or(0)).filter(|other| *other != ordinal).collect();
        let is_apart = |other: &Ordinal| self.reach(ordinal, *other).is_ok_and(|reach| !reach.native_atomics);
        // The driver first, as opening NVML takes longer.
        others.iter().all(is_apart)
            && self.links_and_power(ordinal).0.map_or(!others.is_empty(), |links| links == 0)
    }

    /// How many NVLinks of a device are up, and its power limit in watts, each if NVML tells it.
    pub fn links_and_power(&self, ordinal: Ordinal) -> (Option<u32>, Option<u32>) {
        let found = || {
            let nvml = Nvml::opened()?;
            let device = nvml.device(&self.pci(ordinal).ok()?)?;
            Some((nvml.links(device), nvml.power_limit_watts(device)))
        };
        found().unwrap_or_default()
    }

    fn ordinal_of(&self, uuid: &[u8; 16]) -> Option<Ordinal> {
        (0..self.device_count().ok()?).find(|ordinal| self.uuid(*ordinal).is_ok_and(|found| found == *uuid))
    }
}

type Handle = *mut c_void;

struct Nvml(Library);

impl Nvml {
    /// Opened at the first call, and never closed.
    fn opened() -> Option<&'static Nvml> {
        static NVML: OnceCell<Option<Nvml>> = OnceCell::new();
        NVML.get_or_init(Nvml::open).as_ref()
    }

    fn open() -> Option<Nvml> {
        // SAFETY: NVML's constructors do nothing.
        let library = unsafe { Library::open(Some("libnvidia-ml.so.1"), libc::RTLD_NOW) }.ok()?;
        // SAFETY: the signature is nvml.h's.
        let init = unsafe { library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2\0") }.ok()?;
        // SAFETY: takes nothing; others in the process may have done it, too: it counts.
        (unsafe { init() } == 0).then_some(())?;
        Some(Nvml(library))
    }

    fn nvlink(&self, from: &str, to: &str) -> Option<bool> {
        type Function = unsafe extern "C" fn(Handle, Handle, c_int, *mut c_int) -> c_int;
        // SAFETY: the signature is nvml.h's.
        let function = unsafe { self.0.get::<Function>(b"nvmlDeviceGetP2PStatus\0") }.ok()?;
        let (from, to) = (self.device(from)?, self.device(to)?);
        let mut status = -1;
        // SAFETY: both handles are NVML's; the answer is one integer.
        (unsafe { function(from, to, CAPABILITY_NVLINK, &mut status) } == 0).then_some(status == 0)
    }

    /// `nvmlDeviceGetNvLinkState` of each link; devices have at most 18.
    fn links(&self, device: Handle) -> Option<u32> {
        type Function = unsafe extern "C" fn(Handle, c_uint, *mut c_uint) -> c_int;
        // SAFETY: the signature is nvml.h's.
        let function = unsafe { self.0.get::<Function>(b"nvmlDeviceGetNvLinkState\0") }.ok()?;
        let is_up = |link: &c_uint| {
            let mut state = 0;
            // SAFETY: the handle is NVML's; the answer is one integer.
            unsafe { function(device, *link, &mut state) == 0 && state == 1 }
        };
        Some((0..LINKS_MAX).filter(is_up).count() as u32)
    }

    fn power_limit_watts(&self, device: Handle) -> Option<u32> {
        type Function = unsafe extern "C" fn(Handle, *mut c_uint) -> c_int;
        // SAFETY: the signature is nvml.h's.
        let function = unsafe { self.0.get::<Function>(b"nvmlDeviceGetEnforcedPowerLimit\0") }.ok()?;
        let mut milliwatts = 0;
        // SAFETY: the handle is NVML's; the answer is one integer.
        (unsafe { function(device, &mut milliwatts) } == 0).then_some(milliwatts / 1000)
    }

    fn device(&self, pci: &str) -> Option<Handle> {
        type Function = unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int;
        // SAFETY: the signature is nvml.h's.
        let function = unsafe { self.0.get::<Function>(b"nvmlDeviceGetHandleByPciBusId_v2\0") }.ok()?;
        let pci = CString::new(pci).ok()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the text ends with a zero; the answer is one pointer.
        (unsafe { function(pci.as_ptr(), &mut handle) } == 0).then_some(handle)
    }
}
