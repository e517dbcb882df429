//! Exports for virtual memory management.

use crate::code::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED};
use crate::ffi::{In, Out};
use crate::memory::Address;
use crate::simulator::simulator;
use crate::table::Handle;
use crate::virtual_memory::{
    self, AccessDescription, AllocationProperties, GRANULARITY, HANDLE_DESCRIPTOR, HANDLE_FABRIC, Location,
};

exports! {
    fn cuMemAddressReserve(address: Out<Address>, bytes: usize, alignment: usize, hint: Address, flags: u64) {
        address.check()?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        address.set(virtual_memory::reserve(bytes, alignment, hint)?)
    }

    fn cuMemAddressFree(address: Address, bytes: usize) {
        virtual_memory::free_addresses(address, bytes)
    }

    fn cuMemCreate(handle: Out<Handle>, bytes: usize, properties: In<AllocationProperties>, flags: u64) {
        handle.check()?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        handle.set(virtual_memory::create(bytes, properties.get()?)?)
    }

    fn cuMemRelease(handle: Handle) {
        virtual_memory::release(handle)
    }

    fn cuMemMap(address: Address, bytes: usize, offset: usize, handle: Handle, flags: u64) {
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        virtual_memory::map(address, bytes, offset, handle)
    }

    fn cuMemUnmap(address: Address, bytes: usize) {
        virtual_memory::unmap(address, bytes)
    }

    fn cuMemSetAccess(address: Address, bytes: usize, descriptions: In<AccessDescription>, count: usize) {
        if count == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        virtual_memory::set_access(address, bytes, &descriptions.list(count)?)
    }

    fn cuMemGetAccess(flags: Out<u64>, location: In<Location>, address: Address) {
        flags.set(virtual_memory::access(address, location.get()?)?)
    }

    fn cuMemGetAllocationGranularity(bytes: Out<usize>, properties: In<AllocationProperties>, _option: u32) {
        simulator()?;
        virtual_memory::check_properties(&properties.get()?)?;
        bytes.set(GRANULARITY)
    }

    fn cuMemGetAllocationPropertiesFromHandle(properties: Out<AllocationProperties>, handle: Handle) {
        properties.set(virtual_memory::find(handle)?.properties)
    }

    fn cuMemRetainAllocationHandle(handle: Out<Handle>, address: Address) {
        handle.check()?;
        handle.set(virtual_memory::retain_at(address)?)
    }

    fn cuMemExportToShareableHandle(out: Out<i32>, handle: Handle, kind: u32, flags: u64) {
        out.check()?;
        match kind {
            HANDLE_DESCRIPTOR if flags == 0 => out.set(virtual_memory::export(handle)?),
            HANDLE_FABRIC => Err(CUDA_ERROR_NOT_SUPPORTED),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    // The pointer argument itself holds the descriptor.
    fn cuMemImportFromShareableHandle(handle: Out<Handle>, source: usize, kind: u32) {
        handle.check()?;
        match kind {
            HANDLE_DESCRIPTOR => handle.set(virtual_memory::import(source as i32)?),
            HANDLE_FABRIC => Err(CUDA_ERROR_NOT_SUPPORTED),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}
