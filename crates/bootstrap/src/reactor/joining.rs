//! The connection of a rank of this process to the host of its session or round.

use std::sync::Arc;

use rustix::io::Errno;

use crate::approach::Hindrance;
use crate::commands::{Host, Reporting};
use crate::connection::{self, Connection, Line};
use crate::message::{FROM_HOST_BYTES_MAX, FromHost};
use crate::outcome::Failure;
use crate::poll::Watched;
use crate::waiter::{Need, Waiter};

/// The connection of a rank of this process to its host.
#[derive(Debug)]
pub(super) struct Joining {
    connection: Connection,
    /// Where its host is.
    pub(super) host: Host,
    waiter: Arc<dyn Waiter>,
    stage: JoinStage,
    /// Bytes to be sent once the connection stands.
    words: Vec<u8>,
}

/// The state of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JoinStage {
    Connecting,
    Talking,
}

impl Joining {
    /// A connection that has begun, and the bytes to send over it first.
    pub(super) fn new(watched: Watched, host: Host, waiter: Arc<dyn Waiter>, words: Vec<u8>) -> Joining {
        let connection = Connection::new(watched);
        Joining { connection, host, waiter, stage: JoinStage::Connecting, words }
    }

    /// Sends these bytes to the host, now or after the connection stands.
    pub(super) fn say(&mut self, bytes: &[u8]) -> Result<Need, Hindrance> {
        if self.stage != JoinStage::Talking {
            self.words.extend_from_slice(bytes);
            return Ok(Need::Connection);
        }
        // If the connection closed during the send, the rest is read now: an outcome may be among it.
        match self.connection.say(bytes) {
            Line::Open => Ok(Need::Connection),
            Line::Closed => self.turn(),
        }
    }

    /// The rank with its waiter, and the bytes that have not gone out.
    pub(super) fn reporting(&self) -> Reporting {
        Reporting {
            key: self.connection.watched.key(),
            waiter: self.waiter.clone(),
            words: self.words.clone(),
        }
    }

    /// Handles an event of the socket.
    pub(super) fn turn(&mut self) -> Result<Need, Hindrance> {
        if self.stage == JoinStage::Connecting {
            let unreached = |error: Errno| Hindrance::Unreached { words: error.to_string() };
            connection::outcome(&self.connection.watched).map_err(unreached)?;
            self.stage = JoinStage::Talking;
            let words = std::mem::take(&mut self.words);
            let _ = self.connection.say(&words);
        }
        let (messages, line, complaint) = self.connection.messages(FROM_HOST_BYTES_MAX, FromHost::decode);
        for message in messages {
            if self.waiter.heard(message) == Need::Nothing {
                return Ok(Need::Nothing);
            }
        }
        let line = if line == Line::Open { self.connection.flush() } else { line };
        match (line, complaint) {
            (Line::Open, _) => Ok(Need::Connection),
            (Line::Closed, Some(_)) => Err(Hindrance::Unreadable),
            (Line::Closed, None) => Err(Hindrance::Ended),
        }
    }
}

impl Drop for Joining {
    /// Whatever ends the connection, the waiter hears of it.
    fn drop(&mut self) {
        self.waiter.lost(Failure::HostLost);
    }
}
