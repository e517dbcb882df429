//! Virtual memory management: reserved addresses, physical memory by handle, and mappings. Each physical memory is a file,
//! so that a descriptor of it means the same memory in every process.

use crate::code::{
    CUDA_ERROR_ALREADY_MAPPED, CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_INVALID_DEVICE,
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OPERATING_SYSTEM, Code,
};
use crate::device::{Charge, Ordinal};
use crate::former;
use crate::holders;
use crate::mapping::{Reservation, anonymous_file, identity};
use crate::memory::{Address, Kind, Range};
use crate::simulator::{next_identity, simulator};
use crate::sync::lock;
use crate::table::Handle;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

/// Bytes of the allocation granularity, minimum and recommended alike.
pub const GRANULARITY: usize = 2 << 20;

/// `CUmemAllocationHandleType`.
pub const HANDLE_DESCRIPTOR: u32 = 1;
pub const HANDLE_FABRIC: u32 = 8;

/// `CUmemLocationType`.
pub const LOCATION_DEVICE: u32 = 1;
pub const LOCATION_HOST_NUMA: u32 = 3;

/// `CUmemAccess_flags`.
pub const ACCESS_READ: u32 = 1;
pub const ACCESS_READ_WRITE: u32 = 3;

const NAME: &str = "sim-cuda-physical-";

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Location {
    pub kind: u32,
    pub id: i32,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AllocationProperties {
    pub kind: u32,
    pub handle_types: u32,
    pub location: Location,
    pub windows_metadata: usize,
    pub compression: u8,
    pub direct_rdma: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AccessDescription {
    pub location: Location,
    pub flags: u32,
}

#[derive(Default)]
pub struct AddressSpace(BTreeMap<Address, Arc<Reservation>>);

impl AddressSpace {
    pub fn find(&self, address: Address) -> Option<&Arc<Reservation>> {
        let (_, place) = self.0.range(..=address).next_back()?;
        (address < place.base + place.bytes).then_some(place)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// Physical memory. It lives as long as the handle or a mapping, in this process or one that imported it.
pub struct Physical {
    pub handle: Handle,
    /// The id of the memory, from the same numbers as buffer ids.
    pub identity: u64,
    pub properties: AllocationProperties,
    pub bytes: usize,
    file: OwnedFd,
    references: Mutex<u32>,
    /// `None` for host memory and for imported memory.
    charge: Option<Charge>,
}

impl Physical {
    /// Whether it is device memory that another process made.
    pub fn is_imported(&self) -> bool {
        self.charge.is_none() && self.properties.location.kind == LOCATION_DEVICE
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        if self.charge.is_some() {
            former::keep(&self.file, self.properties.location.id, self.bytes);
        }
        holders::leave(&self.file);
        if let Some(charge) = self.charge.take()
            && holders::exist(&self.file)
            && let Ok(file) = self.file.try_clone()
        {
            charge.lend(file);
        }
    }
}

/// A mapped part of physical memory.
pub struct Mapped {
    pub physical: Arc<Physical>,
    pub place: Arc<Reservation>,
    pub access: Mutex<BTreeMap<Ordinal, u32>>,
}

pub fn reserve(bytes: usize, alignment: usize, hint: Address) -> Result<Address, Code> {
    let alignment_is_right = alignment == 0 || alignment.is_power_of_two();
    if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || !alignment_is_right {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let place = Reservation::new(bytes, alignment.max(GRANULARITY), hint)?;
    let base = place.base;
    lock(&simulator()?.addresses).0.insert(base, Arc::new(place));
    Ok(base)
}

pub fn free_addresses(base: Address, bytes: usize) -> Result<(), Code> {
    let simulator = simulator()?;
    let mut addresses = lock(&simulator.addresses);
    let place =
        addresses.0.get(&base).filter(|place| place.bytes == bytes).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if lock(&simulator.ranges).overlaps(base, place.bytes) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    addresses.0.remove(&base);
    Ok(())
}

/// Refuses properties that the simulated machine does not support.
pub fn check_properties(properties: &AllocationProperties) -> Result<(), Code> {
    if properties.handle_types & HANDLE_FABRIC != 0 {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    if properties.kind != 1 || properties.handle_types & !HANDLE_DESCRIPTOR != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    match properties.location.kind {
        LOCATION_DEVICE => simulator()?.device(properties.location.id).map(drop),
        LOCATION_HOST_NUMA => Ok(()),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

pub fn create(bytes: usize, properties: AllocationProperties) -> Result<Handle, Code> {
    let simulator = simulator()?;
    if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    check_properties(&properties)?;
    let (charge, device) = if properties.location.kind == LOCATION_DEVICE {
        let device = simulator.device(properties.location.id)?;
        (Some(device.memory.charge(bytes)?), device.ordinal)
    } else {
        (None, -1)
    };
    let file = anonymous_file(&format!("{NAME}{device}"), bytes)?;
    former::fill(&file, device, bytes)?;
    Ok(add(properties, bytes, file, charge)?.handle)
}

fn add(
    properties: AllocationProperties,
    bytes: usize,
    file: OwnedFd,
    charge: Option<Charge>,
) -> Result<Arc<Physical>, Code> {
    let identity = next_identity();
    let references = Mutex::new(1);
    let make = |handle| Physical { handle, identity, properties, bytes, file, references, charge };
    Ok(simulator()?.physicals.insert(make))
}

pub fn find(handle: Handle) -> Result<Arc<Physical>, Code> {
    simulator()?.physicals.get(handle).ok_or(CUDA_ERROR_INVALID_VALUE)
}

pub fn release(handle: Handle) -> Result<(), Code> {
    let physical = find(handle)?;
    let mut references = lock(&physical.references);
    *references -= 1;
    if *references == 0 {
        simulator()?.physicals.remove(handle);
    }
    Ok(())
}

/// The handle of the memory mapped at an address, with one reference more. The handle comes back if all references were released.
pub fn retain_at(address: Address) -> Result<Handle, Code> {
    let range = crate::memory::find(address)?;
    let Kind::Virtual(mapped) = &range.kind else { return Err(CUDA_ERROR_INVALID_VALUE) };
    let physical = &mapped.physical;
    let mut references = lock(&physical.references);
    if *references == 0 {
        simulator()?.physicals.restore(physical.handle, physical.clone());
    }
    *references += 1;
    Ok(physical.handle)
}

/// Maps memory without access rights; every mapping is a buffer with an id of its own.
pub fn map(base: Address, bytes: usize, offset: usize, handle: Handle) -> Result<(), Code> {
    let simulator = simulator()?;
    let physical = find(handle)?;
    let fits = offset.checked_add(bytes).is_some_and(|end| end <= physical.bytes);
    let aligned = [base, bytes, offset].iter().all(|number| number.is_multiple_of(GRANULARITY));
    if bytes == 0 || !fits || !aligned {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let addresses = lock(&simulator.addresses);
    let place = addresses.find(base).cloned().ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if base + bytes > place.base + place.bytes {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let mut ranges = lock(&simulator.ranges);
    if ranges.overlaps(base, bytes) {
        return Err(CUDA_ERROR_ALREADY_MAPPED);
    }
    place.place(base, bytes, &physical.file, offset, libc::PROT_NONE)?;
    place.keep_from_children(base, bytes);
    let device = physical.properties.location.id;
    let mapped = Mapped { physical, place, access: Mutex::default() };
    ranges.insert(Range::over(base, bytes, Kind::Virtual(mapped), device, 0));
    Ok(())
}

/// The mappings that make up exactly these bytes.
fn mappings(base: Address, bytes: usize) -> Result<Vec<Arc<Range>>, Code> {
    let ranges = lock(&simulator()?.ranges);
    let found: Vec<_> = ranges.within(base, bytes).cloned().collect();
    let whole = found.iter().all(|range| range.base >= base && range.end() <= base.saturating_add(bytes));
    let sum: usize = found.iter().map(|range| range.bytes).sum();
    let all_virtual = found.iter().all(|range| matches!(range.kind, Kind::Virtual(_)));
    if bytes == 0 || !whole || sum != bytes || !all_virtual {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(found)
}

pub fn unmap(base: Address, bytes: usize) -> Result<(), Code> {
    let simulator = simulator()?;
    for range in mappings(base, bytes)? {
        if let Kind::Virtual(mapped) = &range.kind {
            mapped.place.clear(range.base, range.bytes);
        }
        lock(&simulator.ranges).remove(range.base);
    }
    Ok(())
}

pub fn set_access(base: Address, bytes: usize, descriptions: &[AccessDescription]) -> Result<(), Code> {
    let simulator = simulator()?;
    for description in descriptions {
        match description.location.kind {
            LOCATION_DEVICE => simulator.device(description.location.id).map(drop)?,
            2 | LOCATION_HOST_NUMA => {}
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        if !matches!(description.flags, 0 | ACCESS_READ | ACCESS_READ_WRITE) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
    }
    for range in mappings(base, bytes)? {
        let Kind::Virtual(mapped) = &range.kind else { continue };
        let mut access = lock(&mapped.access);
        for description in descriptions {
            let on_device = description.location.kind == LOCATION_DEVICE;
            access.insert(if on_device { description.location.id } else { -1 }, description.flags);
        }
        // All simulated devices share the host's page table: an access right of one device holds for all.
        let protection = match access.values().copied().max().unwrap_or(0) {
            0 => libc::PROT_NONE,
            ACCESS_READ => libc::PROT_READ,
            _ => libc::PROT_READ | libc::PROT_WRITE,
        };
        mapped.place.protect(range.base, range.bytes, protection)?;
    }
    Ok(())
}

pub fn access(address: Address, location: Location) -> Result<u64, Code> {
    if location.kind == LOCATION_DEVICE {
        simulator()?.device(location.id).map_err(|_| CUDA_ERROR_INVALID_DEVICE)?;
    }
    let range = crate::memory::find(address)?;
    let Kind::Virtual(mapped) = &range.kind else { return Err(CUDA_ERROR_INVALID_VALUE) };
    let key = if location.kind == LOCATION_DEVICE { location.id } else { -1 };
    Ok(u64::from(lock(&mapped.access).get(&key).copied().unwrap_or(0)))
}

/// Refuses what the current context's device reads of a mapping that it may not access.
pub fn check_read(address: Address) -> Result<(), Code> {
    let device = crate::context::current()?.device;
    match crate::memory::find(address).as_ref().map(|range| &range.kind) {
        Ok(Kind::Virtual(mapped)) if lock(&mapped.access).get(&device).is_none_or(|flags| *flags == 0) => {
            Err(CUDA_ERROR_ILLEGAL_ADDRESS)
        }
        _ => Ok(()),
    }
}

/// Makes a new descriptor of the memory, which the caller owns.
pub fn export(handle: Handle) -> Result<i32, Code> {
    let physical = find(handle)?;
    if physical.properties.handle_types & HANDLE_DESCRIPTOR == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(holders::open(&physical.file)?.into_raw_fd())
}

/// Opens memory from a descriptor, which stays the caller's. The device comes from the file's name.
pub fn import(descriptor: i32) -> Result<Handle, Code> {
    if descriptor < 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: borrowed for this call only; a number that is no open descriptor makes the calls below fail.
    let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let text = holders::link(&file).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let device =
        text.split_once(NAME).and_then(|(_, rest)| rest.split_whitespace().next()?.parse::<i32>().ok());
    let device = device.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let (_, bytes) = identity(file)?;
    let file = file.as_fd().try_clone_to_owned().map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
    holders::hold(&file)?;
    holders::enter(&file);
    let kind = if device < 0 { LOCATION_HOST_NUMA } else { LOCATION_DEVICE };
    let location = Location { kind, id: device.max(0) };
    let properties = AllocationProperties {
        kind: 1,
        handle_types: HANDLE_DESCRIPTOR,
        location,
        ..AllocationProperties::default()
    };
    Ok(add(properties, bytes, file, None)?.handle)
}
