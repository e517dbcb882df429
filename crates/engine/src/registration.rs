//! A cache of registrations, of one communicator, that does not know what registering means.
//!
//! It registers whole allocations, when a buffer within is first wanted, through a [`Registrar`]. What identifies an
//! allocation is its [`Key`]: where it lies and the driver's id, which never comes again (`ctests/programs/buffer_ids.c`).
//! An address alone says nothing: NCCL 2.28.9 gives the old record for a range that was freed and allocated again, and
//! peers then write into the old memory.
//!
//! An entry's life: registered and *active*; *retired* when its memory is freed or something else is seen at its addresses;
//! deregistered when all ranks have passed the [`Epoch`] of its last use and no graph holds it. Peers unmap at once what is
//! deregistered, so until then nothing may be. Entries never overlap, retired ones included: an allocation over the
//! addresses of a retired entry is staged meanwhile, as is every buffer for which the answer is not that it is registered.
//! It is the caller who stages: such a buffer must not reach NCCL itself.
//!
//! One thread at a time, as NCCL has it for a communicator. Finding a buffer again takes one look, or a walk
//! down one tree, and allocates nothing.

mod applications;

mod counters;

mod entry;

mod places;

mod refused;

use crate::range::Range;

pub use applications::Token;
pub use counters::{Counters, Staged};
pub use entry::{BufferId, EntryId, Epoch, Key};
use entry::{Entry, State};

/// What registering means.
pub trait Registrar {
    /// What a registration is given back by.
    type Handle;

    /// Registers a whole allocation, and nothing beside it: an allocation that is not whole pages is for it to refuse, as
    /// NCCL registers pages.
    fn register(&mut self, range: Range) -> Result<Self::Handle, Failure>;

    /// Gives a registration back; it is the last time that anybody hears of the handle. False where that failed: the
    /// addresses then stay as they are for the life of the cache, because nobody knows what is still registered there.
    fn deregister(&mut self, handle: Self::Handle) -> bool;
}

/// Why there is no registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Memory of this kind never is: it is not asked for again.
    Never,
    /// Another time it might.
    NotNow,
}

/// What the cache may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Registrations at once, retired ones too. NCCL walks through all of them for every buffer of every call.
    pub entries_max: usize,
    /// Their bytes.
    pub bytes_max: u64,
    /// How many allocations that cannot be registered are remembered.
    pub refused_max: usize,
}

/// How a buffer is to reach NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// As it is: its allocation is registered.
    Registered(EntryId),
    /// As it is: the application has registered it itself.
    Applications,
    /// Not as it is.
    Staged(Why),
}

/// Why a buffer is not registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It does not lie within one allocation.
    Straddles,
    /// What was at its addresses before is still registered, and may be in use.
    Waits,
    /// What was at its addresses before could not be given back.
    Stuck,
    /// The application has registered something that was at its addresses before.
    Applications,
    /// No room, and nothing that may leave.
    Full,
    /// The registrar refuses such memory.
    Refused,
    /// The registrar failed this time.
    Failed,
}

/// The registrations of one communicator.
#[derive(Debug)]
pub struct Cache<H> {
    limits: Limits,
    entries: places::Places<Entry<H>>,
    refused: refused::Refused,
    applications: applications::Applications,
    passed: Epoch,
    /// Counts uses: what was used longest ago has the least.
    clock: u64,
    serial: u64,
    counters: Counters,
}

impl<H> Cache<H> {
    /// An empty one.
    pub fn new(limits: Limits) -> Self {
        Cache {
            limits,
            entries: places::Places::new(limits.entries_max),
            refused: refused::Refused::new(limits.refused_max),
            applications: applications::Applications::default(),
            passed: Epoch(0),
            clock: 0,
            serial: 0,
            counters: Counters::default(),
        }
    }

    /// How the buffer `part` of the allocation `key` is to reach NCCL in the operation `epoch`; registers the allocation if
    /// need be. What leaves for it leaves for good reasons alone: not in use, not held, used longest ago.
    #[inline]
    pub fn want<R: Registrar<Handle = H>>(
        &mut self,
        registrar: &mut R,
        key: Key,
        part: Range,
        epoch: Epoch,
    ) -> Answer {
        self.clock += 1;
        if let Some(entry) = self.entries.find_exact(key.range)
            && entry.is_active_as(key.id)
            && key.range.contains(part)
        {
            entry.used(epoch, self.clock);
            self.counters.hits += 1;
            return Answer::Registered(EntryId { base: key.range.base, serial: entry.serial });
        }
        let answer = self.want_unknown(registrar, key, part, epoch);
        match answer {
            Answer::Registered(_) => {}
            Answer::Applications => self.counters.applications_hits += 1,
            Answer::Staged(why) => self.counters.staged.note(why),
        }
        answer
    }

    #[cold]
    fn want_unknown<R: Registrar<Handle = H>>(
        &mut self,
        registrar: &mut R,
        key: Key,
        part: Range,
        epoch: Epoch,
    ) -> Answer {
        let wraps = key.range.base.checked_add(key.range.bytes).is_none();
        if wraps || part.bytes == 0 || !key.range.contains(part) {
            return Answer::Staged(Why::Straddles);
        }
        if let Some(why) = self.clear(registrar, key) {
            return Answer::Staged(why);
        }
        match self.applications.look(key, part) {
            applications::Found::Nothing => {}
            applications::Found::Covers => return Answer::Applications,
            applications::Found::Stale => return Answer::Staged(Why::Applications),
        }
        if self.refused.has(key, self.clock) {
            return Answer::Staged(Why::Refused);
        }
        if !self.make_room(registrar, key.range.bytes) {
            return Answer::Staged(Why::Full);
        }
        match registrar.register(key.range) {
            Ok(handle) => self.enter(registrar, key, handle, epoch),
            Err(Failure::Never) => {
                self.refused.enter(key, self.clock);
                Answer::Staged(Why::Refused)
            }
            Err(Failure::NotNow) => Answer::Staged(Why::Failed),
        }
    }

    fn enter<R: Registrar<Handle = H>>(
        &mut self,
        registrar: &mut R,
        key: Key,
        handle: H,
        epoch: Epoch,
    ) -> Answer {
        self.serial += 1;
        let entry = Entry::new(key.id, handle, self.serial, epoch, self.clock);
        if let Err(Entry { state: State::Active(handle), .. }) = self.entries.insert(key.range, entry) {
            // The addresses were cleared: this cannot be. Nothing is lost all the same.
            registrar.deregister(handle);
            return Answer::Staged(Why::Failed);
        }
        self.counters.registered += 1;
        self.counters.entries_highest = self.counters.entries_highest.max(self.entries.len() as u64);
        self.counters.bytes += key.range.bytes;
        self.counters.bytes_highest = self.counters.bytes_highest.max(self.counters.bytes);
        Answer::Registered(EntryId { base: key.range.base, serial: self.serial })
    }

    /// Retires what is not `key` at its addresses and gives back what may go; why something stays.
    fn clear<R: Registrar<Handle = H>>(&mut self, registrar: &mut R, key: Key) -> Option<Why> {
        let others: Vec<u64> = self
            .entries
            .overlapping(key.range)
            .filter(|(range, entry)| *range != key.range || !entry.is_active_as(key.id))
            .map(|(range, _)| range.base)
            .collect();
        let mut why = None;
        for base in others {
            self.retire(base);
            self.give_back_if_over(registrar, base);
            if let Some((_, entry)) = self.entries.at(base) {
                why = Some(if entry.is_stuck() { Why::Stuck } else { Why::Waits });
            }
        }
        why
    }

    fn retire(&mut self, base: u64) {
        if let Some((_, entry)) = self.entries.at_mut(base)
            && entry.retire()
        {
            self.counters.retired += 1;
            self.counters.waiting += 1;
        }
    }

    /// Gives a retired entry back unless somebody may still use it. What cannot be given back stays.
    fn give_back_if_over<R: Registrar<Handle = H>>(&mut self, registrar: &mut R, base: u64) {
        let over = |(_, entry): (Range, &Entry<H>)| entry.is_retired() && entry.is_unused_after(self.passed);
        if self.entries.at(base).is_some_and(over) {
            self.give_back(registrar, base);
        }
    }

    /// Whether it is gone now.
    fn give_back<R: Registrar<Handle = H>>(&mut self, registrar: &mut R, base: u64) -> bool {
        let Some((range, entry)) = self.entries.at_mut(base) else { return false };
        self.counters.waiting -= u64::from(entry.is_retired());
        let state = std::mem::replace(&mut entry.state, State::Stuck);
        let (State::Active(handle) | State::Retired(handle)) = state else { return false };
        if !registrar.deregister(handle) {
            self.counters.stuck += 1;
            return false;
        }
        self.entries.remove(range.base);
        self.counters.deregistered += 1;
        self.counters.bytes -= range.bytes;
        true
    }

    /// Room for one more of `bytes` bytes. Nothing leaves unless that makes room enough.
    fn make_room<R: Registrar<Handle = H>>(&mut self, registrar: &mut R, bytes: u64) -> bool {
        if bytes > self.limits.bytes_max || self.limits.entries_max == 0 {
            return false;
        }
        self.drain(registrar);
        if self.has_room(0, 0, bytes) {
            return true;
        }
        let mut leaving: Vec<(u64, Range)> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.is_active() && entry.is_unused_after(self.passed))
            .map(|(range, entry)| (entry.used_at, range))
            .collect();
        let leaving_bytes = leaving.iter().map(|(_, range)| range.bytes).sum();
        if !self.has_room(leaving.len(), leaving_bytes, bytes) {
            return false;
        }
        leaving.sort_unstable();
        for (_, range) in leaving {
            self.counters.evicted += u64::from(self.give_back(registrar, range.base));
            if self.has_room(0, 0, bytes) {
                return true;
            }
        }
        // What was to leave is stuck.
        false
    }

    /// Whether one more of `bytes` bytes fits when so much has left.
    fn has_room(&self, entries_leaving: usize, bytes_leaving: u64, bytes: u64) -> bool {
        self.entries.len() - entries_leaving < self.limits.entries_max
            && (self.counters.bytes - bytes_leaving)
                .checked_add(bytes)
                .is_some_and(|all| all <= self.limits.bytes_max)
    }

    /// A graph captured an operation that uses this entry: it stays until it was [released](Cache::release) as often.
    /// False if it has left already.
    pub fn hold(&mut self, id: EntryId) -> bool {
        let held = self.entry_mut(id).map(|entry| entry.holds += 1);
        held.is_some()
    }

    /// Such a graph is gone; its last run was no later than `epoch`.
    pub fn release(&mut self, id: EntryId, epoch: Epoch) {
        if let Some(entry) = self.entry_mut(id) {
            entry.holds = entry.holds.saturating_sub(1);
            entry.last_use = entry.last_use.max(epoch);
        }
    }

    fn entry_mut(&mut self, id: EntryId) -> Option<&mut Entry<H>> {
        let (_, entry) = self.entries.at_mut(id.base)?;
        (entry.serial == id.serial).then_some(entry)
    }

    /// Memory at these addresses was, or is about to be, freed or unmapped. Nothing is given back here.
    pub fn freed(&mut self, range: Range) {
        let bases: Vec<u64> = self.entries.overlapping(range).map(|(range, _)| range.base).collect();
        for base in bases {
            self.retire(base);
        }
    }

    /// All that any rank does in operations up to this one is over on all ranks, and stays so.
    pub fn passed(&mut self, epoch: Epoch) {
        self.passed = self.passed.max(epoch);
    }

    /// Whether something retired waits; then [`Cache::drain`] after the next [`Cache::passed`].
    pub fn is_waiting(&self) -> bool {
        self.counters.waiting > 0
    }

    /// The epoch that has to pass before all that waits now may go, graphs aside.
    pub fn waits_for(&self) -> Option<Epoch> {
        self.entries.iter().filter(|(_, entry)| entry.is_retired()).map(|(_, entry)| entry.last_use).max()
    }

    /// Gives back all that is retired and over. Cheap when nothing waits.
    pub fn drain<R: Registrar<Handle = H>>(&mut self, registrar: &mut R) {
        if !self.is_waiting() {
            return;
        }
        let retired = |(range, entry): (Range, &Entry<H>)| entry.is_retired().then_some(range.base);
        let bases: Vec<u64> = self.entries.iter().filter_map(retired).collect();
        for base in bases {
            self.give_back_if_over(registrar, base);
        }
    }

    /// The application registers `range` of `key` itself, under this token; in whole pages, as NCCL takes it. To be called
    /// after [`Cache::make_way`].
    ///
    /// Where it lies in one of ours NCCL counts on that record, which then stays when we give it back.
    pub fn application_registers(&mut self, token: Token, key: Key, range: Range) {
        let ours = self.entries.overlapping(range).map(|(ours, _)| ours).find(|ours| ours.contains(range));
        self.applications.enter(token, key, ours.unwrap_or(range));
        self.counters.applications = self.applications.len() as u64;
    }

    /// Retires what is not `key` at its addresses and gives it back if it is over. False if something stays: NCCL would
    /// give the application the old record if it registered there now.
    pub fn make_way<R: Registrar<Handle = H>>(&mut self, registrar: &mut R, key: Key) -> bool {
        self.clear(registrar, key).is_none()
    }

    /// The application gives back what it registered under this token, once. Ours stays as it is.
    pub fn application_deregisters(&mut self, token: Token) {
        self.applications.remove(token);
        self.counters.applications = self.applications.len() as u64;
    }

    /// Gives everything back, held and used alike: for the end of a communicator, when all ranks have come to it. What
    /// could not be given back is forgotten, too.
    pub fn close<R: Registrar<Handle = H>>(&mut self, registrar: &mut R) {
        let bases: Vec<u64> = self.entries.iter().map(|(range, _)| range.base).collect();
        for base in bases {
            self.give_back(registrar, base);
        }
        self.entries = places::Places::new(self.limits.entries_max);
        self.refused = refused::Refused::new(self.limits.refused_max);
        self.applications = applications::Applications::default();
        self.counters = Counters { bytes: 0, waiting: 0, applications: 0, ..self.counters };
    }

    /// What there is and was.
    pub fn counters(&self) -> Counters {
        Counters { entries: self.entries.len() as u64, refused: self.refused.len() as u64, ..self.counters }
    }
}
