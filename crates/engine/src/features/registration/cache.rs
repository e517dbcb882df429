//! The registrations of one communicator, as a cache. How to register is left to a [`Registrar`]. One thread at a time, which the caller ensures.
//!
//! An entry is a whole allocation of the program, of which the [`Registrar`] made an *alias*: the memory mapped a second time and registered
//! there, when a buffer within was first wanted. A [`Key`] identifies an allocation by its range and the driver's id, which is never reused
//! (`ctests/programs/buffer_ids.c`). At an address alone there may be other memory by now.
//!
//! An entry leaves at once when its memory was freed: [`Cache::want`] sees another allocation at its addresses, [`Cache::freed`] is called, or
//! [`Cache::look`] finds its id gone. A program may free a buffer only when the calls that use it are over on its rank, and then no peer
//! touches the buffer any more. Or an entry leaves for room, but only after its last [`Use`] is over, since calls may be using it.
//!
//! An alias that cannot be deregistered is *stuck*: kept to the end, as peers may still use it. It takes room, but its allocation may be
//! registered anew. Finding a buffer again takes two table lookups, 6 to 10 ns, and allocates nothing. All else walks through the few entries.

mod room;

use room::{Resident, Room};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use windlass_base::range::Range;

/// What identifies an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The whole range.
    pub range: Range,
    /// The driver's id of it (`CU_POINTER_ATTRIBUTE_BUFFER_ID`).
    pub id: u64,
}

/// The number of a registered call of this communicator on this rank, from 1. All buffers of one call have the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Use(pub u64);

/// How registrations are made and ended.
pub trait Registrar {
    /// A registration: the mapping at its other address, and NCCL's handle.
    type Alias;

    /// Maps an allocation again and registers the mapping. The allocation may be freed and replaced meanwhile. So the implementation must
    /// compare the id with the key's after it has mapped the memory.
    fn register(&mut self, key: Key) -> Result<Self::Alias, Failure>;

    /// Deregisters an alias, then unmaps it. On failure the alias comes back whole, and this is never called
    /// for it again.
    fn deregister(&mut self, alias: Self::Alias) -> Result<(), Self::Alias>;
}

/// Why there is no registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// This allocation can never be registered, and is not tried again.
    Never,
    /// It failed this time.
    NotNow,
}

/// What the cache may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Registrations at once, stuck ones included. NCCL walks through all of them for every buffer of every call.
    pub entries_max: usize,
    /// Bytes of these registrations.
    pub bytes_max: u64,
    /// How many allocations that cannot be registered are remembered.
    pub refused_max: usize,
}

/// Why a buffer has no alias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The buffer does not lie within one allocation.
    Straddles,
    /// The registrar refuses such memory for good.
    Refused,
    /// No room, and no entry that may leave now: see [`Cache::waits_for`].
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

/// The registrations of one communicator. Dropping the cache drops its aliases, so [`Cache::close`] comes first.
#[derive(Debug)]
pub struct Cache<A> {
    limits: Limits,
    /// Entries never overlap: of two overlapping allocations one was freed, and has left.
    entries: ById<Entry<A>>,
    stuck: Vec<A>,
    refused: Refused,
    /// All calls up to this one are over.
    over: Use,
    /// The call that must be over to make room for the last allocation that found none.
    helps: Option<Use>,
    /// Bytes of all entries, stuck ones included.
    bytes: u64,
}

impl<A> Cache<A> {
    /// An empty one.
    pub fn new(limits: Limits) -> Self {
        Cache {
            limits,
            entries: ById::default(),
            stuck: Vec::new(),
            refused: Refused::new(limits.refused_max),
            over: Use::default(),
            helps: None,
            bytes: 0,
        }
    }

    /// The alias of the allocation `key` for its part `part`, in the call `at`. Registers the allocation if needed.
    /// A buffer is at the same offset in the alias as in the allocation. The entry counts as used by the call even if the caller
    /// then does not use it.
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
            }
            _ => self.want_unknown(registrar, key, part, at)?,
        }
        // Looked up again only for the borrow checker: 3 ns.
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
        self.remove(registrar, |id, entry| entry.range.overlaps(key.range) || id == key.id);
        if self.refused.has(key.id) {
            return Err(Why::Refused);
        }
        if !self.make_room(registrar, key.range.bytes) {
            return Err(Why::Full);
        }
        match registrar.register(key) {
            Ok(alias) => {
                self.entries.insert(key.id, Entry { range: key.range, alias, last_use: at });
                self.bytes += key.range.bytes;
            }
            Err(Failure::Never) => {
                self.refused.enter(key.id);
                return Err(Why::Refused);
            }
            Err(Failure::NotNow) => return Err(Why::Failed),
        }
        Ok(())
    }

    /// How many registrations there are, stuck ones included.
    pub fn registrations(&self) -> usize {
        self.entries.len() + self.stuck.len()
    }

    /// Ends the entries for which `leaves` is true. Returns how many there were.
    fn remove<R: Registrar<Alias = A>>(
        &mut self,
        registrar: &mut R,
        mut leaves: impl FnMut(u64, &Entry<A>) -> bool,
    ) -> usize {
        let leaving = |(id, entry): (&u64, &Entry<A>)| leaves(*id, entry).then_some(*id);
        let leaving: Vec<u64> = self.entries.iter().filter_map(leaving).collect();
        for id in &leaving {
            self.give_back(registrar, *id);
        }
        leaving.len()
    }

    /// Ends an entry. Returns whether that made room.
    fn give_back<R: Registrar<Alias = A>>(&mut self, registrar: &mut R, id: u64) -> bool {
        let Some(entry) = self.entries.remove(&id) else { return false };
        // There may now be room without waiting for a call.
        self.helps = None;
        match registrar.deregister(entry.alias) {
            Ok(()) => {
                self.bytes -= entry.range.bytes;
                true
            }
            Err(alias) => {
                self.stuck.push(alias);
                false
            }
        }
    }

    /// Makes room for one more entry of `bytes` bytes. No entry leaves unless that makes enough room.
    fn make_room<R: Registrar<Alias = A>>(&mut self, registrar: &mut R, bytes: u64) -> bool {
        // Each turn but the last has one entry less, because the one that was to leave got stuck.
        loop {
            let entries = self.entries.iter().map(|(id, entry)| Resident {
                last_use: entry.last_use,
                id: *id,
                bytes: entry.range.bytes,
            });
            let room = room::plan(self.limits, self.registrations(), self.bytes, entries, bytes);
            self.helps = None;
            match room {
                Room::Free => return true,
                Room::After { leave, last_use } if last_use <= self.over => {
                    for id in leave {
                        if !self.give_back(registrar, id) {
                            break;
                        }
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

    /// Says that all calls up to this one are over on this rank, so none of their work still runs, here or on a peer.
    pub fn over(&mut self, up_to: Use) {
        self.over = self.over.max(up_to);
    }

    /// After [`Why::Full`]: the call after which there is room for what was wanted. None if waiting does not help, if that call is over,
    /// or if an entry has left since.
    pub fn waits_for(&self) -> Option<Use> {
        self.helps.filter(|call| *call > self.over)
    }

    /// Ends all entries that overlap this range, because the program frees it or is about to. Returns how many
    /// there were.
    pub fn freed<R: Registrar<Alias = A>>(&mut self, registrar: &mut R, range: Range) -> usize {
        self.remove(registrar, |_, entry| entry.range.overlaps(range))
    }

    /// Compares the id at each entry's address, and ends the entries whose memory is gone. Returns how many
    /// there were. Allocates nothing if there are none.
    pub fn look<R: Registrar<Alias = A>>(
        &mut self,
        registrar: &mut R,
        mut id_at: impl FnMut(u64) -> Option<u64>,
    ) -> usize {
        self.remove(registrar, |id, entry| id_at(entry.range.base) != Some(id))
    }

    /// Whether no entry could be ended.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether [`Cache::look`] would end any entry.
    pub fn has_gone(&self, mut id_at: impl FnMut(u64) -> Option<u64>) -> bool {
        self.entries.iter().any(|(id, entry)| id_at(entry.range.base) != Some(*id))
    }

    /// Whether [`Cache::freed`] would end any entry.
    pub fn overlaps(&self, range: Range) -> bool {
        self.entries.values().any(|entry| entry.range.overlaps(range))
    }

    /// Takes all aliases, stuck ones included, without deregistering them. For the end of a communicator, after NCCL has ended its
    /// registrations. The cache is empty then.
    pub fn close(&mut self) -> impl Iterator<Item = A> + use<A> {
        let entries = std::mem::take(&mut self.entries);
        let stuck = std::mem::take(&mut self.stuck);
        self.refused = Refused::new(self.limits.refused_max);
        self.helps = None;
        self.bytes = 0;
        entries.into_values().map(|entry| entry.alias).chain(stuck)
    }

    /// The bytes of all registrations, stuck ones included.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A map from the id of an allocation.
type ById<T> = HashMap<u64, T, BuildHasherDefault<Spread>>;

/// 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

#[derive(Clone, Copy, Debug, Default)]
struct Spread(u64);

impl Hasher for Spread {
    #[inline]
    fn write_u64(&mut self, id: u64) {
        // The table takes the lowest bits and the highest seven. Of ids that are multiples of a power of two the lowest bits of
        // the product are all zero; the upper half of it tells them apart.
        let product = u128::from(id) * u128::from(GOLDEN);
        self.0 = product as u64 ^ (product >> 64) as u64;
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(GOLDEN);
        }
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod by_id_tests {
    use super::*;

    /// Ids in sequence, far apart, or at multiples of powers of two collide seldom: of 64 ids in 128 places, at most four share one.
    #[test]
    fn ids_are_spread() {
        for step in [1_u64, 2, 3, 7, 1 << 8, 1 << 12, 1 << 20, 1 << 32, 1 << 40, (1 << 32) + 1] {
            for start in [0_u64, 1, 1000, 1 << 33] {
                let mut places = [0; 128];
                for index in 0..64 {
                    let mut hash = Spread::default();
                    hash.write_u64(start.wrapping_add(step.wrapping_mul(index)));
                    places[hash.finish() as usize % 128] += 1;
                }
                assert!(places.iter().all(|count| *count < 5), "from {start} by {step}: {places:?}");
            }
        }
    }
}

/// A list of at most `count_max` ids. The one that was asked for longest ago is forgotten first.
#[derive(Debug)]
struct Refused {
    /// The id that was asked for last is at the end.
    ids: Vec<u64>,
    count_max: usize,
}

impl Refused {
    fn new(count_max: usize) -> Self {
        Refused { ids: Vec::new(), count_max }
    }

    /// Whether this id is in the list. Moves it to the end.
    fn has(&mut self, id: u64) -> bool {
        let Some(at) = self.ids.iter().rposition(|known| *known == id) else { return false };
        if let Some(later) = self.ids.get_mut(at..) {
            later.rotate_left(1);
        }
        true
    }

    /// Adds an id that is not in the list.
    fn enter(&mut self, id: u64) {
        if self.count_max == 0 {
            return;
        }
        if self.ids.len() >= self.count_max {
            self.ids.remove(0);
        }
        self.ids.push(id);
    }
}
