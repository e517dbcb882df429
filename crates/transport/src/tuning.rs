//! Decides up to which size native collectives serve a call. Pure.
//!
//! A *cell* is one collective over so many ranks of one kind of GPU. Above its limit NCCL is as fast or faster, or nothing was
//! timed. A limit is [built in](built_in), or a rank brings it from a [file](mod@file) or from this machine's [`cache`]; which one
//! holds is [`agreed`].

pub mod agreed;
mod built_in;
pub mod cache;
pub mod file;

use windlass_kernels::collective::{BATCH_CALLS_MAX, BATCH_ENTRIES};
use windlass_kernels::collectives::{Crossover, Kind, Tuning, batch_bytes_max};

use windlass_base::call::Function;
use windlass_bootstrap::negotiated::bytes::{Writer, checksum};
use windlass_bootstrap::negotiated::{GRID_MAX, NegotiatedConfig, capability};

pub use built_in::{REGISTERED_BYTES_MIN, RINGS_IN_FOURS, UNMEASURED_BYTES_MAX, unmeasured_bytes_max};
/// Version of the kernels' protocol, and of how groups are cut and ordered. It must change with each change of packets, rings, credit or
/// shares, or of groups.
const PROTOCOL: u64 = 15;
/// The most ranks that the kernels have.
const RANKS_MAX: usize = 8;

/// The collectives that have cells.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(usize)]
#[allow(missing_docs)]
pub enum Collective {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    /// Broadcasts of one group with a root each; a size is the sum over all of them.
    UnevenAllGather,
    /// Reduces of one group with a root each.
    UnevenReduceScatter,
    /// All-reduces of other types or operations than sums and averages of short floats. Their kernel looks at type and operation as it runs.
    OtherAllReduce,
    /// Reduces of such types or operations.
    OtherReduce,
    /// Reduce-scatters of such types or operations.
    OtherReduceScatter,
    /// Not a native collective: all-gathers that NCCL runs over buffers that Windlass registers.
    RegisteredAllGather,
}

/// How many collectives have cells.
pub const COLLECTIVES: usize = 11;

impl Collective {
    /// The collective of a function. A `…Config` function has none, as its calls stay on NCCL. An all-to-all has none: NCCL makes it of sends and
    /// receives, so one rank may call it while the others send and receive in a group. The p2p transport serves both.
    #[inline]
    pub fn of(function: Function) -> Option<Collective> {
        match function {
            Function::AllReduce => Some(Collective::AllReduce),
            Function::Broadcast | Function::Bcast => Some(Collective::Broadcast),
            Function::Reduce => Some(Collective::Reduce),
            Function::AllGather => Some(Collective::AllGather),
            Function::ReduceScatter => Some(Collective::ReduceScatter),
            _ => None,
        }
    }

    /// What several of them in one group are together, each with another root: an all-gather-v or reduce-scatter-v.
    #[inline]
    pub fn fused(self) -> Option<Collective> {
        match self {
            Collective::Broadcast => Some(Collective::UnevenAllGather),
            Collective::Reduce => Some(Collective::UnevenReduceScatter),
            _ => None,
        }
    }

    /// The same reduction with other types or operations.
    #[inline]
    pub fn other(self) -> Option<Collective> {
        match self {
            Collective::AllReduce => Some(Collective::OtherAllReduce),
            Collective::Reduce => Some(Collective::OtherReduce),
            Collective::ReduceScatter => Some(Collective::OtherReduceScatter),
            _ => None,
        }
    }

    /// What an uneven collective is if all parts have one size.
    fn even(self) -> Option<Collective> {
        match self {
            Collective::UnevenAllGather => Some(Collective::AllGather),
            Collective::UnevenReduceScatter => Some(Collective::ReduceScatter),
            _ => None,
        }
    }
}

/// The limits of one communicator, by collective: native collectives serve calls of fewer bytes ([`windlass_base::call::Shared::bytes`]).
/// 0: they serve none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits(pub [u64; COLLECTIVES]);

/// Whether Windlass serves a group by `count` kernels of one communicator, one after the other, the smallest of `smallest_bytes` bytes. NCCL
/// runs a whole group in one kernel, so three small kernels of ours are slower. Ours against NCCL's on 2 × H200, in us: 4 all-reduces of 1 KB
/// 8.3 against 6.3, 32 of them 65 against 9; 4 of 1 MB 28 against 47, 8 of these eager 66 against 59 (`crates/kernels/bench/grouped.cu`).
pub fn serve_separate(count: usize, smallest_bytes: u64) -> bool {
    match smallest_bytes {
        ..SEPARATE_BYTES_MIN => count <= 2,
        _ => count <= 4,
    }
}

/// From this size on a collective takes so long that two more kernels do not matter.
const SEPARATE_BYTES_MIN: u64 = 1 << 20;

/// Whether Windlass serves a group by `count` kernels that each run calls with a root each, the smallest kernel of `smallest_bytes` bytes in
/// all. NCCL runs all of them in one kernel, but takes longer to launch it. Ours against NCCL's on 2 × H200, in us: 2 all-gathers of 1 KB as
/// two broadcasts each 5.9 against 5.3 in a graph, 9.7 against 12.4 eager; 3 of them 8.6 against 5.4 and 14.0 against 13.0; 4 of 1 MB 22
/// against 31; 3 reductions of 4 MB 48 against 44 (`docs/measurements/2026-11-24-lists`).
pub fn serve_lists(count: usize, reduce: bool, smallest_bytes: u64) -> bool {
    count <= if smallest_bytes >= SEPARATE_BYTES_MIN && !reduce { 4 } else { 2 }
}

/// The largest collective of a group that runs beside others in one kernel. Larger ones were not measured so, and take so long that a kernel
/// each does not matter.
pub const BATCHED_BYTES_MAX: u64 = 8 << 20;

impl Limits {
    /// Limits by which native collectives serve nothing.
    pub const NONE: Limits = Limits([0; COLLECTIVES]);

    /// Whether native collectives serve a call of `bytes` bytes.
    #[inline]
    pub fn serve(&self, collective: Collective, bytes: u64) -> bool {
        bytes < self.0[collective as usize]
    }

    /// Whether one kernel serves several broadcasts, or several reduces, of these bytes over `ranks` ranks, each with a root of
    /// its own.
    ///
    /// Parts that are each served by themselves are served together, as one kernel takes no longer than several. Otherwise the limit is that of
    /// all parts together, measured with shares of 2n + 1, 2n + 3 … 4n - 1 for n ranks. The more uneven the parts, the more the largest one sets
    /// the time: its root's wires carry it alone, while NCCL spreads it over all rings. So parts are served that are no more uneven than the
    /// measured ones, or whose largest exceeds an even share by no more than a single part does at its limit. If no single part is served, none
    /// are together: a table that says so of broadcasts means all of them.
    pub fn serve_fused(
        &self,
        each: Collective,
        bytes: impl Iterator<Item = u64> + Clone,
        ranks: usize,
    ) -> bool {
        let total = bytes.clone().fold(0, u64::saturating_add);
        let largest = bytes.max().unwrap_or_default();
        let n = ranks as u64;
        // n times the largest part, less all parts. In the measured shares, which are of whole elements, it is (n - 1) / 3n of all parts.
        let uneven = n.saturating_mul(largest).saturating_sub(total);
        let as_measured = uneven.saturating_sub(8 * n).saturating_mul(3 * n) <= total.saturating_mul(n - 1);
        let alone = self.0[each as usize].saturating_sub(1);
        let serves = |fused| {
            self.serve(fused, total)
                && self.serve(each, 0)
                && (as_measured || uneven <= alone.saturating_mul(n - 1))
        };
        each.fused().is_some_and(|fused| self.serve(each, largest) || serves(fused))
    }
}

/// Up to so many bytes a block, native collectives serve a communicator with fewer blocks than usual. Tables are measured with all blocks.
const EACH_BLOCK_BYTES_MAX: u64 = 64 << 10;

/// The most bytes that `blocks` blocks serve. With few blocks NCCL's kernels, which have more threads, are faster at large sizes. Parts of
/// NCCL's time on 2 × H100, under the same limit on blocks, for an all-reduce (docs/measurements/2026-11-25-environments): 1 block 0.53 at
/// 256 KiB, 1.40 at 4 MiB; 4 blocks 0.59 and 1.13; 8 blocks 0.91 at 4 MiB, 1.54 at 64 MiB.
fn most_of_few_blocks(blocks: u32) -> u64 {
    match blocks {
        ..GRID_MAX => EACH_BLOCK_BYTES_MAX * u64::from(blocks),
        _ => u64::MAX - 1,
    }
}

/// What decides the path of a communicator's calls, by its negotiated config.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// How many ranks the communicator has.
    pub ranks: usize,
    /// Up to which sizes collectives are native.
    pub native: Limits,
    /// Whether reductions that round are native at every size, and combine rank 0's value, then rank 1's, and so on.
    pub fixed_order: bool,
}

impl Terms {
    /// From the negotiated config, and the limits that hold for the communicator.
    pub fn of(negotiated: &NegotiatedConfig, native: Limits) -> Terms {
        let fixed_order = asks_for_fixed_order(negotiated) && serves(negotiated);
        Terms { ranks: negotiated.members.len(), native, fixed_order }
    }
}

/// Whether native collectives serve a communicator at all. Without fixed order no rank may have asked for a policy of blocks (`UNBOUND`), as
/// that concerns the order of NCCL's sums, too.
pub fn serves(negotiated: &NegotiatedConfig) -> bool {
    let needed = if asks_for_fixed_order(negotiated) { capability::NATIVE } else { NEEDED };
    negotiated.capabilities & needed == needed && negotiated.members.len() <= RANKS_MAX
}

const NEEDED: u64 = capability::NATIVE | capability::UNBOUND;

fn asks_for_fixed_order(negotiated: &NegotiatedConfig) -> bool {
    negotiated.capabilities & capability::FIXED_ORDER != 0
}

/// Which kernel serves which size: the same on all ranks.
pub fn kernels() -> Tuning {
    Tuning::default()
}

/// A number for all that this build decides by. Ranks whose numbers differ have no peer group.
pub fn hash() -> u64 {
    let mut writer = Writer::default();
    writer.u64(EACH_BLOCK_BYTES_MAX);
    writer.u64(PROTOCOL).u64(SEPARATE_BYTES_MIN);
    writer.u64(BATCH_CALLS_MAX as u64).u64(BATCH_ENTRIES as u64).u64(BATCHED_BYTES_MAX);
    for ranks in 2..=RANKS_MAX as u32 {
        for kind in [Kind::AllReduce, Kind::AllGather, Kind::ReduceScatter] {
            writer.u64(batch_bytes_max(kind, ranks));
        }
    }
    built_in::put(&mut writer);
    let Tuning { all_reduce, broadcast, reduce, all_gather, reduce_scatter } = kernels();
    for crossover in [all_reduce, broadcast, reduce, all_gather, reduce_scatter] {
        let Crossover { ll_bytes_max, one_shot_bytes_max, two_groups_bytes_max, large_bytes_min } = crossover;
        writer.u64(ll_bytes_max).u64(one_shot_bytes_max).u64(two_groups_bytes_max).u64(large_bytes_min);
    }
    checksum(&writer.finish())
}

#[cfg(test)]
mod tests {
    use super::agreed::{Brought, decide};
    use super::file::{Multicast, Table};
    use super::*;
    use proptest::prelude::*;
    use windlass_bootstrap::negotiated::{Device, Member, Token, Version};

    pub(super) fn negotiated(
        ranks: usize,
        capabilities: u64,
        capability: u16,
        multiprocessors: u16,
    ) -> NegotiatedConfig {
        let token = Token([0; 16]);
        let member = |rank| Member {
            rank: rank as u32,
            process: token,
            process_id: 0,
            device: Device { uuid: [0; 16], pci: (0, 0, 0), capability, multiprocessors },
            descriptor_socket: token,
            process_listener: token,
            cells: Vec::new(),
            attachment: Vec::new(),
        };
        NegotiatedConfig {
            comm: token,
            version: Version::THIS,
            host: token,
            capabilities,
            options: 0,
            ctas_max: 0,
            members: (0..ranks).map(member).collect(),
        }
    }

    /// Without a limit nothing is served, not even 0 bytes.
    #[test]
    fn limits() {
        let mut limits = Limits::NONE;
        assert!(!limits.serve(Collective::AllGather, 0));
        limits.0[Collective::AllGather as usize] = 9;
        let served = [0, 8, 9, u64::MAX].map(|bytes| limits.serve(Collective::AllGather, bytes));
        assert_eq!(served, [true, true, false, false]);
        assert!(!limits.serve(Collective::AllReduce, 0));
    }

    /// Even parts are served up to the limit of uneven ones, or while each is served by itself; a single part up to that of broadcasts.
    #[test]
    fn fused() {
        const KIB: u64 = 1 << 10;
        const MIB: u64 = 1 << 20;
        for (ranks, ends) in [(2, [(32 << 10, 256), (8 << 10, 16)]), (4, [(512, 256), (2048, 64)])] {
            let limits = decide(&negotiated(ranks, NEEDED, 90, 132)).limits;
            for (each, (alone, whole)) in [Collective::Broadcast, Collective::Reduce].into_iter().zip(ends) {
                let (alone, whole) = (alone * KIB, whole * MIB);
                let serve = |parts: &[u64]| limits.serve_fused(each, parts.iter().copied(), ranks);
                let even = |total: u64| vec![total / ranks as u64; ranks];
                assert!(serve(&even(4096)) && serve(&even(whole)) && !serve(&even(whole + 4)));
                assert!(serve(&[alone]) && !serve(&[alone + 1]));
                let mut larger = even(4 * MIB);
                larger[0] += alone;
                assert_eq!(serve(&larger), alone + 4 * MIB <= limits.0[each.fused().unwrap() as usize]);
                larger[0] += 1;
                assert!(!serve(&larger));
            }
            assert!(!limits.serve_fused(Collective::AllReduce, [1, 1].into_iter(), ranks));
        }
        for each in [Collective::Broadcast, Collective::Reduce] {
            assert!(!Limits::NONE.serve_fused(each, [0, 0].into_iter(), 4));
        }
    }

    /// In shares of 5 to 7, all-gathers of 2 ranks are served at every size, reduce-scatters at 8 MiB and not at 16. Parts that are served by
    /// themselves are one kernel rather than several.
    #[test]
    fn uneven() {
        const MIB: u64 = 1 << 20;
        let limits = decide(&negotiated(2, NEEDED, 90, 132)).limits;
        let serve = |each, parts: [u64; 2]| limits.serve_fused(each, parts.into_iter(), 2);
        let shares = |total: u64| [total * 5 / 12, total * 7 / 12];
        for total in [1, 4, 8, 16, 64] {
            assert!(serve(Collective::Broadcast, shares(total * MIB)), "{total} MB");
            assert_eq!(serve(Collective::Reduce, shares(total * MIB)), total < 16, "{total} MB");
        }
        // Each part alone is served.
        assert!(serve(Collective::Reduce, [8 * MIB; 2]) && !serve(Collective::Reduce, [9 * MIB; 2]));
        assert!(serve(Collective::Reduce, [8 * MIB, MIB]) && !serve(Collective::Reduce, [9 * MIB, MIB]));
        // With more ranks, too, shares as they were measured have the limit of all parts.
        for ranks in [3, 4_usize] {
            let limits = decide(&negotiated(ranks, NEEDED, 90, 132)).limits;
            let places = 0..ranks as u64;
            let shares = places
                .map(|at| (256 * MIB * (2 * (ranks as u64 + at) + 1)).div_ceil(3 * (ranks * ranks) as u64));
            let shares: Vec<u64> = shares.map(|bytes| bytes / 4 * 4).collect();
            assert!(limits.serve_fused(Collective::Broadcast, shares.iter().copied(), ranks), "{shares:?}");
            let more = shares.iter().enumerate().map(|(at, bytes)| if at == 0 { bytes / 2 } else { *bytes });
            assert!(!limits.serve_fused(Collective::Broadcast, more, ranks));
        }
    }

    /// Limits of a table hold for what runs together, too. If it has none for single ones, none run together.
    #[test]
    fn tuned_fused() {
        let text = "windlass-tuning 1\n\
            broadcast ranks 4 gpu 9.0/132 multicast no native_bytes_max 1K\n\
            all_gather ranks 4 gpu 9.0/132 multicast no native_bytes_max 16K\n\
            reduce ranks 4 gpu 9.0/132 multicast no native_bytes_max none\n";
        let table = Table::parse(text).unwrap();
        let mut negotiated = negotiated(4, NEEDED, 90, 132);
        for member in &mut negotiated.members {
            member.cells = Brought::of(4, &member.device, Multicast::No, &table, None).encode();
        }
        let limits = decide(&negotiated).limits;
        let serve = |each, parts: [u64; 4]| limits.serve_fused(each, parts.into_iter(), 4);
        assert!(serve(Collective::Broadcast, [4096; 4]) && !serve(Collective::Broadcast, [4097; 4]));
        assert!(
            serve(Collective::Broadcast, [1024, 0, 0, 0]) && !serve(Collective::Broadcast, [1025, 0, 0, 0])
        );
        assert!(!serve(Collective::Reduce, [0; 4]) && !serve(Collective::Reduce, [9; 4]));
    }

    proptest! {
        /// Parts that are served together have a limit by themselves, too, and nothing overflows.
        #[test]
        fn fused_have_limits_alone(
            parts in proptest::collection::vec(0..u64::MAX, 1..9),
            scale in 0..64_u32,
            limits in proptest::array::uniform11(prop_oneof![Just(0), any::<u32>()]),
            ranks in 2..9_usize,
        ) {
            let limits = Limits(limits.map(u64::from));
            let parts: Vec<u64> = parts.into_iter().take(ranks).map(|bytes| bytes >> scale).collect();
            let is_served = limits.serve_fused(Collective::Broadcast, parts.iter().copied(), ranks);
            prop_assert!(!is_served || limits.serve(Collective::Broadcast, 0));
        }
    }
}
