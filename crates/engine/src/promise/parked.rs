//! NCCL's communicators of promises that have ended, kept to be used again: by a promise with the same ranks, this one's rank
//! and device among them, and the same configuration. Which of them a birth takes all its ranks agree on, by names that all know.
//!
//! One that is not kept, or has been kept long enough, is aborted and never destroyed: NCCL's destroy waits until the peers in
//! other processes end the same communicator, and theirs may stay parked. Nothing is in flight on it by then.
//!
//! At exit they are left to the process's end, as what a program never destroys is with NCCL. An abort might wait for a kernel that
//! never ends; and where the process went on without it, a thread of NCCL's called a CUDA runtime that was no more (2.28.9: a crash
//! at exit).

use std::sync::{Mutex, MutexGuard, PoisonError};

use nccl_sys::{NCCL_UNIQUE_ID_BYTES, ncclComm_t};

use crate::config::config;
use crate::contract::Token;
use crate::contract::bytes::{Writer, checksum};
use crate::forward::known::{self, End};
use crate::gpu::Ordinal;
use crate::stats::count;

/// No process keeps more, whatever they need.
const COUNT_MAX: usize = 16;

/// What two communicators have in common that can stand for each other, on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Kind {
    pub ranks: u32,
    pub rank: u32,
    pub device: Ordinal,
    /// What the configuration says, empty for none, and then NCCL's variables of each init.
    pub configuration: Vec<u8>,
}

/// NCCL's communicator behind a promise, or parked.
#[derive(Debug)]
pub struct Built {
    pub(super) kind: Kind,
    /// Names it on all its ranks.
    pub(super) token: Token,
    /// NCCL's handle.
    handle: usize,
    /// Device memory that it keeps, as far as is known.
    pub(super) bytes: u64,
    /// Its place among the parked, by age, once it has been there.
    place: Option<u64>,
}

impl Built {
    pub(super) fn new(kind: Kind, id: &[u8; NCCL_UNIQUE_ID_BYTES], handle: ncclComm_t) -> Built {
        Built { kind, token: token(id), handle: handle as usize, bytes: 0, place: None }
    }

    /// The same, with what it holds.
    pub(super) fn holding(self, bytes: u64) -> Built {
        Built { bytes, ..self }
    }

    /// NCCL's handle.
    pub(super) fn handle(&self) -> ncclComm_t {
        self.handle as ncclComm_t
    }
}

/// The name of what is built with an id, which is used once: NCCL's random number in front, and all the rest.
fn token(id: &[u8; NCCL_UNIQUE_ID_BYTES]) -> Token {
    let mut writer = Writer::default();
    writer.raw(&id[..8]).u64(checksum(id));
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&writer.finish());
    Token(bytes)
}

/// The parked of this process, the oldest first. Held for a look or a move.
static PARKED: Mutex<Store> = Mutex::new(Store { next: 0, all: Vec::new() });

#[derive(Debug)]
struct Store {
    next: u64,
    all: Vec<Built>,
}

/// How much may be kept.
#[derive(Clone, Copy, Debug)]
struct Limits {
    count: usize,
    bytes: u64,
}

impl Store {
    /// Takes in what was built: as the youngest, or where it was before. Gives what has no room any more: the oldest, and what
    /// other ranks of this process have of the same, which nobody can use without it.
    fn park(&mut self, mut one: Built, limits: Limits) -> Vec<Built> {
        let place = *one.place.get_or_insert(self.next);
        self.next = self.next.max(place + 1);
        let index = self.all.partition_point(|other| other.place < Some(place));
        self.all.insert(index, one);
        let mut gone = Vec::new();
        while self.all.len() > limits.count || self.bytes() > limits.bytes {
            let token = self.all[0].token;
            gone.extend(self.all.extract_if(.., |one| one.token == token));
        }
        gone
    }

    fn take(&mut self, kind: &Kind) -> Vec<Built> {
        self.all.extract_if(.., |one| one.kind == *kind).collect()
    }

    fn bytes(&self) -> u64 {
        self.all.iter().map(|one| one.bytes).sum()
    }

    fn count(&self) {
        count::parked(self.all.len() as u64, self.bytes());
    }
}

fn parked() -> MutexGuard<'static, Store> {
    PARKED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps it, or some others less. This thread has no group open.
pub fn park(one: Built) {
    let limits = Limits { count: COUNT_MAX, bytes: config().parked_bytes_max };
    let mut store = parked();
    let gone = store.park(one, limits);
    store.count();
    drop(store);
    end(gone);
}

fn end(gone: Vec<Built>) {
    for one in gone {
        log::info!("a parked communicator of {} ranks ends, {} bytes", one.kind.ranks, one.bytes);
        known::end(End::Abort, one.handle());
    }
}

/// What a birth may use, away from all other births meanwhile. What it does not choose goes back, each to its old place.
#[derive(Debug)]
pub struct Taken(Vec<Built>);

/// Takes all that fits.
pub fn take(kind: &Kind) -> Taken {
    let mut store = parked();
    let taken = store.take(kind);
    store.count();
    Taken(taken)
}

impl Taken {
    /// Nothing: the birth has no use for any.
    pub fn nothing() -> Taken {
        Taken(Vec::new())
    }

    /// Their names, the youngest first.
    pub fn tokens(&self) -> Vec<Token> {
        self.0.iter().rev().map(|one| one.token).collect()
    }

    /// The one that all ranks have, if they have one.
    pub fn choose(mut self, token: Option<Token>) -> Option<Built> {
        let index = self.0.iter().position(|one| Some(one.token) == token)?;
        Some(self.0.remove(index))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.drain(..).for_each(park);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { count: 3, bytes: 100 };

    fn kind(rank: u32) -> Kind {
        Kind { ranks: 2, rank, device: rank as Ordinal, configuration: Vec::new() }
    }

    fn built(name: u8, rank: u32, bytes: u64) -> Built {
        let handle = (64 * usize::from(name)) as ncclComm_t;
        Built { bytes, ..Built::new(kind(rank), &[name; NCCL_UNIQUE_ID_BYTES], handle) }
    }

    fn names(built: &[Built]) -> Vec<u8> {
        built.iter().map(|one| one.token.0[0]).collect()
    }

    fn store() -> Store {
        Store { next: 0, all: Vec::new() }
    }

    /// Over the count or the bytes the oldest goes; what is too large for all room goes itself.
    #[test]
    fn limits() {
        let mut store = store();
        let gone: Vec<u8> = [(1, 10), (2, 10), (3, 10), (4, 10)]
            .map(|(name, bytes)| names(&store.park(built(name, 0, bytes), LIMITS)))
            .concat();
        assert_eq!((gone, names(&store.all)), (vec![1], vec![2, 3, 4]));
        assert_eq!(names(&store.park(built(5, 0, 85), LIMITS)), [2, 3]);
        assert_eq!(names(&store.park(built(6, 0, 101), LIMITS)), [4, 5, 6]);
        assert!(store.all.is_empty());
        assert_eq!(names(&store.park(built(7, 0, 1), Limits { bytes: 0, ..LIMITS })), [7]);
    }

    /// Ranks of one communicator in one process go together.
    #[test]
    fn ranks_go_together() {
        let mut store = store();
        for (name, rank) in [(1, 0), (2, 0), (1, 1)] {
            assert!(store.park(built(name, rank, 1), LIMITS).is_empty());
        }
        assert_eq!(names(&store.park(built(3, 0, 1), LIMITS)), [1, 1]);
        assert_eq!(names(&store.all), [2, 3]);
    }

    /// Only what is the same in all is taken; what goes back is as old as it was, in any order.
    #[test]
    fn taken_and_back() {
        let mut store = store();
        let limits = Limits { count: 16, bytes: 100 };
        for (name, rank) in [(1, 0), (2, 1), (3, 0), (4, 0)] {
            store.park(built(name, rank, 1), limits);
        }
        for other in [
            Kind { ranks: 3, ..kind(0) },
            Kind { device: 1, ..kind(0) },
            Kind { configuration: vec![1], ..kind(0) },
        ] {
            assert!(store.take(&other).is_empty(), "{other:?}");
        }
        let mut taken = store.take(&kind(0));
        assert_eq!((names(&taken), names(&store.all)), (vec![1, 3, 4], vec![2]));
        store.park(built(5, 0, 1), limits);
        taken.rotate_left(1);
        taken.into_iter().for_each(|one| drop(store.park(one, limits)));
        assert_eq!(names(&store.all), [1, 2, 3, 4, 5]);
    }

    /// A birth offers the youngest first and gets what was agreed on, if it has it.
    #[test]
    fn choice() {
        let taken = || Taken(vec![built(1, 9, 1), built(2, 9, 1)]);
        let offered = taken();
        let tokens = offered.tokens();
        std::mem::forget(offered);
        assert_eq!(tokens, [token(&[2; NCCL_UNIQUE_ID_BYTES]), token(&[1; NCCL_UNIQUE_ID_BYTES])]);
        let chosen = taken().choose(Some(tokens[1])).unwrap();
        assert_eq!(chosen.token, tokens[1]);
        assert!(taken().choose(None).is_none());
        assert!(taken().choose(Some(Token([7; 16]))).is_none());
        let returned = take(&kind(9));
        assert_eq!(returned.0.len(), 5);
        std::mem::forget(returned);
    }

    /// Ids that differ anywhere have other names.
    #[test]
    fn tokens() {
        let mut id = [3; NCCL_UNIQUE_ID_BYTES];
        let first = token(&id);
        id[NCCL_UNIQUE_ID_BYTES - 1] = 4;
        assert_ne!(token(&id), first);
        assert_eq!(token(&id).0[..8], [3; 8]);
    }
}
