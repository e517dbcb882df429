//! [`InitRequest`]: a communicator that is asked for by an id, and what this rank reports of itself to the session.

use std::sync::Arc;

use windlass_kernels::launch::Geometry;

use crate::background::life;
use crate::forward::init::Ctas;
use windlass_base::config::nccl::{self, Effect};
use windlass_base::config::{Lazy, config};
use windlass_base::gpu::{self, Ordinal, device};
use windlass_base::stats::features::{Feature, Lack};
use windlass_base::stats::peer_group;
use windlass_bootstrap::children::plan::LazyVote;
use windlass_bootstrap::children::{NOBODY, local_rendezvous};
use windlass_bootstrap::facts::{Facts, LocalFacts, Waiting, fallback_reason};
use windlass_bootstrap::id_tag::{Id, IdTag};
use windlass_bootstrap::negotiated::bytes::{Writer, checksum};
use windlass_bootstrap::negotiated::{Device, GRID_MAX, Member, RANKS_MAX, Token, Version, capability};
use windlass_bootstrap::outcome::FallbackReason;
use windlass_bootstrap::place;
use windlass_transport::heap::Heap;
use windlass_transport::native;
use windlass_transport::p2p::Layout;
use windlass_transport::tuning;

use crate::peers::chores;
use crate::peers::setup::transports::Share;
use crate::peers::setup::{capabilities, tuned};

/// One rank's request for a communicator by an id.
#[derive(Clone, Debug)]
pub struct InitRequest {
    /// The first id.
    pub id: Id,
    /// The other ids of an init that has several.
    pub more_ids: Vec<Id>,
    /// How many ranks.
    pub ranks: i32,
    /// This rank's number.
    pub rank: i32,
    /// Whether the call waits, as far as the configuration says.
    pub waiting: Waiting,
    /// What the configuration says of blocks.
    pub ctas: Ctas,
    /// The device that NCCL takes for the rank, or why it is not known, in words.
    pub device: Result<Ordinal, String>,
    /// Whether NCCL may build its part later.
    pub laziness: Laziness,
    /// The names of cached NCCL communicators of this rank that would fit, the preferred one first.
    pub cached: Vec<Token>,
}

/// Whether this rank wants its communicator lazy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Laziness {
    /// As the options say.
    AsConfigured,
    /// No: NCCL builds its part now.
    None,
}

impl Laziness {
    pub(in crate::peers) fn capability(self, ranks: u32) -> u64 {
        let lazy = match allowed() {
            Lazy::Off => false,
            Lazy::Pairs => ranks == 2,
            Lazy::All => true,
        };
        let caches = if config().cache_bytes_max > 0 { capability::CACHES } else { 0 };
        if lazy && self == Laziness::AsConfigured { capability::LAZY | caches } else { 0 }
    }

    /// This rank's vote before a split, for a rank that may wait.
    pub fn vote(self) -> LazyVote {
        match (self, allowed()) {
            (Laziness::None, _) | (_, Lazy::Off) => LazyVote::No,
            (_, Lazy::Pairs) => LazyVote::InPair,
            (_, Lazy::All) => LazyVote::Always,
        }
    }
}

/// Which communicators may be lazy. Their ranks wait for each other where NCCL has an error at a rank's death, so deaths must be seen.
fn allowed() -> Lazy {
    let is_off = nccl::settings().has(Effect::ConnectsAtInit) || !life::has_pidfds();
    if is_off { Lazy::Off } else { config().lazy }
}

impl InitRequest {
    /// Fails with the reason why there is no session.
    pub(in crate::peers) fn check(&self) -> Result<(), FallbackReason> {
        let facts = LocalFacts {
            ranks: self.ranks.max(0) as usize,
            id_tag: IdTag::decode(&self.id),
            ids: 1 + self.more_ids.len(),
            waiting: waits(self.waiting),
            forbidden: forbidden(self.ctas),
        };
        fallback_reason(&facts).map_or(Ok(()), Err)
    }

    /// The communicator's name, if its children may have peer groups even where it has none itself.
    pub(in crate::peers) fn name_of_parent(&self) -> Option<Token> {
        let splits = !self.is_nonblocking() && self.ranks > 1 && forbidden(self.ctas).is_none();
        splits.then(|| self.name())
    }

    /// The communicator's name, if no session is behind its ids: then its ranks meet around NCCL's init. All ranks have the same ids.
    pub fn name_of_roster(&self) -> Option<Token> {
        use FallbackReason::{ManyIds, NoIdTag, NonBlocking, OtherVersion};
        matches!(self.check(), Err(ManyIds | NoIdTag | NonBlocking | OtherVersion)).then(|| self.name())
    }

    /// Whether the call returns before the other ranks have come.
    pub fn is_nonblocking(&self) -> bool {
        waits(self.waiting) == Waiting::NonBlocking
    }

    fn name(&self) -> Token {
        match IdTag::decode(&self.id) {
            Some(id_tag) if self.more_ids.is_empty() => id_tag.token,
            _ => local_rendezvous::name_of_ids(&[&[self.id], &self.more_ids[..]].concat()),
        }
    }
}

/// Fails with the reason why a child communicator has no peer group, as far as that does not depend on its device.
pub(in crate::peers) fn check_child(waiting: Waiting) -> Result<(), FallbackReason> {
    match waiting {
        Waiting::Blocking => Ok(()),
        Waiting::NonBlocking => Err(FallbackReason::NonBlocking),
    }
}

/// Fails where NCCL orders launches among those of all communicators of the device: Windlass's kernels would not be in that order.
pub(in crate::peers) fn check_order(ctas: Ctas) -> Result<(), FallbackReason> {
    match ctas.are_ordered || nccl::settings().has(Effect::ImplicitOrder) {
        true => Err(FallbackReason::ImplicitOrder),
        false => Ok(()),
    }
}

/// Whether an init waits. NCCL_COMM_BLOCKING overrides the configuration.
pub fn waits(configured: Waiting) -> Waiting {
    let nccl = nccl::settings();
    if nccl.has(Effect::NonBlocking) {
        Waiting::NonBlocking
    } else if nccl.has(Effect::Blocking) {
        Waiting::Blocking
    } else {
        configured
    }
}

/// Fails with the reason why so many ranks of one call have no peer group, as far as that does not depend on their devices.
pub(in crate::peers) fn check_all(ranks: usize) -> Result<(), FallbackReason> {
    check_child(waits(Waiting::Blocking))?;
    match (forbidden(Ctas::UNSAID), ranks) {
        (Some(FallbackReason::OldNccl), 0 | 1) => Err(FallbackReason::OneRank),
        // They need no id.
        (Some(reason), _) if reason != FallbackReason::CommId => Err(reason),
        (_, 0 | 1) => Err(FallbackReason::OneRank),
        (_, ranks) if ranks > RANKS_MAX => Err(FallbackReason::ManyRanks),
        _ => Ok(()),
    }
}

/// The reason why NCCL's release, one of its variables or the configuration forbids a peer group. NCCL_COMM_ID comes last, as it forbids
/// less than the others.
fn forbidden(ctas: Ctas) -> Option<FallbackReason> {
    // 0: there is no NCCL, as in tests of this crate.
    if (1..peer_group::NCCL_SINCE).contains(&nccl::version()) {
        return Some(FallbackReason::OldNccl);
    }
    let settings = nccl::settings();
    let forbids = [
        (settings.has(Effect::UnseenValues), FallbackReason::UnseenValues),
        (settings.has(Effect::NoPeerAccess), FallbackReason::PeerAccess),
        (check_order(ctas).is_err(), FallbackReason::ImplicitOrder),
        (settings.has(Effect::OwnIds), FallbackReason::CommId),
    ];
    forbids.into_iter().find(|(forbids, _)| *forbids).map(|(_, reason)| reason)
}

/// The symmetric heap, the share and the facts of a device; the rank is still to be filled in.
pub(in crate::peers) fn on(
    ordinal: Ordinal,
    ranks: u32,
    ctas: Ctas,
    laziness: Laziness,
) -> Result<(Arc<Heap>, Share, Facts), FallbackReason> {
    let driver = gpu::driver().map_err(no_identity)?;
    let device = driver.device_facts(ordinal).map_err(no_identity)?;
    let heap = Heap::of(ordinal).map_err(no_identity)?;
    let nccl = nccl::settings();
    let mut share = Share::new(ordinal, ranks).map_err(|words| FallbackReason::Refused { rank: 0, words })?;
    let basis = capabilities::Basis {
        options: config(),
        nccl: &nccl,
        version: nccl::version(),
        device: &device,
        ctas,
        ranks,
        has_kernels: share.kernels.is_some(),
        has_pidfds: life::has_pidfds(),
    };
    share.lacks = basis.lacks();
    share.graphs = basis.graphs();
    let of_device = Device {
        uuid: device.uuid,
        pci: pci(&device.pci),
        capability: device.capability.clamp(0, u16::MAX.into()) as u16,
        multiprocessors: device.multiprocessors.clamp(0, u16::MAX.into()) as u16,
    };
    let has = |feature| basis.lacks().of(feature) == Lack::Nothing;
    let cells = if has(Feature::Native) || has(Feature::Registration) {
        tuned::brought(ranks, &device, &of_device, basis.has_multicast())
    } else {
        Vec::new()
    };
    let facts = Facts {
        ranks,
        version: Version::THIS,
        nccl: nccl::version(),
        place: place::here(nccl.host()),
        capabilities: capabilities(&device)
            | laziness.capability(ranks)
            | of_children()
            | basis.capabilities(),
        options: options(),
        ctas_max: basis.ctas_max(),
        member: Member {
            rank: 0,
            process: place::process().map_err(no_identity)?,
            process_id: std::process::id(),
            device: of_device,
            descriptor_socket: Token([0; 16]),
            process_listener: windlass_bootstrap::process()
                .map_or(NOBODY, |bootstrap| bootstrap.process_listener),
            cells,
            attachment: chores::request_socket().map_err(no_identity)?.0.to_vec(),
        },
    };
    Ok((heap, share, facts))
}

pub(super) fn no_identity(error: impl std::fmt::Display) -> FallbackReason {
    FallbackReason::NoIdentity { words: error.to_string() }
}

fn of_children() -> u64 {
    if allowed() == Lazy::Off { 0 } else { capability::LAZY_CHILDREN }
}

fn capabilities(device: &device::Facts) -> u64 {
    let bits = [
        (device.virtual_memory, capability::VIRTUAL_MEMORY),
        (device.posix_handles, capability::DESCRIPTORS),
    ];
    bits.into_iter().filter(|(has, _)| *has).fold(0, |all, (_, bit)| all | bit)
}

/// A checksum that differs where ranks' kernels would not understand each other: of the rings' sizes without limits, and of how paths are chosen.
fn options() -> u64 {
    let messages = Layout::of(2, &Geometry::recommended(GRID_MAX, 0)).bytes;
    let collectives = native::Layout::of(&native::Geometry::recommended(GRID_MAX, 2, 0, 1)).bytes;
    checksum(&Writer::default().u64(messages).u64(collectives).u64(tuning::hash()).finish())
}

/// Parses an address such as `0000:65:00.0`. Parts that cannot be read are 0: nothing is decided by them.
fn pci(text: &str) -> (u32, u8, u8) {
    let mut numbers =
        text.split([':', '.']).map(|part| u32::from_str_radix(part, 16).unwrap_or(0)).chain([0, 0, 0]);
    let mut next = || numbers.next().unwrap_or(0);
    (next(), next() as u8, next() as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks meet at a roster if no session is behind their ids and nothing else keeps them from having a peer group. All ids name it.
    #[test]
    fn who_meets_at_a_roster() {
        let of = |id: u8, more: &[u8], ranks, waiting| {
            let (id, more_ids) = ([id; 128], more.iter().map(|id| [*id; 128]).collect());
            let (ctas, device, laziness, cached) = (Ctas::UNSAID, Ok(0), Laziness::None, Vec::new());
            InitRequest { id, more_ids, ranks, rank: 0, waiting, ctas, device, laziness, cached }
        };
        let name = |id, more: &[u8]| of(id, more, 4, Waiting::Blocking).name_of_roster().unwrap();
        assert_eq!(name(1, &[2]), name(1, &[2]));
        let names = [name(1, &[]), name(2, &[]), name(1, &[2]), name(2, &[1]), name(1, &[2, 2])];
        assert_eq!(std::collections::BTreeSet::from(names).len(), names.len());
        let without = [
            of(1, &[], 1, Waiting::Blocking),
            of(1, &[], 17, Waiting::Blocking),
            of(1, &[], 17, Waiting::NonBlocking),
        ];
        assert!(without.iter().all(|request| request.name_of_roster().is_none()));
        let nonblocking = of(1, &[], 4, Waiting::NonBlocking);
        assert_eq!(nonblocking.name_of_roster(), Some(name(1, &[])));
        assert!(nonblocking.name_of_parent().is_none());
        // Children of a larger one may meet all the same.
        assert_eq!(of(1, &[], 17, Waiting::Blocking).name_of_parent(), Some(name(1, &[])));
    }

    /// Addresses are read as the driver writes them.
    #[test]
    fn pci_addresses() {
        assert_eq!(pci("0001:C3:0a.0"), (1, 0xc3, 10));
        assert_eq!(pci(""), (0, 0, 0));
    }
}
