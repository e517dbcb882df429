//! Memory for what kernels keep on their stacks, for all threads that fit on a device. It grows at the launch of a kernel
//! that needs more a thread than any before, and only when nothing runs: a launch beside a kernel that waits for ever waits,
//! too (seen on H200). Kernels of modules run; what needs more is `libnccl`'s, by [`need`].

use crate::context::Context;
use crate::sync::{lock, wait};
use crate::table::Handle;
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex};

/// What a context has from the start, in bytes a thread.
const AT_FIRST: usize = 1024;

struct Stack {
    bytes: usize,
    running: usize,
}

static STACKS: Mutex<BTreeMap<Handle, Stack>> = Mutex::new(BTreeMap::new());
static LESS_RUNS: Condvar = Condvar::new();

fn of(stacks: &mut BTreeMap<Handle, Stack>, context: Handle) -> &mut Stack {
    stacks.entry(context).or_insert(Stack { bytes: AT_FIRST, running: 0 })
}

/// A kernel of a context runs.
pub fn while_running(context: Handle, kernel: impl FnOnce()) {
    of(&mut lock(&STACKS), context).running += 1;
    kernel();
    of(&mut lock(&STACKS), context).running -= 1;
    LESS_RUNS.notify_all();
}

/// A kernel that needs so many bytes a thread is launched.
pub fn need(context: &Context, bytes: usize) {
    let mut stacks = lock(&STACKS);
    while of(&mut stacks, context.handle).bytes < bytes && of(&mut stacks, context.handle).running > 0 {
        stacks = wait(&LESS_RUNS, stacks);
    }
    let stack = of(&mut stacks, context.handle);
    stack.bytes = stack.bytes.max(bytes);
}
