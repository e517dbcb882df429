//! User objects: counted resources of the application that graphs keep alive.

use crate::code::{CUDA_ERROR_INVALID_VALUE, Code};
use crate::guard;
use crate::simulator::{simulator, started};
use crate::sync::lock;
use crate::table::Handle;
use crate::work::HostFunction;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};

pub struct UserObject {
    pub handle: Handle,
    pub pointer: usize,
    pub destroy: HostFunction,
    pub references: Mutex<u32>,
}

impl UserObject {
    pub fn retain(&self, count: u32) {
        *lock(&self.references) += count;
    }

    /// The last reference hands the destructor to a thread of its own, which may make no CUDA call.
    pub fn release(&self, count: u32) -> Result<(), Code> {
        let mut references = lock(&self.references);
        *references = references.checked_sub(count).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if *references == 0 {
            if let Some(simulator) = started() {
                simulator.user_objects.remove(self.handle);
            }
            let (destroy, pointer) = (self.destroy, self.pointer);
            let send = || destructions().send((destroy, pointer)).map_err(|_| CUDA_ERROR_INVALID_VALUE);
            return send();
        }
        Ok(())
    }
}

fn destructions() -> Sender<(HostFunction, usize)> {
    static QUEUE: OnceLock<Sender<(HostFunction, usize)>> = OnceLock::new();
    let start = || {
        let (sender, receiver) = channel::<(HostFunction, usize)>();
        let run = move || {
            for (destroy, pointer) in receiver {
                guard::forbidding_calls(|| {
                    // SAFETY: the application passed this function for being called once with this pointer.
                    unsafe { destroy(pointer as *mut c_void) }
                });
            }
        };
        std::thread::Builder::new()
            .name("sim-user-objects".into())
            .spawn(run)
            .expect("a thread for destructors");
        sender
    };
    QUEUE.get_or_init(start).clone()
}

pub fn find(handle: Handle) -> Result<Arc<UserObject>, Code> {
    simulator()?.user_objects.get(handle).ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// References that a graph or an executable graph holds; copying it retains, dropping it releases.
#[derive(Default)]
pub struct Held(BTreeMap<Handle, (Arc<UserObject>, u32)>);

impl Held {
    /// Takes over references that the caller owned.
    pub fn adopt(&mut self, object: &Arc<UserObject>, count: u32) {
        self.0.entry(object.handle).or_insert_with(|| (object.clone(), 0)).1 += count;
    }

    pub fn release(&mut self, object: &Arc<UserObject>, count: u32) -> Result<(), Code> {
        let held = self.0.get_mut(&object.handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        held.1 = held.1.checked_sub(count).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if held.1 == 0 {
            self.0.remove(&object.handle);
        }
        object.release(count)
    }
}

impl Clone for Held {
    fn clone(&self) -> Self {
        self.0.values().for_each(|(object, count)| object.retain(*count));
        Held(self.0.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for (object, count) in self.0.values() {
            // Cannot underflow: these references are ours.
            let _ = object.release(*count);
        }
    }
}
