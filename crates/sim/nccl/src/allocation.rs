//! `ncclMemAlloc` and `ncclMemFree`: virtual memory of the driver, and who has not given it back.

use crate::driver::driver;
use crate::leaks;
use crate::refusal::{Outcome, lock};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Blocks by address, with their size in bytes as asked for.
static BLOCKS: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// Gives the address; 0 for no bytes, as cudaMalloc does.
pub fn allocate(bytes: usize) -> Outcome<usize> {
    if bytes == 0 {
        return Ok(0);
    }
    leaks::watch_exit();
    let (address, _) = driver()?.allocate_virtual(bytes)?;
    lock(&BLOCKS).insert(address, bytes);
    Ok(address)
}

pub fn free(address: usize) -> Outcome {
    if address == 0 {
        return Ok(());
    }
    driver()?.free(address)?;
    lock(&BLOCKS).remove(&address);
    Ok(())
}

/// Address and size of all blocks that live.
pub fn live() -> Vec<(usize, usize)> {
    lock(&BLOCKS).iter().map(|(address, bytes)| (*address, *bytes)).collect()
}
