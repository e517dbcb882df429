//! Memory that stands in for a buffer that cannot be registered, in a call whose other ranks' are: NCCL's own (so that it can be
//! exported as NCCL exports), registered, and there before this rank offers anything.

use nccl_sys::{ncclComm_t, ncclSuccess};

use crate::forward::registration;
use windlass_base::gpu::{Address, Home};
use windlass_base::stats::count;
use windlass_base::stats::registration::Registered;

/// Pieces begin at multiples of this.
const ALIGNMENT: u64 = 4096;
/// So many times as much must be free on the device, so that a program that needs the rest gets it.
const SPARE: u64 = 4;

/// What is copied on a call's stream, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Copy {
    pub from: Address,
    pub to: Address,
    pub bytes: u64,
}

/// One allocation of NCCL's, which its record is of.
#[derive(Debug)]
struct Block {
    base: Address,
    bytes: u64,
    registration: usize,
}

/// A communicator's.
#[derive(Debug)]
pub(crate) struct Staging {
    /// The first is for any one call of the size that was offered; others are for groups of several.
    blocks: Vec<Block>,
    /// What NCCL did not let go of: kept to the end.
    stuck: Vec<Block>,
    bytes_max: u64,
    handle_types: u64,
    /// Which block the next piece is of, and how much of that is taken by calls of the open group, which run at its end.
    current: usize,
    taken: u64,
}

impl Staging {
    /// None yet, and never more than so many bytes at once but for groups that need several calls' worth.
    pub(crate) fn new(bytes_max: u64) -> Staging {
        Staging { blocks: Vec::new(), stuck: Vec::new(), bytes_max, handle_types: 0, current: 0, taken: 0 }
    }

    /// By what NCCL exports memory, as the driver's mask; 0 while there is none.
    pub(crate) fn handle_types(&self) -> u64 {
        self.handle_types
    }

    /// The largest size, as a power of two, for which a communicator of so many ranks could ever have room.
    pub(crate) fn size_max(&self, ranks: u32) -> u8 {
        (0..=40).rev().find(|size| needed(*size, ranks) <= self.bytes_max).unwrap_or(0)
    }

    /// All that there is, also what NCCL keeps.
    pub(crate) fn bytes(&self) -> u64 {
        self.blocks.iter().chain(&self.stuck).map(|block| block.bytes).sum()
    }

    /// Whether there is none, nor anything that NCCL keeps.
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.stuck.is_empty()
    }

    /// Whether a call that needs so many bytes in two pieces has them.
    pub(crate) fn has_room_for(&self, bytes: u64) -> bool {
        self.blocks.first().is_some_and(|block| block.bytes >= bytes)
    }

    /// Gets room for such a call, while nothing uses what there is; false if that is over the limit, or would leave little memory
    /// to the program.
    pub(crate) fn prepare(&mut self, home: &Home, real: usize, bytes: u64) -> bool {
        let Ok(entered) = home.enter() else { return false };
        let free = home.driver.free_bytes().unwrap_or(0);
        if bytes > self.bytes_max || free / SPARE < bytes {
            return false;
        }
        let Some(block) = Block::new(home, real, bytes) else { return false };
        self.handle_types = home.driver.handle_types(block.base);
        (self.current, self.taken) = (0, 0);
        // After the new one is there: what was offered holds all the time.
        let old = std::mem::replace(&mut self.blocks, vec![block]);
        self.end_each(old, home, real);
        drop(entered);
        true
    }

    /// No call has any of it that NCCL has not begun.
    pub(crate) fn begin(&mut self) {
        (self.current, self.taken) = (0, 0);
    }

    /// A piece for a call; none if there is no memory at all.
    pub(crate) fn take(&mut self, home: &Home, real: usize, bytes: u64) -> Option<Address> {
        let piece = bytes.checked_next_multiple_of(ALIGNMENT)?;
        while self
            .blocks
            .get(self.current)
            .is_some_and(|block| block.bytes.saturating_sub(self.taken) < piece)
        {
            (self.current, self.taken) = (self.current + 1, 0);
        }
        if self.current == self.blocks.len() {
            let _entered = home.enter().ok()?;
            self.blocks.push(Block::new(home, real, piece)?);
        }
        let place = self.blocks.get(self.current)?.base + self.taken;
        self.taken += piece;
        Some(place)
    }

    /// Whether a group has needed more than one call does.
    pub(crate) fn is_grown(&self) -> bool {
        self.blocks.len() > 1
    }

    /// Gives back what only a group has needed, while nothing uses any of it.
    pub(crate) fn shrink(&mut self, home: &Home, real: usize) {
        let Ok(_entered) = home.enter() else { return };
        let more = self.blocks.split_off(1.min(self.blocks.len()));
        self.end_each(more, home, real);
    }

    /// Gives all back, while NCCL's communicator lives and nothing uses it any more; whether it could.
    pub(crate) fn end(&mut self, home: &Home, real: usize) -> bool {
        if self.is_empty() {
            return true;
        }
        let Ok(_entered) = home.enter() else { return false };
        let blocks = std::mem::take(&mut self.blocks);
        self.end_each(blocks, home, real);
        self.stuck.is_empty()
    }

    /// All of them, also after one that stays.
    fn end_each(&mut self, blocks: Vec<Block>, home: &Home, real: usize) {
        self.stuck.extend(blocks.into_iter().filter(|block| !block.end(home, real)));
    }
}

impl Staging {
    /// Gives the memory back, of which NCCL keeps its record.
    pub(crate) fn free(&mut self) {
        self.blocks.drain(..).chain(self.stuck.drain(..)).for_each(|block| block.free());
    }
}

/// What a call of that size needs, a power of two, of so many ranks: the result and one rank's part, each from a multiple of the
/// alignment.
pub(crate) fn needed(size: u8, ranks: u32) -> u64 {
    let bytes = 1_u64.checked_shl(u32::from(size)).unwrap_or(u64::MAX);
    bytes.saturating_add(bytes / u64::from(ranks.max(1))).saturating_add(2 * ALIGNMENT)
}

impl Block {
    fn new(home: &Home, real: usize, bytes: u64) -> Option<Block> {
        let began = std::time::Instant::now();
        let base = registration::allocate(bytes as usize).map_err(|code| {
            log::info!("no staging memory of {bytes} bytes: {code:?}");
        });
        let base = base.ok()?;
        let registration = registration::register(real as ncclComm_t, base as usize, bytes as usize);
        count::registered_now(Registered::StagingBytes, bytes as i64);
        let block = Block { base, bytes, registration: registration.unwrap_or(0) };
        if block.registration == 0 {
            // NCCL registers nothing here, whatever it says.
            block.free();
            return None;
        }
        let (device, took) = (home.device, began.elapsed().as_micros());
        log::debug!("device {device}: {bytes} bytes of staging memory in {took} us");
        Some(block)
    }

    /// Whether it could.
    fn end(&self, home: &Home, real: usize) -> bool {
        let code = registration::deregister(real as ncclComm_t, self.registration);
        if code != ncclSuccess {
            // NCCL and peers still know it: it stays.
            log::warn!("device {}: NCCL keeps {} bytes of staging memory: {code:?}", home.device, self.bytes);
            return false;
        }
        self.free();
        true
    }

    fn free(&self) {
        count::registered_now(Registered::StagingBytes, -(self.bytes as i64));
        let code = registration::free(self.base);
        if code != ncclSuccess {
            log::warn!("{} bytes of staging memory are not freed: {code:?}", self.bytes);
        }
    }
}
