//! The init of a peer group: [`ask`] begins a rank's and waits for nobody, [`complete`] waits for the others, prepares and brings each rank's
//! [`InitOutcome`]; ranks that are all in one hand need no session ([`all_here`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::forward::init::Ctas;
use windlass_base::gpu;
use windlass_base::stats::features::{Lacks, line};
use windlass_base::stats::limits;
use windlass_base::stats::{count, peer_group};
use windlass_bootstrap::id_tag::Id;
use windlass_bootstrap::negotiated::{NegotiatedConfig, Token};
use windlass_bootstrap::outcome::{Failure, FallbackReason};
use windlass_bootstrap::{self, LocalEntry, Outcome, decision, place};
use windlass_transport::heap::Heap;

use crate::features::check;
use crate::peers::group::PeerGroup;
use crate::peers::registry;
use crate::peers::setup::asked::{Asked, cannot_reach};
use crate::peers::setup::hosting::bootstrap;
use crate::peers::setup::preparing::{self, Prepared};
use crate::peers::setup::request::{self, InitRequest, Laziness};
use crate::peers::setup::transports::Share;
use crate::peers::setup::{capabilities, offers};
use crate::peers::shutdown::at_exit;
use crate::peers::shutdown::closing::settle;
use crate::peers::shutdown::room;

/// What a communicator's init came to.
#[derive(Debug)]
pub enum InitOutcome {
    /// All ranks confirmed.
    PeerGroup(Arc<PeerGroup>),
    /// NCCL does everything.
    OnNccl(FallbackReason),
    /// There is no communicator.
    Failed(Failure),
}

/// This thread's current device, where [`ask`] is called later than NCCL is.
pub fn device_now() -> Option<i32> {
    gpu::driver().ok()?.current_device().ok()?
}

/// Begins a rank's init with the request's device, or this thread's current one. Waits for no other rank, but a moment
/// for what has just ended on this one; and for its host, where it cannot take part. An error is its outcome.
pub fn ask(request: &InitRequest) -> Result<Asked, InitOutcome> {
    let id_tag = request.check().map_err(InitOutcome::OnNccl)?;
    at_exit::at_exit_too();
    // Room that is over must not keep an init from having any.
    settle();
    report(request, id_tag.token).map_err(|reason| decline(request, reason))
}

fn report(request: &InitRequest, token: Token) -> Result<Asked, FallbackReason> {
    let (ranks, ctas, laziness) = (request.ranks as u32, request.ctas, request.laziness);
    let (heap, share, mut facts) = match request.device {
        Some(device) => request::on(device, ranks, ctas, laziness)?,
        None => request::current(ranks, ctas, laziness)?,
    };
    room::close_soon(heap.device());
    facts.member.rank = request.rank as u32;
    offers::put(&mut facts.member.attachment, &request.cached);
    let rank = facts.member.rank;
    let participant = bootstrap().and_then(|bootstrap| bootstrap.join(&request.id, vec![facts]));
    let (until, local_entry) = (None, None);
    let participant = participant.map_err(cannot_reach)?;
    Ok(Asked { participant, token, rank, heap, share, until, local_entry })
}

/// This rank cannot take part, and its session hears of it.
fn decline(request: &InitRequest, reason: FallbackReason) -> InitOutcome {
    let rank = request.rank as u32;
    let (reason, said) = match reason {
        FallbackReason::Refused { words, .. } => {
            let reason = FallbackReason::Refused { rank, words };
            (reason.clone(), reason)
        }
        // To others "this rank" is another.
        reason => {
            let said = FallbackReason::Refused { rank, words: reason.to_string() };
            (reason, said)
        }
    };
    match bootstrap().map(|bootstrap| bootstrap.decline_at_port(&request.id, said)) {
        Ok(Err(failure)) => {
            log::info!("a rank could not take part: {reason}");
            InitOutcome::Failed(failure)
        }
        Ok(Ok(())) | Err(_) => InitOutcome::OnNccl(reason),
    }
}

/// Waits for all others, prepares and confirms: as long as it takes.
pub fn complete(asked: Vec<Asked>) -> Vec<InitOutcome> {
    type Key = (Token, u32);
    let (mut keys, mut participants, mut shares) = (Vec::new(), Vec::new(), BTreeMap::new());
    let (mut waits, mut local_entries) = (Vec::new(), Vec::new());
    for Asked { participant, token, rank, heap, share, until, local_entry: one } in asked {
        local_entries.push(one);
        // Ends with its parent as long as it waits.
        waits.extend(until);
        keys.push((token, rank));
        participants.push(participant);
        shares.insert((token, rank), (heap, share));
    }
    // Held for a few stores; participants of a group prepare on several threads.
    let shares: Mutex<BTreeMap<Key, (Arc<Heap>, Share)>> = Mutex::new(shares);
    let prepared: Mutex<BTreeMap<Key, Prepared>> = Mutex::default();
    let take = |key| prepared.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    let outcomes = windlass_bootstrap::complete_all(participants, &|preparation| {
        // A participant of ours has one rank.
        let rank = preparation.ranks.first().copied().unwrap_or_default();
        let key = (preparation.token, rank);
        let (heap, share) = shares
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&key)
            .ok_or("this rank did not ask")?;
        let (made, result) = preparing::for_session(preparation, rank, &heap, share)?;
        prepared.lock().unwrap_or_else(PoisonError::into_inner).insert(key, made);
        result
    });
    let outcome = |(key, outcome)| match (outcome, take(key)) {
        (Outcome::PeerGroup(negotiated), Some(prepared)) => {
            // Nobody confirms without the p2p transport and the shared page.
            begin(negotiated, prepared)
        }
        // Nobody confirms without having prepared.
        (Outcome::PeerGroup(_), None) => InitOutcome::Failed(Failure::Unreadable),
        // These come at any moment: as if it had failed.
        (
            Outcome::OnNccl(reason @ (FallbackReason::NonWindlass | FallbackReason::Unreachable { .. })),
            prepared,
        ) => {
            prepared.into_iter().for_each(|prepared| prepared.fail());
            InitOutcome::OnNccl(reason)
        }
        (Outcome::OnNccl(reason), prepared) => {
            // All have spoken: nobody touches what was announced any more.
            prepared.into_iter().for_each(|prepared| prepared.abandon());
            InitOutcome::OnNccl(reason)
        }
        (Outcome::Failed(failure), prepared) => {
            // Others may still be testing it: they let go of their release sockets when they are not.
            prepared.into_iter().for_each(|prepared| prepared.fail());
            InitOutcome::Failed(failure)
        }
    };
    let outcomes: Vec<InitOutcome> = keys.iter().zip(outcomes.into_iter().flatten()).map(outcome).collect();
    for (outcome, local_entry) in outcomes.iter().zip(local_entries) {
        local_entry.into_iter().for_each(|local_entry| part(outcome, &local_entry));
    }
    settle();
    outcomes
}

/// All have confirmed: from now on the peer group is looked after.
fn begin(negotiated: Arc<NegotiatedConfig>, prepared: Prepared) -> InitOutcome {
    let Some(peer_group) = PeerGroup::new(negotiated, prepared) else {
        return InitOutcome::Failed(Failure::Unreadable);
    };
    registry::add(&peer_group);
    InitOutcome::PeerGroup(peer_group)
}

/// What a rank of a host-local rendezvous says when its session is over for it. Whoever has failed leaves as one that has died.
fn part(outcome: &InitOutcome, local_entry: &LocalEntry) {
    match outcome {
        // The others may still have their host, and wait for this rank.
        InitOutcome::OnNccl(FallbackReason::Unreachable { .. }) => local_entry.decline(),
        InitOutcome::OnNccl(_) | InitOutcome::PeerGroup(_) => local_entry.leave(),
        InitOutcome::Failed(_) => {}
    }
}

/// The peer group of ranks that are all in one hand, on these devices, in order.
pub fn all_here(devices: &[i32], laziness: Laziness) -> Vec<InitOutcome> {
    at_exit::at_exit_too();
    all_here_or_reason(devices, laziness)
        .unwrap_or_else(|reason| devices.iter().map(|_| InitOutcome::OnNccl(reason.clone())).collect())
}

fn all_here_or_reason(devices: &[i32], laziness: Laziness) -> Result<Vec<InitOutcome>, FallbackReason> {
    request::check_all(devices.len())?;
    let (mut heaps, mut shares, mut all) = (Vec::new(), Vec::new(), Vec::new());
    for (rank, device) in (0..).zip(devices) {
        let (heap, share, mut facts) = request::on(*device, devices.len() as u32, Ctas::UNSAID, laziness)?;
        facts.member.rank = rank;
        heaps.push(heap);
        shares.push(share);
        all.push(facts);
    }
    let no_name = |error: std::io::Error| FallbackReason::NoIdentity { words: error.to_string() };
    let negotiated = Arc::new(decision::decide(place::random().map_err(no_name)?, &all)?);
    let refused = |(rank, words): (u32, String)| FallbackReason::Refused { rank, words };
    let prepared = preparing::in_one_hand(&negotiated, &heaps, shares).map_err(refused)?;
    Ok(prepared.into_iter().map(|prepared| begin(negotiated.clone(), prepared)).collect())
}

/// Whether so many ranks in one hand would be lazy.
pub fn would_be_lazy(ranks: usize) -> bool {
    Laziness::AsConfigured.capability(ranks as u32) != 0
}

/// Counts and logs what a communicator's init came to: one line with what it has, or why it is on NCCL.
pub fn tell(counters: usize, outcome: &InitOutcome) {
    match outcome {
        InitOutcome::PeerGroup(peers) => {
            let own = peers.transports().map(|transports| transports.lacks).unwrap_or_default();
            let lacks = capabilities::of_all(peers.negotiated(), peers.limits(), own);
            let serial = count::peer_group(counters, peer_group::YES, lacks);
            count::limits_from(counters, peers.limits_from());
            peers.checking().into_iter().for_each(|checking| checking.is_known_as(serial));
            if log::log_enabled!(log::Level::Info) {
                let (rank, ranks, hash) =
                    (peers.rank(), peers.negotiated().members.len(), peers.negotiated().hash());
                let has = line(&lacks.words(), &limits::names(peers.limits_from()));
                log::info!("communicator {serial}, rank {rank} of {ranks}, peer group {hash:016x}: {has}");
            }
        }
        InitOutcome::OnNccl(reason) => {
            let number = peer_group::ON_NCCL + u32::from(reason.number());
            let serial = count::peer_group(counters, number, Lacks::default());
            let change = match peer_group::change(number) {
                "" => String::new(),
                change => format!(" ({change})"),
            };
            log::info!("communicator {serial} is on NCCL: {reason}{change}");
            check::say_why_not(serial, reason);
        }
        InitOutcome::Failed(failure) => log::warn!("a communicator failed in its init: {failure}"),
    }
}

/// Whether these communicators are all one.
pub fn is_one_session<'a>(requests: impl Iterator<Item = &'a InitRequest>) -> bool {
    let mut ids: Vec<&Id> = requests.map(|request| &request.id).collect();
    ids.dedup();
    ids.len() < 2
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Readers of counters say what the reasons say.
    #[test]
    fn reasons_read_back() {
        let words = String::new;
        let reasons = [
            FallbackReason::SwitchedOff,
            FallbackReason::OneRank,
            FallbackReason::ManyRanks,
            FallbackReason::NonBlocking,
            FallbackReason::CommId,
            FallbackReason::ManyIds,
            FallbackReason::PeerAccess,
            FallbackReason::NoIdTag,
            FallbackReason::OtherVersion,
            FallbackReason::Unreachable { words: words() },
            FallbackReason::NoIdentity { words: words() },
            FallbackReason::NonWindlass,
            FallbackReason::OtherHost { rank: 1, other: 0 },
            FallbackReason::OtherNetwork { rank: 1, other: 0 },
            FallbackReason::SameDevice { rank: 1, other: 0 },
            FallbackReason::OtherOptions { rank: 1, other: 0 },
            FallbackReason::Incapable { rank: 1 },
            FallbackReason::Refused { rank: 1, words: words() },
            FallbackReason::Child,
            FallbackReason::Grouped,
            FallbackReason::Apart,
            FallbackReason::ImplicitOrder,
            FallbackReason::LaunchBarrier { rank: 1, other: 0 },
            FallbackReason::UnseenValues,
            FallbackReason::OtherOrder { rank: 1, other: 0 },
            FallbackReason::OtherNccl { rank: 1, other: 0 },
        ];
        for reason in reasons {
            let text = peer_group::text(peer_group::ON_NCCL + u32::from(reason.number()));
            assert!(reason.to_string().starts_with(text), "{reason} and {text}");
        }
        assert_eq!((peer_group::text(peer_group::YES), peer_group::text(peer_group::NOT_ASKED)), ("yes", ""));
    }
}
