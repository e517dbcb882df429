//! A rank's side of a [host-local rendezvous](super::local_rendezvous), on the caller's own thread.
//!
//! That thread waits only for the background thread of a process of its host that is in the same call.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SendFlags};

use crate::negotiated::Token;
use windlass_base::descriptor::Ours;

use super::local_rendezvous::{self, ANSWER_BYTES, RosterAnswer, RosterMessage};
use crate::commands::{Command, Shared};
use crate::connection;

/// How long a rank tries to enter. After that it goes without a peer group: no rank counts on one that has not entered.
const ENTERS_WITHIN: Duration = Duration::from_secs(3);
/// How soon a rank tries again.
const AGAIN_AFTER: Duration = Duration::from_millis(1);
/// How often a waiting rank checks `is_over`.
const LOOKS_EVERY: Duration = Duration::from_millis(100);

/// A rank that has entered. If it is dropped before it has asked, it leaves in good order. Dropped after that it counts
/// as dead, unless it [declines](LocalEntry::decline) or its session [is over](LocalEntry::leave).
#[derive(Debug)]
pub struct LocalEntry {
    socket: Ours,
    has_asked: Cell<bool>,
}

impl LocalEntry {
    pub(crate) fn enter(
        shared: &Arc<Shared>,
        name: Token,
        rank: u32,
        is_over: &dyn Fn() -> bool,
    ) -> io::Result<LocalEntry> {
        let until = Instant::now() + ENTERS_WITHIN;
        let is_over = &|| is_over() || Instant::now() >= until;
        loop {
            let (socket, keeps) = connect(shared, name, is_over)?;
            // The rank may be counted from here on, so a later error must not drop it silently.
            let local_entry = LocalEntry { socket, has_asked: Cell::new(false) };
            let greeted = say(&local_entry.socket, &local_rendezvous::greeting(name, rank));
            match greeted.and_then(|()| hear(&local_entry.socket, is_over)) {
                Ok(RosterAnswer::Entered) => return Ok(local_entry),
                Ok(_) => {
                    return Err(io::Error::other("the others of this host do not wait for it any more"));
                }
                // The last rank left just now, and this one opens the next rendezvous; or unknown connections fill this
                // one.
                Err(Errno::CONNRESET | Errno::PIPE) if !keeps && !is_over() => {
                    std::thread::sleep(AGAIN_AFTER);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Asks, once NCCL has made the communicator of `ranks` ranks, whether all of them are here. Waits for the answer
    /// until `is_over`. To be called once. After an error this rank has declined.
    pub fn ask(&self, ranks: u32, is_over: &dyn Fn() -> bool) -> io::Result<RosterAnswer> {
        self.has_asked.set(true);
        let asked = say(&self.socket, &RosterMessage::Ask { ranks }.encode());
        let answer = asked.and_then(|()| hear(&self.socket, is_over));
        match answer {
            Ok(answer @ RosterAnswer::Complete { .. }) => return Ok(answer),
            Ok(_) => self.leave(),
            Err(_) => self.decline(),
        }
        Ok(answer?)
    }

    /// Says that this rank does not come to the session: the other ranks use NCCL's communicator.
    pub fn decline(&self) {
        let _ = say(&self.socket, &RosterMessage::Decline.encode());
    }

    /// Says that this rank leaves, as the session is over.
    pub fn leave(&self) {
        let _ = say(&self.socket, &RosterMessage::Leave.encode());
    }
}

impl Drop for LocalEntry {
    fn drop(&mut self) {
        if !self.has_asked.get() {
            self.leave();
        }
    }
}

/// Connects to the host-local rendezvous, or opens it. Also returns whether this process keeps it.
fn connect(shared: &Arc<Shared>, name: Token, is_over: &dyn Fn() -> bool) -> io::Result<(Ours, bool)> {
    let address = local_rendezvous::address(name)?;
    loop {
        match connection::connect_locally(&address) {
            Ok(socket) => return Ok((socket, false)),
            Err(Errno::CONNREFUSED | Errno::NOENT) => match connection::listen_locally(&address) {
                Ok(listener) => {
                    // Connected before the thread gets the listener: a host-local rendezvous ends with its last
                    // connection.
                    let socket = connection::connect_locally(&address)?;
                    shared.send(Command::LocalRendezvous(name, listener));
                    return Ok((socket, true));
                }
                // Another process was first, and is about to listen.
                Err(Errno::ADDRINUSE) => {}
                Err(error) => return Err(error.into()),
            },
            // The listener's queue is full.
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        if is_over() {
            return Err(Errno::TIMEDOUT.into());
        }
        std::thread::sleep(AGAIN_AFTER);
    }
}

fn say(socket: &Ours, words: &[u8]) -> rustix::io::Result<()> {
    // A connection always has room for so few bytes.
    match net::send(socket, words, SendFlags::NOSIGNAL)? {
        sent if sent == words.len() => Ok(()),
        _ => Err(Errno::AGAIN),
    }
}

fn hear(socket: &Ours, is_over: &dyn Fn() -> bool) -> rustix::io::Result<RosterAnswer> {
    let mut heard = Vec::new();
    loop {
        let mut room = [0; ANSWER_BYTES];
        match net::recv(socket, &mut room[heard.len()..], RecvFlags::empty()) {
            Ok((_, 0)) => return Err(Errno::CONNRESET),
            Ok((_, count)) => {
                let from = heard.len();
                heard.extend_from_slice(&room[from..from + count]);
            }
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) if is_over() => return Err(Errno::TIMEDOUT),
            Err(Errno::AGAIN) => wait(socket)?,
            Err(error) => return Err(error),
        }
        if heard.len() == ANSWER_BYTES {
            return RosterAnswer::decode(&heard).ok_or(Errno::PROTO);
        }
    }
}

/// Waits until there are bytes to read, or it is time to check `is_over`.
fn wait(socket: &Ours) -> rustix::io::Result<()> {
    let tick = Timespec { tv_sec: 0, tv_nsec: LOOKS_EVERY.subsec_nanos().into() };
    match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&tick)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::{Limits, place};

    /// A rank that is turned away again and again (unknown connections fill the rendezvous) pauses between its tries.
    #[test]
    fn turned_away() {
        const TRIES_FOR: Duration = Duration::from_millis(100);
        let shared = Arc::new(Shared::new(&Limits::default()).unwrap());
        let name = place::random().unwrap();
        let listener = connection::listen_locally(&local_rendezvous::address(name).unwrap()).unwrap();
        let (came, began) = (AtomicUsize::new(0), Instant::now());
        let is_over = || began.elapsed() >= TRIES_FOR;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while began.elapsed() < 2 * TRIES_FOR {
                    let all = std::iter::from_fn(|| net::accept(&listener).ok());
                    came.fetch_add(all.count(), Ordering::Relaxed);
                    std::thread::yield_now();
                }
            });
            LocalEntry::enter(&shared, name, 0, &is_over).unwrap_err();
        });
        let most = (TRIES_FOR.as_millis() / AGAIN_AFTER.as_millis()) as usize + 1;
        let came = came.load(Ordering::Relaxed);
        assert!((2..=most).contains(&came), "{came} tries, expected at most {most}");
    }
}
