//! Tables of objects by handle. Handles are numbers, so that a stale or unknown one gives an error code and not a wild pointer.

use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// A handle. To C it is an opaque pointer.
pub type Handle = usize;

/// Far above null and the special streams 1 and 2, and below any address that a program would map.
static NEXT_HANDLE: AtomicUsize = AtomicUsize::new(0x51_0000);

/// Whether a handle comes back after its object has gone.
#[derive(Clone, Copy, PartialEq)]
pub enum Reuse {
    /// Never, so that stale handles are always detected.
    Never,
    /// The handle that was freed last is given next, as the driver does with streams: programs must compare ids.
    LastFreed,
}

pub struct Table<T> {
    reuse: Reuse,
    entries: Mutex<Entries<T>>,
}

struct Entries<T> {
    live: BTreeMap<Handle, Arc<T>>,
    freed: Vec<Handle>,
}

impl<T> Table<T> {
    pub const fn new(reuse: Reuse) -> Self {
        Table { reuse, entries: Mutex::new(Entries { live: BTreeMap::new(), freed: Vec::new() }) }
    }

    /// Adds the object that `make` builds around its handle.
    pub fn insert(&self, make: impl FnOnce(Handle) -> T) -> Arc<T> {
        let freed = lock(&self.entries).freed.pop();
        let handle = freed.unwrap_or_else(|| NEXT_HANDLE.fetch_add(64, Ordering::Relaxed));
        let object = Arc::new(make(handle));
        lock(&self.entries).live.insert(handle, object.clone());
        object
    }

    /// Puts an object back under a handle that it had before.
    pub fn restore(&self, handle: Handle, object: Arc<T>) {
        lock(&self.entries).live.insert(handle, object);
    }

    pub fn get(&self, handle: Handle) -> Option<Arc<T>> {
        lock(&self.entries).live.get(&handle).cloned()
    }

    pub fn remove(&self, handle: Handle) -> Option<Arc<T>> {
        let mut entries = lock(&self.entries);
        let object = entries.live.remove(&handle)?;
        if self.reuse == Reuse::LastFreed {
            entries.freed.push(handle);
        }
        Some(object)
    }

    pub fn all(&self) -> Vec<Arc<T>> {
        lock(&self.entries).live.values().cloned().collect()
    }

    pub fn len(&self) -> usize {
        lock(&self.entries).live.len()
    }
}
