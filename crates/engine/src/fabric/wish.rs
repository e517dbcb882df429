//! How a communicator is asked for, and who asks.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use windlass_kernels::launch::Geometry;

use crate::arena::Arena;
use crate::config::{Batch, Fast, Lazy, Nccl, Register, Switch, Windows, config};
use crate::contract::bytes::{Writer, checksum};
use crate::contract::{Contract, Device, GRID_MAX, Member, RANKS_MAX, Token, Version, capability};
use crate::fast;
use crate::forward::birth::{Ctas, Policy};
use crate::forward::configuration;
use crate::gpu::{self, Ordinal, device};
use crate::mailbox::Layout;
use crate::rendezvous::card::{Card, Id};
use crate::rendezvous::colors::Willing;
use crate::rendezvous::derived::NOBODY;
use crate::rendezvous::facts::{Facts, Forbidden, LocalFacts, Waiting, plain_reason};
use crate::rendezvous::place;
use crate::rendezvous::verdict::Reason;
use crate::stats::segment;
use crate::tuning;

use super::boxes::{self, Share};
use super::hosting::rendezvous;
use super::{Plain, tuned, watch};

/// A rank of a communicator that is asked for by an id.
#[derive(Clone, Debug)]
pub struct Wish {
    /// The first id.
    pub id: Id,
    /// How many ids there are.
    pub ids: usize,
    /// How many ranks.
    pub ranks: i32,
    /// Which of them.
    pub rank: i32,
    /// Whether the call waits, where its configuration says.
    pub waiting: Option<Waiting>,
    /// What the configuration says of blocks.
    pub ctas: Ctas,
    /// The rank's device, if it is not the current one any more.
    pub device: Option<Ordinal>,
    /// Whether NCCL's part may come later.
    pub patience: Patience,
    /// NCCL's communicators that this rank has parked and that would fit, by name, in the order of its preference.
    pub parked: Vec<Token>,
}

/// Whether this rank would have NCCL's communicator built later only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// If the options say so.
    AsConfigured,
    /// NCCL makes it now.
    None,
}

impl Patience {
    pub(super) fn capability(self, ranks: u32) -> u64 {
        let lazy = match config().lazy {
            Lazy::Off => false,
            Lazy::Pairs => ranks == 2,
            Lazy::All => true,
        };
        let parks = if config().parked_bytes_max > 0 { capability::PARKS } else { 0 };
        if lazy && self == Patience::AsConfigured { capability::PROMISE | parks } else { 0 }
    }

    /// What this rank says before a split, where it may wait.
    pub fn willing(self) -> Willing {
        match (self, config().lazy) {
            (Patience::None, _) | (_, Lazy::Off) => Willing::Unwilling,
            (_, Lazy::Pairs) => Willing::InPair,
            (_, Lazy::All) => Willing::Always,
        }
    }
}

impl Wish {
    /// The card, or why there is no meeting.
    pub(super) fn check(&self) -> Result<Card, Reason> {
        let card = Card::decode(&self.id);
        let facts = LocalFacts {
            ranks: self.ranks.max(0) as usize,
            card,
            ids: self.ids,
            waiting: self.waiting.unwrap_or_else(by_environment),
            forbidden: forbidden(),
        };
        match plain_reason(&facts) {
            Some(reason) => Err(reason),
            None => card.ok_or(Reason::NoCard),
        }
    }

    /// What the communicator keeps for those made from it where it has no fabric: nothing where none of them can have one.
    pub fn plain(&self, configuration: configuration::Kept) -> Option<Arc<Plain>> {
        let card = Card::decode(&self.id)?;
        let waits = self.waiting.unwrap_or_else(by_environment) == Waiting::Blocking;
        let splits = waits && self.ids == 1 && self.ranks > 2 && forbidden() == Forbidden::Nothing;
        splits.then(|| Plain::new(card.token, self.rank.max(0) as u32, self.ctas, configuration))
    }
}

/// Why a communicator made from another has no fabric, before anything is asked of its device.
pub(super) fn check_derived(waiting: Option<Waiting>) -> Result<(), Reason> {
    match waiting.unwrap_or_else(by_environment) {
        Waiting::Blocking => Ok(()),
        Waiting::NonBlocking => Err(Reason::NonBlocking),
    }
}

fn by_environment() -> Waiting {
    match config().nccl.blocking {
        Switch::On => Waiting::Blocking,
        Switch::Off => Waiting::NonBlocking,
    }
}

/// Why so many ranks in one hand have no fabric, before anything is asked of their devices.
pub(super) fn check_all(ranks: usize) -> Result<(), Reason> {
    match (forbidden(), ranks) {
        (Forbidden::PeerAccess, _) => Err(Reason::PeerAccess),
        (Forbidden::Launches, _) => Err(Reason::Launches),
        (_, 0 | 1) => Err(Reason::OneRank),
        (_, ranks) if ranks > RANKS_MAX => Err(Reason::ManyRanks),
        _ => Ok(()),
    }
}

fn forbidden() -> Forbidden {
    let nccl = config().nccl;
    if nccl.comm_id == Switch::On {
        Forbidden::CommId
    } else if nccl.peer_access == Switch::Off {
        Forbidden::PeerAccess
    } else if nccl.launches_alone == Switch::Off {
        Forbidden::Launches
    } else {
        Forbidden::Nothing
    }
}

/// The arena, the share and the facts of this thread's current device.
pub(super) fn current(
    ranks: u32,
    ctas: Ctas,
    patience: Patience,
) -> Result<(Arc<Arena>, Share, Facts), Reason> {
    let driver = gpu::driver().map_err(no_identity)?;
    match driver.current_device().map_err(no_identity)? {
        Some(device) => on(device, ranks, ctas, patience),
        // NCCL would take the runtime's, which only the runtime knows.
        None => Err(no_identity("no device is current")),
    }
}

/// The arena, the share and the facts of a device; the rank is still to be filled in.
pub(super) fn on(
    ordinal: Ordinal,
    ranks: u32,
    ctas: Ctas,
    patience: Patience,
) -> Result<(Arc<Arena>, Share, Facts), Reason> {
    let driver = gpu::driver().map_err(no_identity)?;
    let device = driver.device_facts(ordinal).map_err(no_identity)?;
    let arena = Arena::of(ordinal).map_err(no_identity)?;
    let share = Share::new(ordinal, ranks).map_err(|words| Reason::Refused { rank: 0, words })?;
    let facts = Facts {
        ranks,
        version: Version::THIS,
        place: place::here().map_err(no_identity)?,
        capabilities: capabilities(&device)
            | patience.capability(ranks)
            | of_children()
            | of_registration(&device)
            | of_windows(&device)
            | of_fast(&share, ctas),
        options: options(),
        ctas_max: boxes::ctas_max(ctas),
        member: Member {
            rank: 0,
            process: place::process().map_err(no_identity)?,
            process_id: std::process::id(),
            device: Device {
                uuid: device.uuid,
                pci: pci(&device.pci),
                capability: device.capability.clamp(0, u16::MAX.into()) as u16,
                multiprocessors: device.multiprocessors.clamp(0, u16::MAX.into()) as u16,
            },
            door: Token([0; 16]),
            lobby: rendezvous().map_or(NOBODY, |rendezvous| rendezvous.lobby()),
            tuning: tuned::table().hash(),
            checks: config().check == Switch::On,
            attachment: watch::desk().map_err(no_identity)?.0.to_vec(),
        },
    };
    Ok((arena, share, facts))
}

fn no_identity(error: impl std::fmt::Display) -> Reason {
    Reason::NoIdentity { words: error.to_string() }
}

fn of_children() -> u64 {
    if config().lazy == Lazy::Off { 0 } else { capability::PROMISED_CHILDREN }
}

fn capabilities(device: &device::Facts) -> u64 {
    let bits = [
        (device.virtual_memory, capability::VIRTUAL_MEMORY),
        (device.posix_handles, capability::DESCRIPTORS),
        (device.multicast && config().nccl.multicast == Switch::On, capability::MULTICAST),
    ];
    bits.into_iter().filter(|(has, _)| *has).fold(0, |all, (_, bit)| all | bit)
}

/// What stands for the protocol of the kernels, as numbers: the rings of unlimited communicators, and by what is chosen.
fn options() -> u64 {
    let messages = Layout::of(2, &Geometry::recommended(GRID_MAX, 0)).bytes;
    let collectives = fast::Layout::of(&fast::Geometry::recommended(GRID_MAX, 2, 0, 1)).bytes;
    let mut writer = Writer::default();
    writer.u64(messages).u64(collectives).u64(tuning::hash());
    checksum(&writer.finish())
}

/// Fast collectives, where the kernels load, our options let them and NCCL is not asked to go by something else.
fn of_fast(share: &Share, ctas: Ctas) -> u64 {
    let wanted = fast_wanted(config().fast, config().nccl);
    let bound = if ctas.policy == Policy::Default { capability::UNBOUND } else { 0 };
    let fast = if wanted && share.has_fast() { capability::FAST } else { 0 };
    let batches = match config().batch {
        Batch::Off => 0,
        Batch::Small => capability::BATCHES,
        Batch::All => capability::BATCHES | capability::LARGER_BATCHES,
    };
    fast | bound | batches
}

/// Whether this process would have fast collectives.
pub(super) fn fast_wanted(option: Fast, nccl: Nccl) -> bool {
    option == Fast::Auto && nccl.choice == Switch::On
}

/// What a communicator said of blocks, of which another is made without a word.
pub(super) fn ctas_of(contract: &Contract) -> Ctas {
    let policy = match contract.capabilities & capability::UNBOUND {
        0 => Policy::Own,
        _ => Policy::Default,
    };
    Ctas { max: contract.ctas_max, policy }
}

fn of_registration(device: &device::Facts) -> u64 {
    // Known since the first communicator was asked for.
    let version = segment::current().nccl_version.load(Ordering::Relaxed);
    let does = registers(config().register, config().nccl, version, device);
    if does { capability::REGISTERS } else { 0 }
}

fn of_windows(device: &device::Facts) -> u64 {
    let version = segment::current().nccl_version.load(Ordering::Relaxed);
    let does = config().pool_bytes_max > 0 && keeps_windows(config().windows, config().nccl, version, device);
    let goes_directly = does && config().windows == Windows::Direct && LAYOUT_KNOWN.contains(&version);
    let direct = if goes_directly { capability::DIRECT } else { 0 };
    if does { capability::WINDOWS | direct } else { 0 }
}

/// The releases whose handles are known to begin alike (`windows::Reach`): read in the sources of all from the first to the last.
const LAYOUT_KNOWN: std::ops::RangeInclusive<i32> = 22803..=23007;

/// The first release whose windows are found again by a handle that is the device's.
const WINDOWS_SINCE: i32 = 22803;

/// Whether this rank would keep windows. With multicast NCCL binds them at places that must be equal on all ranks, and makes some
/// that nobody sees; so it does by itself where a policy of blocks asks for that.
fn keeps_windows(option: Windows, nccl: Nccl, version: i32, device: &device::Facts) -> bool {
    let multicast = device.multicast && nccl.multicast == Switch::On;
    let lets = [nccl.peer_access, nccl.choice, nccl.windows] == [Switch::On; 3];
    option != Windows::Off && version >= WINDOWS_SINCE && lets && !multicast
}

/// Whether NCCL's kernels that begin while the one before them runs wait for it before they touch memory. Before, its kernels over
/// windows were so launched and did not wait: they relied on kernels before them that never let them begin early.
pub(super) fn others_wait() -> bool {
    segment::current().nccl_version.load(Ordering::Relaxed) >= WAITS_SINCE
}

/// Read in the sources of 2.28.7 to 2.30.7.
const WAITS_SINCE: i32 = 23007;

/// The first release in which buffers of collectives over peer memory are registered by `ncclCommRegister`.
const REGISTERS_SINCE: i32 = 21903;
/// The first release with which registering was measured to profit.
const PROFITS_SINCE: i32 = 22800;

/// Whether this rank would register buffers, with NCCL's version code (0 if unknown).
fn registers(option: Register, nccl: Nccl, version: i32, device: &device::Facts) -> bool {
    // NCCL_CUMEM_ENABLE=0, without which NCCL maps nothing of ours, leaves no peer access.
    let lets = nccl.registration == Switch::On && nccl.peer_access == Switch::On;
    match option {
        Register::Off => false,
        Register::On => lets && version >= REGISTERS_SINCE,
        Register::Auto => {
            let multicast = device.multicast && nccl.multicast == Switch::On;
            lets && version >= PROFITS_SINCE && device.capability == 90 && !multicast
        }
    }
}

/// `0000:65:00.0`; what cannot be read is 0, for nothing is decided by it.
fn pci(text: &str) -> (u32, u8, u8) {
    let mut numbers =
        text.split([':', '.']).map(|part| u32::from_str_radix(part, 16).unwrap_or(0)).chain([0, 0, 0]);
    let mut next = || numbers.next().unwrap_or(0);
    (next(), next() as u8, next() as u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn hopper() -> device::Facts {
        device::Facts {
            ordinal: 0,
            uuid: [0; 16],
            pci: String::new(),
            capability: 90,
            multiprocessors: 132,
            memory_bytes: 0,
            virtual_memory: true,
            posix_handles: true,
            multicast: false,
            memory_domains: 4,
            threads_per_multiprocessor: 2048,
        }
    }

    /// Registering by itself is for devices, versions and settings that were measured; if asked for it is done wherever NCCL can.
    #[test]
    fn who_registers() {
        let nccl = Config::default().nccl;
        let hopper = hopper();
        let (auto, on, off) = (Register::Auto, Register::On, Register::Off);
        let all = |nccl, version, device: &device::Facts| {
            [auto, on, off].map(|option| registers(option, nccl, version, device))
        };
        assert_eq!(all(nccl, 22800, &hopper), [true, true, false]);
        assert_eq!(all(nccl, 22799, &hopper), [false, true, false]);
        assert_eq!(all(nccl, 21902, &hopper), [false; 3]);
        assert_eq!(all(nccl, 0, &hopper), [false; 3]);
        assert_eq!(
            all(nccl, 22809, &device::Facts { capability: 100, ..hopper.clone() }),
            [false, true, false]
        );
        let switched = device::Facts { multicast: true, ..hopper.clone() };
        assert_eq!(all(nccl, 22809, &switched), [false, true, false]);
        assert_eq!(all(Nccl { multicast: Switch::Off, ..nccl }, 22809, &switched), [true, true, false]);
        assert_eq!(all(Nccl { registration: Switch::Off, ..nccl }, 22809, &hopper), [false; 3]);
        assert_eq!(all(Nccl { peer_access: Switch::Off, ..nccl }, 22809, &hopper), [false; 3]);
    }

    /// Windows are kept where NCCL makes none by itself.
    #[test]
    fn who_keeps_windows() {
        let nccl = Config::default().nccl;
        let hopper = hopper();
        let switched = device::Facts { multicast: true, ..hopper.clone() };
        let keep =
            |nccl, version, device: &device::Facts| keeps_windows(Windows::Keep, nccl, version, device);
        assert!(keep(nccl, 22803, &hopper) && !keep(nccl, 22802, &hopper) && !keep(nccl, 22809, &switched));
        assert!(keep(Nccl { multicast: Switch::Off, ..nccl }, 22809, &switched));
        assert!(!keep(Nccl { choice: Switch::Off, ..nccl }, 22809, &hopper));
        assert!(!keep(Nccl { windows: Switch::Off, ..nccl }, 22809, &hopper));
        assert!(!keep(Nccl { peer_access: Switch::Off, ..nccl }, 22809, &hopper));
        assert!(!keeps_windows(Windows::Off, nccl, 22809, &hopper));
    }

    /// Fast collectives are for those who leave the choice.
    #[test]
    fn who_is_fast() {
        let nccl = Config::default().nccl;
        assert!(fast_wanted(Fast::Auto, nccl));
        assert!(!fast_wanted(Fast::Off, nccl));
        assert!(!fast_wanted(Fast::Auto, Nccl { choice: Switch::Off, ..nccl }));
    }

    /// Addresses are read as the driver writes them.
    #[test]
    fn pci_addresses() {
        assert_eq!(pci("0001:C3:0a.0"), (1, 0xc3, 10));
        assert_eq!(pci(""), (0, 0, 0));
    }
}
