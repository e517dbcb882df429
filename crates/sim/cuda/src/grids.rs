//! A record of the kernels that ran and their numbers of blocks, for tests that check grid sizes (`simTakeGrids`).

use crate::device::Ordinal;
use crate::module::Launch;
use crate::sync::lock;
use std::collections::VecDeque;
use std::ffi::{CStr, CString};
use std::sync::Mutex;

/// Launches that are kept; beyond that the oldest is forgotten.
const KEPT_MAX: usize = 4096;

struct Ran {
    device: Ordinal,
    name: CString,
    blocks: u32,
}

/// `None` until the first [`take`]: only then launches are recorded.
static RAN: Mutex<Option<VecDeque<Ran>>> = Mutex::new(None);

/// Records a kernel that begins, on a stream or as a node of a graph.
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

/// Takes the blocks of each recorded launch on a device of a kernel whose name begins with `prefix`, oldest first.
pub fn take(device: Ordinal, prefix: &CStr) -> Vec<u32> {
    let mut ran = lock(&RAN);
    let is_wanted =
        |kernel: &Ran| kernel.device == device && kernel.name.to_bytes().starts_with(prefix.to_bytes());
    let ran = ran.get_or_insert_default();
    let taken = ran.iter().filter(|kernel| is_wanted(kernel)).map(|kernel| kernel.blocks).collect();
    ran.retain(|kernel| !is_wanted(kernel));
    taken
}
