//! The pool's ledger: which block belongs to whom. Pure.

use std::cmp::Reverse;
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

impl Entry {
    /// Blocks of one device and size can stand for each other.
    fn class(&self) -> (Ordinal, u64) {
        (self.block.device, self.block.bytes)
    }

    fn move_to(&mut self, state: State, time: u64) {
        self.state = state;
        self.block.held = state == State::Held;
        self.since = time;
    }

    fn taint(&mut self, time: u64) {
        self.is_tainted = true;
        if self.state == State::Kept {
            self.move_to(State::Leaving, time);
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct PoolLedger {
    entries: BTreeMap<Address, Entry>,
    /// The devices and sizes of which a block was kept, the one used longest ago first.
    used: Vec<(Ordinal, u64)>,
    /// For each registration, the serials of the blocks of each call that returned it: NCCL returns the same handle for a range again.
    registrations: BTreeMap<Registration, Vec<Vec<u64>>>,
    /// The serial of the block that was made last.
    last_serial: u64,
    /// The time of the clock, in milliseconds.
    time: u64,
}

impl PoolLedger {
    /// Sets the time of all that happens from now on.
    pub(crate) fn at(&mut self, time: u64) {
        self.time = time;
    }

    pub(crate) fn sums(&self) -> Sums {
        let mut sums = Sums::default();
        for Entry { block, state, .. } in self.entries.values() {
            let (blocks, bytes) = match state {
                State::Held => (&mut sums.held_blocks, &mut sums.held_bytes),
                State::Kept => (&mut sums.kept_blocks, &mut sums.kept_bytes),
                State::Leaving => (&mut sums.leaving_blocks, &mut sums.leaving_bytes),
            };
            *blocks += 1;
            *bytes += block.bytes;
        }
        sums
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
    }

    /// Hands out the kept block of this device and size that was made first. So ranks that free in different orders still take
    /// corresponding blocks.
    pub(crate) fn take(&mut self, device: Ordinal, bytes: u64) -> Option<Block> {
        let alike = self.kept().filter(|entry| entry.class() == (device, bytes));
        let base = alike.min_by_key(|entry| entry.block.serial)?.block.base;
        self.use_now((device, bytes));
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
        self.use_now((block.device, block.bytes));
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
        self.let_all_go(|entry| entry.block.device == device)
    }

    /// Removes blocks that were kept for longer than `longest`, in milliseconds. Those with ended windows are leaving instead.
    pub(crate) fn age(&mut self, longest: u64) -> Vec<Address> {
        let latest = self.time.saturating_sub(longest);
        self.let_all_go(|entry| entry.since < latest)
    }

    fn let_all_go(&mut self, is_one: impl Fn(&Entry) -> bool) -> Vec<Address> {
        let all: Vec<Address> =
            self.kept().filter(|entry| is_one(entry)).map(|entry| entry.block.base).collect();
        all.into_iter().filter_map(|base| self.let_go(base)).collect()
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
        let time = self.time;
        if let Some(entry) = self.by_serial(serial) {
            entry.taint(time);
        }
    }

    /// Taints all blocks of a device, or of all devices.
    pub(crate) fn taint_all(&mut self, device: Option<Ordinal>) {
        let all = self.entries.values_mut();
        for entry in all.filter(|entry| device.is_none_or(|device| entry.block.device == device)) {
            entry.taint(self.time);
        }
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
            let mut blocks = self.entries.values().map(|entry| entry.block);
            let Block { base, bytes, .. } = blocks.find(|block| block.serial == *serial)?;
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
        let leaving = self.entries.values().filter(|entry| entry.state == State::Leaving);
        leaving.map(|entry| entry.block).collect()
    }

    pub(crate) fn leave(&mut self, serial: u64) -> Option<Address> {
        let base = self.by_serial(serial).filter(|entry| entry.state == State::Leaving)?.block.base;
        self.remove(base);
        Some(base)
    }

    pub(crate) fn kept_on(&self, device: Ordinal) -> u64 {
        let kept = self.kept().filter(|entry| entry.block.device == device);
        kept.map(|entry| entry.block.bytes).sum()
    }

    pub(crate) fn devices(&self) -> BTreeSet<Ordinal> {
        self.kept().map(|entry| entry.block.device).collect()
    }

    fn kept(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values().filter(|entry| entry.state == State::Kept)
    }

    fn use_now(&mut self, class: (Ordinal, u64)) {
        self.used.retain(|other| *other != class);
        self.used.push(class);
    }

    /// The block that leaves next when too much is kept.
    fn oldest(&self, device: Ordinal) -> Option<Address> {
        let used = |entry: &Entry| self.used.iter().position(|class| *class == entry.class());
        let kept = self.kept().filter(|entry| entry.block.device == device);
        kept.min_by_key(|entry| (used(entry), Reverse(entry.block.serial))).map(|entry| entry.block.base)
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
        if !self.entries.values().any(|other| other.class() == entry.class()) {
            self.used.retain(|class| *class != entry.class());
        }
        if entry.registrations > 0 {
            let serial = entry.block.serial;
            self.registrations.retain(|_, calls| {
                calls.iter_mut().for_each(|serials| serials.retain(|other| *other != serial));
                calls.retain(|serials| !serials.is_empty());
                !calls.is_empty()
            });
        }
    }

    fn move_to(&mut self, base: Address, state: State) {
        if let Some(entry) = self.entries.get_mut(&base) {
            entry.move_to(state, self.time);
        }
    }

    fn within(&self, range: Range) -> Vec<Address> {
        let before = self.find(range.base).map(|(block, _)| block.base);
        let after = range.base.saturating_add(1)..range.base.saturating_add(range.bytes);
        let after = if after.is_empty() { 0..0 } else { after };
        before.into_iter().chain(self.entries.range(after).map(|(base, _)| *base)).collect()
    }

    fn by_serial(&mut self, serial: u64) -> Option<&mut Entry> {
        self.entries.values_mut().find(|entry| entry.block.serial == serial)
    }
}

#[cfg(test)]
mod tests;
