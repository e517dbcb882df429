//! User objects (counted resources of the application), and what graphs keep alive: user objects and memory blocks.

use crate::code::{CUDA_ERROR_INVALID_VALUE, Code};
use crate::guard;
use crate::memory::Address;
use crate::simulator::{number_from_environment, simulator, started};
use crate::sync::lock;
use crate::table::Handle;
use crate::work::HostFunction;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

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

    /// Drops references. After the last one the thread `sim-user-objects` calls the destructor, which may make no CUDA calls.
    pub fn release(&self, count: u32) -> Result<(), Code> {
        let mut references = lock(&self.references);
        *references = references.checked_sub(count).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if *references == 0 {
            if let Some(simulator) = started() {
                simulator.user_objects.remove(self.handle);
            }
            let (destroy, pointer) = (self.destroy, self.pointer);
            let destruction = Destruction { destroy, pointer };
            return destructions().send(destruction).map_err(|_| CUDA_ERROR_INVALID_VALUE);
        }
        Ok(())
    }
}

/// A destructor's call, on the way to its thread.
struct Destruction {
    destroy: HostFunction,
    pointer: usize,
}

fn destructions() -> Sender<Destruction> {
    static QUEUE: OnceLock<Sender<Destruction>> = OnceLock::new();
    let start = || {
        let lag = number_from_environment("WINDLASS_SIM_DESTRUCTOR_LAG").unwrap_or(0);
        let lag = Duration::from_millis(lag as u64);
        let (sender, receiver) = channel::<Destruction>();
        let run = move || {
            for Destruction { destroy, pointer } in receiver {
                std::thread::sleep(lag);
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

/// What a graph or an executable graph keeps alive. Cloning retains the user objects, dropping releases them.
#[derive(Default)]
pub struct Held {
    objects: BTreeMap<Handle, (Arc<UserObject>, u32)>,
    blocks: Vec<Arc<GraphBlock>>,
}

impl Held {
    /// Takes over references that the caller owned.
    pub fn adopt(&mut self, object: &Arc<UserObject>, count: u32) {
        self.objects.entry(object.handle).or_insert_with(|| (object.clone(), 0)).1 += count;
    }

    pub fn adopt_block(&mut self, block: GraphBlock) {
        self.blocks.push(Arc::new(block));
    }

    /// Whether the graph allocates memory.
    pub fn has_blocks(&self) -> bool {
        !self.blocks.is_empty()
    }

    /// Whether memory at this address was allocated in the graph.
    pub fn has_block(&self, address: Address) -> bool {
        self.blocks.iter().any(|block| block.base == address)
    }

    /// Takes over everything of another holder.
    pub fn absorb(&mut self, mut other: Held) {
        for (object, count) in std::mem::take(&mut other.objects).into_values() {
            self.adopt(&object, count);
        }
        self.blocks.append(&mut other.blocks);
    }

    pub fn release(&mut self, object: &Arc<UserObject>, count: u32) -> Result<(), Code> {
        let held = self.objects.get_mut(&object.handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        held.1 = held.1.checked_sub(count).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if held.1 == 0 {
            self.objects.remove(&object.handle);
        }
        object.release(count)
    }
}

impl Clone for Held {
    fn clone(&self) -> Self {
        self.objects.values().for_each(|(object, count)| object.retain(*count));
        Held { objects: self.objects.clone(), blocks: self.blocks.clone() }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for (object, count) in self.objects.values() {
            // Cannot underflow: this holder owns these references.
            let _ = object.release(*count);
        }
    }
}

/// Memory that a capture allocated. Its address is fixed. It lives until the graph, its copies and executable graphs are gone, or until
/// the application frees it.
pub struct GraphBlock {
    pub base: Address,
    pub buffer_id: u64,
}

impl Drop for GraphBlock {
    fn drop(&mut self) {
        let Some(simulator) = started() else { return };
        let mut ranges = lock(&simulator.ranges);
        // The application may have freed the block, and another range may lie there now.
        let is_it = ranges.at(self.base).is_some_and(|range| range.buffer_id == self.buffer_id);
        let taken = is_it.then(|| ranges.remove(self.base));
        drop(ranges);
        drop(taken);
    }
}
