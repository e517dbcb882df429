//! Lets graphs keep objects alive, by CUDA's user objects, whose destructors call no CUDA.

use std::ffi::c_void;
use std::sync::Arc;

use crate::gpu::failure::{Failure, SUCCESS};
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

/// `CU_GRAPH_NODE_TYPE_KERNEL`.
const KERNEL: u32 = 0;
/// The first driver of which it was tried that forked streams that only an early start joins count as joined (12.3 has early starts in graphs).
const EARLY_IN_GRAPHS_SINCE: i32 = 13000;
/// `CUDA_KERNEL_NODE_PARAMS_v2`: words, and which one is the context.
const KERNEL_PARAMETERS: usize = 9;
const KERNEL_CONTEXT: usize = 8;

impl Driver {
    /// Whether a captured kernel may be launched to begin early.
    pub fn has_early_in_graphs(&self) -> bool {
        let mut version = 0;
        // SAFETY: the output is a local.
        let code = unsafe { (self.calls.cuDriverGetVersion)(&mut version) };
        code == SUCCESS && version >= EARLY_IN_GRAPHS_SINCE
    }

    /// Whether a node is a kernel of the current context that begins after the ends of all nodes before it, so that its own end says that these
    /// have ended. A kernel that may begin early need not wait for them.
    pub fn is_kernel_after_all(&self, node: usize) -> bool {
        let mut before = [0; 64];
        let mut count = before.len();
        // SAFETY: the node is of a graph that lives, and the outputs are locals. This form fails if an edge is of another kind than usual.
        let code = unsafe { (self.calls.cuGraphNodeGetDependencies)(node, before.as_mut_ptr(), &mut count) };
        code == SUCCESS
            && count < before.len()
            && self.type_of(node).is_ok_and(|kind| kind == KERNEL)
            && self.is_of_current_context(node)
    }

    fn is_of_current_context(&self, kernel: usize) -> bool {
        let (mut parameters, mut current) = ([0; KERNEL_PARAMETERS], 0);
        // SAFETY: the node is a kernel of a graph that lives, and the outputs are locals of the driver's size.
        let codes = unsafe {
            [
                (self.calls.cuGraphKernelNodeGetParams_v2)(kernel, parameters.as_mut_ptr()),
                (self.calls.cuCtxGetCurrent)(&mut current),
            ]
        };
        codes == [SUCCESS; 2] && parameters[KERNEL_CONTEXT] == current
    }
}

unsafe extern "C" fn destroy<T: Released>(pointer: *mut c_void) {
    // SAFETY: the pointer came from `Arc::into_raw` in `retain_in_graph`, and this runs once for it.
    let object = unsafe { Arc::from_raw(pointer.cast_const().cast::<T>()) };
    object.released();
}
