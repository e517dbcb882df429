//! Spare ids: made by NCCL in this process, with a root that listens here and that no rank has reached.
//!
//! An id costs NCCL a thread and a socket until all of its ranks have been at its root, and nothing else ends them. So
//! an id to whose root certainly no rank will go is kept for the next `ncclGetUniqueId`.

use super::connection;
use super::id_tag::{self, Id};
use windlass_base::lock::Mutex;

/// The spare ids of a process.
#[derive(Debug)]
pub(crate) struct Spares {
    /// As NCCL made them, without an id tag. Held for a push or a pop. No other lock is held when it is taken, nor
    /// taken while it is held.
    ids: Mutex<Vec<Id>>,
    max: usize,
}

impl Spares {
    /// Keeps at most `max` ids.
    pub(crate) fn new(max: usize) -> Spares {
        Spares { ids: Mutex::new(Vec::new()), max }
    }

    /// Keeps an id, and returns whether it did: where there are enough, the id's root stays as NCCL leaves it.
    #[must_use]
    pub(crate) fn put(&self, id: Id) -> bool {
        let mut ids = self.ids.lock();
        let has_room = ids.len() < self.max;
        ids.extend(has_room.then_some(id));
        has_room
    }

    /// Takes an id whose root still listens. NCCL's root closes only after a connection. An id without its root would
    /// fail for its ranks, and costs nothing any more, so it is dropped.
    pub(crate) fn take(&self) -> Option<Id> {
        loop {
            let id = self.ids.lock().pop()?;
            if id_tag::address(&id).is_some_and(|root| !connection::is_free(&root)) {
                return Some(id);
            }
        }
    }
}
