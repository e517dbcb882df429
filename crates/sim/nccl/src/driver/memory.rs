//! Driver calls for memory: attributes of addresses, and allocating, mapping and freeing.

use super::*;
use std::ops::Range;

const POINTER_ATTRIBUTE_BUFFER_ID: c_int = 7;
const POINTER_ATTRIBUTE_DEVICE_ORDINAL: c_int = 9;
const POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: c_int = 14;
const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_int = 1;
const ALLOCATION_TYPE_PINNED: c_int = 1;
const LOCATION_TYPE_DEVICE: c_int = 1;
const LOCATION_TYPE_HOST_NUMA: c_int = 3;
const ACCESS_READ_WRITE: c_int = 3;
const GRANULARITY_RECOMMENDED: c_int = 1;

/// A second mapping of an allocation: the `bytes` at `of` are visible at `at`, too.
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    pub of: usize,
    pub bytes: usize,
    pub at: usize,
}

// SAFETY, for all unsafe blocks below: pointers are to locals, and the driver checks addresses and handles.
impl Driver {
    /// The driver's buffer id of the allocation at `address`; `None` if the driver knows none.
    pub fn buffer_id(&self, address: usize) -> Option<u64> {
        let mut id = 0u64;
        // SAFETY: BUFFER_ID is 64 bits wide.
        let code =
            unsafe { (self.pointer_attribute)((&raw mut id).cast(), POINTER_ATTRIBUTE_BUFFER_ID, address) };
        (code == SUCCESS && id != 0).then_some(id)
    }

    /// Whether `address` lies in memory made of exportable handles.
    pub fn is_virtual(&self, address: usize) -> bool {
        let mut handle = 0;
        // SAFETY: see above.
        if unsafe { (self.retain_handle)(&mut handle, address) } != SUCCESS {
            return false;
        }
        // SAFETY: the handle was retained just now.
        unsafe { (self.memory_release)(handle) };
        true
    }

    /// Allocates device memory as `ncclMemAlloc` does, which needs no context. Gives address and size in bytes.
    pub fn allocate_virtual(&self, bytes: usize) -> Outcome<(usize, usize)> {
        let id = self.device()?;
        let location = Location { kind: LOCATION_TYPE_DEVICE, id };
        let (handle, bytes) = self.create(bytes, location, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)?;
        let address = self.map_fresh(handle, bytes, 0, 0..self.devices()?)?;
        Ok((address, bytes))
    }

    /// Allocates memory as cudaMalloc does.
    pub fn allocate_plain(&self, bytes: usize) -> Outcome<usize> {
        self.current()?;
        let mut at = 0;
        // SAFETY: the output is a local.
        check(unsafe { (self.plain_allocate)(&mut at, bytes) }, "cuMemAlloc")?;
        Ok(at)
    }

    /// Frees memory of `allocate_plain`. Waits for all work on its device.
    pub fn free_plain(&self, address: usize) -> Outcome {
        // SAFETY: the caller gives the memory up.
        check(unsafe { (self.plain_free)(address) }, "cuMemFree")
    }

    /// Maps host memory, which peers never see and no device's limit counts, at `hint` if that is free.
    pub fn allocate_private(&self, bytes: usize, hint: usize, device: c_int) -> Outcome<Mapping> {
        let location = Location { kind: LOCATION_TYPE_HOST_NUMA, id: device };
        let (handle, bytes) = self.create(bytes, location, 0)?;
        let at = self.map_fresh(handle, bytes, hint, device..device + 1)?;
        Ok(Mapping { of: at, bytes, at })
    }

    /// Creates unmapped memory. Gives its handle and its size in bytes.
    fn create(&self, bytes: usize, location: Location, handle_types: c_int) -> Outcome<(c_ulonglong, usize)> {
        let properties = AllocationProperties {
            kind: ALLOCATION_TYPE_PINNED,
            handle_types,
            location,
            win32_metadata: std::ptr::null_mut(),
            flags: [0; 8],
        };
        let (mut grain, mut handle) = (0, 0);
        // SAFETY: see above.
        let code = unsafe { (self.granularity)(&mut grain, &properties, GRANULARITY_RECOMMENDED) };
        check(code, "cuMemGetAllocationGranularity")?;
        let bytes = bytes.next_multiple_of(grain);
        // SAFETY: see above.
        check(unsafe { (self.memory_create)(&mut handle, bytes, &properties, 0) }, "cuMemCreate")?;
        Ok((handle, bytes))
    }

    /// Reserves addresses, at `hint` where these are free.
    pub(super) fn reserve(&self, bytes: usize, hint: usize) -> Outcome<usize> {
        let mut at = 0;
        // SAFETY: see above.
        check(unsafe { (self.address_reserve)(&mut at, bytes, 0, hint, 0) }, "cuMemAddressReserve")?;
        Ok(at)
    }

    /// Maps the first `bytes` of a handle's memory at reserved addresses, for `devices`. Releases the handle in any case.
    pub(super) fn place(
        &self,
        handle: c_ulonglong,
        at: usize,
        bytes: usize,
        devices: Range<c_int>,
    ) -> Outcome {
        // SAFETY: the driver checks that the addresses are reserved and free.
        let mapped = check(unsafe { (self.memory_map)(at, bytes, 0, handle, 0) }, "cuMemMap");
        // SAFETY: the mapping keeps the memory; without one it goes now.
        unsafe { (self.memory_release)(handle) };
        mapped?;
        for id in devices {
            let location = Location { kind: LOCATION_TYPE_DEVICE, id };
            let access = AccessDescription { location, flags: ACCESS_READ_WRITE };
            // SAFETY: see above.
            let code = unsafe { (self.set_access)(at, bytes, &access, 1) };
            check(code, "cuMemSetAccess").inspect_err(|_| {
                // SAFETY: mapped above, and nobody knows of it.
                unsafe { (self.memory_unmap)(at, bytes) };
            })?;
        }
        Ok(())
    }

    /// Like `place`, at newly reserved addresses.
    fn map_fresh(
        &self,
        handle: c_ulonglong,
        bytes: usize,
        hint: usize,
        devices: Range<c_int>,
    ) -> Outcome<usize> {
        let at = self.reserve(bytes, hint).inspect_err(|_| {
            // SAFETY: the caller's handle, given up.
            unsafe { (self.memory_release)(handle) };
        })?;
        self.place(handle, at, bytes, devices).inspect_err(|_| {
            // SAFETY: reserved just now, nothing is mapped there.
            unsafe { (self.address_free)(at, bytes) };
        })?;
        Ok(at)
    }

    /// Frees memory of `allocate_virtual`. As NCCL does, it unmaps at the given address: the driver refuses memory of cuMemAlloc, and
    /// addresses inside an allocation.
    pub fn free(&self, address: usize) -> Outcome {
        let mut device = 0;
        let attribute = POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        // SAFETY: DEVICE_ORDINAL is an int.
        let code =
            unsafe { (self.pointer_attribute)((&raw mut device as *mut c_int).cast(), attribute, address) };
        check(code, "cuPointerGetAttribute")?;
        // NCCL sets the memory's device, then the caller's again.
        self.within(self.primary(device)?, device, || self.free_here(address))
    }

    fn free_here(&self, address: usize) -> Outcome {
        if !self.is_virtual(address) {
            return refuse(ncclUnhandledCudaError, format!("cuMemRetainAllocationHandle of {address:#x}"));
        }
        let (_, bytes) = self.allocation(address)?;
        // SAFETY: the caller gives the memory up.
        check(unsafe { (self.memory_unmap)(address, bytes) }, "cuMemUnmap")?;
        // SAFETY: as above.
        check(unsafe { (self.address_free)(address, bytes) }, "cuMemAddressFree")
    }

    /// Whether the memory at `address` can be given to other processes.
    pub fn is_exportable(&self, address: usize) -> bool {
        let mut types = 0u64;
        let place = (&raw mut types).cast();
        // SAFETY: ALLOWED_HANDLE_TYPES is 64 bits wide.
        let code =
            unsafe { (self.pointer_attribute)(place, POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, address) };
        let by_descriptor = types & HANDLE_TYPE_POSIX_FILE_DESCRIPTOR as u64 != 0;
        code == SUCCESS && by_descriptor && self.is_virtual(address)
    }

    /// The start of the allocation that holds `address`, and its size in bytes.
    pub fn allocation(&self, address: usize) -> Outcome<(usize, usize)> {
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: see above.
        check(unsafe { (self.address_range)(&mut base, &mut bytes, address) }, "cuMemGetAddressRange")?;
        Ok((base, bytes))
    }

    /// Maps the allocation that holds `address` a second time, for `device`.
    pub fn map_again(&self, address: usize, device: c_int) -> Outcome<Mapping> {
        let (of, bytes) = self.allocation(address)?;
        let at = self.map_fresh(self.retain(of)?, bytes, 0, device..device + 1)?;
        Ok(Mapping { of, bytes, at })
    }

    /// The handle of the memory at `address`, for the caller to release.
    pub(super) fn retain(&self, address: usize) -> Outcome<c_ulonglong> {
        let mut handle = 0;
        // SAFETY: see above.
        check(unsafe { (self.retain_handle)(&mut handle, address) }, "cuMemRetainAllocationHandle")?;
        Ok(handle)
    }

    /// Ends a mapping of `map_again` or `allocate_private`.
    pub fn unmap(&self, mapping: Mapping) {
        // SAFETY: mapped and reserved by us; nobody uses the addresses any more.
        unsafe {
            (self.memory_unmap)(mapping.at, mapping.bytes);
            (self.address_free)(mapping.at, mapping.bytes);
        }
    }
}
