//! Ids of NCCL's that nobody uses: their roots listen in this process and nobody has been there.
//!
//! An id costs NCCL a thread and a socket until all of its ranks have been at its root, and nothing else ends them. So
//! where it is certain that nobody will go there, the id is kept for the next that is asked for.

use std::sync::{Mutex, PoisonError};

use super::connection;
use super::id_tag::{self, Id};

/// The spare ids of a process.
#[derive(Debug)]
pub(crate) struct Spares {
    /// As NCCL made them, without an id tag. Held for a push or a pop; comes after no other lock, and none after it.
    ids: Mutex<Vec<Id>>,
    max: usize,
}

/// What became of an id that was given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) enum Room {
    Kept,
    /// There are enough. Its root stays as NCCL leaves it.
    Full,
}

impl Spares {
    /// None yet; never more than so many.
    pub(crate) fn new(max: usize) -> Spares {
        Spares { ids: Mutex::new(Vec::new()), max }
    }

    /// Keeps an id.
    pub(crate) fn put(&self, id: Id) -> Room {
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        if ids.len() >= self.max {
            return Room::Full;
        }
        ids.push(id);
        Room::Kept
    }

    /// Takes one whose root still listens. NCCL's root leaves only when it has been talked to; an id without it
    /// would fail for its ranks, and costs nothing any more.
    pub(crate) fn take(&self) -> Option<Id> {
        loop {
            let id = self.ids.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
            if id_tag::address(&id).is_some_and(|root| !connection::is_free(&root)) {
                return Some(id);
            }
        }
    }
}
