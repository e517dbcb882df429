//! Exports for allocation, host memory, pointer attributes and IPC.

use crate::capture;
use crate::code::{CUDA_ERROR_INVALID_VALUE, Code};
use crate::context;
use crate::ffi::{In, Out};
use crate::ipc::{self, IpcHandle};
use crate::memory::{self, Address, Kind};
use crate::pointer;
use crate::simulator::simulator;
use std::ffi::c_void;

exports! {
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let context = context::current()?;
        let memory = &simulator()?.device(context.device)?.memory;
        free.set_if_wanted(memory.free());
        total.set_if_wanted(memory.total);
        Ok(())
    }

    fn cuMemAlloc_v2(address: Out<Address>, bytes: usize) {
        address.check()?;
        let context = context::current()?;
        capture::refuse_unsafe()?;
        address.set(memory::allocate(&context, bytes, Kind::Device)?.base)
    }

    fn cuMemAllocPitch_v2(address: Out<Address>, pitch: Out<usize>, width: usize, height: usize, element: u32) {
        if !matches!(element, 4 | 8 | 16) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        address.check()?;
        pitch.check()?;
        let context = context::current()?;
        capture::refuse_unsafe()?;
        let row = width.next_multiple_of(512);
        let bytes = row.checked_mul(height).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        address.set(memory::allocate(&context, bytes, Kind::Device)?.base)?;
        pitch.set(row)
    }

    fn cuMemAllocManaged(address: Out<Address>, bytes: usize, flags: u32) {
        if !matches!(flags, 1 | 2) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        address.check()?;
        let context = context::current()?;
        capture::refuse_unsafe()?;
        address.set(memory::allocate(&context, bytes, Kind::Managed)?.base)
    }

    // Null is allowed, as in free().
    fn cuMemFree_v2(address: Address) {
        context::current()?;
        if address == 0 {
            return Ok(());
        }
        capture::refuse_unsafe()?;
        memory::free(address)
    }

    fn cuMemGetAddressRange_v2(base: Out<Address>, bytes: Out<usize>, address: Address) {
        context::current()?;
        let range = memory::find(address).map_err(|_| crate::code::CUDA_ERROR_NOT_FOUND)?;
        base.set_if_wanted(range.base);
        bytes.set_if_wanted(range.bytes);
        Ok(())
    }

    fn cuMemAllocHost_v2(address: Out<Address>, bytes: usize) {
        address.check()?;
        capture::refuse_unsafe()?;
        address.set(memory::allocate_host(bytes, 0)?)
    }

    fn cuMemHostAlloc(address: Out<Address>, bytes: usize, flags: u32) {
        if flags & !7 != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        address.check()?;
        capture::refuse_unsafe()?;
        address.set(memory::allocate_host(bytes, flags)?)
    }

    fn cuMemFreeHost(address: Address) {
        context::current()?;
        if address == 0 {
            return Ok(());
        }
        capture::refuse_unsafe()?;
        memory::free_host(address)
    }

    fn cuMemHostRegister_v2(address: Address, bytes: usize, flags: u32) {
        if flags & !15 != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        capture::refuse_unsafe()?;
        memory::register_host(address, bytes, flags)
    }

    fn cuMemHostUnregister(address: Address) {
        context::current()?;
        capture::refuse_unsafe()?;
        memory::unregister_host(address)
    }

    fn cuMemHostGetDevicePointer_v2(out: Out<Address>, address: Address, flags: u32) {
        context::current()?;
        if flags != 0 || !memory::find(address)?.kind.is_host() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.set(address)
    }

    fn cuMemHostGetFlags(flags: Out<u32>, address: Address) {
        let range = memory::find(address)?;
        if !range.kind.is_host() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        flags.set(range.flags)
    }

    fn cuPointerGetAttribute(data: *mut c_void, attribute: u32, address: Address) {
        pointer::attribute(address, attribute)?.store(data)
    }

    fn cuPointerGetAttributes(count: u32, attributes: In<u32>, data: In<*mut c_void>, address: Address) {
        for index in 0..count as usize {
            let attribute = attributes.at(index)?;
            let value = pointer::attribute(address, attribute).or_else(|_| pointer::unknown(attribute))?;
            value.store(data.at(index)?)?;
        }
        Ok(())
    }

    // Only SYNC_MEMOPS can be set, without effect: synchronous copies are always synchronous here.
    fn cuPointerSetAttribute(value: In<u32>, attribute: u32, address: Address) {
        value.get()?;
        memory::find(address)?;
        if attribute == 6 { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    }

    fn cuMemAdvise(address: Address, bytes: usize, _advice: u32, _device: i32) {
        advise(address, bytes)
    }

    // `CUmemLocation` has eight bytes, which the ABI passes in one register.
    fn cuMemAdvise_v2(address: Address, bytes: usize, _advice: u32, _location: u64) {
        advise(address, bytes)
    }

    fn cuIpcGetMemHandle(handle: Out<IpcHandle>, address: Address) {
        handle.check()?;
        handle.set(ipc::memory_handle(address)?)
    }

    fn cuIpcOpenMemHandle_v2(address: Out<Address>, handle: IpcHandle, flags: u32) {
        // The driver requires `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
        if flags != 1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        address.check()?;
        capture::refuse_unsafe()?;
        address.set(ipc::open_memory(&handle)?)
    }

    fn cuIpcCloseMemHandle(address: Address) {
        context::current()?;
        capture::refuse_unsafe()?;
        ipc::close_memory(address)
    }
}

fn advise(address: Address, bytes: usize) -> Result<(), Code> {
    memory::check(address, bytes)
}
