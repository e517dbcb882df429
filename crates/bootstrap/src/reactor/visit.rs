//! A connection to a host-local rendezvous whose roster this process keeps, and the reading of its messages.

use crate::children::local_rendezvous::{self, GREETING_BYTES, MESSAGE_BYTES, RosterMessage};
use crate::connection::{Connection, Line};
use crate::negotiated::Token;

/// A connection to a host-local rendezvous.
#[derive(Debug)]
pub(super) struct Visit {
    pub connection: Connection,
    pub name: Token,
    pub has_entered: bool,
    /// The message with which its rank leaves, if it sent one.
    pub last: Option<RosterMessage>,
}

impl Visit {
    /// A connection without a greeting yet.
    pub(super) fn new(connection: Connection, name: Token) -> Visit {
        Visit { connection, name, has_entered: false, last: None }
    }

    /// Reads the next greeting or message. After bytes that cannot be read the connection is to be closed.
    pub(super) fn next_said(&mut self) -> Said {
        let length = if self.has_entered { MESSAGE_BYTES } else { GREETING_BYTES };
        let line = self.connection.fill(length);
        if self.connection.input.len() < length {
            return if line == Line::Open { Said::Nothing } else { Said::Closed };
        }
        let words: Vec<u8> = self.connection.input.drain(..length).collect();
        let said = match self.has_entered {
            false => local_rendezvous::who(&words, self.name).map(Said::Greeting),
            true => RosterMessage::decode(&words).map(Said::Message),
        };
        said.unwrap_or(Said::Unreadable)
    }
}

/// What was read from the connection.
pub(super) enum Said {
    /// Nothing yet.
    Nothing,
    /// The connection has closed.
    Closed,
    /// Bytes that no rank sends.
    Unreadable,
    Greeting(u32),
    Message(RosterMessage),
}
