//! What a rank knows before it connects, and the fallback reasons that follow from that alone.
//!
//! A rank for which [`fallback_reason`] finds a reason goes to NCCL without a message to any rank. That is safe even if
//! its peers wait in a session: its NCCL connects to the port in the id, which is the session's. Such a connection
//! makes the session end on NCCL for all.

use crate::negotiated::bytes::{Reader, Writer};
use crate::negotiated::{Member, RANKS_MAX, Token, Version};

use super::id_tag::IdTag;
use super::outcome::FallbackReason;

/// The parts of an init call that decide whether there is a session at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalFacts {
    /// How many ranks the communicator has.
    pub ranks: usize,
    /// The id tag of its first id.
    pub id_tag: Option<IdTag>,
    /// How many ids there are: more than one with `ncclCommInitRankScalable`.
    pub ids: usize,
    /// Whether the call waits (`blocking` of the configuration and NCCL_COMM_BLOCKING).
    pub waiting: Waiting,
    /// Which of NCCL's variables forbids a peer group, if one does.
    pub forbidden: Option<FallbackReason>,
}

/// Whether the caller of an init waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Waiting {
    Blocking,
    NonBlocking,
}

/// Why this communicator is on NCCL without a session, if it is.
pub fn fallback_reason(facts: &LocalFacts) -> Option<FallbackReason> {
    // Of two reasons the one counts that the user need not be told.
    let is_old = facts.forbidden == Some(FallbackReason::OldNccl);
    if facts.forbidden.is_some() && !(is_old && facts.ranks < 2) {
        return facts.forbidden.clone();
    }
    if facts.ranks < 2 {
        return Some(FallbackReason::OneRank);
    }
    if facts.ranks > RANKS_MAX {
        return Some(FallbackReason::ManyRanks);
    }
    if facts.waiting == Waiting::NonBlocking {
        return Some(FallbackReason::NonBlocking);
    }
    if facts.ids != 1 {
        return Some(FallbackReason::ManyIds);
    }
    match facts.id_tag {
        None => Some(FallbackReason::NoIdTag),
        Some(id_tag) if id_tag.version != Version::THIS => Some(FallbackReason::OtherVersion),
        Some(_) => None,
    }
}

/// Where a rank runs, as far as its peers can reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The boot id: the same in all containers of a host.
    pub host: Token,
    /// The network namespace, to which abstract Unix sockets belong, too. It only saves time: whether descriptors pass
    /// is the proof.
    pub network: u64,
}

/// What a rank reports to the session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The number of ranks in its init call.
    pub ranks: u32,
    /// Its version of Windlass.
    pub version: Version,
    /// The version code of its NCCL. NCCL refuses ranks of different versions, but a lazy communicator would not ask
    /// NCCL.
    pub nccl: i32,
    /// Where it runs.
    pub place: Place,
    /// What its device and driver can do, [`crate::negotiated::capability`] bits.
    pub capabilities: u64,
    /// Checksum of the options that change behaviour.
    pub options: u64,
    /// Its limit on blocks; 0 is no limit.
    pub ctas_max: u32,
    /// The part that goes into the negotiated config unchanged.
    pub member: Member,
}

impl Facts {
    pub(super) fn put(&self, writer: &mut Writer) {
        writer.u32(self.ranks);
        self.version.put(writer);
        writer.u32(self.nccl as u32).token(self.place.host).u64(self.place.network);
        writer.u64(self.capabilities).u64(self.options).u32(self.ctas_max);
        self.member.put(writer);
    }

    pub(super) fn take(reader: &mut Reader<'_>) -> Option<Facts> {
        Some(Facts {
            ranks: reader.u32()?,
            version: Version::take(reader)?,
            nccl: reader.u32()? as i32,
            place: Place { host: reader.token()?, network: reader.u64()? },
            capabilities: reader.u64()?,
            options: reader.u64()?,
            ctas_max: reader.u32()?,
            member: Member::take(reader)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each reason alone; without any there is a session.
    #[test]
    fn reasons() {
        let id_tag = IdTag { version: Version::THIS, token: Token([1; 16]), root_port: 1 };
        let good = LocalFacts {
            ranks: 4,
            id_tag: Some(id_tag),
            ids: 1,
            waiting: Waiting::Blocking,
            forbidden: None,
        };
        let other = IdTag { version: Version { major: 999, minor: 0, patch: 0 }, ..id_tag };
        let cases = [
            (good.clone(), None),
            (LocalFacts { ranks: RANKS_MAX, ..good.clone() }, None),
            (LocalFacts { ranks: RANKS_MAX + 1, ..good.clone() }, Some(FallbackReason::ManyRanks)),
            (LocalFacts { ranks: 1, ..good.clone() }, Some(FallbackReason::OneRank)),
            (LocalFacts { id_tag: None, ..good.clone() }, Some(FallbackReason::NoIdTag)),
            (LocalFacts { id_tag: Some(other), ..good.clone() }, Some(FallbackReason::OtherVersion)),
            (
                LocalFacts { forbidden: Some(FallbackReason::CommId), ids: 2, ..good.clone() },
                Some(FallbackReason::CommId),
            ),
            (LocalFacts { ids: 2, ..good.clone() }, Some(FallbackReason::ManyIds)),
            (LocalFacts { waiting: Waiting::NonBlocking, ..good.clone() }, Some(FallbackReason::NonBlocking)),
        ];
        for (facts, expected) in cases {
            assert_eq!(fallback_reason(&facts), expected, "{facts:?}");
        }
    }
}
