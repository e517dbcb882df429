//! A rank's side of a [muster](super::muster): on the caller's own thread, which waits for nothing but the thread of
//! a process of its host that is in the same call.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SendFlags};

use crate::contract::Token;
use crate::descriptor::Ours;

use super::connection;
use super::muster::{self, ANSWER_BYTES, Answer, Word};
use super::reactor::{Command, Shared};

/// How long a rank tries to enter. It goes without a fabric then: as long as it has not entered nobody counts on it.
const ENTERS_WITHIN: Duration = Duration::from_secs(10);

/// A rank that has entered. Dropped, it says that it goes: after it has spoken in the meeting, if there is one.
#[derive(Debug)]
pub struct Mustered {
    socket: Ours,
}

impl Mustered {
    pub(super) fn enter(shared: &Arc<Shared>, name: Token, rank: u32) -> io::Result<Mustered> {
        let until = Instant::now() + ENTERS_WITHIN;
        loop {
            let (socket, keeps) = connect(shared, name, until)?;
            let greeted = say(&socket, &muster::greeting(name, rank));
            match greeted.and_then(|()| hear(&socket, Some(until))) {
                Ok(Answer::Entered) => return Ok(Mustered { socket }),
                Ok(_) => return Err(io::Error::other("the others of this host do not wait for it any more")),
                // The last one has gone while this one came: it is the first of the next.
                Err(Errno::CONNRESET | Errno::PIPE) if !keeps && Instant::now() < until => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// NCCL has made the communicator, of so many ranks: whether all of them are here. Once.
    pub fn ask(&self, ranks: u32) -> io::Result<Answer> {
        say(&self.socket, &Word::Ask { ranks }.encode())?;
        Ok(hear(&self.socket, None)?)
    }
}

impl Drop for Mustered {
    fn drop(&mut self) {
        let _ = say(&self.socket, &Word::Leave.encode());
    }
}

/// Connects to the muster, or opens it; and whether this process keeps it.
fn connect(shared: &Arc<Shared>, name: Token, until: Instant) -> io::Result<(Ours, bool)> {
    let address = muster::address(name)?;
    loop {
        match connection::connect_locally(&address) {
            Ok(socket) => return Ok((socket, false)),
            Err(Errno::CONNREFUSED | Errno::NOENT) => match connection::listen_locally(&address) {
                Ok(listener) => {
                    // Before the thread has it: a muster ends with its last connection.
                    let socket = connection::connect_locally(&address)?;
                    shared.send(Command::Muster(name, listener));
                    return Ok((socket, true));
                }
                // Another was first, and is about to listen.
                Err(Errno::ADDRINUSE) => {}
                Err(error) => return Err(error.into()),
            },
            // Its queue is full.
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        if Instant::now() >= until {
            return Err(Errno::TIMEDOUT.into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn say(socket: &Ours, words: &[u8]) -> rustix::io::Result<()> {
    // A connection has room for so little.
    match net::send(socket, words, SendFlags::NOSIGNAL)? {
        sent if sent == words.len() => Ok(()),
        _ => Err(Errno::AGAIN),
    }
}

fn hear(socket: &Ours, until: Option<Instant>) -> rustix::io::Result<Answer> {
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
            Err(Errno::AGAIN) => wait(socket, until)?,
            Err(error) => return Err(error),
        }
        if heard.len() == ANSWER_BYTES {
            return Answer::decode(&heard).ok_or(Errno::PROTO);
        }
    }
}

/// Until there is something to read.
fn wait(socket: &Ours, until: Option<Instant>) -> rustix::io::Result<()> {
    let left = match until.map(|until| until.saturating_duration_since(Instant::now())) {
        Some(left) if left.is_zero() => return Err(Errno::TIMEDOUT),
        left => {
            left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() })
        }
    };
    match poll(&mut [PollFd::new(socket, PollFlags::IN)], left.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error),
    }
}
