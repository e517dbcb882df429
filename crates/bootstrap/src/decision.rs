//! Decides from the ranks' reports whether there can be a peer group, and makes its negotiated config. Pure functions.
//!
//! A conflict is a fact of one or two ranks that no later report can change, so a session ends on NCCL at the first
//! conflict, without waiting for the rest.

use crate::negotiated::{NegotiatedConfig, Token, Version, capability};

use super::facts::Facts;
use super::outcome::FallbackReason;

/// Why a rank that reports now cannot form a peer group with those that have reported.
pub fn conflict<'a>(
    newcomer: &Facts,
    mut present: impl Iterator<Item = &'a Facts>,
) -> Option<FallbackReason> {
    let rank = newcomer.member.rank;
    if newcomer.version != Version::THIS {
        return Some(FallbackReason::OtherVersion);
    }
    if newcomer.capabilities & capability::REQUIRED != capability::REQUIRED {
        return Some(FallbackReason::Incapable { rank });
    }
    present.find_map(|facts| {
        let other = facts.member.rank;
        if facts.place.host != newcomer.place.host {
            Some(FallbackReason::OtherHost { rank, other })
        } else if facts.place.network != newcomer.place.network {
            Some(FallbackReason::OtherNetwork { rank, other })
        } else if facts.member.device.uuid == newcomer.member.device.uuid {
            Some(FallbackReason::SameDevice { rank, other })
        } else if is_tied(facts, newcomer) {
            Some(FallbackReason::LaunchBarrier { rank, other })
        } else if (facts.capabilities ^ newcomer.capabilities) & capability::FIXED_ORDER != 0 {
            Some(FallbackReason::OtherOrder { rank, other })
        } else if facts.nccl != newcomer.nccl {
            Some(FallbackReason::OtherNccl { rank, other })
        } else if facts.options != newcomer.options {
            Some(FallbackReason::OtherOptions { rank, other })
        } else {
            None
        }
    })
}

/// Whether launches of one of these ranks may wait for the other's. The copy that orders NCCL's work before ours must
/// not wait so.
fn is_tied(one: &Facts, other: &Facts) -> bool {
    let alone = one.capabilities & other.capabilities & capability::LAUNCHES_ALONE != 0;
    one.member.process == other.member.process && !alone
}

/// Decides without a session for ranks of one caller, in order, as `ncclCommInitAll` has them.
pub fn decide(comm: Token, all: &[Facts]) -> Result<NegotiatedConfig, FallbackReason> {
    match all.iter().enumerate().find_map(|(index, facts)| conflict(facts, all[..index].iter())) {
        Some(reason) => Err(reason),
        None => Ok(negotiated(comm, all.iter())),
    }
}

/// The negotiated config of all ranks, in order, which have no conflict.
pub fn negotiated<'a>(comm: Token, facts: impl Iterator<Item = &'a Facts>) -> NegotiatedConfig {
    let mut negotiated = NegotiatedConfig {
        comm,
        version: Version::THIS,
        host: Token([0; 16]),
        capabilities: u64::MAX,
        options: 0,
        ctas_max: 0,
        members: Vec::new(),
    };
    for facts in facts {
        negotiated.host = facts.place.host;
        negotiated.capabilities &= facts.capabilities;
        negotiated.options = facts.options;
        negotiated.ctas_max = lesser_limit(negotiated.ctas_max, facts.ctas_max);
        negotiated.members.push(facts.member.clone());
    }
    negotiated
}

/// The lesser of two limits, of which 0 is no limit.
fn lesser_limit(one: u32, other: u32) -> u32 {
    match (one, other) {
        (0, limit) | (limit, 0) => limit,
        (one, other) => one.min(other),
    }
}
