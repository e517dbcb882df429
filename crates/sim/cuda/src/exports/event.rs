//! Exports for events.

use crate::capture;
use crate::code::{CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE};
use crate::event;
use crate::ffi::Out;
use crate::ipc::{self, IpcHandle};
use crate::simulator::simulator;
use crate::stream::{self, Scope};
use crate::table::Handle;

exports! {
    fn cuEventCreate(out: Out<Handle>, flags: u32) {
        out.check()?;
        out.set(event::create(flags)?)
    }

    // A pending recording still completes: the queued work holds it.
    fn cuEventDestroy_v2(handle: Handle) {
        simulator()?.events.remove(handle).map(drop).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    fn cuEventDestroy(handle: Handle) {
        simulator()?.events.remove(handle).map(drop).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    fn cuEventRecord / cuEventRecord_ptsz(handle: Handle, stream: Handle) {
        stream::record_event(&stream::find(stream)?, &event::find(handle)?, Scope::Capture)
    }

    fn cuEventRecordWithFlags / cuEventRecordWithFlags_ptsz(handle: Handle, stream: Handle, flags: u32) {
        let scope = match flags {
            0 => Scope::Capture,
            1 => Scope::External,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        stream::record_event(&stream::find(stream)?, &event::find(handle)?, scope)
    }

    fn cuEventQuery(handle: Handle) {
        let event = event::find(handle)?;
        capture::refuse_unsafe()?;
        event.query()
    }

    fn cuEventSynchronize(handle: Handle) {
        let event = event::find(handle)?;
        capture::refuse_unsafe()?;
        event.synchronize()
    }

    fn cuEventElapsedTime(milliseconds: Out<f32>, start: Handle, end: Handle) {
        milliseconds.check()?;
        milliseconds.set(event::elapsed(event::find(start)?.as_ref(), event::find(end)?.as_ref())?)
    }

    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: Handle, end: Handle) {
        milliseconds.check()?;
        milliseconds.set(event::elapsed(event::find(start)?.as_ref(), event::find(end)?.as_ref())?)
    }

    fn cuIpcGetEventHandle(out: Out<IpcHandle>, handle: Handle) {
        out.check()?;
        out.set(ipc::event_handle(event::find(handle)?.as_ref())?)
    }

    fn cuIpcOpenEventHandle(out: Out<Handle>, handle: IpcHandle) {
        out.check()?;
        out.set(ipc::open_event(&handle)?)
    }
}
