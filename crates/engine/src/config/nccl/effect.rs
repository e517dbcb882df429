//! What a variable of NCCL's changes in Windlass.

use std::fmt;

/// What one value of one variable does.
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
    /// A launch waits for those of all ranks of its process.
    LaunchBarrier,
    /// Somebody else chooses the algorithms.
    Algorithms,
    /// `ncclMemAlloc` gives plain memory, and NCCL maps no memory of others.
    NoCuMem,
    /// NCCL makes no windows.
    NoWindows,
    /// Registered buffers have no use.
    NoRegistration,
    /// NCCL uses no multicast.
    NoMulticast,
    /// NCCL does not order operations of graphs and eager ones against each other.
    GraphsUnordered,
    /// Communicators made from others use their resources.
    SharedResources,
    /// Kernels have at most so many blocks.
    MaxCtas(u32),
    /// This rank is on another host than ranks with another value.
    Host(u64),
}

/// Whether an effect takes something away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Weight {
    Loses,
    Changes,
}

impl Effect {
    /// Whether something is off that would be on.
    pub fn weight(&self) -> Weight {
        match self {
            Effect::OwnIds
            | Effect::NonBlocking
            | Effect::NoPeerAccess
            | Effect::ImplicitOrder
            | Effect::UnseenValues
            | Effect::LaunchBarrier
            | Effect::Algorithms
            | Effect::NoCuMem
            | Effect::NoWindows
            | Effect::NoRegistration => Weight::Loses,
            Effect::Blocking
            | Effect::NoMulticast
            | Effect::GraphsUnordered
            | Effect::SharedResources
            | Effect::MaxCtas(_)
            | Effect::Host(_) => Weight::Changes,
        }
    }
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Effect::OwnIds => "peer groups are off, except those of ncclCommInitAll",
            Effect::NonBlocking | Effect::NoPeerAccess | Effect::ImplicitOrder | Effect::UnseenValues => {
                "peer groups are off"
            }
            Effect::Blocking => "communicators with blocking = 0 can have peer groups, too",
            Effect::LaunchBarrier => "peer groups are off for communicators with several ranks in one process",
            Effect::Algorithms => "native collectives and kept windows are off",
            Effect::NoCuMem => "the memory pool, kept windows and registration are off",
            Effect::NoWindows => "kept windows are off",
            Effect::NoRegistration => "registration is off",
            Effect::NoMulticast => "NCCL uses no multicast; the limits measured without it hold",
            Effect::GraphsUnordered => "NCCL's operations in graphs are not ordered against others",
            Effect::SharedResources => "registration and kept windows are off for communicators with children, and for their children",
            Effect::MaxCtas(most) => return write!(f, "grids have at most {most} blocks"),
            Effect::Host(_) => "ranks with another value are on another host",
        })
    }
}

/// The effects of all variables that are set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// A bit for each effect without a number.
    effects: u32,
    /// The most blocks of a kernel, 0 for no limit.
    ctas_max: u32,
    /// A number of NCCL_HOSTID's text.
    host: Option<u64>,
}

impl Settings {
    /// These and one effect more.
    #[must_use]
    pub fn with(mut self, effect: Effect) -> Settings {
        match effect {
            Effect::MaxCtas(most) => self.ctas_max = least(self.ctas_max, most),
            Effect::Host(host) => self.host = Some(host),
            plain => self.effects |= plain.bit(),
        }
        self
    }

    /// These and others.
    #[must_use]
    pub fn and(self, other: Settings) -> Settings {
        Settings {
            effects: self.effects | other.effects,
            ctas_max: least(self.ctas_max, other.ctas_max),
            host: self.host.or(other.host),
        }
    }

    /// Whether one of these has this effect, which has no number.
    pub fn has(&self, effect: Effect) -> bool {
        self.effects & effect.bit() != 0
    }

    /// The most blocks of a kernel, 0 for no limit.
    pub fn ctas_max(&self) -> u32 {
        self.ctas_max
    }

    /// What stands for the text of NCCL_HOSTID, where it is set.
    pub fn host(&self) -> Option<u64> {
        self.host
    }
}

/// 0 is no limit.
fn least(one: u32, other: u32) -> u32 {
    match (one, other) {
        (0, limit) | (limit, 0) => limit,
        (one, other) => one.min(other),
    }
}

impl Effect {
    fn bit(self) -> u32 {
        let index = match self {
            Effect::OwnIds => 0,
            Effect::NonBlocking => 1,
            Effect::NoPeerAccess => 2,
            Effect::ImplicitOrder => 3,
            Effect::UnseenValues => 4,
            Effect::LaunchBarrier => 5,
            Effect::Algorithms => 6,
            Effect::NoCuMem => 7,
            Effect::NoWindows => 8,
            Effect::NoRegistration => 9,
            Effect::NoMulticast => 10,
            Effect::GraphsUnordered => 11,
            Effect::SharedResources => 12,
            Effect::Blocking => 13,
            Effect::MaxCtas(_) | Effect::Host(_) => return 0,
        };
        1 << index
    }
}
