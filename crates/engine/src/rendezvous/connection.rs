//! A connection that carries messages, without ever waiting.

use std::net::SocketAddr;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use super::message::{Front, front};
use super::poll::Watched;
use crate::descriptor::Ours;

/// Whether the other side may still say something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Line {
    Open,
    Closed,
}

/// A connection with what came and is not read, and what is said and not sent.
#[derive(Debug)]
pub struct Connection {
    /// The socket.
    pub watched: Watched,
    /// What came, at most the limit of the last [`Connection::fill`].
    pub input: Vec<u8>,
    output: Vec<u8>,
    last: Option<Last>,
}

/// The last words of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    Queued,
    Sent,
}

impl Connection {
    /// A connection over which nothing has gone.
    pub fn new(watched: Watched) -> Connection {
        Connection { watched, input: Vec::new(), output: Vec::new(), last: None }
    }

    /// Reads what is there, until `limit` bytes lie in `input`.
    pub fn fill(&mut self, limit: usize) -> Line {
        let mut chunk = [0u8; 16 * 1024];
        while self.input.len() < limit {
            let room = chunk.len().min(limit - self.input.len());
            match rustix::io::read(&self.watched, &mut chunk[..room]) {
                Ok(0) => return Line::Closed,
                Ok(count) => self.input.extend_from_slice(&chunk[..count]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Line::Open,
                Err(_) => return Line::Closed,
            }
        }
        Line::Open
    }

    /// Reads what is there and takes the whole messages. What is oversized or cannot be read closes the line, and is
    /// told; messages before it count.
    pub fn messages<M>(
        &mut self,
        body_limit: usize,
        decode: fn(u16, &[u8]) -> Option<M>,
    ) -> (Vec<M>, Line, Option<String>) {
        let mut messages = Vec::new();
        loop {
            let before = self.input.len();
            let line = self.fill(body_limit + super::message::HEADER_BYTES);
            let filled = self.input.len() > before;
            loop {
                match front(&self.input, body_limit) {
                    Front::Partial => break,
                    Front::Oversized(length) => {
                        return (messages, Line::Closed, Some(format!("a message of {length} bytes")));
                    }
                    Front::Whole(kind, body, end) => match decode(kind, body) {
                        Some(message) => {
                            messages.push(message);
                            self.input.drain(..end);
                        }
                        None => {
                            let told = format!("an unreadable message, kind {kind} bytes {}", body.len());
                            return (messages, Line::Closed, Some(told));
                        }
                    },
                }
            }
            // A flood is read in turns with everyone else.
            if line == Line::Closed || !filled || messages.len() >= 16 {
                return (messages, line, None);
            }
        }
    }

    /// Says something; it goes out as far as the socket takes it.
    pub fn say(&mut self, bytes: &[u8]) -> Line {
        if self.last.is_none() {
            self.output.extend_from_slice(bytes);
        }
        self.flush()
    }

    /// After this nothing is said. The line stays open until the other side closes: closing first could destroy what
    /// it has not read.
    pub fn last_words(&mut self, bytes: &[u8]) -> Line {
        if self.last.is_none() {
            self.output.extend_from_slice(bytes);
            self.last = Some(Last::Queued);
        }
        self.flush()
    }

    /// Sends what the socket takes.
    pub fn flush(&mut self) -> Line {
        while !self.output.is_empty() {
            match net::send(&self.watched, &self.output, SendFlags::NOSIGNAL) {
                Ok(count) => drop(self.output.drain(..count)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => return Line::Closed,
            }
        }
        if self.output.is_empty() && self.last == Some(Last::Queued) {
            self.last = Some(Last::Sent);
            let _ = net::shutdown(&self.watched, Shutdown::Write);
        }
        self.rearm()
    }

    fn rearm(&mut self) -> Line {
        let out = if self.output.is_empty() { EventFlags::empty() } else { EventFlags::OUT };
        match self.watched.want(EventFlags::IN | out) {
            Ok(()) => Line::Open,
            Err(_) => Line::Closed,
        }
    }
}

/// Connects to the lobby of a process of this host, at once or not at all.
pub fn connect_locally(lobby: &SocketAddrUnix) -> rustix::io::Result<Ours> {
    let socket = local_socket()?;
    net::connect(&socket, lobby)?;
    Ok(socket)
}

/// Listens under an abstract name.
pub fn listen_locally(name: &SocketAddrUnix) -> rustix::io::Result<Ours> {
    let socket = local_socket()?;
    net::bind(&socket, name)?;
    net::listen(&socket, 4096)?;
    Ok(socket)
}

fn local_socket() -> rustix::io::Result<Ours> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ours::new(net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Takes a connection that is waiting at a lobby.
pub fn accept_locally(listener: &Watched) -> rustix::io::Result<Ours> {
    Ours::new(net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?)
}

fn socket(address: &SocketAddr) -> rustix::io::Result<Ours> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ours::new(net::socket_with(family, SocketType::STREAM, flags, None)?)
}

/// Begins to connect; the socket is writable when that has ended, and [`outcome`] says how.
pub fn connect(address: &SocketAddr) -> rustix::io::Result<Ours> {
    let socket = socket(address)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    // A host that vanished without a word is found dead by the kernel's own clock, as any connection's peer is.
    sockopt::set_socket_keepalive(&socket, true)?;
    match net::connect(&socket, address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error),
    }
}

/// Whether a socket could not be had or connected for want of something that there may be later: descriptors, ports,
/// memory, room in the wait.
pub fn is_lack(error: Errno) -> bool {
    const LACKS: [Errno; 7] = [
        Errno::MFILE,
        Errno::NFILE,
        Errno::ADDRNOTAVAIL,
        Errno::NOBUFS,
        Errno::NOMEM,
        Errno::NOSPC,
        Errno::AGAIN,
    ];
    LACKS.contains(&error)
}

/// How a connect ended.
pub fn outcome(socket: &Watched) -> rustix::io::Result<()> {
    sockopt::socket_error(socket)?
}

/// Listens on a free port of the address's interface, and says on which.
pub fn listen(address: &SocketAddr) -> rustix::io::Result<(Ours, u16)> {
    let socket = socket(address)?;
    let mut any_port = *address;
    any_port.set_port(0);
    net::bind(&socket, &any_port)?;
    net::listen(&socket, 4096)?;
    let bound = SocketAddr::try_from(net::getsockname(&socket)?)?;
    Ok((socket, bound.port()))
}

/// Takes a connection that is waiting.
pub fn accept(listener: &Watched) -> rustix::io::Result<Ours> {
    let accepted = net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    sockopt::set_tcp_nodelay(&accepted, true)?;
    sockopt::set_socket_keepalive(&accepted, true)?;
    Ours::new(accepted)
}

/// Whether nobody listens there: the address can be bound, which disturbs no listener as a connection would. Anything
/// unclear counts as somebody.
pub fn is_free(address: &SocketAddr) -> bool {
    let Ok(socket) = socket(address) else { return false };
    // Connections that have just ended do not count.
    sockopt::set_socket_reuseaddr(&socket, true).is_ok() && net::bind(&socket, address).is_ok()
}
