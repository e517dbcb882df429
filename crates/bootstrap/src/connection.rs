//! A connection that carries messages, without ever waiting.

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

/// Whether the other side may still say something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) enum Line {
    Open,
    Closed,
}

/// A connection with what came and is not read, and what is said and not sent.
#[derive(Debug)]
pub(crate) struct Connection {
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
    pub(crate) fn new(watched: Watched) -> Connection {
        Connection { watched, input: Vec::new(), output: Vec::new(), last: None }
    }

    /// Reads what is there, until `limit` bytes lie in `input`.
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

    /// Reads what is there and takes the whole messages. What is oversized or cannot be read closes the line, and is
    /// told; messages before it count.
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
            // A flood is read in turns with everyone else.
            if line == Line::Closed || !filled || messages.len() >= 16 {
                return (messages, line, None);
            }
        }
    }

    /// Says something; it goes out as far as the socket takes it.
    pub(crate) fn say(&mut self, bytes: &[u8]) -> Line {
        if self.last.is_none() {
            self.output.extend_from_slice(bytes);
        }
        self.flush()
    }

    /// After this nothing is said. The line stays open until the other side closes: closing first could destroy what
    /// it has not read.
    pub(crate) fn last_message(&mut self, bytes: &[u8]) -> Line {
        if self.last.is_none() {
            self.output.extend_from_slice(bytes);
            self.last = Some(Last::Queued);
        }
        self.flush()
    }

    /// Sends what the socket takes.
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

/// Connects to the process listener of a process of this host, at once or not at all.
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
    Ours::new(net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Takes a connection that is waiting at a process listener.
pub(crate) fn accept_locally(listener: &Watched) -> rustix::io::Result<Ours> {
    Ours::new(net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?)
}

fn socket(address: &SocketAddr) -> rustix::io::Result<Ours> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ours::new(net::socket_with(family, SocketType::STREAM, flags, None)?)
}

/// Begins to connect; the socket is writable when that has ended, and [`outcome`] says how.
pub(crate) fn connect(address: &SocketAddr) -> rustix::io::Result<Ours> {
    let socket = socket(address)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    keep_alive(&socket)?;
    match net::connect(&socket, address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error),
    }
}

/// A host that vanished without a message is found dead by the kernel's clock, as any connection's peer is. A rank that waits
/// for the others says nothing for as long as they load: firewalls forget such a connection after minutes, and neither
/// side would hear of it for hours.
fn keep_alive(socket: impl AsFd + Copy) -> rustix::io::Result<()> {
    sockopt::set_socket_keepalive(socket, true)?;
    // Where the kernel has no such times its own will do.
    let _ = Keepalive::of(socket).and_then(|of_host| of_host.asking_sooner().apply(socket));
    Ok(())
}

/// When the kernel asks whether the other side of a silent connection is there, and how often in vain before it counts as
/// dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Keepalive {
    idle_s: u64,
    interval_s: u64,
    probes: u32,
}

impl Keepalive {
    /// Below a minute, which is the limit of the strictest firewalls that are met.
    const IDLE_MAX_S: u64 = 45;
    /// Asking again more often would only be noise.
    const INTERVAL_MIN_S: u64 = 15;
    /// The kernel takes no more.
    const INTERVAL_MAX_S: u64 = 32767;
    const PROBES_MAX: u32 = 127;

    /// Of a new socket: the host's (`net.ipv4.tcp_keepalive_*`).
    fn of(socket: impl AsFd + Copy) -> rustix::io::Result<Keepalive> {
        Ok(Keepalive {
            idle_s: sockopt::tcp_keepidle(socket)?.as_secs(),
            interval_s: sockopt::tcp_keepintvl(socket)?.as_secs(),
            probes: sockopt::tcp_keepcnt(socket)?,
        })
    }

    /// How long after its last word the other side counts as dead.
    fn found_dead_s(&self) -> u64 {
        self.idle_s + self.interval_s * u64::from(self.probes)
    }

    /// Asks soon enough for firewalls, and still finds nobody dead before the host's times would: a host that cannot be
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
        // How often first: nobody is to be found dead between two of these calls.
        sockopt::set_tcp_keepcnt(socket, self.probes)?;
        sockopt::set_tcp_keepintvl(socket, seconds(self.interval_s))?;
        sockopt::set_tcp_keepidle(socket, seconds(self.idle_s))
    }
}

/// Whether a socket could not be had or connected for want of something that there may be later: descriptors, ports,
/// memory, room in the wait.
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

/// Whether there are so many descriptors, and one more for NCCL's root.
pub(crate) fn free_for_root(ours: usize) -> rustix::io::Result<()> {
    if descriptor::are_free(ours + 1) { Ok(()) } else { Err(Errno::MFILE) }
}

/// How a connect ended.
pub(crate) fn outcome(socket: &Watched) -> rustix::io::Result<()> {
    sockopt::socket_error(socket)?
}

/// Listens on a free port of the address's interface, and says on which.
pub(crate) fn listen(address: &SocketAddr) -> rustix::io::Result<(Ours, u16)> {
    let socket = socket(address)?;
    let mut any_port = *address;
    any_port.set_port(0);
    net::bind(&socket, &any_port)?;
    net::listen(&socket, 4096)?;
    let bound = SocketAddr::try_from(net::getsockname(&socket)?)?;
    Ok((socket, bound.port()))
}

/// Takes a connection that is waiting.
pub(crate) fn accept(listener: &Watched) -> rustix::io::Result<Ours> {
    let accepted = net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    sockopt::set_tcp_nodelay(&accepted, true)?;
    keep_alive(&accepted)?;
    Ours::new(accepted)
}

/// Whether nobody listens there: the address can be bound, which disturbs no listener as a connection would. Anything
/// unclear counts as somebody.
pub(crate) fn is_free(address: &SocketAddr) -> bool {
    let Ok(socket) = socket(address) else { return false };
    // Connections that have just ended do not count.
    sockopt::set_socket_reuseaddr(&socket, true).is_ok() && net::bind(&socket, address).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::poll::Poll;

    /// Both ends of a silent connection are asked for before a firewall with a limit of a minute forgets it, and are found
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

    /// Linux's own times; shorter ones, which somebody has set; such as need not be changed; the longest there are.
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
