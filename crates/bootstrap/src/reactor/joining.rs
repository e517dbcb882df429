//! A rank of this process in its session or round, wherever that is hosted.

use std::sync::Arc;

use crate::connection::{self, Connection, Line};
use crate::message::{FROM_HOST_BYTES_MAX, FromHost};
use crate::outcome::{Failure, FallbackReason, SessionOutcome, bounded};
use crate::process_listener;
use crate::waiter::{Need, Waiter};

/// The connection of a rank of this process to its host.
#[derive(Debug)]
pub(super) struct Joining {
    connection: Connection,
    waiter: Arc<dyn Waiter>,
    state: JoinStage,
    /// What has not gone out.
    words: Vec<u8>,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JoinStage {
    Connecting,
    /// At a process listener.
    Entering,
    Talking,
}

impl Joining {
    /// A connection that has begun, at a port or a process listener, with what is to be said.
    pub(super) fn new(
        connection: Connection,
        waiter: Arc<dyn Waiter>,
        state: JoinStage,
        words: Vec<u8>,
    ) -> Joining {
        Joining { connection, waiter, state, words }
    }

    /// Says this to its host, now or behind what has not gone out.
    pub(super) fn say(&mut self, bytes: &[u8]) -> Need {
        if self.state != JoinStage::Talking {
            self.words.extend_from_slice(bytes);
            return Need::Connection;
        }
        // A line that closed while speaking is read to its end now: an outcome may lie in it.
        match self.connection.say(bytes) {
            Line::Open => Need::Connection,
            Line::Closed => self.turn(),
        }
    }

    /// What has not gone out.
    pub(super) fn unsaid(&self) -> &[u8] {
        &self.words
    }

    /// Where there is no thread, its rank says that it does not come.
    pub(super) fn withdraw_alone(&self) {
        process_listener::withdraw_alone(&*self.waiter, &self.words);
    }

    /// Its socket has something.
    pub(super) fn turn(&mut self) -> Need {
        if self.state != JoinStage::Talking {
            if let Err(error) = connection::outcome(&self.connection.watched) {
                if self.state == JoinStage::Entering {
                    self.waiter.lost(Failure::HostLost);
                    return Need::Nothing;
                }
                // Nobody has heard of this rank, so it may go to NCCL: whose root is there, or is not, for it too.
                let words = bounded(&error.to_string());
                self.waiter.end(SessionOutcome::OnNccl(FallbackReason::Unreachable { words }));
                return Need::Nothing;
            }
            self.state = JoinStage::Talking;
            let words = std::mem::take(&mut self.words);
            let _ = self.connection.say(&words);
        }
        let (messages, line, complaint) = self.connection.messages(FROM_HOST_BYTES_MAX, FromHost::decode);
        for message in messages {
            if self.waiter.heard(message) == Need::Nothing {
                return Need::Nothing;
            }
        }
        let line = if line == Line::Open { self.connection.flush() } else { line };
        if line == Line::Open {
            return Need::Connection;
        }
        let failure = if complaint.is_some() { Failure::Unreadable } else { Failure::HostLost };
        self.waiter.lost(failure);
        Need::Nothing
    }
}

impl Drop for Joining {
    /// However its connection ends, nobody waits for it.
    fn drop(&mut self) {
        self.waiter.lost(Failure::HostLost);
    }
}
