//! Memory while cuMem is off: with `NCCL_CUMEM_ENABLE=0`, and by default before 2.19.1. `ncclMemAlloc` gives memory of cudaMalloc, and
//! window handles are null. The first init of a process tries legacy IPC with a buffer; freeing that waits for all work on its device.

use crate::driver::driver;
use crate::refusal::Outcome;
use crate::settings::settings;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

/// The first release that has cuMem on by default.
const ON_SINCE: i32 = 21_901;

/// Whether cuMem is on. Read once, at the first call, as NCCL does.
pub fn cu_mem() -> bool {
    static ON: OnceLock<bool> = OnceLock::new();
    *ON.get_or_init(|| match std::env::var("NCCL_CUMEM_ENABLE") {
        Ok(text) if !text.is_empty() => text.trim() != "0",
        _ => settings().version >= ON_SINCE,
    })
}

/// Tries legacy IPC, as NCCL does once in a process: for its first communicator of several GPUs, if the process sees two of them. Here a
/// process sees all.
pub fn try_ipc(ranks: usize) -> Outcome {
    static TRIED: AtomicBool = AtomicBool::new(false);
    if cu_mem() || ranks < 2 || TRIED.swap(true, SeqCst) {
        return Ok(());
    }
    let driver = driver()?;
    driver.free_plain(driver.allocate_plain(IPC_BYTES)?)
}

const IPC_BYTES: usize = 2 << 20;
