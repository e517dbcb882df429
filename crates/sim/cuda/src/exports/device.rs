//! Exports for devices, peer access between them, and primary contexts.

use crate::code::{CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_VALUE};
use crate::context;
use crate::device::Ordinal;
use crate::ffi::{Out, Text, copy_text};
use crate::simulator::simulator;
use crate::sync::lock;
use crate::table::Handle;

/// CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED.
const MULTICAST_SUPPORTED: u32 = 132;

exports! {
    fn cuDeviceGet(device: Out<Ordinal>, ordinal: i32) {
        device.set(simulator()?.device(ordinal)?.ordinal)
    }

    fn cuDeviceGetCount(count: Out<i32>) {
        count.set(simulator()?.devices.len() as i32)
    }

    fn cuDeviceGetName(name: Out<u8>, room: i32, device: Ordinal) {
        simulator()?.device(device)?;
        copy_text(&name, room, "NVIDIA H200 (Windlass simulator)")
    }

    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: Ordinal) {
        uuid.set(simulator()?.device(device)?.uuid())
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: Ordinal) {
        uuid.set(simulator()?.device(device)?.uuid())
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: Ordinal) {
        bytes.set(simulator()?.device(device)?.memory.total)
    }

    fn cuDeviceGetAttribute(value: Out<i32>, attribute: u32, device: Ordinal) {
        let simulator = simulator()?;
        let known = simulator.device(device)?.attribute(attribute).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        value.set(if attribute == MULTICAST_SUPPORTED { i32::from(simulator.multicast) } else { known })
    }

    fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, device: Ordinal) {
        let capability = simulator()?.device(device)?.capability;
        minor.check()?;
        major.set(capability / 10)?;
        minor.set(capability % 10)
    }

    fn cuDeviceGetPCIBusId(text: Out<u8>, room: i32, device: Ordinal) {
        copy_text(&text, room, &simulator()?.device(device)?.bus_id())
    }

    fn cuDeviceGetByPCIBusId(device: Out<Ordinal>, text: Text) {
        let simulator = simulator()?;
        let wanted = text.get()?.to_string_lossy().to_uppercase();
        // The domain and the function may be left out.
        let matches = |id: &str| id == wanted || id.strip_prefix("0000:").is_some_and(|short| {
            short == wanted || short.strip_suffix(".0") == Some(&wanted)
        }) || id.strip_suffix(".0") == Some(&wanted);
        let found = simulator.devices.iter().find(|device| matches(&device.bus_id()));
        device.set(found.ok_or(CUDA_ERROR_INVALID_DEVICE)?.ordinal)
    }

    fn cuDeviceCanAccessPeer(can: Out<i32>, device: Ordinal, peer: Ordinal) {
        let simulator = simulator()?;
        can.set(i32::from(simulator.device(device)?.ordinal != simulator.device(peer)?.ordinal))
    }

    fn cuDeviceGetP2PAttribute(value: Out<i32>, attribute: u32, source: Ordinal, target: Ordinal) {
        let simulator = simulator()?;
        if simulator.device(source)?.ordinal == simulator.device(target)?.ordinal {
            return Err(CUDA_ERROR_INVALID_DEVICE);
        }
        value.set(match attribute {
            // 1: the best performance rank. 2 to 4: access, native atomics (over NVLink only), access to arrays.
            1 => 0,
            3 => i32::from(simulator.nvlink),
            2 | 4 => 1,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        })
    }

    fn cuDevicePrimaryCtxRetain(context: Out<Handle>, device: Ordinal) {
        context.check()?;
        context.set(context::retain_primary(device)?)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: Ordinal) {
        context::release_primary(device)
    }

    fn cuDevicePrimaryCtxRelease(device: Ordinal) {
        context::release_primary(device)
    }

    fn cuDevicePrimaryCtxSetFlags_v2(device: Ordinal, flags: u32) {
        context::set_primary_flags(device, flags)
    }

    fn cuDevicePrimaryCtxSetFlags(device: Ordinal, flags: u32) {
        context::set_primary_flags(device, flags)
    }

    fn cuDevicePrimaryCtxGetState(device: Ordinal, flags: Out<u32>, active: Out<i32>) {
        let primary = lock(&simulator()?.device(device)?.primary);
        active.check()?;
        flags.set(primary.flags)?;
        active.set(i32::from(primary.holders > 0))
    }

    fn cuDevicePrimaryCtxReset_v2(device: Ordinal) {
        context::reset_primary(device)
    }

    fn cuDevicePrimaryCtxReset(device: Ordinal) {
        context::reset_primary(device)
    }
}
