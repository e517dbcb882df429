//! Cached communicators: NCCL's part of lazy communicators that have ended, kept for a lazy communicator with the same ranks, rank, device and
//! configuration. All ranks of an init agree on which of them it takes, by names that are equal on all ranks.
//!
//! One that is not kept any longer is aborted, never destroyed: NCCL's destroy waits until the peers' processes end the same communicator, and
//! theirs may stay cached. No work is in flight on it. That happens after some unused seconds, or when memory is short on its device. Every
//! rank decides that alone. A rank that has ended its own does not offer it, so no init takes it.
//!
//! NCCL's abort frees host memory, for which the driver may wait until the device is at rest, holding up launches. A program expects that of
//! its own inits and ends, so these end what is due. The worker does so only while [no communicator lives](crate::features::recycling::alive):
//! a kernel that waits for a peer could wait for ever beside the abort. At exit cached communicators are left as they are: an abort might wait
//! for a kernel that never ends. A process that did not wait crashed when NCCL's thread called a CUDA runtime that was gone (2.28.9).

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nccl_sys::{NCCL_UNIQUE_ID_BYTES, ncclComm_t};

use crate::forward::known::{self, End};
use windlass_base::config::config;
use windlass_base::gpu::{self, Context, Ordinal};
use windlass_base::lock::Mutex;
use windlass_base::stats::count;
use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::negotiated::bytes::{Writer, checksum};

use crate::background::{side_thread, worker};
use crate::features::recycling::alive;
use crate::features::registration::freeing::{home_of, is_short_on};

/// How many communicators a process caches at most, whatever their size.
const COUNT_MAX: usize = 16;
/// How long an unused one is kept.
const KEPT_FOR: Duration = Duration::from_secs(5);
/// How long a thread of the program waits for aborts on another thread.
const ENDS_WITHIN: Duration = Duration::from_secs(2);

/// What two communicators must have in common on a rank, so that one can replace the other.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Kind {
    pub ranks: u32,
    pub rank: u32,
    pub device: Ordinal,
    /// The context in which NCCL's resources are.
    pub context: Context,
    /// The words of the configuration, if there is one, then NCCL's variables of the init.
    pub configuration: Vec<u8>,
}

/// NCCL's communicator behind a lazy one, or cached.
#[derive(Debug)]
pub struct Built {
    kind: Kind,
    /// Its name, equal on all its ranks.
    token: Token,
    /// NCCL's handle.
    handle: usize,
    /// Bytes of device memory that it keeps, as far as is known.
    bytes: u64,
    /// Its place in the cache, while an init has it and may give it back.
    place: Option<Place>,
}

/// A place in the cache, ordered by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    number: u64,
    since: Instant,
}

impl Built {
    /// A communicator that NCCL built with this id.
    pub fn new(kind: Kind, id: &[u8; NCCL_UNIQUE_ID_BYTES], handle: ncclComm_t) -> Built {
        Built { kind, token: token(id), handle: handle as usize, bytes: 0, place: None }
    }

    /// Bytes of device memory that it keeps, as far as is known.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Sets these bytes.
    pub fn holding(self, bytes: u64) -> Built {
        Built { bytes, ..self }
    }

    /// NCCL's handle.
    pub fn handle(&self) -> ncclComm_t {
        self.handle as ncclComm_t
    }
}

/// The name of a communicator, from its id, which is used once: NCCL's random number at the beginning, and a checksum of all bytes.
fn token(id: &[u8; NCCL_UNIQUE_ID_BYTES]) -> Token {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&Writer::default().raw(&id[..8]).u64(checksum(id)).finish());
    Token(bytes)
}

/// The cached communicators of this process, the oldest first. Locked for a look or a move.
static CACHED: Mutex<Store> = Mutex::new(Store { next: 0, all: Vec::new() });
/// How many there are. Without any, the lock is not needed.
static COUNT: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
struct Store {
    next: u64,
    all: Vec<Built>,
}

/// How much may be cached.
#[derive(Clone, Copy, Debug)]
struct Limits {
    count: usize,
    bytes: u64,
}

impl Store {
    /// Inserts a communicator as the youngest, or at its former place. Returns those that have no room any more: the oldest, with
    /// the other ranks of the same communicator in this process, which are useless without it.
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

    /// Removes those for which this is true, with the other ranks of the same communicators in this process.
    fn let_go(&mut self, is_over: impl Fn(&Built) -> bool) -> Vec<Built> {
        let over: Vec<Token> = self.all.iter().filter(|one| is_over(one)).map(|one| one.token).collect();
        self.all.extract_if(.., |one| over.contains(&one.token)).collect()
    }

    /// Removes those that were cached for this long.
    fn age(&mut self, longest: Duration) -> Vec<Built> {
        self.let_go(|one| one.place.is_some_and(|place| place.since.elapsed() >= longest))
    }

    fn devices(&self) -> BTreeSet<Ordinal> {
        self.all.iter().map(|one| one.kind.device).collect()
    }

    fn bytes(&self) -> u64 {
        self.all.iter().map(|one| one.bytes).sum()
    }

    /// Forgets those whose context is gone (`cudaDeviceReset`): their resources are gone, too.
    fn forget_gone(&mut self) {
        let Some(driver) = gpu::opened() else { return };
        self.all.retain(|one| driver.is_there(one.kind.context));
    }

    fn count(&self) {
        COUNT.store(self.all.len(), Ordering::Relaxed);
        count::cached(self.all.len() as u64, self.bytes());
    }
}

/// Caches a communicator, and ends those that have no room or are due. The calling thread must have no group open.
pub(crate) fn cache(one: Built) {
    let device = one.kind.device;
    let limits = Limits { count: COUNT_MAX, bytes: config().cache_bytes_max };
    end(change(|store| store.cache(one, limits)));
    end_due(&[device].into());
    worker::wake();
}

/// Changes the cache, and updates its counters.
fn change<T>(act: impl FnOnce(&mut Store) -> T) -> T {
    let mut store = CACHED.lock();
    store.forget_gone();
    let done = act(&mut store);
    store.count();
    done
}

fn end(gone: Vec<Built>) {
    for one in gone {
        log::info!("a cached communicator of {} ranks ends, {} bytes", one.kind.ranks, one.bytes);
        // Without a current context NCCL, which restores the previous device, would make a context on device 0.
        let home = home_of(one.kind.device);
        let _entered = home.as_ref().and_then(|home| home.enter().ok());
        known::end(End::Abort, one.handle());
    }
}

/// Ends those that are cached for too long, and all on those of these devices where memory is short. This thread has no group open.
fn end_due(devices: &BTreeSet<Ordinal>) {
    end(change(|store| store.age(KEPT_FOR)));
    for device in devices.iter().filter(|device| is_short_on(**device)) {
        end(change(|store| store.let_go(|one| one.kind.device == *device)));
    }
}

/// Whether any communicator is cached.
pub(crate) fn is_any() -> bool {
    COUNT.load(Ordering::Relaxed) > 0
}

/// Whether any is cached, and the worker may end it now.
pub(crate) fn may_end() -> bool {
    is_any() && alive::are_none()
}

/// Ends what is due, if no communicator of this process lives. Called on a side thread.
pub(crate) fn look() {
    if may_end() {
        alive::while_none(|| end_due(&devices()));
    }
}

/// Ends all that are cached on a device, on another thread, and waits for it up to [`ENDS_WITHIN`]. For a thread of the program, which may
/// have a group open, in a call that may wait for the device.
pub(crate) fn trim(device: Ordinal) {
    if is_any() {
        let gone = change(|store| store.let_go(|one| one.kind.device == device));
        side_thread::run(Some(ENDS_WITHIN), move || end(gone));
    }
}

/// The devices on which communicators are cached.
pub(crate) fn devices() -> BTreeSet<Ordinal> {
    if is_any() { CACHED.lock().devices() } else { BTreeSet::new() }
}

/// The communicators that an init may use, hidden from other inits. Those that it does not choose go back to their old places.
#[derive(Debug)]
pub(crate) struct Taken(Vec<Built>);

/// Takes all that fit.
pub(crate) fn take(kind: &Kind) -> Taken {
    Taken(change(|store| store.take(kind)))
}

impl Taken {
    /// None, for an init that can use none.
    pub(crate) fn nothing() -> Taken {
        Taken(Vec::new())
    }

    /// Their names, the youngest first.
    pub(crate) fn tokens(&self) -> Vec<Token> {
        self.0.iter().rev().map(|one| one.token).collect()
    }

    /// The one that all ranks have agreed on, if any.
    pub(crate) fn choose(mut self, token: Option<Token>) -> Option<Built> {
        let index = self.0.iter().position(|one| Some(one.token) == token)?;
        // It will be the youngest when it is cached again.
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

    /// A communicator that was used again is the youngest when it is back. One that was not taken keeps its age. The ranks of
    /// one communicator in one process go together here, too.
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

    /// Over the count or the bytes the oldest goes. One that is larger than the limit goes itself.
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

    /// Only what is equal in all is taken. What goes back keeps its age, in any order.
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

    /// An init offers the youngest first, and gets the one that was agreed on if it has it.
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

    /// Ids that differ in any byte have different names.
    #[test]
    fn tokens() {
        let mut id = [3; NCCL_UNIQUE_ID_BYTES];
        let first = token(&id);
        id[NCCL_UNIQUE_ID_BYTES - 1] = 4;
        assert_ne!(token(&id), first);
        assert_eq!(token(&id).0[..8], [3; 8]);
    }
}
