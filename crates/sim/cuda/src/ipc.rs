//! Legacy IPC: a handle names a descriptor of the process that made it, which others open through `/proc`. Nothing is left behind
//! when a process dies, unlike with named shared memory. Both processes must be of one user and see each other's process ids.

use crate::code::{
    CUDA_ERROR_ALREADY_MAPPED, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE,
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_MAP_FAILED, Code,
};
use crate::context;
use crate::event::{self, Event, SharedEvent};
use crate::mapping::{PAGE, Reservation, identity, round_up};
use crate::memory::{self, Address, Kind, Range};
use crate::simulator::simulator;
use crate::sync::lock;
use crate::table::Handle;
use std::fs::OpenOptions;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

const MEMORY_MAGIC: u64 = u64::from_le_bytes(*b"simcumem");
const EVENT_MAGIC: u64 = u64::from_le_bytes(*b"simcuevt");

/// The content of `CUipcMemHandle` and `CUipcEventHandle`: 64 bytes, opaque to the application.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle {
    magic: u64,
    process: u32,
    descriptor: i32,
    /// Descriptor numbers are reused; the inode tells whether the number still means the same file.
    inode: u64,
    offset: u64,
    bytes: u64,
    device: i32,
    flags: u32,
    buffer_id: u64,
    reserved: u64,
}

const _: () = assert!(std::mem::size_of::<IpcHandle>() == 64);

impl IpcHandle {
    fn of_file(magic: u64, file: &OwnedFd) -> Result<Self, Code> {
        Ok(IpcHandle {
            magic,
            process: std::process::id(),
            descriptor: file.as_raw_fd(),
            inode: identity(file.as_fd())?.0,
            offset: 0,
            bytes: 0,
            device: 0,
            flags: 0,
            buffer_id: 0,
            reserved: 0,
        })
    }

    fn open(&self) -> Result<OwnedFd, Code> {
        let path = format!("/proc/{}/fd/{}", self.process, self.descriptor);
        let file: OwnedFd =
            OpenOptions::new().read(true).write(true).open(path).map_err(|_| CUDA_ERROR_MAP_FAILED)?.into();
        if identity(file.as_fd())?.0 == self.inode { Ok(file) } else { Err(CUDA_ERROR_MAP_FAILED) }
    }
}

/// The handle of the block that an address lies in. Mappings and pool blocks have none.
pub fn memory_handle(address: Address) -> Result<IpcHandle, Code> {
    let range = memory::find(address)?;
    let block = match (&range.kind, &range.block) {
        (Kind::Device, Some(block)) => block,
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    let handle = IpcHandle::of_file(MEMORY_MAGIC, &block.file)?;
    Ok(IpcHandle {
        offset: block.offset as u64,
        bytes: range.bytes as u64,
        device: range.device,
        buffer_id: range.buffer_id,
        ..handle
    })
}

pub fn open_memory(handle: &IpcHandle) -> Result<Address, Code> {
    let context = context::current()?;
    if handle.magic != MEMORY_MAGIC {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if handle.process == std::process::id() {
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    }
    let simulator = simulator()?;
    let identity = ((u64::from(handle.process)) << 32) ^ handle.buffer_id;
    let file = handle.open()?;
    let whole = round_up(handle.bytes as usize, PAGE).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let place = Reservation::new(whole, PAGE, 0)?;
    place.place(place.base, whole, &file, handle.offset as usize, libc::PROT_READ | libc::PROT_WRITE)?;
    let mut ranges = lock(&simulator.ranges);
    let is_same = |range: &Arc<Range>| {
        range.context == context.handle && matches!(range.kind, Kind::Imported(other) if other == identity)
    };
    if ranges.all().any(is_same) {
        return Err(CUDA_ERROR_ALREADY_MAPPED);
    }
    let mut range = Range::owning(place, handle.bytes as usize, Kind::Imported(identity), &context);
    range.device = handle.device;
    Ok(ranges.insert(range).base)
}

pub fn close_memory(address: Address) -> Result<(), Code> {
    let simulator = simulator()?;
    let range = lock(&simulator.ranges).at(address).cloned().ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if !matches!(range.kind, Kind::Imported(_)) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    context::synchronize_device(simulator, range.device);
    let taken = lock(&simulator.ranges).remove(address);
    drop(taken);
    Ok(())
}

pub fn event_handle(event: &Event) -> Result<IpcHandle, Code> {
    let shared = event.shared.as_ref().ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    let handle = IpcHandle::of_file(EVENT_MAGIC, &shared.file)?;
    Ok(IpcHandle { device: event.device, flags: event.flags, ..handle })
}

pub fn open_event(handle: &IpcHandle) -> Result<Handle, Code> {
    let context = context::current()?;
    if handle.magic != EVENT_MAGIC {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let shared = Arc::new(SharedEvent::open(handle.open()?)?);
    let flags = handle.flags | event::INTERPROCESS | event::DISABLE_TIMING;
    Ok(simulator()?.events.insert(|handle| Event::new(handle, &context, flags, Some(shared))).handle)
}
