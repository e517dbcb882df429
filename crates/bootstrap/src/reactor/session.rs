//! A session that this process hosts: its agreement, and counts of its connections.

use std::collections::VecDeque;
use std::net::SocketAddr;

use crate::agreement::Agreement;
use crate::children::NOBODY;
use crate::id_tag::Id;
use crate::negotiated::Token;
use crate::{Limits, connection, place};

/// A session and its connections.
#[derive(Debug)]
pub(super) struct Session {
    pub agreement: Agreement,
    kind: Kind,
    pub listener: Option<u64>,
    /// Connections without a greeting yet, the oldest first.
    pub newcomers: VecDeque<u64>,
    /// How many connections of ranks there are.
    pub present: usize,
    pub relays: usize,
    /// How many connections wait to be relayed.
    pub waiting: usize,
    /// How many of NCCL's connections were relayed to their end without an error.
    pub relayed: u32,
}

#[derive(Debug)]
enum Kind {
    /// The session of an id, as NCCL made it, and the address of its root.
    Id { id: Id, root: SocketAddr },
    /// The session of a communicator that a call makes from another. `silent`: connections without a message yet, and
    /// their ranks in the parent. Kept until no rank can come any more.
    Call { call: Token, silent: Vec<(u64, u32)> },
    /// The same, when all ranks that could come have come.
    Complete,
}

impl Session {
    fn new(comm: Token, kind: Kind, listener: Option<u64>) -> Session {
        Session {
            // Without a random name of this process the agreement tells no rank last.
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

    /// The session of an id. `root`: the address of NCCL's root. `listener`: the key of our port.
    pub(super) fn of_id(id: Id, root: SocketAddr, comm: Token, listener: u64) -> Session {
        Session::new(comm, Kind::Id { id, root }, Some(listener))
    }

    /// The session of a communicator that this call makes from another.
    pub(super) fn of_call(call: Token, comm: Token) -> Session {
        Session::new(comm, Kind::Call { call, silent: Vec::new() }, None)
    }

    /// Counts a rank's connection, if there is room. `in_parent`: its rank in the parent, in a session of a call.
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

    /// Notes the first message of a connection. Returns the call and the rank in the parent, if the session is of a
    /// call.
    pub(super) fn arrived(&mut self, key: u64) -> Option<(Token, u32)> {
        let Kind::Call { call, silent } = &mut self.kind else { return None };
        let index = silent.iter().position(|(silent, _)| *silent == key)?;
        Some((*call, silent.swap_remove(index).1))
    }

    /// All ranks that could come have come.
    pub(super) fn nobody_comes(&mut self) {
        self.kind = Kind::Complete;
    }

    /// The address of NCCL's root, if the session has one.
    pub(super) fn root(&self) -> Option<&SocketAddr> {
        match &self.kind {
            Kind::Id { root, .. } => Some(root),
            _ => None,
        }
    }

    /// The id as NCCL made it, if the session has one.
    pub(super) fn id(&self) -> Option<&Id> {
        match &self.kind {
            Kind::Id { id, .. } => Some(id),
            _ => None,
        }
    }

    /// Whether the session can be forgotten: it has no connections, and none can come.
    pub(super) fn is_empty(&self) -> bool {
        let awaited = self.listener.is_some() || matches!(self.kind, Kind::Call { .. });
        !awaited && self.present == 0 && !self.is_relaying()
    }

    /// Whether a connection is relayed to its root, or waits for that.
    pub(super) fn is_relaying(&self) -> bool {
        self.relays > 0 || self.waiting > 0
    }

    /// Whether one more connection can be relayed to its root, while all sessions relay `relays_of_all`.
    pub(super) fn has_room(&self, relays_of_all: usize, limits: &Limits) -> bool {
        self.relays < limits.relays_max && relays_of_all < limits.relays_of_all_max
    }

    /// Whether the root has closed.
    pub(super) fn root_is_gone(&self) -> bool {
        self.root().is_some_and(connection::is_free)
    }
}
