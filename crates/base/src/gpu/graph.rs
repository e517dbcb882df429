//! Lets graphs keep objects alive, by CUDA's user objects, whose destructors call no CUDA.

use std::ffi::c_void;
use std::sync::Arc;

use crate::gpu::failure::Failure;
use crate::gpu::library::Driver;

const NO_DESTRUCTOR_SYNC: u32 = 1;
const MOVE: u32 = 1;

/// Called when the last graph that kept an object is gone, on a thread of the driver. It may only set marks: never call CUDA, wait, or take
/// a lock that others hold for long.
pub trait Released: Send + Sync + 'static {
    /// The graph, and everything made of it, is gone and will not run again.
    fn released(&self);
}

impl Driver {
    /// Makes a graph, and everything made of it, keep `object`. [`Released::released`] is called once when all are gone. It is also called if this
    /// fails, so a caller that counts objects need not undo its count.
    pub fn retain_in_graph<T: Released>(&self, graph: usize, object: Arc<T>) -> Result<(), Failure> {
        let pointer = Arc::into_raw(object).cast_mut();
        let mut handle = 0;
        // SAFETY: `destroy` takes over the reference that the pointer is, once.
        let code = unsafe {
            (self.calls.cuUserObjectCreate)(&mut handle, pointer.cast(), destroy::<T>, 1, NO_DESTRUCTOR_SYNC)
        };
        let detail = || format!("graph {graph:#x}");
        if let Err(failure) = self.check("cuUserObjectCreate", code, detail) {
            // SAFETY: the driver did not take the reference.
            unsafe { destroy::<T>(pointer.cast()) };
            return Err(failure);
        }
        // SAFETY: the object was made above and its one reference moves to the graph.
        let code = unsafe { (self.calls.cuGraphRetainUserObject)(graph, handle, 1, MOVE) };
        let moved = self.check("cuGraphRetainUserObject", code, detail);
        if moved.is_err() {
            // SAFETY: the reference stayed ours; releasing it runs the destructor.
            let code = unsafe { (self.calls.cuUserObjectRelease)(handle, 1) };
            self.note("cuUserObjectRelease", code, detail);
        }
        moved
    }
}

unsafe extern "C" fn destroy<T: Released>(pointer: *mut c_void) {
    // SAFETY: the pointer came from `Arc::into_raw` in `retain_in_graph`, and this runs once for it.
    let object = unsafe { Arc::from_raw(pointer.cast_const().cast::<T>()) };
    object.released();
}
