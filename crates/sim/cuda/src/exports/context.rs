//! Exports for contexts.

use crate::capture;
use crate::code::{
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, CUDA_ERROR_UNSUPPORTED_LIMIT, Code,
};
use crate::context;
use crate::device::Ordinal;
use crate::ffi::{In, Out};
use crate::stream::{PRIORITY_GREATEST, PRIORITY_LEAST};
use crate::sync::lock;
use crate::table::Handle;

/// `CUctxCreateParams`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CreateParameters {
    affinity: usize,
    affinity_count: i32,
    graphics: usize,
}

exports! {
    fn cuCtxCreate_v2(context: Out<Handle>, flags: u32, device: Ordinal) {
        create(&context, flags, device)
    }

    fn cuCtxCreate_v3(context: Out<Handle>, affinity: In<u64>, count: i32, flags: u32, device: Ordinal) {
        if count != 0 || !affinity.is_null() {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        create(&context, flags, device)
    }

    fn cuCtxCreate_v4(context: Out<Handle>, parameters: In<CreateParameters>, flags: u32, device: Ordinal) {
        if !parameters.is_null() {
            let parameters = parameters.get()?;
            if parameters.affinity_count != 0 || parameters.affinity != 0 || parameters.graphics != 0 {
                return Err(CUDA_ERROR_NOT_SUPPORTED);
            }
        }
        create(&context, flags, device)
    }

    fn cuCtxDestroy_v2(handle: Handle) {
        context::destroy(handle)
    }

    fn cuCtxSetCurrent(handle: Handle) {
        context::set_current(handle)
    }

    fn cuCtxGetCurrent(context: Out<Handle>) {
        crate::simulator::simulator()?;
        context.set(context::current_handle().unwrap_or(0))
    }

    fn cuCtxPushCurrent_v2(handle: Handle) {
        context::push_current(handle)
    }

    fn cuCtxPopCurrent_v2(context: Out<Handle>) {
        let handle = context::pop_current()?;
        context.set_if_wanted(handle);
        Ok(())
    }

    fn cuCtxGetDevice(device: Out<Ordinal>) {
        device.set(context::current()?.device)
    }

    fn cuCtxGetDevice_v2(device: Out<Ordinal>, handle: Handle) {
        device.set(context::find_or_current(handle)?.device)
    }

    fn cuCtxGetFlags(flags: Out<u32>) {
        flags.set(lock(&context::current()?.settings).flags)
    }

    fn cuCtxSetFlags(flags: u32) {
        lock(&context::current()?.settings).flags = flags;
        Ok(())
    }

    fn cuCtxGetId(handle: Handle, id: Out<u64>) {
        id.set(context::find_or_current(handle)?.id)
    }

    fn cuCtxGetApiVersion(handle: Handle, version: Out<u32>) {
        context::find_or_current(handle)?;
        version.set(3020)
    }

    fn cuCtxSynchronize() {
        synchronize(0)
    }

    fn cuCtxSynchronize_v2(handle: Handle) {
        synchronize(handle)
    }

    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        context::current()?;
        least.set_if_wanted(PRIORITY_LEAST);
        greatest.set_if_wanted(PRIORITY_GREATEST);
        Ok(())
    }

    fn cuCtxSetLimit(limit: u32, value: usize) {
        default_limit(limit)?;
        lock(&context::current()?.settings).limits.insert(limit, value);
        Ok(())
    }

    fn cuCtxGetLimit(value: Out<usize>, limit: u32) {
        let default = default_limit(limit)?;
        let context = context::current()?;
        let set = lock(&context.settings).limits.get(&limit).copied();
        value.set(set.unwrap_or(default))
    }

    fn cuCtxSetCacheConfig(config: u32) {
        lock(&context::current()?.settings).cache = config;
        Ok(())
    }

    fn cuCtxGetCacheConfig(config: Out<u32>) {
        config.set(lock(&context::current()?.settings).cache)
    }

    fn cuCtxSetSharedMemConfig(config: u32) {
        lock(&context::current()?.settings).shared_banks = config;
        Ok(())
    }

    fn cuCtxGetSharedMemConfig(config: Out<u32>) {
        config.set(lock(&context::current()?.settings).shared_banks)
    }

    fn cuCtxResetPersistingL2Cache() {
        context::current().map(drop)
    }

    fn cuCtxEnablePeerAccess(peer: Handle, flags: u32) {
        let own = context::current()?;
        let peer = context::find(peer)?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if peer.device == own.device {
            return Err(if peer.handle == own.handle {
                CUDA_ERROR_INVALID_CONTEXT
            } else {
                CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
            });
        }
        let is_new = lock(&own.settings).peers.insert(peer.device);
        if is_new { Ok(()) } else { Err(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) }
    }

    fn cuCtxDisablePeerAccess(peer: Handle) {
        let own = context::current()?;
        let peer = context::find(peer)?;
        let was_enabled = lock(&own.settings).peers.remove(&peer.device);
        if was_enabled { Ok(()) } else { Err(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED) }
    }
}

fn create(context: &Out<Handle>, flags: u32, device: Ordinal) -> Result<(), Code> {
    context.check()?;
    context.set(context::create(device, flags)?.handle)
}

fn synchronize(handle: Handle) -> Result<(), Code> {
    let context = context::find_or_current(handle)?;
    capture::refuse_running_in(context.handle)?;
    capture::refuse_unsafe()?;
    context.synchronize();
    Ok(())
}

fn default_limit(limit: u32) -> Result<usize, Code> {
    match limit {
        0 => Ok(1024),
        1 | 2 => Ok(8 << 20),
        3 => Ok(2),
        4 => Ok(2048),
        5 => Ok(64),
        6 => Ok(0),
        _ => Err(CUDA_ERROR_UNSUPPORTED_LIMIT),
    }
}
