//! The pool's ledger: which block belongs to whom. Pure.

use std::collections::{BTreeMap, BTreeSet};

use windlass_base::gpu::{Address, Ordinal};
use windlass_base::range::Range;

/// A block of `ncclMemAlloc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// Its number in this process, from 1, in the order in which blocks were made.
    pub serial: u64,
    /// The device whose memory it is.
    pub device: Ordinal,
    /// First address.
    pub base: Address,
    /// Its size, as the driver reports it.
    pub bytes: u64,
    /// The driver's id of the memory.
    pub buffer_id: u64,
    /// How often it was handed out. 1 when it was made.
    pub life: u64,
    /// Whether the program holds it.
    pub held: bool,
}

/// A registration by the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Registration {
    /// The communicator, by its handle.
    pub communicator: usize,
    /// NCCL's handle of the registration, or of the window.
    pub handle: usize,
}

/// The windows over a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Over {
    /// Windows that are live in NCCL.
    pub windows: u32,
    /// Those of them that the program has still to end.
    pub owed: u32,
}

impl Over {
    /// The windows that the program has ended.
    pub(crate) fn cached(self) -> u32 {
        self.windows.saturating_sub(self.owed)
    }
}

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The program holds it.
    Held,
    /// Kept, to be handed out.
    Kept,
    /// To be freed once it has no windows.
    Leaving,
}

/// What happened to a block that was given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Given {
    /// It is kept, and these blocks leave for it.
    Kept { over: Vec<Address> },
    /// It has left the ledger.
    LetGo,
    /// The program did not hold it.
    NotHeld,
}

/// Totals of the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sums {
    pub held_blocks: usize,
    pub held_bytes: u64,
    pub kept_blocks: usize,
    pub kept_bytes: u64,
    pub leaving_blocks: usize,
    pub leaving_bytes: u64,
}

#[derive(Debug)]
struct Entry {
    block: Block,
    state: State,
    is_tainted: bool,
    over: Over,
    /// When its state last changed, in milliseconds.
    since: u64,
    /// Registrations by the program that have not ended.
    registrations: u32,
}

/// Kept blocks of one device and size. Never empty.
#[derive(Debug)]
struct Shelf {
    /// By serial, and the lowest is handed out first. So ranks that free in different orders still take corresponding blocks.
    blocks: BTreeMap<u64, Address>,
    /// When one was last put here, or taken.
    used: u64,
}

#[derive(Debug, Default)]
pub(crate) struct PoolLedger {
    entries: BTreeMap<Address, Entry>,
    /// Addresses by serial.
    serials: BTreeMap<u64, Address>,
    shelves: BTreeMap<(Ordinal, u64), Shelf>,
    /// For each registration, the serials of the blocks of each call that returned it: NCCL returns the same handle for a range again.
    registrations: BTreeMap<Registration, Vec<Vec<u64>>>,
    sums: Sums,
    /// The serial of the block that was made last.
    last_serial: u64,
    now: u64,
    /// The time of the clock, in milliseconds.
    time: u64,
}

impl PoolLedger {
    /// Sets the time of all that happens from now on.
    pub(crate) fn at(&mut self, time: u64) {
        self.time = time;
    }

    pub(crate) fn sums(&self) -> Sums {
        self.sums
    }

    /// Enters a new block, which the program holds. Blocks known in this range have been freed unseen.
    pub(crate) fn enter(&mut self, device: Ordinal, range: Range, buffer_id: u64) {
        for base in self.within(range) {
            self.remove(base);
        }
        self.last_serial += 1;
        let serial = self.last_serial;
        let block =
            Block { serial, device, base: range.base, bytes: range.bytes, buffer_id, life: 1, held: true };
        let entry = Entry {
            block,
            state: State::Held,
            is_tainted: false,
            over: Over::default(),
            since: 0,
            registrations: 0,
        };
        self.entries.insert(range.base, entry);
        self.serials.insert(serial, range.base);
        self.count(State::Held, range.bytes, true);
    }

    /// Hands out the kept block of this device and size that was made first.
    pub(crate) fn take(&mut self, device: Ordinal, bytes: u64) -> Option<Block> {
        let now = self.tick();
        let shelf = self.shelves.get_mut(&(device, bytes))?;
        shelf.used = now;
        let base = *shelf.blocks.first_key_value()?.1;
        self.move_to(base, State::Held);
        let entry = self.entries.get_mut(&base)?;
        entry.block.life += 1;
        Some(entry.block)
    }

    /// Takes a block back. Keeps at most `bytes_max` bytes on its device: the sizes used longest ago leave first, and of
    /// one size the block that was made last.
    pub(crate) fn give_back(&mut self, block: &Block, bytes_max: u64) -> Given {
        let same = |entry: &&Entry| {
            let Block { serial, life, .. } = entry.block;
            entry.state == State::Held && (serial, life) == (block.serial, block.life)
        };
        let Some(entry) = self.entries.get(&block.base).filter(same) else { return Given::NotHeld };
        let must_go = entry.is_tainted || entry.registrations > 0 || block.bytes > bytes_max;
        if must_go {
            return match self.let_go(block.base) {
                Some(_) => Given::LetGo,
                None => Given::Kept { over: Vec::new() },
            };
        }
        self.move_to(block.base, State::Kept);
        let mut over = Vec::new();
        while self.kept_on(block.device) > bytes_max {
            let Some(oldest) = self.oldest(block.device) else { break };
            over.extend(self.let_go(oldest));
        }
        Given::Kept { over }
    }

    /// Removes all blocks that are kept on a device. Those with ended windows are leaving instead.
    pub(crate) fn trim(&mut self, device: Ordinal) -> Vec<Address> {
        let all: Vec<Address> =
            self.shelves_of(device).flat_map(|(_, shelf)| shelf.blocks.values().copied()).collect();
        all.into_iter().filter_map(|base| self.let_go(base)).collect()
    }

    /// Removes blocks that were kept for longer than `longest`, in milliseconds. Those with ended windows are leaving instead.
    pub(crate) fn age(&mut self, longest: u64) -> Vec<Address> {
        let latest = self.time.saturating_sub(longest);
        let is_old = |base: &Address| self.entries.get(base).is_some_and(|entry| entry.since < latest);
        let kept = self.shelves.values().flat_map(|shelf| shelf.blocks.values().copied());
        let old: Vec<Address> = kept.filter(is_old).collect();
        old.into_iter().filter_map(|base| self.let_go(base)).collect()
    }

    /// Removes a block whose memory is gone.
    pub(crate) fn forget(&mut self, block: &Block) {
        if self.entries.get(&block.base).is_some_and(|entry| entry.block.serial == block.serial) {
            self.remove(block.base);
        }
    }

    /// The block that holds an address.
    pub(crate) fn find(&self, address: Address) -> Option<(Block, State)> {
        let (_, entry) = self.entries.range(..=address).next_back()?;
        (address - entry.block.base < entry.block.bytes).then_some((entry.block, entry.state))
    }

    /// Never hands this block out again. If it is kept, it is leaving now.
    pub(crate) fn taint(&mut self, serial: u64) {
        let Some(entry) = self.by_serial(serial) else { return };
        entry.is_tainted = true;
        let (base, state) = (entry.block.base, entry.state);
        if state == State::Kept {
            self.move_to(base, State::Leaving);
        }
    }

    /// Taints all blocks of a device, or of all devices.
    pub(crate) fn taint_all(&mut self, device: Option<Ordinal>) {
        let is_one = |entry: &&Entry| device.is_none_or(|device| entry.block.device == device);
        let all: Vec<u64> = self.entries.values().filter(is_one).map(|entry| entry.block.serial).collect();
        all.into_iter().for_each(|serial| self.taint(serial));
    }

    pub(crate) fn taint_within(&mut self, range: Range) {
        for base in self.within(range) {
            if let Some(entry) = self.entries.get_mut(&base).filter(|entry| entry.state == State::Held) {
                entry.is_tainted = true;
            }
        }
    }

    pub(crate) fn register(&mut self, range: Range, registration: Registration) {
        let bases = self.within(range);
        let serials: Vec<u64> = bases
            .iter()
            .filter_map(|base| {
                let entry = self.entries.get_mut(base)?;
                entry.registrations += 1;
                Some(entry.block.serial)
            })
            .collect();
        if !serials.is_empty() {
            self.registrations.entry(registration).or_default().push(serials);
        }
    }

    pub(crate) fn registered_by(&self, registration: Registration) -> Vec<Range> {
        let serials = self.registrations.get(&registration).and_then(|calls| calls.last());
        let of = |serial: &u64| {
            let Block { base, bytes, .. } = self.entries.get(self.serials.get(serial)?)?.block;
            Some(Range { base, bytes })
        };
        serials.into_iter().flatten().filter_map(of).collect()
    }

    pub(crate) fn deregister(&mut self, registration: Registration) {
        let Some(calls) = self.registrations.get_mut(&registration) else { return };
        let ended = calls.pop().unwrap_or_default();
        if calls.is_empty() {
            self.registrations.remove(&registration);
        }
        for serial in ended {
            if let Some(entry) = self.by_serial(serial) {
                entry.registrations = entry.registrations.saturating_sub(1);
            }
        }
    }

    pub(crate) fn set_windows(&mut self, serial: u64, over: Over) {
        if let Some(entry) = self.by_serial(serial) {
            entry.over = over;
        }
    }

    pub(crate) fn leaving(&self) -> Vec<Block> {
        if self.sums.leaving_blocks == 0 {
            return Vec::new();
        }
        let leaving = self.entries.values().filter(|entry| entry.state == State::Leaving);
        leaving.map(|entry| entry.block).collect()
    }

    pub(crate) fn leave(&mut self, serial: u64) -> Option<Address> {
        let base = self.by_serial(serial).filter(|entry| entry.state == State::Leaving)?.block.base;
        self.remove(base);
        Some(base)
    }

    pub(crate) fn kept_on(&self, device: Ordinal) -> u64 {
        self.shelves_of(device).map(|((_, bytes), shelf)| bytes * shelf.blocks.len() as u64).sum()
    }

    pub(crate) fn devices(&self) -> BTreeSet<Ordinal> {
        self.shelves.keys().map(|(device, _)| *device).collect()
    }

    fn shelves_of(&self, device: Ordinal) -> impl Iterator<Item = (&(Ordinal, u64), &Shelf)> {
        self.shelves.range((device, 0)..=(device, u64::MAX))
    }

    /// The block that leaves next when too much is kept.
    fn oldest(&self, device: Ordinal) -> Option<Address> {
        let (_, shelf) = self.shelves_of(device).min_by_key(|(_, shelf)| shelf.used)?;
        shelf.blocks.last_key_value().map(|(_, base)| *base)
    }

    /// Removes a block. None if it has ended windows, which must go first: then it is leaving.
    fn let_go(&mut self, base: Address) -> Option<Address> {
        if self.entries.get(&base)?.over.cached() > 0 {
            self.move_to(base, State::Leaving);
            return None;
        }
        self.remove(base);
        Some(base)
    }

    fn remove(&mut self, base: Address) {
        let Some(entry) = self.entries.remove(&base) else { return };
        let Block { serial, device, bytes, .. } = entry.block;
        self.serials.remove(&serial);
        self.count(entry.state, bytes, false);
        if entry.state == State::Kept {
            self.unshelve(device, bytes, serial);
        }
        if entry.registrations > 0 {
            self.registrations.retain(|_, calls| {
                calls.iter_mut().for_each(|serials| serials.retain(|other| *other != serial));
                calls.retain(|serials| !serials.is_empty());
                !calls.is_empty()
            });
        }
    }

    fn move_to(&mut self, base: Address, state: State) {
        let (now, time) = (self.tick(), self.time);
        let Some(entry) = self.entries.get_mut(&base) else { return };
        entry.since = time;
        let before = std::mem::replace(&mut entry.state, state);
        entry.block.held = state == State::Held;
        let Block { serial, device, bytes, .. } = entry.block;
        self.count(before, bytes, false);
        self.count(state, bytes, true);
        if before == State::Kept {
            self.unshelve(device, bytes, serial);
        }
        if state == State::Kept {
            let shelf = self.shelves.entry((device, bytes));
            let shelf = shelf.or_insert_with(|| Shelf { blocks: BTreeMap::new(), used: now });
            shelf.used = now;
            shelf.blocks.insert(serial, base);
        }
    }

    fn unshelve(&mut self, device: Ordinal, bytes: u64, serial: u64) {
        if let Some(shelf) = self.shelves.get_mut(&(device, bytes)) {
            shelf.blocks.remove(&serial);
            if shelf.blocks.is_empty() {
                self.shelves.remove(&(device, bytes));
            }
        }
    }

    fn within(&self, range: Range) -> Vec<Address> {
        let before = self.find(range.base).map(|(block, _)| block.base);
        let after = range.base.saturating_add(1)..range.base.saturating_add(range.bytes);
        let after = if after.is_empty() { 0..0 } else { after };
        before.into_iter().chain(self.entries.range(after).map(|(base, _)| *base)).collect()
    }

    fn by_serial(&mut self, serial: u64) -> Option<&mut Entry> {
        self.entries.get_mut(self.serials.get(&serial)?)
    }

    fn count(&mut self, state: State, bytes: u64, more: bool) {
        let sums = &mut self.sums;
        let (blocks, sum) = match state {
            State::Held => (&mut sums.held_blocks, &mut sums.held_bytes),
            State::Kept => (&mut sums.kept_blocks, &mut sums.kept_bytes),
            State::Leaving => (&mut sums.leaving_blocks, &mut sums.leaving_bytes),
        };
        if more {
            (*blocks, *sum) = (*blocks + 1, *sum + bytes);
        } else {
            (*blocks, *sum) = (blocks.saturating_sub(1), sum.saturating_sub(bytes));
        }
    }

    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }
}

#[cfg(test)]
mod tests;
