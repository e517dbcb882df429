//! Streams of the application, and what holds them up.

use std::ffi::c_void;
use std::sync::mpsc::{Receiver, Sender, channel};

use windlass_base::gpu::{StreamHandle, driver};

use super::driver::*;

/// The stream is destroyed at the end.
pub struct AppStream(pub usize);

impl AppStream {
    /// A stream that orders itself with no other.
    pub fn new() -> AppStream {
        AppStream(made(|out| cuStreamCreate(out, 1)))
    }

    /// A stream that orders itself with the legacy stream, as streams do by default.
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

/// What a stream waits at until it is told; dropping it tells. One at a time: a GPU's driver runs all host functions of a
/// process on one thread, so that a second one would wait for the first. [`AppStream`]s that are to wait too wait for an
/// event behind it.
pub struct Gate {
    open: Sender<()>,
    reached: Receiver<()>,
}

impl Gate {
    /// A gate, and what [`wait_at_gate`] takes: for one call.
    pub fn closed() -> (Gate, *mut c_void) {
        let (open, opened) = channel::<()>();
        let (reach, reached) = channel::<()>();
        (Gate { open, reached }, Box::into_raw(Box::new((reach, opened))).cast())
    }

    pub fn on(stream: &AppStream) -> Gate {
        let (gate, data) = Gate::closed();
        // SAFETY: the data are for this one call, and `wait_at_gate` makes no CUDA call.
        unsafe { driver().unwrap().launch_host(stream.handle(), wait_at_gate, data) }.unwrap();
        gate
    }

    /// Waits until the stream has come to it.
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
    // Whether anybody looks does not matter; an error is the gate's opening, also by a test that failed meanwhile.
    let _ = reach.send(());
    let _ = opened.recv();
}

/// Captures `body` on a stream and makes it runnable; the graph itself is destroyed at once.
pub fn captured(stream: &AppStream, body: impl FnOnce()) -> usize {
    // Ranks are threads here: what one does must not break another's capture.
    const THREAD_LOCAL: u32 = 1;
    ok(cuStreamBeginCapture_v2(stream.0, THREAD_LOCAL));
    body();
    let graph = made(|out| cuStreamEndCapture(stream.0, out));
    let executable = made(|out| cuGraphInstantiateWithFlags(out, graph, 0));
    ok(cuGraphDestroy(graph));
    executable
}
