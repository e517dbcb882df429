//! Knows whether the processes of the other ranks live, by a pidfd each, which is readable once its process has ended.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use windlass_base::descriptor::Ours;

/// Another rank.
#[derive(Debug)]
pub(crate) struct Life {
    pub rank: u32,
    pub process: u64,
    /// The pidfd of its process, shared by all of that process's ranks; none for this process.
    pub ends: Option<Arc<Ours>>,
}

/// The open pidfds by process, since a program may have hundreds of communicators and few descriptors. Held for a lookup.
static ENDS: Mutex<BTreeMap<u64, Weak<Ours>>> = Mutex::new(BTreeMap::new());

impl Life {
    /// Sets the pidfd of its process: an already open one, or else this one.
    pub(crate) fn ends_with(&mut self, pidfd: Ours) {
        let mut all = ENDS.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, ends| ends.strong_count() > 0);
        let known = all.get(&self.process).and_then(Weak::upgrade);
        let ends = known.unwrap_or_else(|| Arc::new(pidfd));
        all.insert(self.process, Arc::downgrade(&ends));
        self.ends = Some(ends);
    }

    /// Whether its process has ended.
    pub(crate) fn is_over(&self) -> bool {
        let Some(ends) = &self.ends else { return false };
        let mut polled = [PollFd::new(ends.as_ref(), PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&at_once)).is_ok_and(|ready| ready > 0)
    }
}
