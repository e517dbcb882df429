//! The stack memory of a context's kernels, of which only the waiting is simulated. A launch that needs more stack a thread
//! than any before waits until no kernel of the context runs: beside a kernel that never ends it waits for ever (seen on H200).
//! Kernels of modules count as running; the simulated NCCL calls [`need`] where a kernel of NCCL would need more.

use crate::context::Context;
use crate::sync::{lock, wait};
use crate::table::Handle;
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex};

/// The stack of a new context, in bytes a thread.
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

/// Runs a kernel; meanwhile [`need`] waits in this context.
pub fn while_running(context: Handle, kernel: impl FnOnce()) {
    of(&mut lock(&STACKS), context).running += 1;
    kernel();
    of(&mut lock(&STACKS), context).running -= 1;
    LESS_RUNS.notify_all();
}

/// Grows the context's stack to `bytes` a thread, for the launch of a kernel that needs them. Waits for running kernels if it grows.
pub fn need(context: &Context, bytes: usize) {
    let mut stacks = lock(&STACKS);
    while of(&mut stacks, context.handle).bytes < bytes && of(&mut stacks, context.handle).running > 0 {
        stacks = wait(&LESS_RUNS, stacks);
    }
    let stack = of(&mut stacks, context.handle);
    stack.bytes = stack.bytes.max(bytes);
}
