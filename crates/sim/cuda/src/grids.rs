//! Which grids ran, for tests that hold them to something.

use crate::device::Ordinal;
use crate::module::Launch;
use crate::sync::lock;
use std::collections::VecDeque;
use std::ffi::{CStr, CString};
use std::sync::Mutex;

/// The oldest go where nobody takes them.
const KEPT_MAX: usize = 4096;

struct Ran {
    device: Ordinal,
    name: CString,
    blocks: u32,
}

/// None until somebody asks.
static RAN: Mutex<Option<VecDeque<Ran>>> = Mutex::new(None);

/// A kernel begins: on a stream, or as a node of a graph.
pub fn ran(launch: &Launch) {
    let mut ran = lock(&RAN);
    let Some(ran) = ran.as_mut() else { return };
    if ran.len() == KEPT_MAX {
        ran.pop_front();
    }
    let shape = &launch.shape;
    let (name, blocks) = (launch.function.name.clone(), shape.grid.iter().product());
    ran.push_back(Ran { device: shape.device, name, blocks });
}

/// Blocks of the kernels of a device whose names begin so, and forgets them.
pub fn take(device: Ordinal, prefix: &CStr) -> Vec<u32> {
    let mut ran = lock(&RAN);
    let is_wanted =
        |kernel: &Ran| kernel.device == device && kernel.name.to_bytes().starts_with(prefix.to_bytes());
    let ran = ran.get_or_insert_default();
    let taken = ran.iter().filter(|kernel| is_wanted(kernel)).map(|kernel| kernel.blocks).collect();
    ran.retain(|kernel| !is_wanted(kernel));
    taken
}
