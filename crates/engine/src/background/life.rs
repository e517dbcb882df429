//! Knows whether the processes of the other ranks live. A pidfd is readable once its process has ended. It says nothing of a process that
//! executes another program. So each process also keeps one end of a socket pair, which an exec closes, and gives the other end to its peers.
//! Linux before 5.3 has no pidfds, and some sandboxes refuse them. Then nobody counts as dead, and memory stays: a process that only seems to
//! have ended may still write there.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Weak};

use once_cell::sync::OnceCell;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use windlass_base::descriptor::Ours;
use windlass_base::lock::Mutex;
use windlass_base::process::fork_local::ForkLocal;

/// What becomes readable when a process ends, in this order: its pidfd, and its peers' end of its socket pair. A child made by a raw `clone`
/// keeps the process's own end open: then only the pidfd tells.
pub(crate) type Ends = [Ours; 2];

/// Another rank.
#[derive(Debug)]
pub(crate) struct Life {
    pub rank: u32,
    pub process: u64,
    /// Shared by all of that process's ranks; none for this process, and where a rank has no pidfds.
    pub ends: OnceCell<Arc<Ends>>,
}

/// The open ends by process, since a program may have hundreds of communicators and few descriptors. Held for a lookup.
static ENDS: Mutex<BTreeMap<u64, Weak<Ends>>> = Mutex::new(BTreeMap::new());

/// The socket pair of this process: its own end, and the one for its peers.
static OWN: ForkLocal<(Ours, Ours)> = ForkLocal::new();

/// Whether this process can have pidfds.
pub(crate) fn has_pidfds() -> bool {
    matches!(pidfd(), Ok(_) | Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM))
}

fn pidfd() -> Result<Ours> {
    Ours::open(|| pidfd_open(getpid(), PidfdFlags::empty()))
}

/// What tells this process's end to its peers, in the order of [`Ends`].
pub(crate) fn for_peers() -> Result<(Ours, BorrowedFd<'static>)> {
    let pair = || socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let (_, others) = OWN.get_or_try_init(|| Ours::open_pair(pair))?;
    Ok((pidfd()?, others.as_fd()))
}

impl Life {
    /// Sets the ends of its process: already open ones, or else these.
    pub(crate) fn ends_with(&self, ends: Ends) {
        let mut all = ENDS.lock();
        all.retain(|_, ends| ends.strong_count() > 0);
        let known = all.get(&self.process).and_then(Weak::upgrade);
        let ends = known.unwrap_or_else(|| Arc::new(ends));
        all.insert(self.process, Arc::downgrade(&ends));
        self.ends.get_or_init(|| ends);
    }

    /// Whether its process has ended, or executes another program.
    pub(crate) fn is_over(&self) -> bool {
        let Some(ends) = self.ends.get() else { return false };
        let mut polled = ends.each_ref().map(|end| PollFd::new(end, PollFlags::IN));
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&at_once)).is_ok_and(|ready| ready > 0)
    }
}
