//! Staging memory: stands in for a buffer that cannot be registered, in a call that is registered on the other ranks. NCCL allocates it (so that it
//! can be exported like NCCL's own), and it is registered before this rank offers anything.

use nccl_sys::{ncclComm_t, ncclSuccess};

use crate::forward::registration;
use windlass_base::gpu::{Address, Home};
use windlass_base::stats::count;
use windlass_base::stats::resources::Registered;

/// Pieces begin at multiples of this, in bytes.
const ALIGNMENT: u64 = 4096;
/// How many times the requested bytes must be free on the device, so that the program gets the memory it needs.
const SPARE: u64 = 4;

/// A copy on a call's stream, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Copy {
    pub from: Address,
    pub to: Address,
    pub bytes: u64,
}

/// One allocation by NCCL, registered as a whole.
#[derive(Debug)]
struct Block {
    base: Address,
    bytes: u64,
    registration: usize,
}

/// The staging memory of one communicator.
#[derive(Debug)]
pub(crate) struct Staging {
    /// The first block serves any one call of the offered size. The others are for groups of several calls.
    blocks: Vec<Block>,
    /// Blocks that NCCL did not deregister, kept to the end.
    stuck: Vec<Block>,
    bytes_max: u64,
    /// The handle types by which NCCL exports memory, as the driver's mask. 0 while there is no block.
    pub(crate) handle_types: u64,
    /// The block of the next piece, and how many bytes of it the calls of the open group have taken, which run at its end.
    current: usize,
    taken: u64,
}

impl Staging {
    /// No memory yet. `bytes_max` limits it, except for groups that need memory for several calls.
    pub(crate) fn new(bytes_max: u64) -> Staging {
        Staging { blocks: Vec::new(), stuck: Vec::new(), bytes_max, handle_types: 0, current: 0, taken: 0 }
    }

    /// The largest size, as log2 of bytes, for which a communicator of so many ranks could ever have room.
    pub(crate) fn size_max(&self, ranks: u32) -> u8 {
        (0..=40).rev().find(|size| needed(*size, ranks) <= self.bytes_max).unwrap_or(0)
    }

    /// Bytes of all blocks, stuck ones included.
    pub(crate) fn bytes(&self) -> u64 {
        self.blocks.iter().chain(&self.stuck).map(|block| block.bytes).sum()
    }

    /// Whether there is no block, stuck ones included.
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.stuck.is_empty()
    }

    /// Whether the first block has so many bytes, enough for both pieces of a call.
    pub(crate) fn has_room_for(&self, bytes: u64) -> bool {
        self.blocks.first().is_some_and(|block| block.bytes >= bytes)
    }

    /// Replaces all blocks by one of `bytes` bytes, while no call uses them. False if that is over the limit, or would leave the program too little
    /// memory.
    pub(crate) fn prepare(&mut self, home: &Home, real: usize, bytes: u64) -> bool {
        let Ok(entered) = home.enter() else { return false };
        let free = home.driver.free_bytes().unwrap_or(0);
        if bytes > self.bytes_max || free / SPARE < bytes {
            return false;
        }
        let Some(block) = Block::new(home, real, bytes) else { return false };
        self.handle_types = home.driver.handle_types(block.base);
        (self.current, self.taken) = (0, 0);
        // The old blocks end after the new one is there, so that the offer always holds.
        let old = std::mem::replace(&mut self.blocks, vec![block]);
        self.end_each(old, home, real);
        drop(entered);
        true
    }

    /// Starts again at the first piece. No call that NCCL has not begun may have a piece.
    pub(crate) fn begin(&mut self) {
        (self.current, self.taken) = (0, 0);
    }

    /// A piece for a call. Allocates a block if needed. None if there is no memory.
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

    /// Whether a group has needed memory for more than one call.
    pub(crate) fn is_grown(&self) -> bool {
        self.blocks.len() > 1
    }

    /// Frees the blocks that only a group has needed, while no call uses any block.
    pub(crate) fn shrink(&mut self, home: &Home, real: usize) {
        let Ok(_entered) = home.enter() else { return };
        let more = self.blocks.split_off(1.min(self.blocks.len()));
        self.end_each(more, home, real);
    }

    /// Frees all blocks, while NCCL's communicator lives and no call uses them. Returns whether NCCL deregistered all.
    pub(crate) fn end(&mut self, home: &Home, real: usize) -> bool {
        if self.is_empty() {
            return true;
        }
        let Ok(_entered) = home.enter() else { return false };
        let blocks = std::mem::take(&mut self.blocks);
        self.end_each(blocks, home, real);
        self.stuck.is_empty()
    }

    /// Frees all these blocks. Those that NCCL does not deregister are stuck.
    fn end_each(&mut self, blocks: Vec<Block>, home: &Home, real: usize) {
        self.stuck.extend(blocks.into_iter().filter(|block| !block.end(home, real)));
    }

    /// Frees all blocks, though NCCL keeps their registrations.
    pub(crate) fn free(&mut self) {
        self.blocks.drain(..).chain(self.stuck.drain(..)).for_each(|block| block.free());
    }
}

/// Bytes that a call of this size, as log2, needs on so many ranks: the result and one rank's part, each beginning at a multiple of the
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
            // NCCL registers nothing here, even if it returned success.
            block.free();
            return None;
        }
        let (device, took) = (home.device, began.elapsed().as_micros());
        log::debug!("device {device}: {bytes} bytes of staging memory in {took} us");
        Some(block)
    }

    /// Deregisters and frees the block. Returns whether NCCL deregistered it.
    fn end(&self, home: &Home, real: usize) -> bool {
        let code = registration::deregister(real as ncclComm_t, self.registration);
        if code != ncclSuccess {
            // NCCL and peers still use it, so it stays.
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
