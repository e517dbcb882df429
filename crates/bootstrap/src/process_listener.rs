//! The process listener as a socket: opened by its process, and connected to by other processes of the host.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SendFlags, Shutdown};

use crate::negotiated::Token;
use windlass_base::descriptor::{self, Ours};

use super::waiter::Waiter;
use super::{children, connection, place};

/// How long a message may take that a caller sends without the background thread.
const ALONE_WITHIN: Duration = Duration::from_millis(900);

/// The listening socket and its secret. Ranks connect to it for communicators that have a rank in this process.
#[derive(Debug)]
pub(crate) struct ProcessListener {
    pub secret: Token,
    pub listener: Ours,
}

impl ProcessListener {
    /// Listens with a new secret.
    pub(crate) fn open() -> std::io::Result<ProcessListener> {
        let secret = place::random()?;
        Ok(ProcessListener { secret, listener: connection::listen_locally(&children::address(secret)?)? })
    }
}

/// How long a refused rank waits before it tries once more. A process that closed its listener and has a descriptor opens it again
/// within microseconds; a process that is stopped in between is still taken for gone.
const AGAIN_AFTER: Duration = Duration::from_millis(1);

/// Why a connect to a process listener failed.
pub(crate) enum Knock {
    /// The listener exists, but its queue is full or this process has no descriptor to spare.
    Later(Errno),
    /// The listener's process is gone.
    Gone,
}

/// Connects to a process listener. Only a refusal counts as a sign that its process is gone: a rank that gave up for
/// another reason would be waited for. A refusal must be repeated: a process without descriptors closes its listener and
/// opens it again at once.
pub(crate) fn connect(process_listener: Token) -> Result<Ours, Knock> {
    let address = children::address(process_listener).map_err(|_| Knock::Gone)?;
    let connect = || descriptor::even_of_reserve(|| connection::connect_locally(&address));
    let is_refused = |error: Errno| matches!(error, Errno::CONNREFUSED | Errno::NOENT);
    let again = |error: Errno| {
        if !is_refused(error) {
            return Err(error);
        }
        std::thread::sleep(AGAIN_AFTER);
        connect()
    };
    connect()
        .or_else(again)
        .map_err(|error| if is_refused(error) { Knock::Gone } else { Knock::Later(error) })
}

/// Without the background thread: the rank of this report, which has not gone out, declines.
pub(crate) fn withdraw_alone(waiter: &dyn Waiter, report: &[u8]) {
    if waiter.declines_elsewhere() {
        return;
    }
    if let Some((process_listener, words)) = children::withdrawal(report) {
        tell_alone(process_listener, &words);
    }
}

/// Sends a message to a process listener without the background thread, and waits up to 900 ms until it has been read:
/// closing first could destroy bytes that the host has not read.
pub(crate) fn tell_alone(process_listener: Token, words: &[u8]) {
    let until = Instant::now() + ALONE_WITHIN;
    let left = || until.saturating_duration_since(Instant::now());
    let socket = loop {
        match connect(process_listener) {
            Ok(socket) => break socket,
            Err(Knock::Later(_)) if !left().is_zero() => std::thread::sleep(Duration::from_millis(1)),
            Err(Knock::Later(_)) => {
                return log::warn!("bootstrap has no thread and its host's queue is full: peers may wait");
            }
            Err(Knock::Gone) => return,
        }
    };
    // A new connection always has room for so few bytes.
    if net::send(&socket, words, SendFlags::NOSIGNAL) != Ok(words.len()) {
        log::warn!("bootstrap has no thread and its host does not hear: peers may wait");
    }
    let _ = net::shutdown(&socket, Shutdown::Write);
    let mut answer = [0; 512];
    while !left().is_zero() {
        let tick = Timespec { tv_sec: 0, tv_nsec: left().subsec_nanos().into() };
        let _ = poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&tick));
        match net::recv(&socket, &mut answer, RecvFlags::empty()) {
            Ok((_, 0)) => return,
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => return,
        }
    }
}
