//! Names the kernels of `device/collective_list.h`; `tests/kernels/structures.rs` holds that the lists are the same.

use super::Kind;
use crate::collective::{LL_PAYLOAD_BYTES, LL128_HALF_PAYLOAD_BYTES, LL128_SLOT_BYTES, SIMPLE_SHARED_BYTES};

/// How data moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// LL.
    Ll,
    /// LL128 in one phase, in packets of two groups of lines.
    Ll128x2,
    /// LL128 in one phase, in packets of four groups of lines.
    Ll128x4,
    /// All-reduces in one phase, each warp's packets all at once, in packets of two groups of lines, for more than 4 ranks.
    OneShotX2,
    /// In packets of four groups, for at most 4 ranks.
    OneShotX4,
    /// All-gathers and reduce-scatters in the same way, for more than 4 ranks.
    OneShotPartsX2,
    /// For at most 4 ranks.
    OneShotPartsX4,
    /// LL128 in two phases, in packets of two groups.
    AllReduce,
    /// In packets of four groups, for sums of 2 ranks.
    AllReduceX4,
    /// Simple, in one phase.
    Simple,
    /// Simple, in two phases.
    SimpleAllReduce,
    /// Several collectives, over LL.
    BatchLl,
    /// Several, over LL128 in packets of two groups, for more than 4 ranks.
    BatchLl128x2,
    /// Several, over LL128 in packets of four groups, for at most 4 ranks.
    BatchLl128x4,
    /// Several all-reduces, in two phases.
    BatchAllReduce,
}

impl Family {
    /// Bytes of payload in a packet.
    pub fn packet_bytes(self) -> u64 {
        match self {
            Family::Ll | Family::BatchLl => LL_PAYLOAD_BYTES,
            Family::Ll128x2
            | Family::OneShotX2
            | Family::OneShotPartsX2
            | Family::AllReduce
            | Family::BatchLl128x2
            | Family::BatchAllReduce => LL128_HALF_PAYLOAD_BYTES,
            Family::Ll128x4
            | Family::OneShotX4
            | Family::OneShotPartsX4
            | Family::AllReduceX4
            | Family::BatchLl128x4 => 2 * LL128_HALF_PAYLOAD_BYTES,
            Family::Simple | Family::SimpleAllReduce => LL128_SLOT_BYTES,
        }
    }

    /// The family that serves an even kind of so many ranks in one shot. Packets of all kinds are alike, as these share rings.
    pub(super) fn one_shot(kind: Kind, ranks: u32) -> Family {
        match (kind, ranks) {
            (Kind::AllReduce, ..=4) => Family::OneShotX4,
            (Kind::AllReduce, _) => Family::OneShotX2,
            (_, ..=4) => Family::OneShotPartsX4,
            _ => Family::OneShotPartsX2,
        }
    }

    /// Whether it runs in one shot.
    pub(super) fn is_one_shot(self) -> bool {
        matches!(
            self,
            Family::OneShotX2 | Family::OneShotX4 | Family::OneShotPartsX2 | Family::OneShotPartsX4
        )
    }

    /// The family that runs in two phases over LL128.
    pub(super) fn two_phases(reducer: Reducer, ranks: u32) -> Family {
        if ranks == 2 && can_post(reducer, ranks) { Family::AllReduceX4 } else { Family::AllReduce }
    }

    /// Bytes of a packet's lines, over LL128.
    pub(super) fn line_bytes(self) -> u64 {
        self.packet_bytes() / LL128_HALF_PAYLOAD_BYTES * LL128_SLOT_BYTES / 2
    }

    /// Whether all that a channel sends in a launch is under way at once. Then packets are not taken in rounds of a ring.
    pub(super) fn sends_at_once(self) -> bool {
        self == Family::Ll || self.is_one_shot()
    }

    /// Bytes that a thread moves at once, if data begins and ends at multiples of them.
    pub(super) fn vector_bytes(self) -> u64 {
        match self {
            Family::Ll | Family::BatchLl => 8,
            _ => 16,
        }
    }

    /// Roles among which the warps of a block are divided evenly.
    pub fn roles(self) -> u32 {
        match self {
            Family::Ll
            | Family::BatchLl
            | Family::OneShotX2
            | Family::OneShotX4
            | Family::OneShotPartsX2
            | Family::OneShotPartsX4 => 1,
            Family::Ll128x2
            | Family::Ll128x4
            | Family::Simple
            | Family::BatchLl128x2
            | Family::BatchLl128x4 => 2,
            Family::AllReduce | Family::AllReduceX4 | Family::SimpleAllReduce | Family::BatchAllReduce => 3,
        }
    }

    /// All warps of a block: those of the roles, and the signal warp.
    pub fn warps(self, role_warps: u32) -> u32 {
        self.roles() * role_warps + u32::from(self.is_simple())
    }

    /// Bytes of shared memory of a block.
    pub fn shared_bytes(self) -> u32 {
        if self.is_simple() { SIMPLE_SHARED_BYTES } else { 0 }
    }

    fn is_simple(self) -> bool {
        matches!(self, Family::Simple | Family::SimpleAllReduce)
    }

    /// Whether it runs in two phases, in which each rank reduces a share.
    pub(super) fn has_shares(self) -> bool {
        self.roles() == 3
    }

    /// Whether it runs several collectives.
    pub(super) fn is_batch(self) -> bool {
        self == Family::BatchLl || self.is_batch_of_larger()
    }

    fn is_batch_of_larger(self) -> bool {
        matches!(self, Family::BatchLl128x2 | Family::BatchLl128x4 | Family::BatchAllReduce)
    }
}

/// How a kernel combines elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reducer {
    /// It only moves bytes.
    Copy,
    /// Sums and averages of fp32.
    SumF32,
    /// Of fp16.
    SumF16,
    /// Of bf16.
    SumBf16,
    /// Every other type and operation, chosen at run time.
    Any,
    /// What only fixed order makes native: floats of 8 bits, and scaled sums of every type.
    Ordered,
}

/// Whether there are kernels of Simple packets: for sums of floats on at most 4 ranks, as others do not get large enough.
pub(super) fn can_post(reducer: Reducer, ranks: u32) -> bool {
    ranks <= 4 && matches!(reducer, Reducer::SumF32 | Reducer::SumF16 | Reducer::SumBf16)
}

/// Whether there are kernels of LL128 packets of two groups, in one phase.
pub(super) fn has_two_groups(reducer: Reducer, ranks: u32) -> bool {
    !(3..=4).contains(&ranks) || matches!(reducer, Reducer::Copy | Reducer::Ordered)
}

/// One kernel of the images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    pub(super) family: Family,
    reducer: Reducer,
    /// The most ranks: 2, 4 or 8.
    ranks: u32,
    straight: Straight,
}

/// Which form of a kernel runs. A rank decides it for itself, as the others cannot tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Straight {
    /// For even collectives whose data begins and ends at whole vectors.
    Whole,
    /// For any call.
    No,
}

const STRAIGHT: [Straight; 2] = [Straight::Whole, Straight::No];

const RANKS: [u32; 3] = [2, 4, 8];
const REDUCERS: [Reducer; 6] =
    [Reducer::Copy, Reducer::SumF32, Reducer::SumF16, Reducer::SumBf16, Reducer::Any, Reducer::Ordered];
const FAMILIES: [Family; 15] = [
    Family::Ll,
    Family::Ll128x2,
    Family::Ll128x4,
    Family::OneShotX2,
    Family::OneShotX4,
    Family::OneShotPartsX2,
    Family::OneShotPartsX4,
    Family::AllReduce,
    Family::AllReduceX4,
    Family::Simple,
    Family::SimpleAllReduce,
    Family::BatchLl,
    Family::BatchLl128x2,
    Family::BatchLl128x4,
    Family::BatchAllReduce,
];

macro_rules! names {
    ($($reducer:literal)*) => {
        [$([
            names!(@ "LL", $reducer),
            names!(@ "LL128x2", $reducer),
            names!(@ "LL128x4", $reducer),
            names!(@ "OneShot", $reducer),
            names!(@ "OneShot", $reducer),
            names!(@ "OneShotParts", $reducer),
            names!(@ "OneShotParts", $reducer),
            names!(@ "AllReduce", $reducer),
            names!(@ "AllReduce", $reducer),
            names!(@ "Simple", $reducer),
            names!(@ "SimpleAllReduce", $reducer),
            names!(@ "LLBatch", $reducer),
            names!(@ "LL128Batch", $reducer),
            names!(@ "LL128Batch", $reducer),
            names!(@ "AllReduceBatch", $reducer),
        ]),*]
    };
    (@ $family:literal, $reducer:literal) => {
        [names!(@ $family, $reducer, "_2"), names!(@ $family, $reducer, "_4"), names!(@ $family, $reducer, "_8")]
    };
    (@ $family:literal, $reducer:literal, $ranks:literal) => {
        [
            concat!("ncclWindlass_", $family, "_", $reducer, $ranks, "_whole"),
            concat!("ncclWindlass_", $family, "_", $reducer, $ranks),
        ]
    };
}
/// Names by reducer, family, ranks and straightness, also of kernels that do not exist.
const NAMES: [[[[&str; STRAIGHT.len()]; RANKS.len()]; FAMILIES.len()]; REDUCERS.len()] =
    names!("Copy" "SumF32" "SumF16" "SumBf16" "Any" "Ordered");

impl Kernel {
    /// More than the greatest [`index`](Kernel::index): the length of a table of kernels.
    pub const INDICES: usize = STRAIGHT.len() * RANKS.len() * FAMILIES.len() * REDUCERS.len();

    /// The kernel for this many ranks, at most 8: the straight one if there is one, and the launch is even and whole.
    pub(super) fn of(family: Family, reducer: Reducer, ranks: u32, even_and_whole: bool) -> Kernel {
        let any = Kernel { family, reducer, ranks: ranks.next_power_of_two().max(2), straight: Straight::No };
        let straight = if even_and_whole && any.has_straight() { Straight::Whole } else { Straight::No };
        Kernel { straight, ..any }
    }

    /// All kernels.
    pub fn all() -> impl Iterator<Item = Kernel> {
        RANKS.into_iter().flat_map(Kernel::all_for)
    }

    /// The kernels that a communicator of so many ranks launches; none for more than 8.
    pub fn all_for(ranks: u32) -> impl Iterator<Item = Kernel> {
        let every = REDUCERS.into_iter().flat_map(|reducer| FAMILIES.map(|family| (family, reducer)));
        every
            .flat_map(move |(family, reducer)| {
                STRAIGHT.map(|straight| Kernel { straight, ..Kernel::of(family, reducer, ranks, false) })
            })
            .filter(|kernel| kernel.exists())
    }

    fn exists(self) -> bool {
        let reduces = self.reducer != Reducer::Copy;
        let is_of_family = match self.family {
            Family::Ll | Family::BatchLl => true,
            Family::Ll128x2 => has_two_groups(self.reducer, self.ranks),
            Family::Ll128x4 | Family::OneShotPartsX4 | Family::BatchLl128x4 => self.ranks < 8,
            Family::OneShotPartsX2 | Family::BatchLl128x2 => self.ranks == 8,
            Family::OneShotX4 => reduces && self.ranks < 8,
            Family::OneShotX2 => reduces && self.ranks == 8,
            Family::AllReduce | Family::AllReduceX4 => {
                reduces && self.family == Family::two_phases(self.reducer, self.ranks)
            }
            Family::BatchAllReduce => reduces,
            Family::Simple | Family::SimpleAllReduce => can_post(self.reducer, self.ranks),
        };
        let is_of_reducer =
            self.reducer != Reducer::Ordered || matches!(self.family, Family::Ll128x2 | Family::AllReduce);
        RANKS.contains(&self.ranks)
            && is_of_family
            && is_of_reducer
            && (self.is_for_any() || self.has_straight())
    }

    /// Whether there is a form of it that is straight. `device/collective_list.h` says why not.
    fn has_straight(self) -> bool {
        let is_one_shot_of_8 = self.family.is_one_shot() && self.ranks == 8;
        self.reducer != Reducer::Ordered && !is_one_shot_of_8 && !self.family.is_batch_of_larger()
    }

    /// Its name in the images.
    pub fn name(&self) -> &'static str {
        NAMES[self.reducer as usize][self.family as usize][self.of_ranks()][self.straight as usize]
    }

    /// The kernel's own number, below [`INDICES`](Kernel::INDICES).
    pub fn index(&self) -> usize {
        let of_ranks =
            (self.reducer as usize * FAMILIES.len() + self.family as usize) * RANKS.len() + self.of_ranks();
        of_ranks * STRAIGHT.len() + self.straight as usize
    }

    /// The most threads of a block with which the kernel loads.
    pub fn threads_max(&self) -> u32 {
        match (self.family, self.ranks) {
            (Family::AllReduce | Family::AllReduceX4 | Family::BatchAllReduce, 2 | 4) => 768,
            (Family::OneShotX4 | Family::OneShotPartsX4, 2) => 768,
            (Family::OneShotX2 | Family::OneShotPartsX2 | Family::OneShotPartsX4, _) => 384,
            (Family::Simple, _) => 544,
            (Family::SimpleAllReduce, 2) => 608,
            (Family::SimpleAllReduce, _) => 416,
            (Family::Ll128x2 | Family::Ll128x4 | Family::BatchLl128x4, 2) => 640,
            _ => 512,
        }
    }

    pub(super) fn role_warps_max(&self) -> u32 {
        (self.threads_max() / 32 - self.family.warps(0)) / self.family.roles()
    }

    /// Whether its parameter is a [`BatchLaunch`](crate::collective::BatchLaunch), not a [`CollectiveLaunch`](crate::collective::CollectiveLaunch).
    pub fn runs_several(&self) -> bool {
        self.family.is_batch()
    }

    /// Whether it takes any call.
    pub fn is_for_any(&self) -> bool {
        self.straight == Straight::No
    }

    fn of_ranks(&self) -> usize {
        // 0, 1, 2 of 2, 4, 8.
        self.ranks.trailing_zeros() as usize - 1
    }
}
