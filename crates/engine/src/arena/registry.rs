//! The arenas of this process and its peers', one each. They live while somebody uses them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::arena::counters::{Counters, PeerCounters};
use crate::arena::peer::{Peer, PeerArena};
use crate::arena::refusal::Refusal;
use crate::arena::space::Serial;
use crate::arena::{Arena, lock};
use crate::config::config;
use crate::gpu::{self, Context, Ordinal};

/// Taken before everything of an arena; held while one is opened, by inits alone.
static ARENAS: Mutex<BTreeMap<Of, Arc<Arena>>> = Mutex::new(BTreeMap::new());

/// A device, and the context in which its arena works. Those of contexts that are gone have what they lent until it comes back.
type Of = (Ordinal, Context);

/// Taken before everything of a peer's arena.
static PEERS: Mutex<BTreeMap<(Peer, u64), Arc<PeerArena>>> = Mutex::new(BTreeMap::new());

/// The context of each device that had an arena, and how often one had another than before. Taken after the arenas.
static CONTEXTS: Mutex<(BTreeMap<Ordinal, Context>, u64)> = Mutex::new((BTreeMap::new(), 0));

pub(super) fn arena(device: Ordinal) -> Result<Arc<Arena>, Refusal> {
    let driver = gpu::driver()?;
    if driver.is_in_forked_child() {
        return Err(Refusal::ForkedChild);
    }
    let mut arenas = lock(&ARENAS);
    let is_it = |of: &Of, arena: &Arena| of.0 == device && arena.home().is_there();
    if let Some((_, arena)) = arenas.iter().find(|(of, arena)| is_it(of, arena)) {
        return Ok(arena.clone());
    }
    let arena = Arena::open(driver, device, config().heap_bytes_max)?;
    let context = arena.home().context();
    let (contexts, changes) = &mut *lock(&CONTEXTS);
    let is_other = contexts.insert(device, context).is_some_and(|before| before != context);
    *changes += u64::from(is_other);
    arenas.insert((device, context), arena.clone());
    Ok(arena)
}

/// The arena of this process that has a chunk of this number.
pub(super) fn arena_with(chunk: Serial) -> Option<Arc<Arena>> {
    if !are_ours() {
        return None;
    }
    let arenas: Vec<_> = lock(&ARENAS).values().cloned().collect();
    arenas.into_iter().find(|arena| arena.has_chunk(chunk))
}

pub(super) fn peer(peer: Peer) -> Result<Arc<PeerArena>, Refusal> {
    let driver = gpu::driver()?;
    if driver.is_in_forked_child() {
        return Err(Refusal::ForkedChild);
    }
    // What is mapped for a context that is gone may have been mapped for it alone.
    let changes = lock(&CONTEXTS).1;
    Ok(lock(&PEERS).entry((peer, changes)).or_insert_with(|| PeerArena::new(driver)).clone())
}

/// Takes back what is over in all arenas and mappings of this process, and lets go of those that nobody uses. The
/// background thread calls it now and then, and after it told an arena that something closed. Never beside a call.
pub fn settle() {
    if !are_ours() {
        return;
    }
    let arenas: Vec<_> = lock(&ARENAS).values().cloned().collect();
    // What fails has been logged where it did, and is tried again the next time.
    arenas.iter().for_each(|arena| drop(arena.settle()));
    drop(arenas);
    let peers: Vec<_> = lock(&PEERS).values().cloned().collect();
    peers.iter().for_each(|peer| peer.settle());
    drop(peers);
    // Only the table's own reference: nobody else can take one while it is locked. Dropped after that.
    let idle_arenas: Vec<_> =
        lock(&ARENAS).extract_if(.., |_, arena| Arc::strong_count(arena) == 1 && arena.is_idle()).collect();
    let idle_peers: Vec<_> =
        lock(&PEERS).extract_if(.., |_, peer| Arc::strong_count(peer) == 1 && peer.is_idle()).collect();
    drop((idle_arenas, idle_peers));
}

/// What all arenas of this process have, and what is mapped of peers'.
pub fn counters() -> (Vec<Counters>, PeerCounters) {
    if !are_ours() {
        return Default::default();
    }
    let arenas: Vec<_> = lock(&ARENAS).values().map(|arena| arena.counters()).collect();
    let mut peers = PeerCounters::default();
    for peer in lock(&PEERS).values() {
        let (chunks, bytes) = peer.mapped();
        peers.peers += 1;
        peers.chunks += chunks;
        peers.mapped_bytes += bytes;
    }
    (arenas, peers)
}

/// Whether this process can have arenas at all. In a forked child the locks may be held by threads that are not here.
fn are_ours() -> bool {
    gpu::opened().is_some_and(|driver| !driver.is_in_forked_child())
}
