//! The effects that NCCL's variables have on Windlass.

use std::fmt;

/// The effect of one value of one variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Every rank makes its own id, so ranks cannot meet by it.
    OwnIds,
    /// Inits do not wait for their ranks, whatever their configuration says.
    NonBlocking,
    /// Inits wait for their ranks, whatever their configuration says.
    Blocking,
    /// Ranks must not reach each other's memory.
    NoPeerAccess,
    /// NCCL orders the launches of a device's communicators among each other.
    ImplicitOrder,
    /// NCCL has values that the environment does not show.
    UnseenValues,
    /// Each kernel launch waits until all ranks of the process launch.
    LaunchBarrier,
    /// The user or a library has chosen NCCL's algorithm, protocol or CTA policy.
    Algorithms,
    /// NCCL takes at the init what a communicator needs.
    ConnectsAtInit,
    /// `ncclMemAlloc` gives plain memory, and NCCL maps no memory of others.
    NoCuMem,
    /// NCCL makes no windows.
    NoWindows,
    /// Registered buffers have no use.
    NoRegistration,
    /// NCCL uses no multicast.
    NoMulticast,
    /// Operations in graphs and eager operations are not ordered against each other.
    GraphsUnordered,
    /// Operations in graphs and eager operations are ordered against each other, whatever configurations say.
    GraphsOrdered,
    /// Child communicators share their parent's resources.
    SharedResources,
    /// Kernels have at most this many blocks.
    MaxCtas(u32),
    /// The fingerprint of NCCL_HOSTID: ranks with another value count as ranks of another host.
    Host(u64),
}

impl Effect {
    /// Whether NCCL runs every call, as no communicator has a peer group.
    pub fn leaves_all_to_nccl(&self) -> bool {
        use Effect::{ImplicitOrder, NoPeerAccess, UnseenValues};
        matches!(self, NoPeerAccess | ImplicitOrder | UnseenValues)
    }

    /// Whether the effect switches off a feature that is on by default.
    pub fn loses(&self) -> bool {
        match self {
            Effect::OwnIds
            | Effect::NonBlocking
            | Effect::NoPeerAccess
            | Effect::ImplicitOrder
            | Effect::UnseenValues
            | Effect::LaunchBarrier
            | Effect::Algorithms
            | Effect::ConnectsAtInit
            | Effect::NoCuMem
            | Effect::NoWindows
            | Effect::NoRegistration
            | Effect::SharedResources => true,
            Effect::Blocking
            | Effect::NoMulticast
            | Effect::GraphsUnordered
            | Effect::GraphsOrdered
            | Effect::MaxCtas(_)
            | Effect::Host(_) => false,
        }
    }
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Effect::OwnIds => "peer groups are off, except those of ncclCommInitAll",
            Effect::NonBlocking => "no communicator is lazy, and peer groups are off for those made in groups, from others or by ncclCommInitAll",
            Effect::NoPeerAccess | Effect::ImplicitOrder | Effect::UnseenValues => {
                "peer groups are off, so NCCL runs every call"
            }
            Effect::Blocking => "calls wait, whatever blocking of a configuration says",
            Effect::LaunchBarrier => "peer groups are off for communicators with several ranks in one process",
            Effect::Algorithms => "native collectives (unless WINDLASS_ORDER is fixed or strict) and kept windows are off",
            Effect::ConnectsAtInit => "no communicator is lazy",
            Effect::NoCuMem => "the memory pool, kept windows and registration are off",
            Effect::NoWindows => "kept windows are off",
            Effect::NoRegistration => "registration is off",
            Effect::NoMulticast => "NCCL uses no multicast; the limits measured without it hold",
            Effect::GraphsUnordered => "operations in graphs are not ordered against others",
            Effect::GraphsOrdered => "operations in graphs are ordered against others, whatever graphUsageMode says",
            Effect::SharedResources => "registration and kept windows are off for communicators with children, and for their children",
            Effect::MaxCtas(most) => return write!(f, "grids have at most {most} blocks"),
            Effect::Host(_) => "ranks with another value are on another host",
        })
    }
}

/// The effects of all variables that are set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings(Vec<Effect>);

impl FromIterator<Effect> for Settings {
    fn from_iter<I: IntoIterator<Item = Effect>>(effects: I) -> Settings {
        Settings(effects.into_iter().collect())
    }
}

impl Settings {
    /// Iterates over the effects.
    pub fn iter(&self) -> impl Iterator<Item = Effect> {
        self.0.iter().copied()
    }

    /// Whether `effect` is among the effects.
    pub fn has(&self, effect: Effect) -> bool {
        self.0.contains(&effect)
    }

    /// The most blocks of a kernel, 0 for no limit.
    pub fn ctas_max(&self) -> u32 {
        let limit = self.iter().find_map(|effect| match effect {
            Effect::MaxCtas(most) => Some(most),
            _ => None,
        });
        limit.unwrap_or(0)
    }

    /// The fingerprint of NCCL_HOSTID, where it is set.
    pub fn host(&self) -> Option<u64> {
        self.iter().find_map(|effect| match effect {
            Effect::Host(host) => Some(host),
            _ => None,
        })
    }
}
