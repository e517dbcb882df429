//! Exports for user objects and for references that graphs hold to them.

use crate::code::CUDA_ERROR_INVALID_VALUE;
use crate::ffi::Out;
use crate::graph;
use crate::simulator::simulator;
use crate::sync::lock;
use crate::table::Handle;
use crate::user_object::{self, UserObject};
use crate::work::HostFunction;
use std::ffi::c_void;
use std::sync::Mutex;

/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, without which no object can be made.
const NO_DESTRUCTOR_SYNC: u32 = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`.
const MOVE: u32 = 1;

exports! {
    fn cuUserObjectCreate(
        out: Out<Handle>,
        pointer: *mut c_void,
        destroy: Option<HostFunction>,
        references: u32,
        flags: u32,
    ) {
        out.check()?;
        let destroy = destroy.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if references == 0 || flags != NO_DESTRUCTOR_SYNC {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let pointer = pointer as usize;
        let references = Mutex::new(references);
        let object =
            simulator()?.user_objects.insert(|handle| UserObject { handle, pointer, destroy, references });
        out.set(object.handle)
    }

    fn cuUserObjectRetain(object: Handle, count: u32) {
        if count == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        user_object::find(object)?.retain(count);
        Ok(())
    }

    fn cuUserObjectRelease(object: Handle, count: u32) {
        if count == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        user_object::find(object)?.release(count)
    }

    fn cuGraphRetainUserObject(graph: Handle, object: Handle, count: u32, flags: u32) {
        let graph = graph::find(graph)?;
        let object = user_object::find(object)?;
        if count == 0 || flags & !MOVE != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if flags & MOVE == 0 {
            object.retain(count);
        }
        lock(&graph.objects).adopt(&object, count);
        Ok(())
    }

    fn cuGraphReleaseUserObject(graph: Handle, object: Handle, count: u32) {
        let graph = graph::find(graph)?;
        let object = user_object::find(object)?;
        lock(&graph.objects).release(&object, count)
    }
}
