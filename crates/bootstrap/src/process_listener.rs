//! A process listener as a socket: opened by its process, reached by others of the host.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SendFlags, Shutdown};

use crate::negotiated::Token;
use windlass_base::descriptor::{self, Ours};

use super::waiter::Waiter;
use super::{children, connection, place};

/// For one that says something without the thread.
const ALONE_WITHIN: Duration = Duration::from_millis(900);

/// Where ranks of communicators that have one in this process may come.
#[derive(Debug)]
pub(crate) struct ProcessListener {
    pub secret: Token,
    pub listener: Ours,
}

impl ProcessListener {
    /// Listens under a new name.
    pub(crate) fn open() -> std::io::Result<ProcessListener> {
        let secret = place::random()?;
        Ok(ProcessListener { secret, listener: connection::listen_locally(&children::address(secret)?)? })
    }
}

/// Why a process listener was not entered.
pub(crate) enum Knock {
    /// Its queue is full, or this process has no descriptor to spare: it is there.
    Later(Errno),
    /// Its process is gone.
    Gone,
}

/// Connects to a process listener. Only a refusal says that nobody is there: whoever gave up for another reason would be waited
/// for.
pub(crate) fn connect(process_listener: Token) -> Result<Ours, Knock> {
    let address = children::address(process_listener).map_err(|_| Knock::Gone)?;
    descriptor::even_of_reserve(|| connection::connect_locally(&address)).map_err(|error| match error {
        Errno::CONNREFUSED | Errno::NOENT => Knock::Gone,
        error => Knock::Later(error),
    })
}

/// Where there is no thread, the rank of a report that has not gone out says that it does not come.
pub(crate) fn withdraw_alone(waiter: &dyn Waiter, report: &[u8]) {
    if waiter.declines_elsewhere() {
        return;
    }
    if let Some((process_listener, words)) = children::withdrawal(report) {
        tell_alone(process_listener, &words);
    }
}

/// Says something at a process listener where there is no thread, and waits a moment until it has been read: closing first could
/// destroy what the host has not read.
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
    // A new connection has room for so little.
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
