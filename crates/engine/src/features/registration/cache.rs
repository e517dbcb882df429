//! A cache of registrations, of one communicator, that does not know what registering means.
//!
//! An entry is a whole allocation of the application's, of which a [`Registrar`] made an *alias*: its memory mapped a second
//! time, at addresses of ours, and those registered. It is made when a buffer within is first wanted. What identifies an
//! allocation is its [`Key`]: where it lies and the driver's id, which never comes again (`ctests/programs/buffer_ids.c`). An
//! address alone says nothing: it may be other memory by now.
//!
//! An entry leaves when its memory was freed: [`Cache::want`] sees another allocation at its addresses, [`Cache::freed`] is
//! told, [`Cache::look`] finds its id gone. It leaves at once then, whoever used it last: a program may free what it has passed
//! to NCCL only when that is over on its rank, and over means that no peer touches the buffer any more. Or it leaves for room;
//! its memory lives then, and calls that use it may be running, so only after its last [`Use`] is over.
//!
//! What cannot be given back is *stuck*: kept to the end, for nobody knows what peers still have of it; it takes room, but no
//! addresses of the application's, which may be registered anew.
//!
//! One thread at a time, which is for the caller to see to. Finding a buffer again takes two looks into a small table, 6 to 10 ns,
//! and allocates nothing; all else walks through the entries, of which there are few.

mod by_id;

mod counters;

mod refused;

mod room;

use by_id::ById;
pub use counters::Counters;
use room::{Resident, Room};
use windlass_base::range::Range;

/// What identifies an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// All of it.
    pub range: Range,
    /// Which one, of all that were ever there (`CU_POINTER_ATTRIBUTE_BUFFER_ID`).
    pub id: u64,
}

/// The number of a registered call of this communicator on this rank; the first is 1. All buffers of one call have the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Use(pub u64);

/// What registering means.
pub trait Registrar {
    /// What there is of a registration: the memory at its other addresses, and what NCCL calls it.
    type Alias;

    /// Maps an allocation again and registers that. The allocation may go, and another come, while this runs: whether the id
    /// is still the key's is to be asked after its memory was taken hold of.
    fn register(&mut self, key: Key) -> Result<Self::Alias, Failure>;

    /// Gives a registration back, and then its memory. Where that fails the alias comes back whole, and this is never called
    /// for it again.
    fn deregister(&mut self, alias: Self::Alias) -> Result<(), Self::Alias>;
}

/// Why there is no registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// This allocation never has one: it is not asked for again.
    Never,
    /// Another time it might.
    NotNow,
}

/// What the cache may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Registrations at once, stuck ones too. NCCL walks through all of them for every buffer of every call.
    pub entries_max: usize,
    /// Their bytes.
    pub bytes_max: u64,
    /// How many allocations that cannot be registered are remembered.
    pub refused_max: usize,
}

/// Why a buffer has no alias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It does not lie within one allocation.
    Straddles,
    /// The registrar refuses such memory.
    Refused,
    /// No room, and nothing that may leave: see [`Cache::waits_for`].
    Full,
    /// The registrar failed this time.
    Failed,
}

#[derive(Debug)]
struct Entry<A> {
    range: Range,
    alias: A,
    last_use: Use,
}

/// The registrations of one communicator. Who drops it drops the aliases that it has: [`Cache::close`] comes first.
#[derive(Debug)]
pub struct Cache<A> {
    limits: Limits,
    /// No two of them share addresses: of two such allocations one was freed, and has left.
    entries: ById<Entry<A>>,
    stuck: Vec<A>,
    refused: refused::Refused,
    /// All uses up to this one are over.
    over: Use,
    /// What has to be over for the last one that found no room.
    helps: Option<Use>,
    counters: Counters,
}

impl<A> Cache<A> {
    /// An empty one.
    pub fn new(limits: Limits) -> Self {
        Cache {
            limits,
            entries: ById::default(),
            stuck: Vec::new(),
            refused: refused::Refused::new(limits.refused_max),
            over: Use::default(),
            helps: None,
            counters: Counters::default(),
        }
    }

    /// The alias of the allocation `key` for the buffer `part` of it, in the call `at`; registers the allocation if need be.
    /// A buffer has its place in the alias that it has in the allocation. The call counts as using it also where the caller
    /// then does not.
    #[inline]
    pub fn want<R: Registrar<Alias = A>>(
        &mut self,
        registrar: &mut R,
        key: Key,
        part: Range,
        at: Use,
    ) -> Result<&A, Why> {
        match self.entries.get_mut(&key.id) {
            Some(entry) if entry.range == key.range && part.bytes > 0 && key.range.contains(part) => {
                entry.last_use = entry.last_use.max(at);
                self.counters.hits += 1;
            }
            _ => self.want_unknown(registrar, key, part, at).inspect_err(|why| self.counters.note(*why))?,
        }
        // There it is. Looked up again, as the borrow checker wants it: 3 ns.
        self.entries.get(&key.id).map(|entry| &entry.alias).ok_or(Why::Failed)
    }

    #[cold]
    fn want_unknown<R: Registrar<Alias = A>>(
        &mut self,
        registrar: &mut R,
        key: Key,
        part: Range,
        at: Use,
    ) -> Result<(), Why> {
        let wraps = key.range.base.checked_add(key.range.bytes).is_none();
        if wraps || part.bytes == 0 || !key.range.contains(part) {
            return Err(Why::Straddles);
        }
        self.counters.changed +=
            self.remove(registrar, |id, entry| entry.range.overlaps(key.range) || id == key.id);
        if self.refused.has(key.id) {
            return Err(Why::Refused);
        }
        if !self.make_room(registrar, key.range.bytes) {
            return Err(Why::Full);
        }
        match registrar.register(key) {
            Ok(alias) => self.enter(key, Entry { range: key.range, alias, last_use: at }),
            Err(Failure::Never) => {
                self.refused.enter(key.id);
                return Err(Why::Refused);
            }
            Err(Failure::NotNow) => return Err(Why::Failed),
        }
        Ok(())
    }

    fn enter(&mut self, key: Key, entry: Entry<A>) {
        self.entries.insert(key.id, entry);
        self.counters.registered += 1;
        self.counters.entries_highest = self.counters.entries_highest.max(self.len() as u64);
        self.counters.bytes += key.range.bytes;
        self.counters.bytes_highest = self.counters.bytes_highest.max(self.counters.bytes);
    }

    fn len(&self) -> usize {
        self.entries.len() + self.stuck.len()
    }

    /// Gives back the entries, by id, for which this is so; how many there were.
    fn remove<R: Registrar<Alias = A>>(
        &mut self,
        registrar: &mut R,
        mut leaves: impl FnMut(u64, &Entry<A>) -> bool,
    ) -> u64 {
        let leaving = |(id, entry): (&u64, &Entry<A>)| leaves(*id, entry).then_some(*id);
        let leaving: Vec<u64> = self.entries.iter().filter_map(leaving).collect();
        for id in &leaving {
            self.give_back(registrar, *id);
        }
        leaving.len() as u64
    }

    /// Whether that made room.
    fn give_back<R: Registrar<Alias = A>>(&mut self, registrar: &mut R, id: u64) -> bool {
        let Some(entry) = self.entries.remove(&id) else { return false };
        // There may be room now without any wait.
        self.helps = None;
        match registrar.deregister(entry.alias) {
            Ok(()) => {
                self.counters.deregistered += 1;
                self.counters.bytes -= entry.range.bytes;
                true
            }
            Err(alias) => {
                self.counters.stuck += 1;
                self.stuck.push(alias);
                false
            }
        }
    }

    /// Room for one more of `bytes` bytes. Nothing leaves unless that makes room enough.
    fn make_room<R: Registrar<Alias = A>>(&mut self, registrar: &mut R, bytes: u64) -> bool {
        // Every turn but the last has one entry less: what was to leave got stuck.
        loop {
            let entries = self.entries.iter().map(|(id, entry)| Resident {
                last_use: entry.last_use,
                id: *id,
                bytes: entry.range.bytes,
            });
            let room = room::plan(self.limits, self.len(), self.counters.bytes, entries, bytes);
            self.helps = None;
            match room {
                Room::Free => return true,
                Room::After { leave, last_use } if last_use <= self.over => {
                    for id in leave {
                        if !self.give_back(registrar, id) {
                            break;
                        }
                        self.counters.evicted += 1;
                    }
                }
                Room::After { last_use, .. } => {
                    self.helps = Some(last_use);
                    return false;
                }
                Room::Never => return false,
            }
        }
    }

    /// All calls up to this one are over on this rank: nothing that they did is still running, here or on a peer.
    pub fn over(&mut self, up_to: Use) {
        self.over = self.over.max(up_to);
    }

    /// After [`Why::Full`]: the call after which there is room for what was wanted. None if no wait helps, if it is over,
    /// and if something has left since.
    pub fn waits_for(&self) -> Option<Use> {
        self.helps.filter(|call| *call > self.over)
    }

    /// The application frees what is at these addresses, or is about to: whatever lies there, also in part, is given back
    /// now. How many there were.
    pub fn freed<R: Registrar<Alias = A>>(&mut self, registrar: &mut R, range: Range) -> usize {
        let gone = self.remove(registrar, |_, entry| entry.range.overlaps(range));
        self.counters.freed += gone;
        gone as usize
    }

    /// Asks of every entry which id is at its first address now, and gives back those whose memory has gone. How many there
    /// were. Without any it allocates nothing.
    pub fn look<R: Registrar<Alias = A>>(
        &mut self,
        registrar: &mut R,
        mut id_at: impl FnMut(u64) -> Option<u64>,
    ) -> usize {
        let gone = self.remove(registrar, |id, entry| id_at(entry.range.base) != Some(id));
        self.counters.changed += gone;
        gone as usize
    }

    /// Whether there is nothing that could be given back: then there is nothing to look at.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether [`Cache::look`] would give anything back.
    pub fn has_gone(&self, mut id_at: impl FnMut(u64) -> Option<u64>) -> bool {
        self.entries.iter().any(|(id, entry)| id_at(entry.range.base) != Some(*id))
    }

    /// Whether [`Cache::freed`] would.
    pub fn overlaps(&self, range: Range) -> bool {
        self.entries.values().any(|entry| entry.range.overlaps(range))
    }

    /// All aliases, stuck ones too, none of them deregistered: for the end of a communicator, after NCCL has taken its
    /// registrations down. The cache is empty then.
    pub fn close(&mut self) -> impl Iterator<Item = A> + use<A> {
        let entries = std::mem::take(&mut self.entries);
        let stuck = std::mem::take(&mut self.stuck);
        self.refused = refused::Refused::new(self.limits.refused_max);
        self.helps = None;
        self.counters.bytes = 0;
        entries.into_values().map(|entry| entry.alias).chain(stuck)
    }

    /// What there is and was.
    pub fn counters(&self) -> Counters {
        Counters { entries: self.len() as u64, ..self.counters }
    }
}
