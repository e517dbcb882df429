//! The init of a peer group. [`ask`] begins a rank's init and waits for no other rank. [`complete`] waits for the others, prepares, and gives
//! each rank's [`InitOutcome`]. Ranks that one call makes in this process need no session ([`all_here`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::forward::init::Ctas;
use windlass_base::stats::count::{self, Identity};
use windlass_base::stats::features::{Lacks, line};
use windlass_base::stats::limits;
use windlass_base::stats::peer_group;
use windlass_bootstrap::id_tag::Id;
use windlass_bootstrap::negotiated::NegotiatedConfig;
use windlass_bootstrap::outcome::{Failure, FallbackReason};
use windlass_bootstrap::{self, LocalEntry, Outcome, Preparation, decision, place};

use crate::background::own_thread;
use crate::peers::group::PeerGroup;
use crate::peers::registry;
use crate::peers::setup::asked::{Asked, cannot_reach};
use crate::peers::setup::preparing::{self, Prepared};
use crate::peers::setup::request::{self, InitRequest, Laziness};
use crate::peers::setup::{capabilities, offers};
use crate::peers::shutdown::at_exit;
use crate::peers::shutdown::closing::settle;
use crate::peers::shutdown::room;

/// The outcome of a communicator's init.
#[derive(Debug)]
pub enum InitOutcome {
    /// All ranks confirmed.
    PeerGroup(Arc<PeerGroup>),
    /// NCCL runs every call.
    OnNccl(FallbackReason),
    /// There is no communicator.
    Failed(Failure),
}

/// Begins a rank's init on the request's device. Waits for no other rank, but shortly for communicators that have
/// just ended on its device. If the rank cannot take part, waits for the session's host. The error is the init's outcome.
pub fn ask(request: &InitRequest) -> Result<Asked, InitOutcome> {
    own_thread::run(|| ask_here(request))
}

fn ask_here(request: &InitRequest) -> Result<Asked, InitOutcome> {
    request.check().map_err(InitOutcome::OnNccl)?;
    at_exit::at_exit_too();
    // Memory of ended communicators must not keep an init from having any.
    settle();
    report(request).map_err(|reason| decline(request, reason))
}

fn report(request: &InitRequest) -> Result<Asked, FallbackReason> {
    let (ranks, ctas, laziness) = (request.ranks as u32, request.ctas, request.laziness);
    let device = request.device.clone().map_err(request::no_identity)?;
    let (heap, share, mut facts) = request::on(device, ranks, ctas, laziness)?;
    room::close_soon(heap.device());
    facts.member.rank = request.rank as u32;
    offers::put(&mut facts.member.attachment, &request.cached);
    let participant = windlass_bootstrap::process().and_then(|bootstrap| bootstrap.join(&request.id, facts));
    let (until, local_entry) = (None, None);
    let participant = participant.map_err(cannot_reach)?;
    Ok(Asked { participant, heap, share, until, local_entry })
}

/// Tells the session that this rank cannot take part, and returns the outcome.
fn decline(request: &InitRequest, reason: FallbackReason) -> InitOutcome {
    let rank = request.rank as u32;
    let reason = match reason {
        FallbackReason::Refused { words, .. } => FallbackReason::Refused { rank, words },
        reason => reason,
    };
    // To others "this rank" is another.
    let words = reason.of_one_rank().map_or_else(|| reason.to_string(), |(_, words)| words.into());
    let said = FallbackReason::Refused { rank, words };
    match windlass_bootstrap::process().map(|bootstrap| bootstrap.decline_at_port(&request.id, said)) {
        Ok(Err(failure)) => {
            log::info!("a rank could not take part: {reason}");
            InitOutcome::Failed(failure)
        }
        Ok(Ok(())) | Err(_) => InitOutcome::OnNccl(reason),
    }
}

/// Waits for all other ranks without limit, prepares and confirms. One outcome per rank, in order.
pub fn complete(asked: Vec<Asked>) -> Vec<InitOutcome> {
    own_thread::run(|| complete_here(asked))
}

/// The same for one rank.
pub fn complete_one(asked: Asked) -> InitOutcome {
    complete(vec![asked]).pop().unwrap_or(InitOutcome::OnNccl(FallbackReason::Child))
}

fn complete_here(asked: Vec<Asked>) -> Vec<InitOutcome> {
    let mut prepared: Vec<Option<Prepared>> = asked.iter().map(|_| None).collect();
    let (mut participants, mut waits, mut local_entries) = (Vec::new(), Vec::new(), Vec::new());
    for (Asked { participant, heap, share, until, local_entry }, place) in
        asked.into_iter().zip(&mut prepared)
    {
        local_entries.push(local_entry);
        // The parent's end ends the wait, as long as this value lives.
        waits.extend(until);
        let prepare = move |preparation: &Preparation<'_>| {
            let (made, result) = preparing::for_session(preparation, &heap, share)?;
            *place = Some(made);
            result
        };
        participants.push((participant, prepare));
    }
    let outcomes = windlass_bootstrap::complete_all(participants);
    let outcome = |outcome| match outcome {
        (Outcome::PeerGroup(negotiated), Some(prepared)) => {
            // No rank confirms without the p2p transport and the shared page.
            begin(negotiated, prepared)
        }
        // No rank confirms without having prepared.
        (Outcome::PeerGroup(_), None) => InitOutcome::Failed(Failure::Unreadable),
        // These outcomes may come while others still test the region, as in a failed init.
        (
            Outcome::OnNccl(reason @ (FallbackReason::NonWindlass | FallbackReason::Unreachable { .. })),
            prepared,
        ) => {
            prepared.into_iter().for_each(|prepared| prepared.fail());
            InitOutcome::OnNccl(reason)
        }
        (Outcome::OnNccl(reason), prepared) => {
            // All ranks have reported, so none touches the announced regions any more.
            prepared.into_iter().for_each(|prepared| prepared.abandon());
            InitOutcome::OnNccl(reason)
        }
        (Outcome::Failed(failure), prepared) => {
            // Others may still be testing the region. They close their release sockets when they are done.
            prepared.into_iter().for_each(|prepared| prepared.fail());
            InitOutcome::Failed(failure)
        }
    };
    let outcomes: Vec<InitOutcome> = outcomes.into_iter().zip(prepared).map(outcome).collect();
    for (outcome, local_entry) in outcomes.iter().zip(local_entries) {
        local_entry.into_iter().for_each(|local_entry| part(outcome, &local_entry));
    }
    settle();
    outcomes
}

/// Makes the peer group once all ranks have confirmed, and has the background worker look after it.
fn begin(negotiated: Arc<NegotiatedConfig>, prepared: Prepared) -> InitOutcome {
    let Some(peer_group) = PeerGroup::new(negotiated, prepared) else {
        return InitOutcome::Failed(Failure::Unreadable);
    };
    registry::add(&peer_group);
    InitOutcome::PeerGroup(peer_group)
}

/// Ends a rank's part in its host-local rendezvous after the session. A failed rank says nothing, so it leaves like a dead one.
fn part(outcome: &InitOutcome, local_entry: &LocalEntry) {
    match outcome {
        // The others may still reach their host, and wait for this rank.
        InitOutcome::OnNccl(FallbackReason::Unreachable { .. }) => local_entry.decline(),
        InitOutcome::OnNccl(_) | InitOutcome::PeerGroup(_) => local_entry.leave(),
        InitOutcome::Failed(_) => {}
    }
}

/// Makes the peer group of ranks that are all in this call, on these devices in order. Needs no session.
pub fn all_here(devices: &[i32], laziness: Laziness) -> Vec<InitOutcome> {
    at_exit::at_exit_too();
    own_thread::run(|| all_here_or_reason(devices, laziness))
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

/// Whether so many ranks of one call would be lazy.
pub fn would_be_lazy(ranks: usize) -> bool {
    Laziness::AsConfigured.capability(ranks as u32) != 0
}

/// Counts and logs an init's outcome: one line with the features, or with the reason why the communicator is on NCCL.
pub fn tell(counters: usize, outcome: &InitOutcome) {
    match outcome {
        InitOutcome::PeerGroup(peers) => {
            let own = peers.transports().map(|transports| transports.lacks).unwrap_or_default();
            let lacks = capabilities::of_all(peers.negotiated(), &peers.features.limits, own);
            let serial = count::peer_group(counters, peer_group::YES, lacks);
            count::limits_from(counters, peers.features.limits_from);
            if peers.features.limits_from & limits::GUESSED != 0 {
                count::reason(counters, None, &limits::not_measured());
            }
            if lacks.is_without_link() && peers.rank() == 0 {
                let refused = FallbackReason::Refused { rank: 0, words: String::new() };
                let text = "no NVLink joins the GPUs of a communicator of 2 ranks: NCCL runs its calls";
                tell_user(&refused, format_args!("{text}"));
            }
            if log::log_enabled!(log::Level::Info) {
                let (rank, ranks, hash) =
                    (peers.rank(), peers.negotiated().members.len(), peers.negotiated().hash());
                let has = line(&lacks.words(), &limits::names(peers.features.limits_from));
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
            let of_one_rank = reason.of_one_rank();
            let (of, words) = of_one_rank.unwrap_or_default();
            count::reason(counters, of, words);
            let Identity { rank, ranks, .. } = count::identity(counters);
            // What a session decides, rank 0 hears.
            let is_own = matches!(of_one_rank, Some((None, _)));
            if (rank == 0 || is_own) && !peer_group::is_expected(peer_group::text(number)) {
                let why = match words {
                    "" => reason.to_string(),
                    words => format!("{words} (rank {})", of.map_or(rank, |of| of as i32)),
                };
                tell_user(reason, format_args!("a communicator of {ranks} ranks is on NCCL: {why}{change}"));
            }
        }
        InitOutcome::Failed(failure) => log::warn!("a communicator failed in its init: {failure}"),
    }
}

/// Tells the user of this process, once for each reason.
fn tell_user(reason: &FallbackReason, text: std::fmt::Arguments<'_>) {
    static TOLD: AtomicU32 = AtomicU32::new(0);
    let bit = 1 << (reason.number() % u32::BITS as u16);
    if TOLD.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
        windlass_base::log::tell(text);
    }
}

/// Whether all requests have the same id.
pub fn is_one_session<'a>(requests: impl Iterator<Item = &'a InitRequest>) -> bool {
    let mut ids: Vec<&Id> = requests.map(|request| &request.id).collect();
    ids.dedup();
    ids.len() < 2
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The counters' texts of the fallback reasons match the reasons' own.
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
            FallbackReason::OldNccl,
        ];
        for reason in reasons {
            let text = peer_group::text(peer_group::ON_NCCL + u32::from(reason.number()));
            assert!(reason.to_string().starts_with(text), "{reason} and {text}");
        }
        assert_eq!((peer_group::text(peer_group::YES), peer_group::text(peer_group::NOT_ASKED)), ("yes", ""));
    }
}
