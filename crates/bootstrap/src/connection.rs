//! Connections that carry messages without ever waiting, and the system calls that open, accept and check sockets.

use std::net::SocketAddr;
use std::os::fd::AsFd;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use super::message::{Front, front};
use super::poll::Watched;
use windlass_base::descriptor::{self, Ours};

/// Whether the other side may still send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) enum Line {
    Open,
    Closed,
}

/// A connection with its unread input and its unsent output.
#[derive(Debug)]
pub(crate) struct Connection {
    /// The socket.
    pub watched: Watched,
    /// Received bytes, at most the limit of the last [`Connection::fill`].
    pub input: Vec<u8>,
    output: Vec<u8>,
    last: Option<Last>,
}

/// The state of a connection's last message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    Queued,
    Sent,
}

impl Connection {
    /// A new connection.
    pub(crate) fn new(watched: Watched) -> Connection {
        Connection { watched, input: Vec::new(), output: Vec::new(), last: None }
    }

    /// Reads what has arrived, until `input` holds `limit` bytes.
    pub(crate) fn fill(&mut self, limit: usize) -> Line {
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

    /// Reads what has arrived, and takes the whole messages. A message that is too long or cannot be read closes the
    /// connection; the text describes it. The messages before it count.
    pub(crate) fn messages<M>(
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
            // The rest of a flood is read after other sockets had their turn.
            if line == Line::Closed || !filled || messages.len() >= 16 {
                return (messages, line, None);
            }
        }
    }

    /// Queues bytes, and sends as many as the socket takes.
    pub(crate) fn say(&mut self, bytes: &[u8]) -> Line {
        if self.last.is_none() {
            self.output.extend_from_slice(bytes);
        }
        self.flush()
    }

    /// Queues the last message. The connection stays open until the other side closes: closing first could destroy
    /// bytes that it has not read.
    pub(crate) fn last_message(&mut self, bytes: &[u8]) -> Line {
        if self.last.is_none() {
            self.output.extend_from_slice(bytes);
            self.last = Some(Last::Queued);
        }
        self.flush()
    }

    /// Sends as many queued bytes as the socket takes.
    pub(crate) fn flush(&mut self) -> Line {
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

/// Connects to a Unix socket of this host, at once or not at all.
pub(crate) fn connect_locally(process_listener: &SocketAddrUnix) -> rustix::io::Result<Ours> {
    let socket = local_socket()?;
    net::connect(&socket, process_listener)?;
    Ok(socket)
}

/// Listens under an abstract name.
pub(crate) fn listen_locally(name: &SocketAddrUnix) -> rustix::io::Result<Ours> {
    let socket = local_socket()?;
    net::bind(&socket, name)?;
    net::listen(&socket, 4096)?;
    Ok(socket)
}

fn local_socket() -> rustix::io::Result<Ours> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ours::open(|| net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None))
}

/// Accepts a connection at a Unix socket.
pub(crate) fn accept_locally(listener: &Watched) -> rustix::io::Result<Ours> {
    Ours::open(|| net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK))
}

fn socket(address: &SocketAddr) -> rustix::io::Result<Ours> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ours::open(|| net::socket_with(family, SocketType::STREAM, flags, None))
}

/// Begins to connect. The socket is writable when the connect has ended, and [`outcome`] returns its result.
pub(crate) fn connect(address: &SocketAddr) -> rustix::io::Result<Ours> {
    let socket = socket(address)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    keep_alive(&socket)?;
    match net::connect(&socket, address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error),
    }
}

/// Sets keepalive: the kernel finds out by its clock that the other side has vanished. A rank that waits for others
/// sends nothing for as long as they load. Firewalls forget such a connection after minutes, and neither side would
/// notice for hours.
fn keep_alive(socket: impl AsFd + Copy) -> rustix::io::Result<()> {
    sockopt::set_socket_keepalive(socket, true)?;
    // Without these socket options the kernel's own times will do.
    let _ = Keepalive::of(socket).and_then(|of_host| of_host.asking_sooner().apply(socket));
    Ok(())
}

/// The kernel's keepalive: when it probes a silent connection, how often again, and after how many probes in vain it
/// counts as dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Keepalive {
    idle_s: u64,
    interval_s: u64,
    probes: u32,
}

impl Keepalive {
    /// Below a minute, the limit of the strictest known firewalls.
    const IDLE_MAX_S: u64 = 45;
    /// Probing again more often would be useless traffic.
    const INTERVAL_MIN_S: u64 = 15;
    /// The kernel accepts no more.
    const INTERVAL_MAX_S: u64 = 32767;
    const PROBES_MAX: u32 = 127;

    /// The times of a new socket, which are the host's (`net.ipv4.tcp_keepalive_*`).
    fn of(socket: impl AsFd + Copy) -> rustix::io::Result<Keepalive> {
        Ok(Keepalive {
            idle_s: sockopt::tcp_keepidle(socket)?.as_secs(),
            interval_s: sockopt::tcp_keepintvl(socket)?.as_secs(),
            probes: sockopt::tcp_keepcnt(socket)?,
        })
    }

    /// Seconds after the last input until the other side counts as dead.
    fn found_dead_s(&self) -> u64 {
        self.idle_s + self.interval_s * u64::from(self.probes)
    }

    /// Probes soon enough for firewalls, but counts nobody dead before the host's times would. So a host that cannot be
    /// reached for an hour ends no session that it would not have ended.
    fn asking_sooner(self) -> Keepalive {
        if self.idle_s <= Keepalive::IDLE_MAX_S {
            return self;
        }
        let rest_s = self.found_dead_s() - Keepalive::IDLE_MAX_S;
        let interval_s = rest_s
            .div_ceil(Keepalive::PROBES_MAX.into())
            .clamp(Keepalive::INTERVAL_MIN_S, Keepalive::INTERVAL_MAX_S);
        let probes = rest_s.div_ceil(interval_s).min(Keepalive::PROBES_MAX.into()) as u32;
        Keepalive { idle_s: Keepalive::IDLE_MAX_S, interval_s, probes }
    }

    fn apply(self, socket: impl AsFd + Copy) -> rustix::io::Result<()> {
        let seconds = std::time::Duration::from_secs;
        // The number of probes first, so that the connection cannot count as dead between two of these calls.
        sockopt::set_tcp_keepcnt(socket, self.probes)?;
        sockopt::set_tcp_keepintvl(socket, seconds(self.interval_s))?;
        sockopt::set_tcp_keepidle(socket, seconds(self.idle_s))
    }
}

/// Whether an open or connect failed for want of what may be there later: descriptors, ports, memory, room in the epoll
/// set.
pub(crate) fn is_lack(error: Errno) -> bool {
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

/// Checks that so many descriptors are free, and one more for NCCL's root.
pub(crate) fn free_for_root(ours: usize) -> rustix::io::Result<()> {
    if descriptor::are_free(ours + 1) { Ok(()) } else { Err(Errno::MFILE) }
}

/// The result of a connect that has ended.
pub(crate) fn outcome(socket: &Watched) -> rustix::io::Result<()> {
    sockopt::socket_error(socket)?
}

/// Listens on a free port of the address's interface. Also returns the port.
pub(crate) fn listen(address: &SocketAddr) -> rustix::io::Result<(Ours, u16)> {
    let socket = socket(address)?;
    let mut any_port = *address;
    any_port.set_port(0);
    net::bind(&socket, &any_port)?;
    net::listen(&socket, 4096)?;
    let bound = SocketAddr::try_from(net::getsockname(&socket)?)?;
    Ok((socket, bound.port()))
}

/// Accepts a connection at a port.
pub(crate) fn accept(listener: &Watched) -> rustix::io::Result<Ours> {
    let accepted = accept_locally(listener)?;
    sockopt::set_tcp_nodelay(&accepted, true)?;
    keep_alive(&accepted)?;
    Ok(accepted)
}

/// Whether no socket listens at this address: it can be bound. A bind disturbs no listener, as a connection would.
/// False if that cannot be told.
pub(crate) fn is_free(address: &SocketAddr) -> bool {
    let Ok(socket) = socket(address) else { return false };
    // Connections that have just ended do not count.
    sockopt::set_socket_reuseaddr(&socket, true).is_ok() && net::bind(&socket, address).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::poll::Poll;

    /// Both ends of a silent connection are probed before a firewall with a limit of a minute forgets it, and count as
    /// dead no sooner than by the host's own times.
    #[test]
    fn silent_connections_are_kept() {
        let mut poll = Poll::new(1).unwrap();
        let (listener, port) = listen(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = poll.watch(listener);
        let plain = socket(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let of_host = Keepalive::of(&plain).unwrap();
        let connecting = connect(&SocketAddr::from(([127, 0, 0, 1], port))).unwrap();
        let accepted = accept(&listener).unwrap();
        for end in [&connecting, &accepted] {
            assert!(sockopt::socket_keepalive(end).unwrap());
            let times = Keepalive::of(end).unwrap();
            assert!(times.idle_s <= 45, "{times:?}");
            assert!(times.found_dead_s() >= of_host.found_dead_s(), "{times:?} of {of_host:?}");
        }
    }

    /// Linux's own times; shorter ones; times that need no change; the longest.
    #[test]
    fn kept_as_long_as_by_the_host() {
        let times = |idle_s, interval_s, probes| Keepalive { idle_s, interval_s, probes };
        assert_eq!(times(7200, 75, 9).found_dead_s(), 7875);
        assert_eq!(times(7200, 75, 9).asking_sooner(), times(45, 62, 127));
        assert_eq!(times(45, 62, 127).found_dead_s(), 7919);
        assert_eq!(times(300, 10, 6).asking_sooner(), times(45, 15, 21));
        assert_eq!(times(45, 1, 2).asking_sooner(), times(45, 1, 2));
        assert_eq!(times(32767, 32767, 127).asking_sooner(), times(45, 32767, 127));
    }
}
