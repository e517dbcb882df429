//! What the driver knows of memory, and virtual memory: made, mapped again, freed.

use super::*;

const POINTER_ATTRIBUTE_BUFFER_ID: c_int = 7;
const POINTER_ATTRIBUTE_DEVICE_ORDINAL: c_int = 9;
const POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: c_int = 14;
const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_int = 1;
const ALLOCATION_TYPE_PINNED: c_int = 1;
const LOCATION_TYPE_DEVICE: c_int = 1;
const ACCESS_READ_WRITE: c_int = 3;
const GRANULARITY_RECOMMENDED: c_int = 1;

/// A second mapping of an allocation: the `bytes` at `of` are at `at` as well.
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    pub of: usize,
    pub bytes: usize,
    pub at: usize,
}

// SAFETY, for all unsafe blocks below: pointers are to locals, and the driver checks addresses and handles.
impl Driver {
    /// The identity of the allocation at `address`; `None` where the driver knows none.
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

    /// Device memory as `ncclMemAlloc` makes it. Gives address and size in bytes.
    pub fn allocate_virtual(&self, bytes: usize) -> Outcome<(usize, usize)> {
        let (_, device) = self.current()?;
        let properties = AllocationProperties {
            kind: ALLOCATION_TYPE_PINNED,
            handle_types: HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            location: Location { kind: LOCATION_TYPE_DEVICE, id: device },
            win32_metadata: std::ptr::null_mut(),
            flags: [0; 8],
        };
        let (mut grain, mut handle, mut address) = (0, 0, 0);
        // SAFETY: see above.
        let code = unsafe { (self.granularity)(&mut grain, &properties, GRANULARITY_RECOMMENDED) };
        check(code, "cuMemGetAllocationGranularity")?;
        let bytes = bytes.next_multiple_of(grain);
        // SAFETY: see above.
        check(unsafe { (self.memory_create)(&mut handle, bytes, &properties, 0) }, "cuMemCreate")?;
        // SAFETY: see above.
        let reserved =
            check(unsafe { (self.address_reserve)(&mut address, bytes, grain, 0, 0) }, "cuMemAddressReserve");
        // SAFETY: the range was reserved just now, the handle is as large.
        let mapped = reserved
            .and_then(|()| check(unsafe { (self.memory_map)(address, bytes, 0, handle, 0) }, "cuMemMap"));
        // SAFETY: the mapping keeps the memory; without one it goes now.
        unsafe { (self.memory_release)(handle) };
        if mapped.is_err() && address != 0 {
            // SAFETY: reserved just now, nothing is mapped there.
            unsafe { (self.address_free)(address, bytes) };
        }
        mapped?;
        for id in 0..self.devices()? {
            let location = Location { kind: LOCATION_TYPE_DEVICE, id };
            let access = AccessDescription { location, flags: ACCESS_READ_WRITE };
            // SAFETY: see above.
            check(unsafe { (self.set_access)(address, bytes, &access, 1) }, "cuMemSetAccess")?;
        }
        Ok((address, bytes))
    }

    /// Frees memory of `allocate_virtual`. As NCCL does, which unmaps at the address that it is given: memory of cuMemAlloc, and
    /// what is no first address, the driver refuses.
    pub fn free(&self, address: usize) -> Outcome {
        let mut device = 0;
        let attribute = POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        // SAFETY: DEVICE_ORDINAL is an int.
        let code =
            unsafe { (self.pointer_attribute)((&raw mut device as *mut c_int).cast(), attribute, address) };
        check(code, "cuPointerGetAttribute")?;
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

    /// Where the allocation at `address` begins, and its size in bytes.
    pub fn allocation(&self, address: usize) -> Outcome<(usize, usize)> {
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: see above.
        check(unsafe { (self.address_range)(&mut base, &mut bytes, address) }, "cuMemGetAddressRange")?;
        Ok((base, bytes))
    }

    /// Maps the allocation of `address` a second time, for `device`.
    pub fn map_again(&self, address: usize, device: c_int) -> Outcome<Mapping> {
        let (of, bytes) = self.allocation(address)?;
        let (mut handle, mut at) = (0, 0);
        // SAFETY: see above.
        check(unsafe { (self.retain_handle)(&mut handle, of) }, "cuMemRetainAllocationHandle")?;
        // SAFETY: see above.
        let reserved =
            check(unsafe { (self.address_reserve)(&mut at, bytes, 0, 0, 0) }, "cuMemAddressReserve");
        let mapped =
            // SAFETY: the range was reserved just now; memory of one handle is as large as its mapping.
            reserved.and_then(|()| check(unsafe { (self.memory_map)(at, bytes, 0, handle, 0) }, "cuMemMap"));
        // SAFETY: retained above; the mapping keeps the memory.
        unsafe { (self.memory_release)(handle) };
        if mapped.is_err() && at != 0 {
            // SAFETY: reserved just now, nothing is mapped there.
            unsafe { (self.address_free)(at, bytes) };
        }
        mapped?;
        let mapping = Mapping { of, bytes, at };
        let access = AccessDescription {
            location: Location { kind: LOCATION_TYPE_DEVICE, id: device },
            flags: ACCESS_READ_WRITE,
        };
        // SAFETY: see above.
        let accessible = check(unsafe { (self.set_access)(at, bytes, &access, 1) }, "cuMemSetAccess");
        if accessible.is_err() {
            self.unmap(mapping);
        }
        accessible.map(|()| mapping)
    }

    /// Ends a mapping of `map_again`.
    pub fn unmap(&self, mapping: Mapping) {
        // SAFETY: mapped and reserved by `map_again`; nobody uses the addresses any more.
        unsafe {
            (self.memory_unmap)(mapping.at, mapping.bytes);
            (self.address_free)(mapping.at, mapping.bytes);
        }
    }
}
