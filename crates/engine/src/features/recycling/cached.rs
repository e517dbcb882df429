//! NCCL's communicators behind lazy ones that have ended, kept to be used again: by a lazy communicator with the same ranks, this one's rank
//! and device among them, and the same configuration. Which of them an init takes all its ranks agree on, by names that all know.
//!
//! One that is not kept, or has been kept long enough, is aborted and never destroyed: NCCL's destroy waits until the peers in
//! other processes end the same communicator, and theirs may stay cached. Nothing is in flight on it by then.
//!
//! One that nobody takes for some seconds ends, and all of a device end when memory is short there: an engine in another process may want
//! that memory. Every rank decides alone. A rank that has ended its own offers it no more, so no init takes the others'.
//!
//! NCCL's abort frees memory of the host, for which the driver may wait until the device is at rest, and hold up launches meanwhile. A
//! program expects that of its own inits and ends, so these end what is due. Otherwise the worker does, but only while [no communicator of
//! this process is alive](crate::features::recycling::alive): a kernel that waits for a peer could wait for ever beside it.
//!
//! At exit they are left to the process's end, as what a program never destroys is with NCCL. An abort might wait for a kernel that
//! never ends; and where the process went on without it, a thread of NCCL's called a CUDA runtime that was no more (2.28.9: a crash
//! at exit).

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nccl_sys::{NCCL_UNIQUE_ID_BYTES, ncclComm_t};

use crate::forward::known::{self, End};
use windlass_base::config::config;
use windlass_base::gpu::{self, Context, Ordinal};
use windlass_base::stats::count;
use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::negotiated::bytes::{Writer, checksum};

use crate::background::{side_thread, worker};
use crate::features::recycling::alive;
use crate::features::registration::freeing::{home_of, is_short_on};

/// No process keeps more, whatever they need.
const COUNT_MAX: usize = 16;
/// What nobody takes for so long ends.
const KEPT_FOR: Duration = Duration::from_secs(5);
/// As long as a thread of the application waits for what ends on another thread.
const ENDS_WITHIN: Duration = Duration::from_secs(2);

/// What two communicators have in common that can stand for each other, on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Kind {
    pub ranks: u32,
    pub rank: u32,
    pub device: Ordinal,
    /// What NCCL has of it lives there.
    pub context: Context,
    /// What the configuration says, empty for none, and then NCCL's variables of each init.
    pub configuration: Vec<u8>,
}

/// NCCL's communicator behind a lazy one, or cached.
#[derive(Debug)]
pub struct Built {
    kind: Kind,
    /// Names it on all its ranks.
    token: Token,
    /// NCCL's handle.
    handle: usize,
    /// Device memory that it keeps, as far as is known.
    bytes: u64,
    /// Its place in the cache, while an init has it that may give it back.
    place: Option<Place>,
}

/// Its place by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    number: u64,
    since: Instant,
}

impl Built {
    /// What was built with an id.
    pub fn new(kind: Kind, id: &[u8; NCCL_UNIQUE_ID_BYTES], handle: ncclComm_t) -> Built {
        Built { kind, token: token(id), handle: handle as usize, bytes: 0, place: None }
    }

    /// What it holds, as far as is known.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The same, with what it holds.
    pub fn holding(self, bytes: u64) -> Built {
        Built { bytes, ..self }
    }

    /// NCCL's handle.
    pub fn handle(&self) -> ncclComm_t {
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

/// The cached ones of this process, the oldest first. Held for a look or a move.
static CACHED: Mutex<Store> = Mutex::new(Store { next: 0, all: Vec::new() });
/// How many there are: without any there is nothing to look at.
static COUNT: AtomicUsize = AtomicUsize::new(0);

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
    fn cache(&mut self, mut one: Built, limits: Limits) -> Vec<Built> {
        let place = *one.place.get_or_insert_with(|| Place { number: self.next, since: Instant::now() });
        self.next = self.next.max(place.number + 1);
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

    /// Gives those of which this is true, and what other ranks of this process have of the same.
    fn let_go(&mut self, is_over: impl Fn(&Built) -> bool) -> Vec<Built> {
        let over: Vec<Token> = self.all.iter().filter(|one| is_over(one)).map(|one| one.token).collect();
        self.all.extract_if(.., |one| over.contains(&one.token)).collect()
    }

    /// Gives what has been here for so long.
    fn age(&mut self, longest: Duration) -> Vec<Built> {
        self.let_go(|one| one.place.is_some_and(|place| place.since.elapsed() >= longest))
    }

    fn devices(&self) -> BTreeSet<Ordinal> {
        self.all.iter().map(|one| one.kind.device).collect()
    }

    fn bytes(&self) -> u64 {
        self.all.iter().map(|one| one.bytes).sum()
    }

    /// Lets go of those whose context is gone (`cudaDeviceReset`): what NCCL would give back of them is no more.
    fn forget_gone(&mut self) {
        let Some(driver) = gpu::opened() else { return };
        self.all.retain(|one| driver.is_there(one.kind.context));
    }

    fn count(&self) {
        COUNT.store(self.all.len(), Ordering::Relaxed);
        count::cached(self.all.len() as u64, self.bytes());
    }
}

fn cached() -> MutexGuard<'static, Store> {
    CACHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps it, or some others less; nothing where memory is short. This thread has no group open.
pub(crate) fn cache(one: Built) {
    let device = one.kind.device;
    let limits = Limits { count: COUNT_MAX, bytes: config().cache_bytes_max };
    end(change(|store| store.cache(one, limits)));
    end_due(&[device].into());
    worker::wake();
}

/// Changes what is cached, and notes how much that is.
fn change<T>(act: impl FnOnce(&mut Store) -> T) -> T {
    let mut store = cached();
    store.forget_gone();
    let done = act(&mut store);
    store.count();
    done
}

fn end(gone: Vec<Built>) {
    for one in gone {
        log::info!("a cached communicator of {} ranks ends, {} bytes", one.kind.ranks, one.bytes);
        // Where no context is current NCCL, which brings back the device that was, would make one for device 0.
        let home = home_of(one.kind.device);
        let _entered = home.as_ref().and_then(|home| home.enter().ok());
        known::end(End::Abort, one.handle());
    }
}

/// Ends what is cached for too long, and all on those of these devices where memory is short. This thread has no group open.
fn end_due(devices: &BTreeSet<Ordinal>) {
    end(change(|store| store.age(KEPT_FOR)));
    for device in devices.iter().filter(|device| is_short_on(**device)) {
        end(change(|store| store.let_go(|one| one.kind.device == *device)));
    }
}

/// Whether any is cached.
pub(crate) fn is_any() -> bool {
    COUNT.load(Ordering::Relaxed) > 0
}

/// Whether any is cached that the worker may end.
pub(crate) fn may_end() -> bool {
    is_any() && alive::are_none()
}

/// Ends what is due, while no communicator of this process is alive. On a thread of ours.
pub(crate) fn look() {
    if may_end() {
        alive::while_none(|| end_due(&devices()));
    }
}

/// All that is cached on a device ends, before this returns. A thread of the application, which may have a group open, is in a call that may
/// wait for the device.
pub(crate) fn trim(device: Ordinal) {
    if is_any() {
        let gone = change(|store| store.let_go(|one| one.kind.device == device));
        side_thread::run(Some(ENDS_WITHIN), move || end(gone));
    }
}

/// The devices on which any is cached.
pub(crate) fn devices() -> BTreeSet<Ordinal> {
    if is_any() { cached().devices() } else { BTreeSet::new() }
}

/// What an init may use, away from all other inits meanwhile. What it does not choose goes back, each to its old place.
#[derive(Debug)]
pub(crate) struct Taken(Vec<Built>);

/// Takes all that fits.
pub(crate) fn take(kind: &Kind) -> Taken {
    Taken(change(|store| store.take(kind)))
}

impl Taken {
    /// Nothing: the init has no use for any.
    pub(crate) fn nothing() -> Taken {
        Taken(Vec::new())
    }

    /// Their names, the youngest first.
    pub(crate) fn tokens(&self) -> Vec<Token> {
        self.0.iter().rev().map(|one| one.token).collect()
    }

    /// The one that all ranks have, if they have one.
    pub(crate) fn choose(mut self, token: Option<Token>) -> Option<Built> {
        let index = self.0.iter().position(|one| Some(one.token) == token)?;
        // When it is cached again it is the youngest.
        Some(Built { place: None, ..self.0.remove(index) })
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.drain(..).for_each(cache);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { count: 3, bytes: 100 };
    const LIMITS_OF_MANY: Limits = Limits { count: 16, bytes: 100 };

    fn kind(rank: u32) -> Kind {
        let context = Context::default();
        Kind { ranks: 2, rank, device: rank as Ordinal, context, configuration: Vec::new() }
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

    /// What was used again is the youngest when it is back, and what nobody took goes by its first day. Ranks of one communicator in
    /// one process go together here, too.
    #[test]
    fn ages() {
        let mut store = store();
        for (name, rank) in [(1, 0), (2, 0), (1, 1), (3, 0)] {
            store.cache(built(name, rank, 1), LIMITS_OF_MANY);
        }
        assert!(store.age(Duration::from_secs(60)).is_empty());
        assert_eq!(names(&store.let_go(|one| one.kind.device == 1)), [1, 1]);
        let Some(long_ago) = Instant::now().checked_sub(Duration::from_secs(7)) else { return };
        let mut taken = Taken(store.take(&kind(0)));
        taken
            .0
            .iter_mut()
            .for_each(|one| one.place = one.place.map(|place| Place { since: long_ago, ..place }));
        let chosen = taken.0.remove(0);
        store.cache(Built { place: None, ..chosen }, LIMITS_OF_MANY);
        taken.0.drain(..).for_each(|one| drop(store.cache(one, LIMITS_OF_MANY)));
        assert_eq!(names(&store.all), [3, 2]);
        assert_eq!((names(&store.age(Duration::from_secs(5))), names(&store.all)), (vec![3], vec![2]));
    }

    /// Over the count or the bytes the oldest goes; what is too large for all room goes itself.
    #[test]
    fn limits() {
        let mut store = store();
        let gone: Vec<u8> = [(1, 10), (2, 10), (3, 10), (4, 10)]
            .map(|(name, bytes)| names(&store.cache(built(name, 0, bytes), LIMITS)))
            .concat();
        assert_eq!((gone, names(&store.all)), (vec![1], vec![2, 3, 4]));
        assert_eq!(names(&store.cache(built(5, 0, 85), LIMITS)), [2, 3]);
        assert_eq!(names(&store.cache(built(6, 0, 101), LIMITS)), [4, 5, 6]);
        assert!(store.all.is_empty());
        assert_eq!(names(&store.cache(built(7, 0, 1), Limits { bytes: 0, ..LIMITS })), [7]);
    }

    /// Ranks of one communicator in one process go together.
    #[test]
    fn ranks_go_together() {
        let mut store = store();
        for (name, rank) in [(1, 0), (2, 0), (1, 1)] {
            assert!(store.cache(built(name, rank, 1), LIMITS).is_empty());
        }
        assert_eq!(names(&store.cache(built(3, 0, 1), LIMITS)), [1, 1]);
        assert_eq!(names(&store.all), [2, 3]);
    }

    /// Only what is the same in all is taken; what goes back is as old as it was, in any order.
    #[test]
    fn taken_and_back() {
        let mut store = store();
        let limits = LIMITS_OF_MANY;
        for (name, rank) in [(1, 0), (2, 1), (3, 0), (4, 0)] {
            store.cache(built(name, rank, 1), limits);
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
        store.cache(built(5, 0, 1), limits);
        taken.rotate_left(1);
        taken.into_iter().for_each(|one| drop(store.cache(one, limits)));
        assert_eq!(names(&store.all), [1, 2, 3, 4, 5]);
    }

    /// An init offers the youngest first and gets what was agreed on, if it has it.
    #[test]
    fn choice() {
        let taken = || Taken(vec![built(1, 9, 1), built(2, 9, 1)]);
        let offered = taken();
        let tokens = offered.tokens();
        std::mem::forget(offered);
        assert_eq!(tokens, [token(&[2; NCCL_UNIQUE_ID_BYTES]), token(&[1; NCCL_UNIQUE_ID_BYTES])]);
        let chosen = taken().choose(Some(tokens[1])).unwrap();
        assert_eq!((chosen.token, chosen.place), (tokens[1], None));
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
