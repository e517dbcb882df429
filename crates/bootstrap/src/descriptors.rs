//! Passes file descriptors between the processes of a session, over Unix sockets, on the thread of the caller.
//!
//! Each participant has a [`DescriptorSocket`] with a random abstract name, which its ranks report. It is open before
//! they report. So a descriptor socket that refuses is not late but in another network namespace (abstract names belong
//! to one), and the rank refuses to prepare. Process-id namespaces and file systems do not matter. Everyone on the host
//! can see the name, so it proves nothing: a connection counts only if it begins with the session's token.
//!
//! Every participant sends each other one a [`Parcel`] over a connection of its own, in packets (`SOCK_SEQPACKET`), so
//! that a message and its descriptors stay together. Received descriptors are close-on-exec. All sizes are bounded. No
//! wait is timed; the session's end ([`Flag`]) stops it.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SendFlags};

use thiserror::Error;

use crate::negotiated::Token;
use crate::negotiated::bytes::{Reader, Writer};

use super::packet_socket::{
    PACKET_DESCRIPTORS, accepted, address, received, received_with, send_with, socket,
};
use super::place;
use super::poll::Flag;
use windlass_base::descriptor::Ours;

/// The most descriptors of one parcel.
pub const DESCRIPTORS_MAX: usize = 1024;
/// The most bytes of one parcel.
pub const PAYLOAD_BYTES_MAX: usize = 256 * 1024;

/// The most bytes of one packet.
const PACKET_BYTES: usize = 16 * 1024;
const MAGIC: [u8; 8] = *b"wndlssfd";
const OPENING_BYTES: usize = 8 + 16 + 16 + 4 + 4;
/// Connections that have not shown the token yet. A further one closes the oldest.
const UNKNOWN_MAX: usize = 64;
/// How soon a connect to a full queue of a descriptor socket is tried again. Only unknown connections can fill it.
const RETRY_MS: i64 = 10;

/// A socket where a participant receives parcels.
#[derive(Debug)]
pub struct DescriptorSocket {
    /// The name by which peers connect.
    pub name: Token,
    listener: Ours,
}

/// The bytes and descriptors that one participant sends another.
#[derive(Debug, Default)]
pub struct Parcel {
    /// Bytes that say what the descriptors are.
    pub payload: Vec<u8>,
    /// The descriptors, in the sender's order.
    pub descriptors: Vec<Ours>,
}

/// A parcel to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Sending<'a> {
    /// The descriptor socket of the receiver.
    pub to: Token,
    /// At most [`PAYLOAD_BYTES_MAX`].
    pub payload: &'a [u8],
    /// At most [`DESCRIPTORS_MAX`].
    pub descriptors: &'a [BorrowedFd<'a>],
}

/// Why an exchange of parcels failed.
#[derive(Debug, Error)]
pub enum Trouble {
    /// The session has ended.
    #[error("the session has ended")]
    Stopped,
    /// A parcel is over a limit.
    #[error("too many descriptors or bytes for one parcel")]
    TooLarge,
    /// A peer's descriptor socket cannot be reached: it is in another network namespace, or gone.
    #[error("descriptor socket {0:?} cannot be reached: {1}")]
    Unreachable(Token, Errno),
    /// A peer closed its connection early, or sent bytes that make no sense.
    #[error("descriptor socket {0:?} broke off")]
    Broken(Token),
    /// A system call failed.
    #[error("descriptors cannot be passed: {0}")]
    System(#[from] Errno),
}

impl DescriptorSocket {
    /// Opens a descriptor socket with a new name.
    pub fn open() -> std::io::Result<DescriptorSocket> {
        let name = place::random()?;
        let listener = socket()?;
        net::bind(&listener, &address(name)?)?;
        net::listen(&listener, 128)?;
        Ok(DescriptorSocket { name, listener })
    }

    /// Sends each peer its parcel and waits for one from each. Returns the peers' parcels in the order of `sendings`.
    pub fn exchange(
        &self,
        token: Token,
        sendings: &[Sending<'_>],
        stop: &Flag,
    ) -> Result<Vec<Parcel>, Trouble> {
        let fits = |sending: &Sending<'_>| {
            sending.payload.len() <= PAYLOAD_BYTES_MAX && sending.descriptors.len() <= DESCRIPTORS_MAX
        };
        if !sendings.iter().all(fits) {
            return Err(Trouble::TooLarge);
        }
        let mut outgoing: Vec<Outgoing<'_>> =
            sendings.iter().map(|sending| Outgoing::new(*sending, token, self.name)).collect();
        let mut incoming =
            Incoming { token, arrived: sendings.iter().map(|_| None).collect(), callers: Vec::new() };
        let from: Vec<Token> = sendings.iter().map(|sending| sending.to).collect();
        loop {
            for outgoing in &mut outgoing {
                outgoing.turn()?;
            }
            incoming.accept(&self.listener)?;
            incoming.turn(&from)?;
            let sent = outgoing.iter().all(|outgoing| outgoing.state == State::Sent);
            if sent && incoming.arrived.iter().all(Option::is_some) {
                return Ok(incoming.arrived.into_iter().flatten().collect());
            }
            self.wait(&outgoing, &incoming, stop)?;
        }
    }

    fn wait(&self, outgoing: &[Outgoing<'_>], incoming: &Incoming, stop: &Flag) -> Result<(), Trouble> {
        let mut waited = vec![PollFd::new(stop, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
        waited.extend(incoming.callers.iter().map(|caller| PollFd::new(&caller.socket, PollFlags::IN)));
        let sending = outgoing.iter().filter(|outgoing| outgoing.state == State::Sending);
        waited.extend(
            sending.filter_map(|outgoing| Some(PollFd::new(outgoing.socket.as_ref()?, PollFlags::OUT))),
        );
        let retry = outgoing.iter().any(|outgoing| outgoing.state == State::Knocking);
        let timeout = retry.then_some(Timespec { tv_sec: 0, tv_nsec: RETRY_MS * 1_000_000 });
        match poll(&mut waited, timeout.as_ref()) {
            Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(_) if waited[0].revents().is_empty() => Ok(()),
            Ok(_) => Err(Trouble::Stopped),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Knocking,
    Sending,
    Sent,
}

/// A parcel on its way to a peer.
struct Outgoing<'a> {
    sending: Sending<'a>,
    opening: Option<Vec<u8>>,
    socket: Option<Ours>,
    state: State,
}

impl<'a> Outgoing<'a> {
    fn new(sending: Sending<'a>, token: Token, from: Token) -> Outgoing<'a> {
        let (bytes, count) = (sending.payload.len() as u32, sending.descriptors.len() as u32);
        let opening = Writer::default().raw(&MAGIC).token(token).token(from).u32(bytes).u32(count).finish();
        Outgoing { sending, opening: Some(opening), socket: None, state: State::Knocking }
    }

    /// Sends what the peer's queue takes.
    fn turn(&mut self) -> Result<(), Trouble> {
        let descriptor_socket = self.sending.to;
        if self.state == State::Knocking {
            let socket = socket()?;
            match net::connect(&socket, &address(descriptor_socket)?) {
                Ok(()) => (self.socket, self.state) = (Some(socket), State::Sending),
                Err(Errno::AGAIN) => {}
                Err(error) => return Err(Trouble::Unreachable(descriptor_socket, error)),
            }
        }
        while self.state == State::Sending {
            match self.packet() {
                Ok(()) => {}
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(Trouble::Broken(descriptor_socket)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends one packet: the opening, or the next piece of the parcel.
    fn packet(&mut self) -> rustix::io::Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        if let Some(opening) = &self.opening {
            net::send(socket, opening, SendFlags::NOSIGNAL)?;
            self.opening = None;
        } else {
            let (payload, payload_rest) =
                self.sending.payload.split_at(self.sending.payload.len().min(PACKET_BYTES));
            let (descriptors, descriptors_rest) =
                self.sending.descriptors.split_at(self.sending.descriptors.len().min(PACKET_DESCRIPTORS));
            // One byte more, since its reader takes an empty packet for the end.
            let packet = [IoSlice::new(&[1]), IoSlice::new(payload)];
            send_with(socket, &packet, descriptors)?;
            (self.sending.payload, self.sending.descriptors) = (payload_rest, descriptors_rest);
        }
        if self.sending.payload.is_empty() && self.sending.descriptors.is_empty() {
            self.state = State::Sent;
            // Packets in the peer's queue stay there after the close.
            self.socket = None;
        }
        Ok(())
    }
}

/// A connection to our descriptor socket that brings a parcel.
struct Delivery {
    socket: Ours,
    /// The sender, by its index among the sendings, once the token was shown.
    from: Option<usize>,
    parcel: Parcel,
    payload_bytes: usize,
    descriptor_count: usize,
}

struct Incoming {
    token: Token,
    arrived: Vec<Option<Parcel>>,
    callers: Vec<Delivery>,
}

/// The state of a delivery.
enum Progress {
    More,
    Whole,
    Gone,
}

impl Incoming {
    fn accept(&mut self, listener: &Ours) -> Result<(), Trouble> {
        loop {
            match accepted(listener) {
                Ok(socket) => self.callers.push(Delivery {
                    socket,
                    from: None,
                    parcel: Parcel::default(),
                    payload_bytes: 0,
                    descriptor_count: 0,
                }),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => return Err(error.into()),
            }
            if self.callers.iter().filter(|caller| caller.from.is_none()).count() > UNKNOWN_MAX {
                let oldest = self.callers.iter().position(|caller| caller.from.is_none());
                oldest.map(|oldest| self.callers.remove(oldest));
            }
        }
    }

    fn turn(&mut self, from: &[Token]) -> Result<(), Trouble> {
        let mut index = 0;
        while let Some(caller) = self.callers.get_mut(index) {
            let progress = caller.turn(self.token, from);
            if let Progress::More = progress {
                index += 1;
                continue;
            }
            let caller = self.callers.remove(index);
            match (progress, caller.from) {
                (Progress::Whole, Some(from)) if self.arrived[from].is_none() => {
                    self.arrived[from] = Some(caller.parcel);
                }
                (_, Some(peer)) => return Err(Trouble::Broken(from[peer])),
                // An unknown connection.
                (_, None) => {}
            }
        }
        Ok(())
    }
}

impl Delivery {
    fn turn(&mut self, token: Token, from: &[Token]) -> Progress {
        loop {
            let outcome = if self.from.is_none() { self.opening(token, from) } else { self.piece() };
            match outcome {
                Ok(Progress::More) => {}
                Ok(end) => return end,
                Err(Errno::AGAIN) => return Progress::More,
                Err(Errno::INTR) => {}
                Err(_) => return Progress::Gone,
            }
        }
    }

    /// Reads the first packet. Without control space: descriptors of an unknown connection never reach this process.
    fn opening(&mut self, token: Token, from: &[Token]) -> rustix::io::Result<Progress> {
        let mut packet = [0u8; OPENING_BYTES + 1];
        let receive = || net::recv(&self.socket, &mut packet, RecvFlags::empty()).map(|(_, length)| length);
        let length = received(receive, |length| *length == 0)?;
        Ok(self.read_opening(&packet[..length.min(packet.len())], token, from).unwrap_or(Progress::Gone))
    }

    fn read_opening(&mut self, packet: &[u8], token: Token, from: &[Token]) -> Option<Progress> {
        let (magic, theirs, descriptor_socket, payload_bytes, descriptor_count) =
            Reader::whole(packet, |reader| {
                Some((reader.raw()?, reader.token()?, reader.token()?, reader.u32()?, reader.u32()?))
            })?;
        let (payload_bytes, descriptor_count) = (payload_bytes as usize, descriptor_count as usize);
        let peer = from.iter().position(|peer| *peer == descriptor_socket)?;
        let is_ours = magic == MAGIC && theirs == token;
        if !is_ours || payload_bytes > PAYLOAD_BYTES_MAX || descriptor_count > DESCRIPTORS_MAX {
            return None;
        }
        (self.from, self.payload_bytes, self.descriptor_count) =
            (Some(peer), payload_bytes, descriptor_count);
        Some(self.whole_or_more())
    }

    fn piece(&mut self) -> rustix::io::Result<Progress> {
        let mut mark = [0u8; 1];
        let mut packet = [0u8; PACKET_BYTES];
        let mut buffers = [IoSliceMut::new(&mut mark), IoSliceMut::new(&mut packet)];
        let bytes = received_with(&self.socket, &mut buffers, &mut self.parcel.descriptors)?;
        if bytes == 0 {
            return Ok(Progress::Gone);
        }
        self.parcel.payload.extend_from_slice(&packet[..bytes - 1]);
        Ok(self.whole_or_more())
    }

    fn whole_or_more(&self) -> Progress {
        let have = (self.parcel.payload.len(), self.parcel.descriptors.len());
        let want = (self.payload_bytes, self.descriptor_count);
        if have == want {
            Progress::Whole
        } else if have.0 > want.0 || have.1 > want.1 {
            Progress::Gone
        } else {
            Progress::More
        }
    }
}

impl AsFd for DescriptorSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// For tests in other crates.
#[cfg(any(test, feature = "test-support"))]
pub mod test_support {
    use super::*;

    /// For fuzzing: an opening of a peer with these bytes as its numbers.
    pub fn opening_with(token: Token, words: &[u8]) -> Vec<u8> {
        [&MAGIC[..], &token.0, &token.0, words].concat()
    }

    /// For fuzzing: the payload that these packets of a peer make, if it is whole.
    pub fn receive(packets: &[Vec<u8>], token: Token) -> Option<Vec<u8>> {
        let (theirs, ours) = net::socketpair(
            net::AddressFamily::UNIX,
            net::SocketType::SEQPACKET,
            net::SocketFlags::NONBLOCK,
            None,
        )
        .ok()?;
        for packet in packets {
            let _ = net::send(&theirs, packet, SendFlags::NOSIGNAL);
        }
        drop(theirs);
        let (socket, parcel) = (Ours::new(ours).ok()?, Parcel::default());
        let mut caller = Delivery { socket, from: None, parcel, payload_bytes: 0, descriptor_count: 0 };
        match caller.turn(token, &[token]) {
            Progress::Whole => Some(caller.parcel.payload),
            Progress::More | Progress::Gone => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    /// All packets of a peer that sends and closes at once arrive, whatever the timing. (Without the second look the
    /// end came too soon in 4 of 1,000,000 rounds, on two cores with Linux 6.18.)
    #[test]
    fn nothing_is_lost_at_the_end() {
        const ROUNDS: u32 = 20_000;
        let descriptor_socket = DescriptorSocket::open().unwrap();
        let name = descriptor_socket.name;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    let socket = socket().unwrap();
                    // The queue may be full.
                    while net::connect(&socket, &address(name).unwrap()).is_err() {
                        std::thread::yield_now();
                    }
                    for packet in [&b"one"[..], b"two"] {
                        net::send(&socket, packet, SendFlags::NOSIGNAL).unwrap();
                    }
                }
            });
            let until = Instant::now() + Duration::from_secs(200);
            let next = |receive: &mut dyn FnMut() -> rustix::io::Result<usize>| loop {
                match receive() {
                    Err(Errno::AGAIN) if Instant::now() < until => std::hint::spin_loop(),
                    other => return other.unwrap(),
                }
            };
            for round in 0..ROUNDS {
                let socket = loop {
                    match accepted(&descriptor_socket.listener) {
                        Ok(socket) => break socket,
                        Err(Errno::AGAIN) if Instant::now() < until => std::hint::spin_loop(),
                        Err(error) => panic!("round {round}: {error}"),
                    }
                };
                let mut packet = [0; 8];
                let mut plain =
                    || net::recv(&socket, &mut packet, RecvFlags::empty()).map(|(_, length)| length);
                let lengths = [(); 3].map(|()| next(&mut || received(&mut plain, |length| *length == 0)));
                assert_eq!(lengths, [3, 3, 0], "round {round}");
            }
        });
    }
}
