//! Keeps the symmetric heaps of this process, and its mappings of peers', one each, as long as somebody uses them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::heap::{Heap, HeapError, Peer, PeerHeap, Serial};
use windlass_base::config::config;
use windlass_base::gpu::{self, Context, Ordinal};
use windlass_base::lock::Mutex;

/// Locked before all locks of a symmetric heap; held while one is opened, by inits alone.
pub(super) static HEAPS: Mutex<BTreeMap<Of, Arc<Heap>>> = Mutex::new(BTreeMap::new());

/// A device, and the context in which its symmetric heap works. A symmetric heap whose context is gone stays until all that it lent has come back.
type Of = (Ordinal, Context);

/// Locked before all locks of a peer's mapping.
pub(super) static PEERS: Mutex<BTreeMap<(Peer, u64), Arc<PeerHeap>>> = Mutex::new(BTreeMap::new());

/// The context of each device that had a symmetric heap, and how often a device got another one. Locked after [`HEAPS`].
static CONTEXTS: Mutex<(BTreeMap<Ordinal, Context>, u64)> = Mutex::new((BTreeMap::new(), 0));

pub(super) fn heap(device: Ordinal) -> Result<Arc<Heap>, HeapError> {
    let driver = gpu::driver()?;
    if driver.is_in_forked_child() {
        return Err(HeapError::ForkedChild);
    }
    let mut heaps = HEAPS.lock();
    let is_it = |of: &Of, heap: &Heap| of.0 == device && heap.home.is_there();
    if let Some((_, heap)) = heaps.iter().find(|(of, heap)| is_it(of, heap)) {
        return Ok(heap.clone());
    }
    let heap = Heap::open(driver, device, config().heap_bytes_max)?;
    let context = heap.home.context;
    let (contexts, changes) = &mut *CONTEXTS.lock();
    let is_other = contexts.insert(device, context).is_some_and(|before| before != context);
    *changes += u64::from(is_other);
    heaps.insert((device, context), heap.clone());
    Ok(heap)
}

/// The symmetric heap of this process that has a chunk of this number.
pub(super) fn heap_with(chunk: Serial) -> Option<Arc<Heap>> {
    if !are_ours() {
        return None;
    }
    let heaps: Vec<_> = HEAPS.lock().values().cloned().collect();
    heaps.into_iter().find(|heap| heap.has_chunk(chunk))
}

pub(super) fn peer(peer: Peer) -> Result<Arc<PeerHeap>, HeapError> {
    let driver = gpu::driver()?;
    if driver.is_in_forked_child() {
        return Err(HeapError::ForkedChild);
    }
    // A mapping made for a context that is gone may be accessible to that context alone.
    let changes = CONTEXTS.lock().1;
    Ok(PEERS.lock().entry((peer, changes)).or_insert_with(|| PeerHeap::new(driver)).clone())
}

/// Takes back what is over in all symmetric heaps and mappings of this process, and drops those that nobody uses. Called by inits, by ends of
/// communicators and by the background worker, never while a call is served.
pub fn settle() {
    if !are_ours() {
        return;
    }
    let heaps: Vec<_> = HEAPS.lock().values().cloned().collect();
    // A failure has been logged already, and is tried again the next time.
    heaps.iter().for_each(|heap| drop(heap.settle()));
    drop(heaps);
    let peers: Vec<_> = PEERS.lock().values().cloned().collect();
    peers.iter().for_each(|peer| peer.settle());
    drop(peers);
    // A count of 1 is the table's own reference: nobody can take another while the table is locked. They are dropped after that.
    let idle_heaps: Vec<_> =
        HEAPS.lock().extract_if(.., |_, heap| Arc::strong_count(heap) == 1 && heap.is_idle()).collect();
    let idle_peers: Vec<_> =
        PEERS.lock().extract_if(.., |_, peer| Arc::strong_count(peer) == 1 && peer.is_idle()).collect();
    drop((idle_heaps, idle_peers));
}

/// Whether this process can have symmetric heaps at all. In a forked child, threads that do not exist there may hold the locks.
pub(super) fn are_ours() -> bool {
    gpu::opened().is_some_and(|driver| !driver.is_in_forked_child())
}
