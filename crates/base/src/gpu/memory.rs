//! Manages virtual memory: addresses, physical memory, and mappings. No call here waits for work on a GPU, so all may run beside kernels that
//! wait for a peer.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::descriptor::Ours;
use crate::descriptor::fork_lock::without_forks;
use crate::gpu::types::{AccessDescription, AllocationProperties, Location};
use crate::gpu::{Address, Driver, Failure, Ordinal};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, the only type there is.
const PINNED: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const DEVICE: u32 = 1;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`.
const RECOMMENDED: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: u32 = 3;

/// Device memory that other processes can open.
fn shareable(device: Ordinal) -> AllocationProperties {
    AllocationProperties {
        kind: PINNED,
        handle_types: DESCRIPTOR,
        location: Location { kind: DEVICE, id: device },
        windows: 0,
        compression: 0,
        direct_rdma: 0,
        usage: 0,
        reserved: [0; 4],
    }
}

/// How much memory a device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes that are free.
    pub free: u64,
    /// Bytes in all.
    pub total: u64,
}

impl Driver {
    /// Bytes that are free on the current context's device, whoever uses the rest.
    pub fn free_bytes(&self) -> Result<u64, Failure> {
        self.room().map(|room| room.free)
    }

    /// Free bytes and all bytes of the current context's device.
    pub fn room(&self) -> Result<Room, Failure> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the outputs are locals.
        let code = unsafe { (self.calls.cuMemGetInfo_v2)(&mut free, &mut total) };
        self.check("cuMemGetInfo_v2", code, String::new)?;
        Ok(Room { free: free as u64, total: total as u64 })
    }
}

/// Sizes and offsets of shareable memory are multiples of this, bytes.
pub fn granularity(driver: &Driver, device: Ordinal) -> Result<u64, Failure> {
    // SAFETY: the output and the properties are locals.
    let ask = |bytes: &mut usize| unsafe {
        (driver.calls.cuMemGetAllocationGranularity)(bytes, &shareable(device), RECOMMENDED)
    };
    let bytes = driver.output("cuMemGetAllocationGranularity", ask, || format!("device {device}"))?;
    Ok(bytes as u64)
}

/// Reserved addresses, with or without memory behind them. Given back when dropped, after all mappings in them.
#[derive(Debug)]
pub struct Reservation {
    driver: &'static Driver,
    /// First address.
    pub base: Address,
    /// How many addresses.
    pub bytes: u64,
}

impl Reservation {
    /// Reserves addresses anywhere. Costs no memory.
    pub fn new(driver: &'static Driver, bytes: u64, alignment: u64) -> Result<Reservation, Failure> {
        // SAFETY: the output is a local; no address is asked for.
        let reserve = |base: &mut Address| unsafe {
            (driver.calls.cuMemAddressReserve)(base, bytes as usize, alignment as usize, 0, 0)
        };
        let detail = || format!("bytes {bytes}, alignment {alignment}");
        Ok(Reservation { driver, base: driver.output("cuMemAddressReserve", reserve, detail)?, bytes })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: reserved by `new`; mappings hold the reservation, so none is left.
        let free = || unsafe { (self.driver.calls.cuMemAddressFree)(self.base, self.bytes as usize) };
        let detail = || format!("address {:#x}, bytes {}", self.base, self.bytes);
        self.driver.release("cuMemAddressFree", free, detail);
    }
}

/// A handle of physical memory. Dropping it releases the handle; mappings keep the memory longer.
#[derive(Debug)]
pub struct Physical {
    driver: &'static Driver,
    handle: u64,
    /// Size in bytes. For memory of another process, or behind another's mapping, as the caller of [`Physical`] gave it.
    pub bytes: u64,
}

impl Physical {
    /// New memory of a device, shareable by descriptor. Its content is undefined.
    pub fn create(driver: &'static Driver, device: Ordinal, bytes: u64) -> Result<Physical, Failure> {
        // SAFETY: the output and the properties are locals.
        let create = |handle: &mut u64| unsafe {
            (driver.calls.cuMemCreate)(handle, bytes as usize, &shareable(device), 0)
        };
        let handle = driver.output("cuMemCreate", create, || format!("bytes {bytes}, device {device}"))?;
        Ok(Physical { driver, handle, bytes })
    }

    /// Memory of another process, from its descriptor. The caller keeps the descriptor.
    pub fn import(
        driver: &'static Driver,
        descriptor: BorrowedFd<'_>,
        bytes: u64,
    ) -> Result<Physical, Failure> {
        let number = descriptor.as_raw_fd();
        // SAFETY: a descriptor travels in the pointer argument itself; it is open for the length of the call.
        let import = |handle: &mut u64| unsafe {
            (driver.calls.cuMemImportFromShareableHandle)(handle, number as usize as *mut c_void, DESCRIPTOR)
        };
        let detail = || format!("descriptor {number}, bytes {bytes}");
        let handle = driver.output("cuMemImportFromShareableHandle", import, detail)?;
        Ok(Physical { driver, handle, bytes })
    }

    /// The memory mapped at an address by anybody. It begins at the first byte of that memory, so `address` must be the mapping's first; `bytes`
    /// bytes of it are to be mapped again. The memory stays while this is held, whatever becomes of that mapping. Works only for memory of
    /// `cuMemCreate`, or imported memory: the driver refuses memory that it maps itself (`cudaMalloc`, pools).
    ///
    /// If another thread frees memory meanwhile, other memory may lie there. The caller knows what it holds only if the id of the address is
    /// still the same afterwards.
    pub fn behind(driver: &'static Driver, address: Address, bytes: u64) -> Result<Physical, Failure> {
        // SAFETY: the output is a local; any address may be asked for.
        let retain = |handle: &mut u64| unsafe {
            (driver.calls.cuMemRetainAllocationHandle)(handle, address as *mut c_void)
        };
        let detail = || format!("address {address:#x}, bytes {bytes}");
        Ok(Physical { driver, handle: driver.output("cuMemRetainAllocationHandle", retain, detail)?, bytes })
    }

    /// A descriptor of the memory for other processes. The memory stays while a descriptor is open anywhere.
    pub fn export(&self) -> Result<Ours, Failure> {
        let lacks = |cause| {
            let detail = format!("{cause}, for memory of {} bytes", self.bytes);
            Failure::without_code("a descriptor", "an error", detail)
        };
        without_forks(|| Ours::new(self.export_now()?).map_err(lacks))
    }

    fn export_now(&self) -> Result<OwnedFd, Failure> {
        // SAFETY: for this handle type the output is an int; ours to close.
        let export = |number: &mut i32| unsafe {
            (self.driver.calls.cuMemExportToShareableHandle)(
                (&raw mut *number).cast(),
                self.handle,
                DESCRIPTOR,
                0,
            )
        };
        let detail = || format!("bytes {}", self.bytes);
        let number = self.driver.output("cuMemExportToShareableHandle", export, detail)?;
        // SAFETY: a new descriptor that nobody else knows.
        let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
        // A program that is started meanwhile must not keep the memory. If setting the flag fails, it is only kept longer.
        let _ = rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC);
        Ok(descriptor)
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: the one reference that `create`, `import` or `behind` took.
        let release = || unsafe { (self.driver.calls.cuMemRelease)(self.handle) };
        self.driver.release("cuMemRelease", release, || format!("bytes {}", self.bytes));
    }
}

/// Physical memory mapped at an address. Dropping it unmaps and releases; nobody may use the addresses then.
#[derive(Debug)]
pub struct Mapping {
    /// Declared before the reservation, so dropped first.
    pub physical: Physical,
    reservation: Arc<Reservation>,
    /// First address.
    pub address: Address,
    /// Which of the first 64 devices may access it, one bit each: the driver takes as long for a repeated request as for the first.
    allowed: AtomicU64,
}

impl Mapping {
    /// Maps all of `physical` at `offset` of the reservation, readable and writable for `device`.
    pub fn new(
        reservation: &Arc<Reservation>,
        offset: u64,
        physical: Physical,
        device: Ordinal,
    ) -> Result<Mapping, Failure> {
        let driver = reservation.driver;
        let (address, bytes) = (reservation.base + offset, physical.bytes);
        // SAFETY: the addresses are of our reservation; the driver refuses what is mapped already or does not fit.
        let code = unsafe { (driver.calls.cuMemMap)(address, bytes as usize, 0, physical.handle, 0) };
        driver.check("cuMemMap", code, || format!("address {address:#x}, bytes {bytes}"))?;
        // From here on a failure drops the mapping, which unmaps.
        let mapping =
            Mapping { physical, reservation: reservation.clone(), address, allowed: AtomicU64::new(0) };
        mapping.allow(device)?;
        Ok(mapping)
    }

    /// Lets another device of this process read and write the mapping.
    pub fn allow(&self, device: Ordinal) -> Result<(), Failure> {
        let bit = 1_u64.checked_shl(device as u32).unwrap_or(0);
        if self.allowed.load(Ordering::Relaxed) & bit != 0 {
            return Ok(());
        }
        let driver = self.reservation.driver;
        let access = AccessDescription { location: Location { kind: DEVICE, id: device }, flags: READ_WRITE };
        let bytes = self.physical.bytes;
        // SAFETY: exactly the bytes that are mapped; the description is a local.
        let code = unsafe { (driver.calls.cuMemSetAccess)(self.address, bytes as usize, &access, 1) };
        driver.check("cuMemSetAccess", code, || {
            format!("address {:#x}, bytes {bytes}, device {device}", self.address)
        })?;
        self.allowed.fetch_or(bit, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let (driver, bytes) = (self.reservation.driver, self.physical.bytes);
        // SAFETY: mapped by `new`; the owner vouches that nothing uses it any more.
        let unmap = || unsafe { (driver.calls.cuMemUnmap)(self.address, bytes as usize) };
        driver.release("cuMemUnmap", unmap, || format!("address {:#x}, bytes {bytes}", self.address));
    }
}
