//! The epoll set of the background thread, the sockets in it, and flags that wake a thread.

use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;

use windlass_base::descriptor::Ours;

/// An eventfd: raised, it wakes the thread that polls it.
#[derive(Debug)]
pub struct Flag(Ours);

impl Flag {
    /// A flag that is down.
    pub fn new() -> rustix::io::Result<Flag> {
        Ok(Flag(Ours::open(|| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK))?))
    }

    /// Raises it.
    pub fn raise(&self) {
        // Fails only if it is raised 2^64 times before it is lowered.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Takes it down.
    pub fn lower(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Flag {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A descriptor of an epoll set. It is not in the set while no event is wanted, because the kernel reports hang-ups
/// even so. It is taken out before it is closed, because a forked child may still hold it open.
#[derive(Debug)]
pub struct Watched {
    set: Rc<Ours>,
    fd: Ours,
    key: u64,
    wanted: EventFlags,
}

impl Watched {
    /// Waits for these events from now on; none takes the descriptor out of the set.
    pub fn want(&mut self, wanted: EventFlags) -> rustix::io::Result<()> {
        if wanted == self.wanted {
            return Ok(());
        }
        let data = EventData::new_u64(self.key);
        if wanted.is_empty() {
            epoll::delete(&self.set, &self.fd)?;
        } else if self.wanted.is_empty() {
            epoll::add(&self.set, &self.fd, data, wanted)?;
        } else {
            epoll::modify(&self.set, &self.fd, data, wanted)?;
        }
        self.wanted = wanted;
        Ok(())
    }

    /// The number that [`Poll::wait`] reports for its events.
    pub fn key(&self) -> u64 {
        self.key
    }
}

impl AsFd for Watched {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let _ = self.want(EventFlags::empty());
    }
}

/// An epoll set.
pub struct Poll {
    set: Rc<Ours>,
    next_key: u64,
    events: Vec<epoll::Event>,
}

impl std::fmt::Debug for Poll {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Poll").field("set", &self.set).finish_non_exhaustive()
    }
}

impl Poll {
    /// An empty set. Keys below `first_key` are the caller's.
    pub fn new(first_key: u64) -> rustix::io::Result<Poll> {
        let set = Rc::new(Ours::open(|| epoll::create(epoll::CreateFlags::CLOEXEC))?);
        Ok(Poll { set, next_key: first_key, events: Vec::with_capacity(64) })
    }

    /// Takes a descriptor, with a new key, and waits for none of its events yet.
    pub fn watch(&mut self, fd: Ours) -> Watched {
        self.next_key += 1;
        self.watch_as(fd, self.next_key)
    }

    /// Takes a descriptor, with a new key, and waits for these events.
    pub fn watch_for(&mut self, fd: Ours, wanted: EventFlags) -> rustix::io::Result<Watched> {
        let mut watched = self.watch(fd);
        watched.want(wanted)?;
        Ok(watched)
    }

    /// As [`Poll::watch`], with a key of the caller's.
    pub fn watch_as(&self, fd: Ours, key: u64) -> Watched {
        Watched { set: self.set.clone(), fd, key, wanted: EventFlags::empty() }
    }

    /// Waits for input of a descriptor that the caller keeps.
    pub fn add(&self, fd: impl AsFd, key: u64) -> rustix::io::Result<()> {
        epoll::add(&self.set, fd, EventData::new_u64(key), EventFlags::IN)
    }

    /// Waits until an event or the timeout, in milliseconds, and returns the keys that have events. An error is final:
    /// a program that closed descriptors that were not its own has closed this one, too.
    pub fn wait(&mut self, timeout_ms: Option<u32>) -> rustix::io::Result<Vec<u64>> {
        let timeout = timeout_ms
            .map(|ms| Timespec { tv_sec: i64::from(ms / 1000), tv_nsec: (ms % 1000 * 1_000_000).into() });
        self.events.clear();
        match epoll::wait(&self.set, spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) => Ok(self.events.iter().map(|event| event.data.u64()).collect()),
            Err(Errno::INTR) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }
}
