//! Asks what devices are, what they can do, and how two of them reach each other.

use std::ffi::c_int;

use crate::gpu::failure::Failure;
use crate::gpu::library::Driver;

/// `CUdevice`, and the ordinal that makes it: they are equal.
pub type Ordinal = i32;

/// What a device says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The device's number in this process.
    pub ordinal: Ordinal,
    /// The device's UUID, the same in every process.
    pub uuid: [u8; 16],
    /// `domain:bus:device.function`, in the driver's case: compare it without case.
    pub pci: String,
    /// Compute capability, 90 for 9.0.
    pub capability: i32,
    /// Number of SMs.
    pub multiprocessors: i32,
    /// Device memory, bytes.
    pub memory_bytes: usize,
    /// Whether it has virtual memory management, without which there is no symmetric heap.
    pub virtual_memory: bool,
    /// Whether its memory can be exported as descriptors, without which no other process can map it.
    pub posix_handles: bool,
    /// Whether it has multicast objects, over which NCCL has switches reduce and copy (NVLS).
    pub multicast: bool,
    /// Number of memory synchronisation domains, at least 1.
    pub memory_domains: i32,
    /// Threads that an SM runs at once.
    pub threads_per_multiprocessor: i32,
}

/// How one device reaches another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Whether loads and stores work.
    pub access: bool,
    /// Whether atomics work natively: over NVLink, not PCIe.
    pub native_atomics: bool,
    /// 0 is the best link of this machine.
    pub performance_rank: i32,
}

/// `CUdevice_attribute`.
mod attribute {
    pub(super) const MULTIPROCESSOR_COUNT: u32 = 16;
    pub(super) const COMPUTE_MODE: u32 = 20;
    pub(super) const MAX_THREADS_PER_MULTIPROCESSOR: u32 = 39;
    pub(super) const COMPUTE_CAPABILITY_MAJOR: u32 = 75;
    pub(super) const COMPUTE_CAPABILITY_MINOR: u32 = 76;
    pub(super) const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: u32 = 102;
    pub(super) const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: u32 = 103;
    pub(super) const MEM_SYNC_DOMAIN_COUNT: u32 = 126;
    pub(super) const MULTICAST_SUPPORTED: u32 = 132;
}

/// `CUdevice_P2PAttribute`.
mod link {
    pub(super) const PERFORMANCE_RANK: u32 = 1;
    pub(super) const ACCESS_SUPPORTED: u32 = 2;
    pub(super) const NATIVE_ATOMIC_SUPPORTED: u32 = 3;
}

impl Driver {
    /// A device's `CUcomputemode`: which processes may have contexts on it.
    pub fn compute_mode(&self, ordinal: Ordinal) -> Result<i32, Failure> {
        self.attribute(ordinal, attribute::COMPUTE_MODE)
    }

    /// How many devices this process sees.
    pub fn device_count(&self) -> Result<i32, Failure> {
        // SAFETY: the output is a local.
        self.output("cuDeviceGetCount", |count| unsafe { (self.calls.cuDeviceGetCount)(count) }, String::new)
    }

    /// What a device says of itself. Optional features that the driver is too old to know count as missing.
    pub fn device_facts(&self, ordinal: Ordinal) -> Result<Facts, Failure> {
        let detail = || format!("device {ordinal}");
        // SAFETY: the output is a local.
        let get = |device: &mut c_int| unsafe { (self.calls.cuDeviceGet)(device, ordinal) };
        let device = self.output("cuDeviceGet", get, detail)?;
        // SAFETY: the output is a local.
        let total = |bytes: &mut usize| unsafe { (self.calls.cuDeviceTotalMem_v2)(bytes, device) };
        let memory_bytes = self.output("cuDeviceTotalMem_v2", total, detail)?;
        let ask = |attribute| self.attribute(device, attribute);
        Ok(Facts {
            ordinal,
            uuid: self.uuid(device)?,
            pci: self.pci(device)?,
            capability: 10 * ask(attribute::COMPUTE_CAPABILITY_MAJOR)?
                + ask(attribute::COMPUTE_CAPABILITY_MINOR)?,
            multiprocessors: ask(attribute::MULTIPROCESSOR_COUNT)?,
            memory_bytes,
            virtual_memory: ask(attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED).unwrap_or(0) != 0,
            posix_handles: ask(attribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED).unwrap_or(0) != 0,
            multicast: ask(attribute::MULTICAST_SUPPORTED).unwrap_or(0) != 0,
            memory_domains: ask(attribute::MEM_SYNC_DOMAIN_COUNT).unwrap_or(1).max(1),
            threads_per_multiprocessor: ask(attribute::MAX_THREADS_PER_MULTIPROCESSOR)?,
        })
    }

    /// How `from` reaches the memory of `to`; a device reaches its own.
    pub fn reach(&self, from: Ordinal, to: Ordinal) -> Result<Reach, Failure> {
        if from == to {
            return Ok(Reach { access: true, native_atomics: true, performance_rank: 0 });
        }
        let ask = |attribute: u32| {
            // SAFETY: the output is a local.
            let ask = |value: &mut c_int| unsafe {
                (self.calls.cuDeviceGetP2PAttribute)(value, attribute, from, to)
            };
            let detail = || format!("attribute {attribute}, from device {from}, to device {to}");
            self.output("cuDeviceGetP2PAttribute", ask, detail)
        };
        Ok(Reach {
            access: ask(link::ACCESS_SUPPORTED)? != 0,
            native_atomics: ask(link::NATIVE_ATOMIC_SUPPORTED)? != 0,
            performance_rank: ask(link::PERFORMANCE_RANK)?,
        })
    }

    /// One of a device's attributes, by its number.
    pub fn attribute(&self, device: Ordinal, attribute: u32) -> Result<i32, Failure> {
        // SAFETY: the output is a local.
        let ask = |value: &mut c_int| unsafe { (self.calls.cuDeviceGetAttribute)(value, attribute, device) };
        self.output("cuDeviceGetAttribute", ask, || format!("attribute {attribute}, device {device}"))
    }

    pub(super) fn uuid(&self, device: Ordinal) -> Result<[u8; 16], Failure> {
        // SAFETY: a CUuuid is 16 bytes.
        let ask = |uuid: &mut [u8; 16]| unsafe { (self.calls.cuDeviceGetUuid_v2)(uuid, device) };
        self.output("cuDeviceGetUuid_v2", ask, || format!("device {device}"))
    }

    pub(super) fn pci(&self, device: Ordinal) -> Result<String, Failure> {
        // SAFETY: the driver writes at most as many bytes as it is told there are.
        let ask = |text: &mut [u8; 32]| unsafe {
            (self.calls.cuDeviceGetPCIBusId)(text.as_mut_ptr().cast(), text.len() as c_int, device)
        };
        let text = self.output("cuDeviceGetPCIBusId", ask, || format!("device {device}"))?;
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        Ok(String::from_utf8_lossy(&text[..end]).into_owned())
    }
}
