//! `ncclMemAlloc` and `ncclMemFree`: memory of the driver, and the table of blocks that were not freed.

use crate::driver::{Mapping, driver};
use crate::leaks;
use crate::legacy;
use crate::refusal::{Outcome, lock};
use crate::settings::settings;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Mutex, Once};

/// Blocks by address, with their size in bytes as requested and as allocated.
static BLOCKS: Mutex<BTreeMap<usize, (usize, usize)>> = Mutex::new(BTreeMap::new());

/// How often memory was allocated; `FREED`: how often it was freed.
pub static MADE: AtomicU64 = AtomicU64::new(0);
pub static FREED: AtomicU64 = AtomicU64::new(0);

/// Allocates memory and gives its address; 0 for 0 bytes, as cudaMalloc does.
pub fn allocate(bytes: usize) -> Outcome<usize> {
    if bytes == 0 {
        return Ok(0);
    }
    leaks::watch_exit();
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let _ = driver().and_then(|driver| driver.before_leaks(leaks::free_kept));
    });
    std::thread::sleep(settings().allocation);
    let (address, whole) = match legacy::cu_mem() {
        true => driver()?.allocate_virtual(bytes)?,
        false => (driver()?.allocate_plain(bytes)?, bytes),
    };
    MADE.fetch_add(1, SeqCst);
    lock(&BLOCKS).insert(address, (bytes, whole));
    Ok(address)
}

pub fn free(address: usize) -> Outcome {
    if address == 0 {
        return Ok(());
    }
    // Removed first: another thread may get the address again and enter it.
    let bytes = lock(&BLOCKS).remove(&address);
    let freed = match legacy::cu_mem() {
        true => driver()?.free(address),
        false => driver()?.free_plain(address),
    };
    match (bytes, &freed) {
        (Some(_), Ok(())) => drop(FREED.fetch_add(1, SeqCst)),
        (Some(bytes), Err(_)) => drop(lock(&BLOCKS).insert(address, bytes)),
        (None, _) => {}
    }
    freed
}

/// Address and requested bytes of all blocks that were not freed.
pub fn live() -> Vec<(usize, usize)> {
    lock(&BLOCKS).iter().map(|(address, (bytes, _))| (*address, *bytes)).collect()
}

/// Frees all blocks at the process's end, when no context is current any more.
pub fn free_all() {
    let Ok(driver) = driver() else { return };
    for (at, (_, bytes)) in std::mem::take(&mut *lock(&BLOCKS)) {
        match legacy::cu_mem() {
            true => driver.unmap(Mapping { of: at, bytes, at }),
            false => drop(driver.free_plain(at)),
        }
    }
}
