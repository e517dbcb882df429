//! The mailboxes of a fabric: what of its device a rank's kernels may have, and how their rings are shaped.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use windlass_kernels::launch::Geometry;

use crate::arena::Holds;
use crate::config::config;
use crate::contract::Contract;
use crate::gpu::{self, Address, Home, Ordinal};
use crate::mailbox::{Calls, Grant, Mailbox, Parts, Refusal, Supply};

/// Blocks of a kernel at most, where nobody sets a limit.
pub(super) const BLOCKS_MAX: u32 = 32;

/// One for each device that had communicators. Kept to the end of the process: to unload code may wait for the device.
/// Held while one is made, by births alone.
static SUPPLIES: Mutex<BTreeMap<Ordinal, Arc<Supply>>> = Mutex::new(BTreeMap::new());

/// What a rank needs of its device to make its mailboxes, acquired before it reports.
#[derive(Debug)]
pub(super) struct Share {
    supply: Arc<Supply>,
    grant: Grant,
}

impl Share {
    /// For a communicator of so many ranks; `ctas_max` is its configuration's limit on blocks, 0 for none.
    pub fn new(device: Ordinal, ranks: u32, ctas_max: u32) -> Result<Share, String> {
        let most = blocks_max(ctas_max);
        let supply = supply(device).map_err(|error| error.to_string())?;
        let least = supply.least_blocks(ranks).min(most);
        let grant = supply.grant(most, least).map_err(|refusal| refusal.to_string())?;
        Ok(Share { supply, grant })
    }

    /// The mailboxes, over the slices of all ranks as this rank's device sees them.
    pub fn mailbox(
        self,
        geometry: Geometry,
        slices: Vec<Address>,
        holds: &Arc<Holds>,
    ) -> Result<Mailbox, Refusal> {
        let holds = holds.clone();
        let hold = Box::new(move |driver: &_, capture| holds.hold(driver, capture));
        Mailbox::new(Parts { supply: self.supply, grant: self.grant, geometry, slices, hold })
    }
}

/// The limit on blocks of a communicator whose configuration says so much, 0 for nothing: what ranks report.
pub(super) fn blocks_max(ctas_max: u32) -> u32 {
    let limits = [ctas_max, config().nccl.ctas_max];
    limits.into_iter().filter(|limit| *limit > 0).fold(BLOCKS_MAX, u32::min)
}

/// The shape of all rings, from what all ranks agreed on. Tags begin at a random number, so that a ring that grows may lie in
/// memory that holds anything, also the lines of a communicator before: what it holds at a tag's place is that very tag once
/// in 2^60 lines.
pub(super) fn geometry(contract: &Contract, rank: u32) -> Geometry {
    let blocks = if contract.ctas_max == 0 { BLOCKS_MAX } else { contract.ctas_max.min(BLOCKS_MAX) };
    let first_tag = contract.birth.number() >> 2 | 1;
    Geometry { first_tag, ..Geometry::recommended(blocks, rank) }
}

/// Whether no mailbox and no graph uses anything of them.
pub(super) fn are_unused() -> bool {
    lock().values().all(|supply| supply.is_unused())
}

/// Lets go of what no communicator uses: when the process ends.
pub(super) fn give_back() {
    let unused: Vec<_> =
        lock().extract_if(.., |_, supply| Arc::strong_count(supply) == 1 && supply.is_unused()).collect();
    drop(unused);
}

fn supply(device: Ordinal) -> Result<Arc<Supply>, Refusal> {
    let mut supplies = lock();
    if let Some(supply) = supplies.get(&device) {
        return Ok(supply.clone());
    }
    let driver = gpu::driver()?;
    let supply = Supply::new(Home::of(driver, device)?, Calls::of(driver))?;
    supplies.insert(device, supply.clone());
    Ok(supply)
}

fn lock() -> MutexGuard<'static, BTreeMap<Ordinal, Arc<Supply>>> {
    SUPPLIES.lock().unwrap_or_else(PoisonError::into_inner)
}
