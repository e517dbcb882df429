//! Exports for stream-ordered allocation and memory pools.

use crate::code::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, Code};
use crate::context;
use crate::device::Ordinal;
use crate::ffi::{In, Out};
use crate::memory::{self, Address, Kind};
use crate::simulator::simulator;
use crate::stream;
use crate::sync::lock;
use crate::table::Handle;
use crate::user_object::GraphBlock;
use crate::virtual_memory::{AccessDescription, AllocationProperties, LOCATION_DEVICE};
use crate::work::Work;

/// `CUmemPool_attribute` numbers: the first four can be set; the release threshold and the gauges are 64 bits wide.
const RELEASE_THRESHOLD: u32 = 4;
const USED_HIGH: u32 = 8;

exports! {
    fn cuMemAllocAsync / cuMemAllocAsync_ptsz(address: Out<Address>, bytes: usize, stream: Handle) {
        let device = stream::find(stream)?.context.device;
        allocate(&address, bytes, memory::current_pool(device)?, stream)
    }

    fn cuMemAllocFromPoolAsync / cuMemAllocFromPoolAsync_ptsz(
        address: Out<Address>,
        bytes: usize,
        pool: Handle,
        stream: Handle,
    ) {
        memory::find_pool(pool)?;
        allocate(&address, bytes, pool, stream)
    }

    fn cuMemFreeAsync / cuMemFreeAsync_ptsz(address: Address, stream: Handle) {
        let stream = stream::find(stream)?;
        if address == 0 {
            return Ok(());
        }
        if let Some(capturing) = &mut *lock(&stream.capturing) {
            // A graph may free only its own memory. The addresses stay valid from launch to launch, so the node does nothing.
            let is_ours = lock(&capturing.capture.graph.objects).has_block(address);
            return if is_ours { capturing.add(Work::Empty) } else { Err(CUDA_ERROR_NOT_SUPPORTED) };
        }
        memory::free_in_order(address, &stream)
    }

    fn cuDeviceGetDefaultMemPool(pool: Out<Handle>, device: Ordinal) {
        pool.set(memory::default_pool(device)?)
    }

    fn cuDeviceGetMemPool(pool: Out<Handle>, device: Ordinal) {
        pool.set(memory::current_pool(device)?)
    }

    fn cuDeviceSetMemPool(device: Ordinal, pool: Handle) {
        if memory::find_pool(pool)?.device != device {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        lock(&simulator()?.device(device)?.pools).current = pool;
        Ok(())
    }

    fn cuMemPoolCreate(pool: Out<Handle>, properties: In<AllocationProperties>) {
        pool.check()?;
        // `CUmemPoolProps` begins as `CUmemAllocationProp` does; the rest is ignored.
        let properties = properties.get()?;
        if properties.kind != 1 || properties.location.kind != LOCATION_DEVICE {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if properties.handle_types != 0 {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        pool.set(memory::create_pool(properties.location.id, false)?)
    }

    fn cuMemPoolDestroy(pool: Handle) {
        let found = memory::find_pool(pool)?;
        if found.is_default {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let simulator = simulator()?;
        let mut pools = lock(&simulator.device(found.device)?.pools);
        if pools.current == pool {
            pools.current = 0;
        }
        simulator.pools.remove(pool);
        Ok(())
    }

    // Freed blocks go back at once, so there is nothing to trim.
    fn cuMemPoolTrimTo(pool: Handle, _keep: usize) {
        memory::find_pool(pool).map(drop)
    }

    fn cuMemPoolSetAttribute(pool: Handle, attribute: u32, value: In<u32>) {
        let pool = memory::find_pool(pool)?;
        let value = match attribute {
            1..RELEASE_THRESHOLD => u64::from(value.get()?),
            RELEASE_THRESHOLD => u64::from(value.at(0)?) | u64::from(value.at(1)?) << 32,
            // High-water marks are reset by writing 0; the gauges cannot be written.
            6 | USED_HIGH => return Ok(()),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        lock(&pool.attributes)[attribute as usize] = value;
        Ok(())
    }

    fn cuMemPoolGetAttribute(pool: Handle, attribute: u32, value: Out<u32>) {
        let pool = memory::find_pool(pool)?;
        value.check()?;
        let found = match attribute {
            1..=RELEASE_THRESHOLD => lock(&pool.attributes)[attribute as usize],
            5..=USED_HIGH => memory::pool_bytes(pool.handle)?,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        let words = [found as u32, (found >> 32) as u32];
        value.fill(if attribute < RELEASE_THRESHOLD { 1 } else { 2 }, &words);
        Ok(())
    }

    // All devices reach all memory here; only the arguments are checked.
    fn cuMemPoolSetAccess(pool: Handle, map: In<AccessDescription>, count: usize) {
        memory::find_pool(pool)?;
        for access in map.list(count)? {
            simulator()?.device(access.location.id)?;
        }
        Ok(())
    }
}

fn allocate(address: &Out<Address>, bytes: usize, pool: Handle, stream: Handle) -> Result<(), Code> {
    address.check()?;
    let stream = stream::find(stream)?;
    context::find(stream.context.handle)?;
    let Some(capturing) = &mut *lock(&stream.capturing) else {
        return address.set(memory::allocate(&stream.context, bytes, Kind::Pool(pool))?.base);
    };
    capturing.add(Work::Empty)?;
    let range = memory::allocate(&stream.context, bytes, Kind::Pool(pool))?;
    let block = GraphBlock { base: range.base, buffer_id: range.buffer_id };
    lock(&capturing.capture.graph.objects).adopt_block(block);
    address.set(range.base)
}
