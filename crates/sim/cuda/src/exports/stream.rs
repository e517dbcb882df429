//! Exports for streams, host functions, memory operations and capture.

use crate::capture;
use crate::clock::RawWork;
use crate::code::{CUDA_ERROR_ILLEGAL_STATE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, Code};
use crate::event;
use crate::ffi::{In, Out};
use crate::graph;
use crate::memory;
use crate::stream::{self, Scope};
use crate::sync::lock;
use crate::table::Handle;
use crate::work::{HostFunction, MemoryOperation, WAIT_NOR, Work};
use std::ffi::c_void;

/// `CUstreamCallback`.
type StreamCallback = extern "C" fn(Handle, Code, *mut c_void);

/// `CUgraphEdgeData`.
pub type EdgeData = [u8; 8];

/// `CUstreamBatchMemOpParams`, a union whose members for waits and writes have the same layout.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BatchOperation {
    operation: u32,
    address: usize,
    value: u64,
    flags: u32,
    alias: usize,
    pad: u64,
}

const _: () = assert!(std::mem::size_of::<BatchOperation>() == 48);

exports! {
    fn cuStreamCreate(out: Out<Handle>, flags: u32) {
        out.check()?;
        out.set(stream::create(flags, stream::PRIORITY_LEAST)?)
    }

    fn cuStreamCreateWithPriority(out: Out<Handle>, flags: u32, priority: i32) {
        out.check()?;
        out.set(stream::create(flags, priority)?)
    }

    fn cuStreamDestroy_v2(handle: Handle) {
        stream::destroy(handle)
    }

    fn cuStreamDestroy(handle: Handle) {
        stream::destroy(handle)
    }

    fn cuStreamSynchronize / cuStreamSynchronize_ptsz(handle: Handle) {
        stream::find(handle)?.synchronize()
    }

    fn cuStreamQuery / cuStreamQuery_ptsz(handle: Handle) {
        stream::find(handle)?.query()
    }

    fn cuStreamWaitEvent / cuStreamWaitEvent_ptsz(handle: Handle, event: Handle, flags: u32) {
        let scope = match flags {
            0 => Scope::Capture,
            1 => Scope::External,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        stream::wait_event(&stream::find(handle)?, &event::find(event)?, scope)
    }

    fn cuStreamGetPriority / cuStreamGetPriority_ptsz(handle: Handle, priority: Out<i32>) {
        priority.set(stream::find(handle)?.priority)
    }

    fn cuStreamGetFlags / cuStreamGetFlags_ptsz(handle: Handle, flags: Out<u32>) {
        flags.set(stream::find(handle)?.flags)
    }

    fn cuStreamGetId / cuStreamGetId_ptsz(handle: Handle, id: Out<u64>) {
        let stream = stream::find(handle)?;
        stream.refuse_member()?;
        id.set(stream.id)
    }

    fn cuStreamGetDevice / cuStreamGetDevice_ptsz(handle: Handle, device: Out<i32>) {
        device.set(stream::find(handle)?.context.device)
    }

    fn cuStreamGetCtx / cuStreamGetCtx_ptsz(handle: Handle, context: Out<Handle>) {
        context.set(stream::find(handle)?.context.handle)
    }

    fn cuStreamGetCtx_v2 / cuStreamGetCtx_v2_ptsz(handle: Handle, context: Out<Handle>, green: Out<Handle>) {
        context.set(stream::find(handle)?.context.handle)?;
        green.set_if_wanted(0);
        Ok(())
    }

    fn cuStreamAddCallback / cuStreamAddCallback_ptsz(
        handle: Handle,
        callback: Option<StreamCallback>,
        data: *mut c_void,
        flags: u32,
    ) {
        let callback = callback.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let stream = stream::find(handle)?;
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        stream.refuse_member()?;
        let data = data as usize;
        stream.submit(move || {
            crate::guard::forbidding_calls(|| callback(handle, 0, data as *mut c_void));
        });
        Ok(())
    }

    fn cuLaunchHostFunc / cuLaunchHostFunc_ptsz(
        handle: Handle,
        function: Option<HostFunction>,
        data: *mut c_void,
    ) {
        let function = function.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        stream::issue(&stream::find(handle)?, Work::Host { function, data: data as usize }).map(drop)
    }

    fn simLaunch(handle: Handle, function: Option<HostFunction>, data: *mut c_void, work: In<RawWork>) {
        let function = function.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let stream = stream::find(handle)?;
        let work = if work.is_null() { None } else { work.get()?.read() };
        let device = stream.context.device;
        stream::issue(&stream, Work::Device { function, data: data as usize, device, work }).map(drop)
    }

    // Managed memory is visible to all devices here, so there is nothing to attach.
    fn cuStreamAttachMemAsync / cuStreamAttachMemAsync_ptsz(
        handle: Handle,
        address: usize,
        _bytes: usize,
        _flags: u32,
    ) {
        memory::find(address)?;
        stream::issue(&stream::find(handle)?, Work::Empty).map(drop)
    }

    fn cuStreamWaitValue32_v2 / cuStreamWaitValue32_v2_ptsz(handle: Handle, address: usize, value: u32, flags: u32) {
        issue(handle, vec![wait(address, u64::from(value), flags, 32)?])
    }

    fn cuStreamWaitValue64_v2 / cuStreamWaitValue64_v2_ptsz(handle: Handle, address: usize, value: u64, flags: u32) {
        issue(handle, vec![wait(address, value, flags, 64)?])
    }

    fn cuStreamWriteValue32_v2 / cuStreamWriteValue32_v2_ptsz(handle: Handle, address: usize, value: u32, flags: u32) {
        issue(handle, vec![write(address, u64::from(value), flags, 32)?])
    }

    fn cuStreamWriteValue64_v2 / cuStreamWriteValue64_v2_ptsz(handle: Handle, address: usize, value: u64, flags: u32) {
        issue(handle, vec![write(address, value, flags, 64)?])
    }

    fn cuStreamBatchMemOp_v2 / cuStreamBatchMemOp_v2_ptsz(
        handle: Handle,
        count: u32,
        operations: In<BatchOperation>,
        flags: u32,
    ) {
        if flags != 0 || count > 256 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        issue(handle, batch(&operations, count)?)
    }

    fn cuStreamBeginCapture_v2 / cuStreamBeginCapture_v2_ptsz(handle: Handle, mode: u32) {
        capture::begin(&stream::find(handle)?, mode, None)
    }

    fn cuStreamBeginCaptureToGraph / cuStreamBeginCaptureToGraph_ptsz(
        handle: Handle,
        graph: Handle,
        dependencies: In<Handle>,
        _edges: In<EdgeData>,
        count: usize,
        mode: u32,
    ) {
        let graph = graph::find(graph)?;
        capture::begin(&stream::find(handle)?, mode, Some((graph, dependencies.list(count)?)))
    }

    fn cuStreamEndCapture / cuStreamEndCapture_ptsz(handle: Handle, graph: Out<Handle>) {
        graph.check()?;
        graph.set(0)?;
        graph.set(capture::end(&stream::find(handle)?)?.handle)
    }

    fn cuStreamIsCapturing / cuStreamIsCapturing_ptsz(handle: Handle, status: Out<u32>) {
        status.set(capture::status(stream::find(handle)?.as_ref())?.0)
    }

    fn cuStreamGetCaptureInfo / cuStreamGetCaptureInfo_ptsz(handle: Handle, status: Out<u32>, id: Out<u64>) {
        let graph = Out::none();
        info(handle, &status, &id, &graph, &Out::none(), &Out::none())
    }

    fn cuStreamGetCaptureInfo_v2 / cuStreamGetCaptureInfo_v2_ptsz(
        handle: Handle,
        status: Out<u32>,
        id: Out<u64>,
        graph: Out<Handle>,
        dependencies: Out<*const Handle>,
        count: Out<usize>,
    ) {
        info(handle, &status, &id, &graph, &dependencies, &count)
    }

    fn cuStreamGetCaptureInfo_v3 / cuStreamGetCaptureInfo_v3_ptsz(
        handle: Handle,
        status: Out<u32>,
        id: Out<u64>,
        graph: Out<Handle>,
        dependencies: Out<*const Handle>,
        edges: Out<*const EdgeData>,
        count: Out<usize>,
    ) {
        // Null means that every edge is an ordinary one.
        edges.set_if_wanted(std::ptr::null());
        info(handle, &status, &id, &graph, &dependencies, &count)
    }

    fn cuStreamUpdateCaptureDependencies / cuStreamUpdateCaptureDependencies_ptsz(
        handle: Handle,
        dependencies: In<Handle>,
        count: usize,
        flags: u32,
    ) {
        update_dependencies(handle, &dependencies.list(count)?, flags)
    }

    fn cuStreamUpdateCaptureDependencies_v2 / cuStreamUpdateCaptureDependencies_v2_ptsz(
        handle: Handle,
        dependencies: In<Handle>,
        _edges: In<EdgeData>,
        count: usize,
        flags: u32,
    ) {
        update_dependencies(handle, &dependencies.list(count)?, flags)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) {
        let before = capture::exchange_thread_mode(mode.get()?)?;
        mode.set(before)
    }
}

fn issue(handle: Handle, operations: Vec<MemoryOperation>) -> Result<(), Code> {
    stream::issue(&stream::find(handle)?, Work::Memory(operations)).map(drop)
}

/// Checks the operations of a batch.
pub fn batch(operations: &In<BatchOperation>, count: u32) -> Result<Vec<MemoryOperation>, Code> {
    let checked = |operation: BatchOperation| {
        let BatchOperation { operation, address, value, flags, .. } = operation;
        match operation {
            1 => wait(address, value & u64::from(u32::MAX), flags, 32),
            2 => write(address, value & u64::from(u32::MAX), flags, 32),
            4 => wait(address, value, flags, 64),
            5 => write(address, value, flags, 64),
            // 6 is the barrier, 3 the flush of remote writes, which the device attribute says is not supported.
            6 => Ok(MemoryOperation::Barrier),
            3 => Err(CUDA_ERROR_NOT_SUPPORTED),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    };
    operations.list(count as usize)?.into_iter().map(checked).collect()
}

fn wait(address: usize, value: u64, flags: u32, bits: u32) -> Result<MemoryOperation, Code> {
    /// `CU_STREAM_WAIT_VALUE_FLUSH`.
    const FLUSH: u32 = 1 << 30;
    if flags & FLUSH != 0 {
        // The device attribute says that remote writes cannot be flushed.
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    if flags > WAIT_NOR {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    check_word(address, bits)?;
    Ok(MemoryOperation::Wait { address, value, comparison: flags, bits })
}

fn write(address: usize, value: u64, flags: u32, bits: u32) -> Result<MemoryOperation, Code> {
    // Flag 1 omits the memory barrier; the simulator's writes always have one.
    if flags > 1 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    check_word(address, bits)?;
    Ok(MemoryOperation::Write { address, value, bits })
}

fn check_word(address: usize, bits: u32) -> Result<(), Code> {
    let bytes = bits as usize / 8;
    if !address.is_multiple_of(bytes) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    memory::check(address, bytes)
}

fn info(
    handle: Handle,
    status: &Out<u32>,
    id: &Out<u64>,
    graph: &Out<Handle>,
    dependencies: &Out<*const Handle>,
    count: &Out<usize>,
) -> Result<(), Code> {
    status.check()?;
    let stream = stream::find(handle)?;
    let (now, capture_id) = capture::status(&stream)?;
    status.set(now)?;
    if let Some(capture_id) = capture_id {
        id.set_if_wanted(capture_id);
    }
    if now == capture::STATUS_ACTIVE
        && let Some(capturing) = &*lock(&stream.capturing)
    {
        graph.set_if_wanted(capturing.capture.graph.handle);
        // Valid until the next call that changes this stream's capture, as the driver guarantees.
        dependencies.set_if_wanted(capturing.dependencies.as_ptr());
        count.set_if_wanted(capturing.dependencies.len());
    }
    Ok(())
}

fn update_dependencies(handle: Handle, dependencies: &[Handle], flags: u32) -> Result<(), Code> {
    let stream = stream::find(handle)?;
    let mut capturing = lock(&stream.capturing);
    let capturing = capturing.as_mut().ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
    capturing.capture.refuse_invalidated()?;
    for dependency in dependencies {
        if graph::find_node(*dependency)?.graph != capturing.capture.graph.handle {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
    }
    match flags {
        0 => {}
        1 => capturing.dependencies.clear(),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    }
    capturing.join(dependencies);
    Ok(())
}
