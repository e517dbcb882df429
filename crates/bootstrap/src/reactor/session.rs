//! A session that this process hosts: its agreement, and how many are there.

use std::collections::VecDeque;
use std::net::SocketAddr;

use crate::agreement::Agreement;
use crate::children::NOBODY;
use crate::connection;
use crate::id_tag::Id;
use crate::limits::Limits;
use crate::negotiated::Token;
use crate::place;

/// A session, and who is there.
#[derive(Debug)]
pub(super) struct Session {
    pub agreement: Agreement,
    kind: Kind,
    pub listener: Option<u64>,
    /// Connections that have not said who they are, the oldest first.
    pub newcomers: VecDeque<u64>,
    /// Ranks' connections.
    pub present: usize,
    pub relays: usize,
    /// Connections that are not relayed yet.
    pub waiting: usize,
    /// Connections of NCCL's that came and went in good order.
    pub relayed: u32,
}

#[derive(Debug)]
enum Kind {
    /// Of an id, as NCCL made it, and where its root is.
    Id { id: Id, root: SocketAddr },
    /// Of a call that makes communicators from another, with the connections that have not sent a message, and whose they
    /// are. Kept until nobody can come any more.
    Call { call: Token, silent: Vec<(u64, u32)> },
    /// Of such a call, and all who could come have come.
    Complete,
}

impl Session {
    fn new(comm: Token, kind: Kind, listener: Option<u64>) -> Session {
        Session {
            // Without a name of its own it tells nobody last.
            agreement: Agreement::new(comm, place::process().unwrap_or(NOBODY)),
            kind,
            listener,
            newcomers: VecDeque::new(),
            present: 0,
            relays: 0,
            waiting: 0,
            relayed: 0,
        }
    }

    /// The session of an id, as NCCL made it, whose root is there, at this listener of ours.
    pub(super) fn of_id(id: Id, root: SocketAddr, comm: Token, listener: u64) -> Session {
        Session::new(comm, Kind::Id { id, root }, Some(listener))
    }

    /// The session of a communicator that this call makes from another.
    pub(super) fn of_call(call: Token, comm: Token) -> Session {
        Session::new(comm, Kind::Call { call, silent: Vec::new() }, None)
    }

    /// Takes a connection of a rank in, if there is room; of a call's, which rank of the parent it is.
    #[must_use]
    pub(super) fn enter(&mut self, key: u64, in_parent: Option<u32>, present_max: usize) -> bool {
        if self.present >= present_max {
            return false;
        }
        self.present += 1;
        if let (Kind::Call { silent, .. }, Some(rank)) = (&mut self.kind, in_parent) {
            silent.push((key, rank));
        }
        true
    }

    /// The first message of a connection: of which call, and whose.
    pub(super) fn arrived(&mut self, key: u64) -> Option<(Token, u32)> {
        let Kind::Call { call, silent } = &mut self.kind else { return None };
        let index = silent.iter().position(|(silent, _)| *silent == key)?;
        Some((*call, silent.swap_remove(index).1))
    }

    /// How many ranks are waited for that have not reported.
    pub(super) fn missing(&self) -> Option<u32> {
        self.agreement.missing()
    }

    /// Whether nobody is there.
    pub(super) fn is_left(&self) -> bool {
        self.present == 0
    }

    /// All who could come have come.
    pub(super) fn nobody_comes(&mut self) {
        self.kind = Kind::Complete;
    }

    /// Where NCCL's root is, if there is one.
    pub(super) fn root(&self) -> Option<&SocketAddr> {
        match &self.kind {
            Kind::Id { root, .. } => Some(root),
            _ => None,
        }
    }

    /// Its id as NCCL made it, if it has one.
    pub(super) fn id(&self) -> Option<&Id> {
        match &self.kind {
            Kind::Id { id, .. } => Some(id),
            _ => None,
        }
    }

    /// Whether it can be forgotten: nobody is there, and nobody is waited for.
    pub(super) fn is_empty(&self) -> bool {
        let awaited = self.listener.is_some() || matches!(self.kind, Kind::Call { .. });
        !awaited && self.present == 0 && !self.is_relaying()
    }

    /// Whether a connection goes to its root, or waits for that.
    pub(super) fn is_relaying(&self) -> bool {
        self.relays > 0 || self.waiting > 0
    }

    /// Whether one more connection can be relayed to its root, beside so many of all sessions.
    pub(super) fn has_room(&self, relays_of_all: usize, limits: &Limits) -> bool {
        self.relays < limits.relays_max && relays_of_all < limits.relays_of_all_max
    }

    /// Whether nobody listens there any more.
    pub(super) fn root_is_gone(&self) -> bool {
        self.root().is_some_and(connection::is_free)
    }
}
