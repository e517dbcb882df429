//! Memory where cuMem is off (NCCL_CUMEM_ENABLE=0, and unless asked for in 2.18): `ncclMemAlloc` gives memory of cudaMalloc, windows are
//! empty, and the first init of a process frees what it has tried legacy IPC with, which waits for all that runs on its device.

use crate::driver::driver;
use crate::refusal::Outcome;
use crate::settings::settings;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

/// The first release that has cuMem on by itself.
const ON_SINCE: i32 = 21_901;

/// Whether memory is cuMem's. Read once, at the first need, as NCCL does.
pub fn cu_mem() -> bool {
    static ON: OnceLock<bool> = OnceLock::new();
    *ON.get_or_init(|| match std::env::var("NCCL_CUMEM_ENABLE") {
        Ok(text) if !text.is_empty() => text.trim() != "0",
        _ => settings().version >= ON_SINCE,
    })
}

/// What NCCL does once in a process, for the first communicator of several GPUs of which it sees two; here a process sees all.
pub fn try_ipc(ranks: usize) -> Outcome {
    static TRIED: AtomicBool = AtomicBool::new(false);
    if cu_mem() || ranks < 2 || TRIED.swap(true, SeqCst) {
        return Ok(());
    }
    let driver = driver()?;
    driver.free_plain(driver.allocate_plain(IPC_BYTES)?)
}

const IPC_BYTES: usize = 2 << 20;
