//! A relay between a rank that speaks NCCL's protocol and NCCL's root: passes every byte both ways, on the background
//! thread.
//!
//! Each way is closed when its sender has closed it. At most [`BUFFER_BYTES`] are held each way: a side that does not
//! read stops the other.

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{self, SendFlags, Shutdown};

use super::connection;
use super::poll::Watched;

/// The most bytes that are held for a side that does not read.
const BUFFER_BYTES: usize = 64 * 1024;
/// Reads and sends of one way before other sockets get their turn.
const TURNS: usize = 16;

/// The state of a relay after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RelayState {
    /// More will come.
    Running,
    /// Both sides have closed.
    Complete,
    /// A side broke, or NCCL's root was not there.
    Broken,
}

/// One relayed connection.
#[derive(Debug)]
pub(crate) struct Relay {
    client: Watched,
    root: Watched,
    forth: Way,
    back: Way,
    connecting: bool,
}

/// One direction.
#[derive(Debug)]
struct Way {
    held: Vec<u8>,
    /// The sender has closed or broken.
    ended: bool,
    /// The sender broke. The held bytes go out, then both sides are closed.
    broken: bool,
    /// The receiver has been told the end, or takes no more.
    passed_on: bool,
    bytes: u64,
}

impl Relay {
    /// A relay whose connection to NCCL's root has begun. `seen`: bytes that the client has sent so far.
    pub(crate) fn new(client: Watched, root: Watched, seen: Vec<u8>) -> Relay {
        let way = |held| Way { held, ended: false, broken: false, passed_on: false, bytes: 0 };
        Relay { client, root, forth: way(seen), back: way(Vec::new()), connecting: true }
    }

    /// Bytes sent to the root, and back.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.forth.bytes, self.back.bytes)
    }

    /// The key of the connection to the root.
    pub(crate) fn root_key(&self) -> u64 {
        self.root.key()
    }

    /// Passes all bytes that can be passed, after an event of the socket with this key.
    pub(crate) fn turn(&mut self, key: u64) -> RelayState {
        match self.pass(key) {
            Ok(()) if self.forth.passed_on && self.back.passed_on => RelayState::Complete,
            Ok(()) if self.forth.broken && self.forth.passed_on => RelayState::Broken,
            Ok(()) if self.back.broken && self.back.passed_on => RelayState::Broken,
            Ok(()) => self.rearm().map_or(RelayState::Broken, |()| RelayState::Running),
            Err(_) => RelayState::Broken,
        }
    }

    fn pass(&mut self, key: u64) -> rustix::io::Result<()> {
        if self.connecting {
            if key != self.root.key() {
                return Ok(());
            }
            connection::outcome(&self.root)?;
            self.connecting = false;
        }
        self.forth.pass(&self.client, &self.root);
        self.back.pass(&self.root, &self.client);
        Ok(())
    }

    fn rearm(&mut self) -> rustix::io::Result<()> {
        if self.connecting {
            return self.root.want(EventFlags::OUT);
        }
        self.client.want(self.forth.input() | self.back.output())?;
        self.root.want(self.back.input() | self.forth.output())
    }

    /// Begins to wait for events.
    pub(crate) fn start(&mut self) -> rustix::io::Result<()> {
        self.client.want(EventFlags::empty())?;
        self.rearm()
    }
}

impl Way {
    fn pass(&mut self, from: &Watched, to: &Watched) {
        let mut chunk = [0u8; 16 * 1024];
        for _ in 0..TURNS {
            let room = chunk.len().min(BUFFER_BYTES.saturating_sub(self.held.len()));
            let mut idle = true;
            if !self.ended && room > 0 {
                match rustix::io::read(from, &mut chunk[..room]) {
                    Ok(0) => self.ended = true,
                    Ok(count) => {
                        self.held.extend_from_slice(&chunk[..count]);
                        idle = false;
                    }
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    Err(_) => (self.ended, self.broken) = (true, true),
                }
            }
            if !self.held.is_empty() {
                match net::send(to, &self.held, SendFlags::NOSIGNAL) {
                    Ok(count) => {
                        self.bytes += count as u64;
                        self.held.drain(..count);
                        idle = false;
                    }
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    // A receiver that is gone ends this way. The other way may still have bytes.
                    Err(_) => {
                        self.held.clear();
                        (self.ended, self.passed_on) = (true, true);
                    }
                }
            }
            if idle {
                break;
            }
        }
        if self.ended && self.held.is_empty() && !self.passed_on {
            self.passed_on = true;
            // Fails if the receiver has closed both ways, which it may.
            let _ = net::shutdown(to, Shutdown::Write);
        }
    }

    fn input(&self) -> EventFlags {
        if self.ended || self.held.len() >= BUFFER_BYTES { EventFlags::empty() } else { EventFlags::IN }
    }

    fn output(&self) -> EventFlags {
        if self.held.is_empty() { EventFlags::empty() } else { EventFlags::OUT }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::poll::Poll;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use windlass_base::descriptor::Ours;

    /// If the sender closes while bytes are held, these go out before the end. No more than the limit is ever held.
    #[test]
    fn end_behind_the_last_bytes() {
        let mut poll = Poll::new(1).unwrap();
        let mut pair = || {
            let flags = SocketFlags::NONBLOCK;
            let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
            sockopt::set_socket_send_buffer_size(&ours, 4096).unwrap();
            (poll.watch(Ours::new(ours).unwrap()), UnixStream::from(theirs))
        };
        let ((from, mut sender), (to, mut receiver)) = (pair(), pair());
        let mut way = Way { held: vec![1], ended: false, broken: false, passed_on: false, bytes: 0 };
        let sent = [2u8; 50_000];
        sender.write_all(&sent).unwrap();
        drop(sender);
        let mut received = Vec::new();
        let mut held_at_end = 0;
        while !way.passed_on {
            way.pass(&from, &to);
            assert!(way.held.len() <= BUFFER_BYTES);
            if way.ended {
                held_at_end = held_at_end.max(way.held.len());
            }
            let mut piece = [0; 1000];
            let count = receiver.read(&mut piece).unwrap();
            received.extend_from_slice(&piece[..count]);
        }
        receiver.set_nonblocking(false).unwrap();
        receiver.read_to_end(&mut received).unwrap();
        assert!(held_at_end > 0, "the end came after all bytes: this test no longer tests");
        assert_eq!(received, [&[1][..], &sent].concat());
    }
}
