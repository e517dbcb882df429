//! The request socket: questions between processes that share a peer group, long after its init.
//!
//! A question is one packet, and so is its answer, with at most one descriptor. The Unix sockets have random abstract
//! names, as [descriptor sockets](super::descriptors) have. A name proves nothing, so questions carry what only ranks
//! of the peer group know.
//!
//! Nothing here waits, but a millisecond without a free descriptor: the owner of a [`RequestSocket`] polls [`RequestSocket::polled`] and calls
//! [`RequestSocket::turn`]. A process that does not answer, or cannot be reached, gives no answer, which is no failure.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SendFlags};

use crate::negotiated::Token;

use super::packet_socket::{accepted, address, received_with, send_with, socket};
use super::place;
use windlass_base::descriptor::{self, Ours};

/// The most bytes of a question or an answer.
pub const WORDS_BYTES_MAX: usize = 512;
/// Connections that have not asked yet. A further one closes the oldest.
const UNKNOWN_MAX: usize = 64;

/// An answer.
#[derive(Debug, Default)]
pub struct Answer {
    /// At least one byte, at most [`WORDS_BYTES_MAX`].
    pub words: Vec<u8>,
    /// Close-on-exec when received.
    pub descriptor: Option<Ours>,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Silence {
    /// The other request socket does not exist, or does not answer.
    Unanswered,
    /// The question was not sent: this process has no descriptor left.
    Want,
}

impl Silence {
    /// Whether this process had no descriptor to ask with.
    pub fn is_want(self) -> bool {
        self == Silence::Want
    }
}

/// The result of a question.
pub type Answered = Result<Answer, Silence>;

/// The socket at which a process gets questions, and its own questions to others.
#[derive(Debug)]
pub struct RequestSocket {
    /// The name by which others ask here.
    pub name: Token,
    listener: Ours,
    /// Accepted connections that have not asked yet.
    callers: Vec<Ours>,
    asked: Vec<Asked>,
    /// No connection can be accepted now.
    pub is_deaf: bool,
}

#[derive(Debug)]
struct Asked {
    key: u64,
    to: Token,
    words: Vec<u8>,
    /// None while the other request socket's queue is full.
    socket: Option<Ours>,
    sent: bool,
}

impl RequestSocket {
    /// Opens one with a new name.
    pub fn open() -> std::io::Result<RequestSocket> {
        RequestSocket::open_as(place::random()?)
    }

    /// Opens one with the name of a closed one, which others still know.
    pub fn open_as(name: Token) -> std::io::Result<RequestSocket> {
        let listener = socket()?;
        net::bind(&listener, &address(name)?)?;
        net::listen(&listener, 128)?;
        Ok(RequestSocket { name, listener, callers: Vec::new(), asked: Vec::new(), is_deaf: false })
    }

    /// Asks another request socket, or this one. [`RequestSocket::turn`] returns the answer with this key.
    pub fn ask(&mut self, to: Token, words: Vec<u8>, key: u64) {
        self.asked.push(Asked { key, to, words, socket: None, sent: false });
    }

    /// Whether a question could not be sent, because the other queue is full. Then call [`RequestSocket::turn`] again soon.
    pub fn knocks(&self) -> bool {
        self.asked.iter().any(|asked| !asked.sent)
    }

    /// The sockets to poll.
    pub fn polled(&self) -> Vec<PollFd<'_>> {
        let listener = (!self.is_deaf).then_some(&self.listener);
        let own = listener.into_iter().chain(&self.callers);
        let asked = self.asked.iter().filter_map(|asked| asked.socket.as_ref());
        own.chain(asked).map(|socket| PollFd::new(socket, PollFlags::IN)).collect()
    }

    /// Handles all that is ready. Answers questions by `answer` (with none the asker hears nothing). Returns the
    /// answers that have come, or why there will be none.
    pub fn turn(&mut self, mut answer: impl FnMut(&[u8]) -> Option<Answer>) -> Vec<(u64, Answered)> {
        let mut answers = Vec::new();
        self.asked.retain_mut(|asked| {
            let answer = asked.turn();
            let waits = answer.is_none();
            answers.extend(answer.map(|answer| (asked.key, answer)));
            waits
        });
        self.accept();
        self.callers.retain(|caller| !hear(caller, &mut answer));
        if let Some(caller) = self.accept_of_reserve() {
            hear(&caller, &mut answer);
            drop(caller);
            descriptor::fill_reserve();
        }
        answers
    }

    /// Accepts only as many as there is room for: a question that has arrived is read before its connection is closed
    /// for others.
    fn accept(&mut self) {
        self.is_deaf = false;
        if self.callers.len() >= UNKNOWN_MAX {
            drop(self.callers.remove(0));
        }
        while self.callers.len() < UNKNOWN_MAX {
            match accepted(&self.listener) {
                Ok(caller) => self.callers.push(caller),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return,
                // Without a free descriptor the next turn tries again. It must not come at once, so the listener is not
                // polled.
                Err(_) => {
                    self.is_deaf = true;
                    return;
                }
            }
        }
    }

    /// Without a free descriptor: a caller that is heard at once, since others may wait for what it says. One that is silent, as
    /// somebody without a token may be, keeps no descriptor of the reserve.
    fn accept_of_reserve(&mut self) -> Option<Ours> {
        // The kernel wants a descriptor even where nobody waits.
        self.is_deaf &= is_ready(&self.listener, NOW);
        if !self.is_deaf {
            return None;
        }
        let caller = descriptor::even_of_reserve(|| accepted(&self.listener)).ok()?;
        self.is_deaf = false;
        is_ready(&caller, SAYS_WITHIN);
        Some(caller)
    }
}

const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// Callers say their question right after they have connected.
const SAYS_WITHIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

fn is_ready(socket: &impl AsFd, within: Timespec) -> bool {
    poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&within)).is_ok_and(|ready| ready > 0)
}

/// Answers a caller's question. Returns whether the conversation is over.
fn hear(caller: &impl AsFd, answer: &mut impl FnMut(&[u8]) -> Option<Answer>) -> bool {
    let mut words = [0; WORDS_BYTES_MAX + 1];
    match net::recv(caller, &mut words, RecvFlags::empty()) {
        Err(Errno::AGAIN | Errno::INTR) => return false,
        Ok((_, length)) if (1..=WORDS_BYTES_MAX).contains(&length) => {
            if let Some(answer) = answer(&words[..length]) {
                // The asker may be gone.
                let descriptor: Vec<_> = answer.descriptor.iter().map(AsFd::as_fd).collect();
                let _ = send_with(caller, &[IoSlice::new(&answer.words)], &descriptor);
            }
        }
        _ => {}
    }
    true
}

impl Asked {
    /// The answer, or why there will be none. None where it is yet to come.
    fn turn(&mut self) -> Option<Answered> {
        match self.go_on() {
            Ok(answer) => Some(answer.ok_or(Silence::Unanswered)),
            Err(Errno::AGAIN | Errno::INTR) => None,
            Err(error) if descriptor::is_want(error) => Some(Err(Silence::Want)),
            Err(_) => Some(Err(Silence::Unanswered)),
        }
    }

    /// Asks, and waits for nothing. None if the answer cannot be read.
    fn go_on(&mut self) -> rustix::io::Result<Option<Answer>> {
        let socket = match self.socket.take() {
            Some(socket) => socket,
            None => {
                let socket = descriptor::even_of_reserve(socket)?;
                net::connect(&socket, &address(self.to)?)?;
                socket
            }
        };
        let socket = self.socket.insert(socket);
        if !self.sent {
            net::send(&*socket, &self.words, SendFlags::NOSIGNAL)?;
            self.sent = true;
        }
        let mut words = [0; WORDS_BYTES_MAX + 1];
        let mut descriptors = Vec::new();
        let bytes = received_with(socket, &mut [IoSliceMut::new(&mut words)], &mut descriptors)?;
        let is_answer = (1..=WORDS_BYTES_MAX).contains(&bytes) && descriptors.len() < 2;
        Ok(is_answer.then(|| Answer { words: words[..bytes].to_vec(), descriptor: descriptors.pop() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Resource, getrlimit, setrlimit};

    fn turns(
        request_sockets: &mut [RequestSocket],
        mut answer: impl FnMut(&[u8]) -> Option<Answer>,
    ) -> Vec<(u64, Answered)> {
        let mut answers = Vec::new();
        for _ in 0..10 {
            for request_socket in request_sockets.iter_mut() {
                answers.extend(request_socket.turn(&mut answer));
            }
        }
        answers
    }

    /// A request socket that is closed gives no answer; one that is opened again under its name does.
    #[test]
    fn opens_again() {
        let (mut request_socket, other) = (RequestSocket::open().unwrap(), RequestSocket::open().unwrap());
        let name = other.name;
        assert!(RequestSocket::open_as(name).is_err());
        drop(other);
        request_socket.ask(name, b"1".to_vec(), 1);
        assert!(matches!(request_socket.turn(|_| None)[..], [(1, Err(Silence::Unanswered))]));
        let other = RequestSocket::open_as(name).unwrap();
        request_socket.ask(name, b"2".to_vec(), 2);
        let answers = turns(&mut [request_socket, other], |words| {
            Some(Answer { words: words.to_vec(), descriptor: None })
        });
        assert!(matches!(&answers[..], [(2, Ok(answer))] if answer.words == b"2"), "{answers:?}");
    }

    /// Questions to another request socket and to one's own are answered, each with its key; a descriptor arrives.
    #[test]
    fn answers_with_descriptors() {
        let mut request_sockets = [RequestSocket::open().unwrap(), RequestSocket::open().unwrap()];
        let (own, other) = (request_sockets[0].name, request_sockets[1].name);
        request_sockets[0].ask(other, b"yes".to_vec(), 7);
        request_sockets[0].ask(own, b"own".to_vec(), 8);
        let mut answers = turns(&mut request_sockets, |words| {
            let descriptor =
                (words == b"yes").then(|| Ours::new(std::fs::File::open("/").unwrap().into()).unwrap());
            Some(Answer { words: words.to_vec(), descriptor })
        });
        answers.sort_by_key(|(key, _)| *key);
        let [(7, Ok(yes)), (8, Ok(own))] = &answers[..] else { panic!("{answers:?}") };
        assert_eq!((&yes.words[..], yes.descriptor.is_some()), (&b"yes"[..], true));
        assert_eq!((&own.words[..], own.descriptor.is_some()), (&b"own"[..], false));
    }

    /// A refused question, one that is too long and one to nobody end without an answer. Silent unknown connections
    /// keep no process from asking.
    #[test]
    fn no_answers() {
        let mut request_sockets = [RequestSocket::open().unwrap(), RequestSocket::open().unwrap()];
        let other = request_sockets[1].name;
        let unknown_connections: Vec<_> = (0..2 * UNKNOWN_MAX)
            .map(|_| {
                let socket = socket().unwrap();
                let reached = net::connect(&socket, &address(other).unwrap()).is_ok();
                request_sockets[1].turn(|_| None);
                (socket, reached)
            })
            .collect();
        assert!(unknown_connections.iter().all(|(_, reached)| *reached));
        request_sockets[0].ask(other, b"no".to_vec(), 1);
        request_sockets[0].ask(other, vec![1; WORDS_BYTES_MAX + 1], 2);
        request_sockets[0].ask(place::random().unwrap(), b"anyone".to_vec(), 3);
        let mut seen = 0;
        let mut answers = turns(&mut request_sockets, |words| {
            seen += 1;
            assert_eq!(words, b"no");
            None
        });
        answers.sort_by_key(|(key, _)| *key);
        assert!(matches!(answers[..], [(1, Err(_)), (2, Err(_)), (3, Err(_))]), "{answers:?}");
        assert_eq!(seen, 1);
    }

    /// Without a free descriptor a question is answered all the same. Silent unknown connections take none of the reserve.
    #[test]
    fn no_descriptors_left() {
        let mut request_sockets = [RequestSocket::open().unwrap(), RequestSocket::open().unwrap()];
        let other = request_sockets[1].name;
        assert!(descriptor::fill_reserve());
        let unknown_connections = [0; 5].map(|_| socket().unwrap());
        let asking = std::fs::File::open("/").unwrap();
        let mut few = getrlimit(Resource::Nofile);
        few.current = Some(64);
        setrlimit(Resource::Nofile, few).unwrap();
        let _all: Vec<_> = std::iter::from_fn(|| asking.try_clone().ok()).collect();
        for socket in &unknown_connections {
            net::connect(socket, &address(other).unwrap()).unwrap();
            request_sockets[1].turn(|_| None);
        }
        assert_eq!(descriptor::missing_of_reserve(), 0);
        drop(asking);
        request_sockets[0].ask(other, b"how".to_vec(), 1);
        let answers =
            turns(&mut request_sockets, |words| Some(Answer { words: words.to_vec(), descriptor: None }));
        assert!(matches!(&answers[..], [(1, Ok(answer))] if answer.words == b"how"), "{answers:?}");
        assert_eq!(descriptor::missing_of_reserve(), 0);
    }
}
