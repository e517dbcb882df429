//! Streams of the application, and gates that block them.

use std::ffi::c_void;
use std::sync::mpsc::{Receiver, Sender, channel};

use windlass_base::gpu::{StreamHandle, driver};

use super::driver::*;

/// A stream, destroyed on drop.
pub struct AppStream(pub usize);

impl AppStream {
    /// A non-blocking stream.
    pub fn new() -> AppStream {
        AppStream(made(|out| cuStreamCreate(out, 1)))
    }

    /// A stream that synchronizes with the legacy stream, as streams do by default.
    pub fn blocking() -> AppStream {
        AppStream(made(|out| cuStreamCreate(out, 0)))
    }

    pub fn handle(&self) -> StreamHandle {
        StreamHandle(self.0)
    }

    #[track_caller]
    pub fn synchronize(&self) {
        ok(cuStreamSynchronize(self.0));
    }

    #[track_caller]
    pub fn is_busy(&self) -> bool {
        let code = cuStreamQuery(self.0);
        assert!(matches!(code, 0 | 600), "cuStreamQuery answered {code}");
        code == 600
    }
}

impl Drop for AppStream {
    fn drop(&mut self) {
        // SAFETY: created by the application, destroyed once.
        unsafe { (driver().unwrap().calls.cuStreamDestroy_v2)(self.0) };
    }
}

/// Blocks a stream until it is opened or dropped. Use one at a time: a GPU's driver runs all host functions of a process on one
/// thread, so a second gate would wait for the first. Other [`AppStream`]s can wait for an event behind the gate.
pub struct Gate {
    open: Sender<()>,
    reached: Receiver<()>,
}

impl Gate {
    /// A gate, and the data for one call of [`wait_at_gate`].
    pub fn closed() -> (Gate, *mut c_void) {
        let (open, opened) = channel::<()>();
        let (reach, reached) = channel::<()>();
        (Gate { open, reached }, Box::into_raw(Box::new((reach, opened))).cast())
    }

    pub fn on(stream: &AppStream) -> Gate {
        let (gate, data) = Gate::closed();
        ok(cuLaunchHostFunc(stream.0, wait_at_gate, data));
        gate
    }

    /// Waits until the stream has come to the gate.
    #[track_caller]
    pub fn wait_until_reached(&self) {
        self.reached.recv_timeout(soon()).expect("the stream comes to its gate");
    }

    pub fn open(self) {
        drop(self.open);
    }
}

pub unsafe extern "C" fn wait_at_gate(data: *mut c_void) {
    // SAFETY: `closed` leaked this box for this one call.
    let (reach, opened) = *unsafe { Box::from_raw(data.cast::<(Sender<()>, Receiver<()>)>()) };
    // The result does not matter; an error means that the gate was opened or dropped, also by a test that failed.
    let _ = reach.send(());
    let _ = opened.recv();
}

/// Captures `body` on a stream and instantiates the graph, which is destroyed at once.
pub fn captured(stream: &AppStream, body: impl FnOnce()) -> usize {
    // Ranks are threads here, and one must not break another's capture.
    const THREAD_LOCAL: u32 = 1;
    ok(cuStreamBeginCapture_v2(stream.0, THREAD_LOCAL));
    body();
    let graph = made(|out| cuStreamEndCapture(stream.0, out));
    let executable = made(|out| cuGraphInstantiateWithFlags(out, graph, 0));
    ok(cuGraphDestroy(graph));
    executable
}
