//! A registrar over memory that does not exist, and the mistakes that it detects.

use std::collections::BTreeSet;

use windlass_base::range::Range;
use windlass_engine::features::registration::cache::{Cache, Failure, Key, Limits, Registrar, Use, Why};

pub fn range(base: u64, bytes: u64) -> Range {
    Range { base, bytes }
}

/// An alias, identified by its number and not cloneable, so that the cache cannot end it twice by mistake.
#[derive(Debug, PartialEq, Eq)]
pub struct Alias(pub u64);

/// A registration that is in effect.
#[derive(Clone, Debug)]
pub struct Live {
    pub alias: u64,
    pub key: Key,
    pub last_use: u64,
}

/// The call in progress, for which the cache may deregister.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    Nothing,
    /// A request: entries that overlap other memory leave, and entries evicted for room.
    Want(Key),
    /// A free: entries that overlap this range leave.
    Freed(Range),
    /// A look: entries leave whose memory is no longer allocated.
    Look,
}

#[derive(Debug)]
pub struct Strict {
    /// The current allocations.
    pub memory: Vec<Key>,
    pub live: Vec<Live>,
    /// Registrations that could not be ended: their number and bytes.
    pub stuck: Vec<(u64, u64)>,
    pub over: u64,
    pub never: BTreeSet<u64>,
    pub fails_now: bool,
    pub gives_back: bool,
    pub doing: Doing,
    /// Calls of this registrar, and how many of them evicted an entry for room.
    pub registered: u64,
    pub deregistered: u64,
    pub evicted: u64,
    /// How many entries left, or were to, because their memory was gone or freed.
    pub gone: u64,
    /// The most registrations at once, and their most bytes, stuck ones included.
    pub entries_highest: u64,
    pub bytes_highest: u64,
    next: u64,
}

impl Strict {
    pub fn new() -> Self {
        Strict {
            memory: Vec::new(),
            live: Vec::new(),
            stuck: Vec::new(),
            over: 0,
            never: BTreeSet::new(),
            fails_now: false,
            gives_back: true,
            doing: Doing::Nothing,
            registered: 0,
            deregistered: 0,
            evicted: 0,
            gone: 0,
            entries_highest: 0,
            bytes_highest: 0,
            next: 0,
        }
    }

    /// Allocates memory with a new id.
    pub fn allocate(&mut self, at: Range) -> Key {
        assert!(self.memory.iter().all(|key| !key.range.overlaps(at)), "the test allocates twice");
        self.next += 1;
        let key = Key { range: at, id: self.next };
        self.memory.push(key);
        key
    }

    pub fn free(&mut self, key: Key) {
        self.memory.retain(|known| *known != key);
    }

    pub fn find(&mut self, key: Key) -> Option<&mut Live> {
        self.live.iter_mut().find(|live| live.key == key)
    }

    /// The number of registrations and their bytes, stuck ones included.
    pub fn held(&self) -> (u64, u64) {
        let live: u64 = self.live.iter().map(|live| live.key.range.bytes).sum();
        let stuck: u64 = self.stuck.iter().map(|(_, bytes)| bytes).sum();
        ((self.live.len() + self.stuck.len()) as u64, live + stuck)
    }

    /// Whether this entry leaves for the reason of the call in progress; else it is evicted for room.
    fn is_gone(&self, key: Key) -> bool {
        match self.doing {
            Doing::Nothing => false,
            Doing::Want(wanted) => key != wanted && key.range.overlaps(wanted.range),
            Doing::Freed(range) => key.range.overlaps(range),
            Doing::Look => !self.memory.contains(&key),
        }
    }
}

impl Registrar for Strict {
    type Alias = Alias;

    fn register(&mut self, key: Key) -> Result<Alias, Failure> {
        self.registered += 1;
        assert_eq!(self.doing, Doing::Want(key));
        assert!(self.memory.contains(&key), "no whole allocation, or freed");
        let there = self.live.iter().find(|live| live.key.range.overlaps(key.range));
        assert!(there.is_none(), "{key:?} though there is {there:?}");
        if self.never.contains(&key.id) {
            return Err(Failure::Never);
        }
        if self.fails_now {
            return Err(Failure::NotNow);
        }
        self.next += 1;
        self.live.push(Live { alias: self.next, key, last_use: 0 });
        let (entries, bytes) = self.held();
        self.entries_highest = self.entries_highest.max(entries);
        self.bytes_highest = self.bytes_highest.max(bytes);
        Ok(Alias(self.next))
    }

    fn deregister(&mut self, alias: Alias) -> Result<(), Alias> {
        assert!(self.stuck.iter().all(|(stuck, _)| *stuck != alias.0), "a stuck one is tried again");
        let at = self.live.iter().position(|live| live.alias == alias.0).expect("given back twice");
        let live = self.live.remove(at);
        if self.is_gone(live.key) {
            self.gone += 1;
        } else {
            assert!(matches!(self.doing, Doing::Want(_)), "{live:?} leaves for nothing: {:?}", self.doing);
            assert!(live.last_use <= self.over, "{live:?} is unmapped under a call");
            let older = self.live.iter().find(|other| other.last_use < live.last_use);
            assert!(older.is_none(), "{live:?} leaves before {older:?}");
            self.evicted += u64::from(self.gives_back);
        }
        if !self.gives_back {
            self.stuck.push((alias.0, live.key.range.bytes));
            return Err(alias);
        }
        self.deregistered += 1;
        Ok(())
    }
}

/// A cache over a strict registrar.
pub struct Run {
    pub cache: Cache<Alias>,
    pub strict: Strict,
    pub limits: Limits,
}

impl Run {
    pub fn new(entries_max: usize, bytes_max: u64) -> Run {
        let limits = Limits { entries_max, bytes_max, refused_max: 4 };
        Run { cache: Cache::new(limits), strict: Strict::new(), limits }
    }

    /// Requests a buffer and returns the number of its alias, which must be that of exactly this memory.
    #[track_caller]
    pub fn want(&mut self, key: Key, part: Range, at: u64) -> Result<u64, Why> {
        self.strict.doing = Doing::Want(key);
        let answer = self.cache.want(&mut self.strict, key, part, Use(at)).map(|alias| alias.0);
        self.strict.doing = Doing::Nothing;
        if let Ok(alias) = answer {
            let live = self.strict.find(key).expect("there is no such alias");
            assert_eq!(live.alias, alias, "the alias of other memory");
            live.last_use = live.last_use.max(at);
        }
        answer
    }

    #[track_caller]
    pub fn want_whole(&mut self, key: Key, at: u64) -> Result<u64, Why> {
        self.want(key, key.range, at)
    }

    pub fn over(&mut self, up_to: u64) {
        self.strict.over = self.strict.over.max(up_to);
        self.cache.over(Use(up_to));
    }

    pub fn freed(&mut self, range: Range) -> usize {
        self.strict.doing = Doing::Freed(range);
        let there = self.strict.live.iter().filter(|live| live.key.range.overlaps(range)).count();
        assert_eq!(self.cache.freed(&mut self.strict, range), there);
        self.strict.doing = Doing::Nothing;
        assert!(!self.strict.live.iter().any(|live| live.key.range.overlaps(range)));
        there
    }

    pub fn look(&mut self) -> usize {
        self.strict.doing = Doing::Look;
        let memory = self.strict.memory.clone();
        let id_at = |base| memory.iter().find(|key| key.range.contains(range(base, 1))).map(|key| key.id);
        let gone = self.cache.look(&mut self.strict, id_at);
        self.strict.doing = Doing::Nothing;
        assert!(self.strict.live.iter().all(|live| self.strict.memory.contains(&live.key)));
        gone
    }

    /// The call that must be over to make room for `bytes`, computed without the cache. `None` if there is room, or never will be.
    pub fn would_help(&self, bytes: u64) -> Option<u64> {
        let mut calls: Vec<u64> = self.strict.live.iter().map(|live| live.last_use).collect();
        calls.sort_unstable();
        calls.into_iter().find(|call| *call > self.strict.over && self.has_room_after(*call, bytes))
    }

    /// Whether there is room when all entries have left whose last use is no later than `over`.
    pub fn has_room_after(&self, over: u64, bytes: u64) -> bool {
        let (mut entries, mut held) = self.strict.held();
        for live in self.strict.live.iter().filter(|live| live.last_use <= over) {
            entries -= 1;
            held -= live.key.range.bytes;
        }
        entries < self.limits.entries_max as u64 && held + bytes <= self.limits.bytes_max
    }

    /// Closes the cache: every alias comes out once.
    #[track_caller]
    pub fn close(mut self) {
        let mut left: Vec<u64> = self.cache.close().map(|alias| alias.0).collect();
        let live = self.strict.live.iter().map(|live| live.alias);
        let mut expected: Vec<u64> = live.chain(self.strict.stuck.iter().map(|(alias, _)| *alias)).collect();
        left.sort_unstable();
        expected.sort_unstable();
        assert_eq!(left, expected);
        assert_eq!(self.cache.close().count(), 0);
        assert!(self.cache.is_empty());
        assert_eq!((self.cache.registrations(), self.cache.bytes()), (0, 0));
    }
}
