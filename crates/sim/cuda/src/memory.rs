//! Memory that the simulated driver knows: the table of ranges, and allocating, freeing and registering them.

use crate::code::{
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, Code,
};
use crate::context::{self, Context};
use crate::device::{Block, Ordinal};
use crate::mapping::{PAGE, Reservation, anonymous_file, round_up};
use crate::simulator::{next_identity, simulator};
use crate::stream::Stream;
use crate::sync::lock;
use crate::table::Handle;
use crate::virtual_memory::Mapped;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// `CUdeviceptr`. Device addresses are host addresses.
pub type Address = usize;

/// One allocation, mapping or registration.
pub struct Range {
    pub base: Address,
    pub bytes: usize,
    pub kind: Kind,
    pub device: Ordinal,
    /// The context whose end frees the range, or 0.
    pub context: Handle,
    pub buffer_id: u64,
    pub flags: u32,
    pub block: Option<Block>,
    /// Whether a free was issued; a second one is an error.
    freeing: AtomicBool,
    _place: Option<Reservation>,
}

pub enum Kind {
    Device,
    Pool(Handle),
    Managed,
    PinnedHost,
    RegisteredHost,
    Virtual(Mapped),
    /// Another process's block, opened from its IPC handle. The number identifies process and block.
    Imported(u64),
}

impl Kind {
    pub fn is_host(&self) -> bool {
        matches!(self, Kind::PinnedHost | Kind::RegisteredHost)
    }
}

impl Range {
    pub fn end(&self) -> Address {
        self.base + self.bytes
    }

    /// A range over addresses that the range does not unmap when it is dropped.
    pub fn over(base: Address, bytes: usize, kind: Kind, device: Ordinal, context: Handle) -> Self {
        Range {
            base,
            bytes,
            kind,
            device,
            context,
            buffer_id: next_identity(),
            flags: 0,
            block: None,
            freeing: AtomicBool::new(false),
            _place: None,
        }
    }

    /// A range that unmaps its addresses when it is dropped.
    pub fn owning(place: Reservation, bytes: usize, kind: Kind, context: &Context) -> Self {
        let range = Range::over(place.base, bytes, kind, context.device, context.handle);
        Range { _place: Some(place), ..range }
    }
}

/// All ranges by their first address; they never overlap.
#[derive(Default)]
pub struct Ranges(BTreeMap<Address, Arc<Range>>);

impl Ranges {
    pub fn insert(&mut self, range: Range) -> Arc<Range> {
        let range = Arc::new(range);
        self.0.insert(range.base, range.clone());
        range
    }

    /// The range that an address lies in.
    pub fn find(&self, address: Address) -> Option<&Arc<Range>> {
        let (_, range) = self.0.range(..=address).next_back()?;
        (address < range.end()).then_some(range)
    }

    pub fn at(&self, base: Address) -> Option<&Arc<Range>> {
        self.0.get(&base)
    }

    pub fn remove(&mut self, base: Address) -> Option<Arc<Range>> {
        self.0.remove(&base)
    }

    /// Whether known ranges cover these bytes without a gap.
    pub fn cover(&self, address: Address, bytes: usize) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        let mut at = address;
        while at < end {
            match self.find(at) {
                Some(range) => at = range.end(),
                None => return false,
            }
        }
        true
    }

    pub fn overlaps(&self, base: Address, bytes: usize) -> bool {
        self.within(base, bytes).next().is_some()
    }

    /// Ranges that overlap `bytes` bytes at `base`.
    pub fn within(&self, base: Address, bytes: usize) -> impl Iterator<Item = &Arc<Range>> {
        let end = base.saturating_add(bytes);
        self.0.range(..end).rev().map(|(_, range)| range).take_while(move |range| range.end() > base)
    }

    pub fn take_of_context(&mut self, context: Handle) -> Vec<Arc<Range>> {
        let bases: Vec<_> =
            self.all().filter(|range| range.context == context).map(|range| range.base).collect();
        bases.iter().filter_map(|base| self.0.remove(base)).collect()
    }

    pub fn all(&self) -> impl Iterator<Item = &Arc<Range>> {
        self.0.values()
    }
}

/// A stream-ordered memory pool. It has properties only: its blocks come from the device as all others do.
pub struct Pool {
    pub handle: Handle,
    pub device: Ordinal,
    pub is_default: bool,
    pub attributes: Mutex<[u64; 9]>,
}

pub fn find(address: Address) -> Result<Arc<Range>, Code> {
    lock(&simulator()?.ranges).find(address).cloned().ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// Fails unless all bytes are known memory.
pub fn check(address: Address, bytes: usize) -> Result<(), Code> {
    if bytes == 0 || lock(&simulator()?.ranges).cover(address, bytes) {
        Ok(())
    } else {
        Err(CUDA_ERROR_INVALID_VALUE)
    }
}

/// Whether an address is pageable host memory, that is, not known to the driver.
pub fn is_pageable(address: Address) -> Result<bool, Code> {
    Ok(lock(&simulator()?.ranges).find(address).is_none())
}

/// Allocates device memory of the context's device.
pub fn allocate(context: &Context, bytes: usize, kind: Kind) -> Result<Arc<Range>, Code> {
    if bytes == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let simulator = simulator()?;
    let whole = round_up(bytes, PAGE).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let block = simulator.device(context.device)?.memory.block(whole)?;
    let place = Reservation::new(whole, PAGE, 0)?;
    place.place(place.base, whole, &block.file, block.offset, libc::PROT_READ | libc::PROT_WRITE)?;
    let range = Range { block: Some(block), ..Range::owning(place, bytes, kind, context) };
    Ok(lock(&simulator.ranges).insert(range))
}

/// `cuMemFree`: waits for the device, then unmaps.
pub fn free(address: Address) -> Result<(), Code> {
    let simulator = simulator()?;
    let range = freeable(address)?;
    context::synchronize_device(simulator, range.device);
    // Unmapped when the last reference goes, outside the lock.
    let taken = lock(&simulator.ranges).remove(address);
    drop(taken);
    Ok(())
}

/// `cuMemFreeAsync`: frees the block in the stream's order; does not wait.
pub fn free_in_order(address: Address, stream: &Stream) -> Result<(), Code> {
    let simulator = simulator()?;
    let range = freeable(address)?;
    drop(range);
    stream.submit(move || {
        let taken = lock(&simulator.ranges).remove(address);
        drop(taken);
    });
    Ok(())
}

fn freeable(address: Address) -> Result<Arc<Range>, Code> {
    let range = lock(&simulator()?.ranges).at(address).cloned().ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let kind_is_right = matches!(range.kind, Kind::Device | Kind::Pool(_) | Kind::Managed);
    if !kind_is_right || range.freeing.swap(true, Ordering::AcqRel) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(range)
}

pub fn allocate_host(bytes: usize, flags: u32) -> Result<Address, Code> {
    let context = context::current()?;
    if bytes == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let whole = round_up(bytes, PAGE).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let file = anonymous_file("sim-cuda-host", whole)?;
    let place = Reservation::new(whole, PAGE, 0)?;
    place.place(place.base, whole, &file, 0, libc::PROT_READ | libc::PROT_WRITE)?;
    let range = Range { flags, ..Range::owning(place, bytes, Kind::PinnedHost, &context) };
    Ok(lock(&simulator()?.ranges).insert(range).base)
}

pub fn free_host(address: Address) -> Result<(), Code> {
    let simulator = simulator()?;
    let range = lock(&simulator.ranges).at(address).cloned().ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if !matches!(range.kind, Kind::PinnedHost) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    context::synchronize_device(simulator, range.device);
    let taken = lock(&simulator.ranges).remove(address);
    drop(taken);
    Ok(())
}

pub fn register_host(address: Address, bytes: usize, flags: u32) -> Result<(), Code> {
    let context = context::current()?;
    if address == 0 || bytes == 0 || address.checked_add(bytes).is_none() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let mut ranges = lock(&simulator()?.ranges);
    if ranges.overlaps(address, bytes) {
        return Err(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    }
    let range = Range::over(address, bytes, Kind::RegisteredHost, context.device, context.handle);
    ranges.insert(Range { flags, ..range });
    Ok(())
}

pub fn unregister_host(address: Address) -> Result<(), Code> {
    let simulator = simulator()?;
    let range = lock(&simulator.ranges).at(address).cloned().ok_or(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)?;
    if !matches!(range.kind, Kind::RegisteredHost) {
        return Err(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    }
    context::synchronize_device(simulator, range.device);
    lock(&simulator.ranges).remove(address);
    Ok(())
}

pub fn find_pool(handle: Handle) -> Result<Arc<Pool>, Code> {
    simulator()?.pools.get(handle).ok_or(CUDA_ERROR_INVALID_VALUE)
}

pub fn create_pool(device: Ordinal, is_default: bool) -> Result<Handle, Code> {
    let simulator = simulator()?;
    simulator.device(device)?;
    // The three reuse switches start as 1; thresholds and gauges start as 0.
    let attributes = Mutex::new([0, 1, 1, 1, 0, 0, 0, 0, 0]);
    Ok(simulator.pools.insert(|handle| Pool { handle, device, is_default, attributes }).handle)
}

pub fn default_pool(device: Ordinal) -> Result<Handle, Code> {
    let mut pools = lock(&simulator()?.device(device)?.pools);
    if pools.default == 0 {
        pools.default = create_pool(device, true)?;
    }
    Ok(pools.default)
}

pub fn current_pool(device: Ordinal) -> Result<Handle, Code> {
    let current = lock(&simulator()?.device(device)?.pools).current;
    if current == 0 { default_pool(device) } else { Ok(current) }
}

/// Bytes of a pool's live blocks.
pub fn pool_bytes(pool: Handle) -> Result<u64, Code> {
    let ranges = lock(&simulator()?.ranges);
    let of_pool = ranges.all().filter(|range| matches!(range.kind, Kind::Pool(handle) if handle == pool));
    Ok(of_pool.map(|range| range.bytes as u64).sum())
}
