//! A registrar on memory that does not exist, and what it forbids.

use std::collections::BTreeSet;

use windlass_engine::range::Range;
use windlass_engine::registration::{BufferId, Cache, Epoch, Failure, Key, Limits, Registrar};

pub fn range(base: u64, bytes: u64) -> Range {
    Range { base, bytes }
}

/// A registration that somebody holds.
#[derive(Clone, Debug)]
pub struct Live {
    pub handle: u64,
    pub key: Key,
    /// The last operation that used it, and the clock then.
    pub last_use: u64,
    pub used_at: u64,
    pub holds: u64,
    /// Whether it is to be found: its memory was not said to be freed, and nothing else was seen there.
    pub is_active: bool,
    /// Whether giving it back failed.
    pub is_stuck: bool,
}

impl Live {
    pub fn may_leave(&self, passed: u64) -> bool {
        !self.is_stuck && self.holds == 0 && self.last_use <= passed
    }
}

#[derive(Debug, Default)]
pub struct Strict {
    /// What is allocated.
    pub memory: Vec<Key>,
    pub live: Vec<Live>,
    pub passed: u64,
    /// Nobody uses anything any more.
    pub is_over: bool,
    pub never: BTreeSet<u64>,
    pub fails_now: bool,
    pub gives_back: bool,
    /// Calls of this registrar.
    pub registered: u64,
    pub deregistered: u64,
    next: u64,
}

impl Strict {
    pub fn new() -> Self {
        Strict { gives_back: true, ..Strict::default() }
    }

    /// Memory with an id that never was.
    pub fn allocate(&mut self, at: Range) -> Key {
        assert!(self.memory.iter().all(|key| !key.range.overlaps(at)), "the test allocates twice");
        self.next += 1;
        let key = Key { range: at, id: BufferId(self.next) };
        self.memory.push(key);
        key
    }

    pub fn free(&mut self, key: Key) {
        self.memory.retain(|known| *known != key);
    }

    pub fn find(&mut self, key: Key) -> Option<&mut Live> {
        self.live.iter_mut().find(|live| live.key == key)
    }

    pub fn bytes(&self) -> u64 {
        self.live.iter().map(|live| live.key.range.bytes).sum()
    }
}

impl Registrar for Strict {
    type Handle = u64;

    fn register(&mut self, range: Range) -> Result<u64, Failure> {
        self.registered += 1;
        let overlapped = self.live.iter().find(|live| live.key.range.overlaps(range));
        assert!(overlapped.is_none(), "{range:?} registered over {overlapped:?}: NCCL gives the old record");
        let key = *self.memory.iter().find(|key| key.range == range).expect("no whole allocation, or freed");
        if self.never.contains(&key.id.0) {
            return Err(Failure::Never);
        }
        if self.fails_now {
            return Err(Failure::NotNow);
        }
        self.next += 1;
        let live = Live {
            handle: self.next,
            key,
            last_use: 0,
            used_at: 0,
            holds: 0,
            is_active: true,
            is_stuck: false,
        };
        self.live.push(live);
        Ok(self.next)
    }

    fn deregister(&mut self, handle: u64) -> bool {
        let at = self.live.iter().position(|live| live.handle == handle).expect("given back twice");
        let live = &self.live[at];
        assert!(!live.is_stuck, "{live:?} is tried again");
        assert!(self.is_over || live.may_leave(self.passed), "{live:?} is unmapped under a peer or a graph");
        if live.is_active && !self.is_over {
            let older = |other: &&Live| {
                other.is_active && other.may_leave(self.passed) && other.used_at < live.used_at
            };
            let older = self.live.iter().find(older);
            assert!(older.is_none(), "{live:?} leaves before {older:?}");
        }
        if !self.gives_back {
            self.live[at].is_stuck = true;
            return false;
        }
        self.deregistered += 1;
        self.live.remove(at);
        true
    }
}

pub fn cache(entries_max: usize, bytes_max: u64) -> Cache<u64> {
    Cache::new(Limits { entries_max, bytes_max, refused_max: 4 })
}

pub fn pass(cache: &mut Cache<u64>, strict: &mut Strict, epoch: u64) {
    strict.passed = strict.passed.max(epoch);
    cache.passed(Epoch(epoch));
}

/// Ends both: nothing is left but what could not be given back.
pub fn close(cache: &mut Cache<u64>, strict: &mut Strict) {
    strict.is_over = true;
    cache.close(strict);
    assert!(strict.live.iter().all(|live| live.is_stuck), "left behind: {:?}", strict.live);
    let counters = cache.counters();
    assert_eq!((counters.entries, counters.bytes, counters.waiting), (0, 0, 0));
    assert_eq!(counters.registered, counters.deregistered + counters.stuck);
    assert_eq!((counters.deregistered, counters.stuck), (strict.deregistered, strict.live.len() as u64));
}
