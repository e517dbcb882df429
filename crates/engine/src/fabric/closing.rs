//! Fabrics that this rank has closed, until the others have, too: then their memory goes back.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::arena::{self, Arena, Event, LeaseId, Slice};
use crate::rendezvous::ours::Ours;
use crate::rendezvous::{self, Membership};
use crate::{guard, process};

/// Giving memory back takes milliseconds.
const EXIT_WITHIN: Duration = Duration::from_secs(2);

/// How it is known which ranks have closed.
#[derive(Debug)]
pub(super) enum Word {
    /// They tell each other over their meeting.
    Meeting(Membership),
    /// All are in this process: one bit each, and this rank.
    Here(Arc<AtomicU64>, u32),
    /// All have, as of now.
    Nobody,
    /// Nothing is heard; only processes that end are seen.
    Unheard,
}

impl Word {
    /// Where ranks of this process tell each other.
    pub fn in_one_hand() -> Arc<AtomicU64> {
        Arc::default()
    }

    pub fn here(closed: &Arc<AtomicU64>, rank: u32) -> Word {
        Word::Here(closed.clone(), rank)
    }

    pub fn nobody() -> Word {
        Word::Nobody
    }

    pub fn unheard() -> Word {
        Word::Unheard
    }

    fn close(&self) {
        match self {
            Word::Meeting(membership) => membership.close(),
            Word::Here(closed, rank) => drop(closed.fetch_or(1 << rank, Ordering::Relaxed)),
            Word::Nobody | Word::Unheard => {}
        }
    }

    fn closed(&self) -> u64 {
        match self {
            Word::Meeting(membership) => membership.closed(),
            Word::Here(closed, _) => closed.load(Ordering::Relaxed),
            Word::Nobody => u64::MAX,
            Word::Unheard => 0,
        }
    }
}

/// Another rank.
#[derive(Debug)]
pub(super) struct Life {
    pub rank: u32,
    pub process: u64,
    /// Its process's pidfd, which is readable once that has ended; none for this process.
    pub ends: Option<Ours>,
}

impl Life {
    fn is_over(&self) -> bool {
        let Some(ends) = &self.ends else { return false };
        let mut polled = [PollFd::new(ends, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&at_once)).is_ok_and(|ready| ready > 0)
    }
}

/// A slice of ours that others may still touch.
#[derive(Debug)]
pub(super) struct Closing {
    arena: Arc<Arena>,
    lease: LeaseId,
    word: Word,
    open: Vec<Life>,
}

/// Held across driver calls of [`settle`], by whoever settles; comes before the locks of arenas and [`CLOSED`].
static SETTLING: Mutex<()> = Mutex::new(());
/// Held for a few stores and looks; the rendezvous' locks come after it.
static CLOSED: Mutex<Vec<Closing>> = Mutex::new(Vec::new());
static EXITING: AtomicBool = AtomicBool::new(false);

impl Closing {
    pub fn new(slice: &Slice, word: Word, open: Vec<Life>) -> Closing {
        Closing { arena: slice.arena().clone(), lease: slice.lease(), word, open }
    }

    /// Other ranks whose ends are not known yet.
    pub fn others(&self) -> &[Life] {
        &self.open
    }

    /// This rank has let go of all that is the others'.
    pub fn begin(self) {
        self.word.close();
        closed().push(self);
    }

    /// Looks who has closed or died; whether nobody is left.
    fn look(&mut self) -> bool {
        let closed = self.word.closed();
        self.open.retain(|life| {
            if closed & (1 << life.rank) != 0 {
                self.arena.note(Event::Closed(self.lease, life.rank));
            } else if life.is_over() {
                self.arena.note(Event::Died(life.process));
            } else {
                return true;
            }
            false
        });
        self.open.is_empty()
    }
}

fn closed() -> MutexGuard<'static, Vec<Closing>> {
    CLOSED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives back what nobody touches any more. Any thread, between calls; cheap while nothing waits.
pub fn settle() {
    if EXITING.load(Ordering::Relaxed) || closed().is_empty() {
        return;
    }
    guard::or_else(
        || (),
        || {
            let _alone = SETTLING.lock().unwrap_or_else(PoisonError::into_inner);
            if !EXITING.load(Ordering::Relaxed) {
                let over: Vec<Closing> = closed().extract_if(.., Closing::look).collect();
                // Their arenas may have no other owner.
                drop(over);
                arena::settle();
            }
        },
    );
}

/// At exit the memory of closed fabrics is given back whoever else has it mapped: a mapping keeps it for him.
pub(super) fn at_exit_too() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| process::on_exit(at_exit));
}

/// On a thread of its own: what this one had in thread-local storage is gone by now, the driver's part of it, too. Waited
/// for a moment only: the driver may be stuck.
extern "C" fn at_exit() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if rendezvous::is_in_child() {
        return;
    }
    let finish = || {
        guard::or_else(|| (), give_back);
        DONE.store(true, Ordering::Release);
    };
    guard::or_else(
        || (),
        || {
            let begun = std::thread::Builder::new().spawn(finish);
            let until = Instant::now() + EXIT_WITHIN;
            while begun.is_ok() && !DONE.load(Ordering::Acquire) && Instant::now() < until {
                std::thread::sleep(Duration::from_micros(200));
            }
        },
    );
}

fn give_back() {
    let _alone = SETTLING.lock().unwrap_or_else(PoisonError::into_inner);
    EXITING.store(true, Ordering::Relaxed);
    let left = std::mem::take(&mut *closed());
    for closing in &left {
        for life in &closing.open {
            closing.arena.note(Event::Closed(closing.lease, life.rank));
        }
    }
    drop(left);
    arena::settle();
}
