//! The limits that hold before anything was measured on this machine. Pure.

use windlass_bootstrap::negotiated::bytes::Writer;
use windlass_bootstrap::negotiated::{Device, NegotiatedConfig, capability};

use super::agreed::Source;
use super::file::NATIVE_BYTES_MAX;
use super::{COLLECTIVES, Collective};

/// The limit of cells that nobody measured and no model covers: up to here LL is faster than NCCL anywhere.
pub const UNMEASURED_BYTES_MAX: u64 = 16 << 10;
/// The limit of reductions whose kernel looks at type and operation as it runs: up to here arithmetic hardly counts.
const OTHER_BYTES_MAX: u64 = 64 << 10;

/// The largest size of a native collective whose cell nobody measured and no model covers. None: no size. Reduces of other types were last
/// measured on 3 and 4 ranks with slower kernels: 1 KiB of int8 took 1.45 and 1.67 of NCCL's time (docs/measurements/2026-11-26-grids).
pub fn unmeasured_bytes_max(collective: Collective) -> Option<u64> {
    match collective {
        Collective::OtherReduce | Collective::RegisteredAllGather => None,
        _ if collective.is_other() => Some(OTHER_BYTES_MAX),
        _ => Some(UNMEASURED_BYTES_MAX),
    }
}

/// Bytes of the larger buffer from which on NCCL is faster with registered ones (docs/registration.md).
pub const REGISTERED_BYTES_MIN: u64 = 8 << 20;

/// The releases 2.21.5 to 2.31 of NCCL: they run rings on 2 to 4 ranks of 9.0 though they could use multicast, by their cost models.
pub const RINGS_IN_FOURS: std::ops::Range<i32> = 22105..23200;

/// The largest size of each collective, if any size is served, and where it comes from.
pub(super) type BuiltIn = [(Option<u64>, Source); COLLECTIVES];

/// A kind of GPU.
#[derive(Clone, Copy, Debug)]
struct Gpu {
    capability: u16,
    /// Parts of GPUs, and smaller ones of the generation, were not measured.
    multiprocessors_min: u16,
}

impl Gpu {
    fn is(self, device: &Device) -> bool {
        device.capability == self.capability && device.multiprocessors >= self.multiprocessors_min
    }
}

/// The GPUs of the measured cells.
const MEASURED: &[Gpu] = &[Gpu { capability: 90, multiprocessors_min: 114 }];

/// The compute capability on which registering buffers was measured.
const REGISTERS_ON: u16 = 90;

/// The cells of one number of ranks.
#[derive(Clone, Copy, Debug)]
struct Cells {
    ranks: usize,
    /// In the order of [`Collective`], without those of other types.
    bytes_max: [u64; USUAL_COLLECTIVES],
    /// Of other types, where they were measured.
    other_bytes_max: &'static [u64],
}

const USUAL_COLLECTIVES: usize = Collective::OtherAllReduce as usize;

/// What `windlass tune` found on H100 without multicast (docs/measurements/2026-11-26-limits for 2 ranks, 2026-11-26-grids for more, with fp32
/// alone).
const CELLS: &[Cells] = &[
    Cells {
        ranks: 2,
        bytes_max: [256 << 20, 32 << 20, 8 << 20, 64 << 20, 256 << 20, 256 << 20, 8 << 20],
        other_bytes_max: &[8 << 20, 2 << 20, 4 << 20],
    },
    Cells {
        ranks: 3,
        bytes_max: [64 << 20, 2 << 20, 2 << 20, 64 << 20, 256 << 20, 256 << 20, 32 << 20],
        other_bytes_max: &[],
    },
    Cells {
        ranks: 4,
        bytes_max: [32 << 20, 512 << 10, 2 << 20, 32 << 20, 256 << 20, 256 << 20, 64 << 20],
        other_bytes_max: &[],
    },
];

impl Cells {
    fn of(&self, collective: Collective) -> Option<u64> {
        self.bytes_max.iter().chain(self.other_bytes_max).nth(collective as usize).copied()
    }
}

/// The largest all-reduce of 3 or 4 ranks with multicast that has a measured cell's limit. NCCL runs rings there, but takes multicast for
/// buffers that the application has registered. On 4 ranks multicast moves 1.25 bytes for each byte where Windlass moves 1.5, and begins
/// later. By the constants of NCCL's own model they meet between 2 and 3 MiB. On 3 ranks both move 1.33, on 2 multicast moves more. Ranks
/// register buffers by themselves, so a limit that followed that would differ between them.
const ALL_REDUCE_BYTES_MAX_WITH_MULTICAST: u64 = 2 << 20;

/// The limits of 5 to 8 ranks: a pessimistic model of Windlass against published times of NCCL with multicast on 8 × H100 and H200, in us:
/// all-reduce 128 KiB 7.4 / 20.3, 512 KiB 10 / 20.8; all-gather 2 MiB 12.3 / 20.2. All-reduces end one step below a factor of 2, the others
/// at half of the smallest published size. Reduces and uneven collectives have no model.
const fn model_bytes_max(collective: Collective) -> Option<u64> {
    match collective {
        Collective::AllReduce => Some(256 << 10),
        Collective::Broadcast | Collective::AllGather | Collective::ReduceScatter => Some(1 << 20),
        _ => None,
    }
}

/// The limits of a communicator that [native collectives serve](super::serves), if no rank brings a cell.
pub(super) fn limits(negotiated: &NegotiatedConfig) -> BuiltIn {
    let is_known = negotiated.members.iter().all(|member| MEASURED.iter().any(|gpu| gpu.is(&member.device)));
    Collective::ALL.map(|collective| match of_known(negotiated, collective) {
        _ if collective == Collective::RegisteredAllGather => registered(negotiated),
        Some((bytes, source)) if is_known => (Some(bytes), source),
        _ => (unmeasured_bytes_max(collective), Source::Unmeasured),
    })
}

/// Up to which size buffers are registered. That pays on 9.0 without multicast (docs/registration.md). Elsewhere it is done only if every
/// rank asks for it (`WINDLASS_REGISTER=on`).
fn registered(negotiated: &NegotiatedConfig) -> (Option<u64>, Source) {
    let has = |bit| negotiated.capabilities & bit != 0;
    let is_measured = !has(capability::MULTICAST)
        && negotiated.members.iter().all(|member| member.device.capability == REGISTERS_ON);
    match (is_measured, has(capability::REGISTERS_ANYWHERE)) {
        (true, _) => (Some(NATIVE_BYTES_MAX), Source::BuiltIn),
        (false, true) => (Some(NATIVE_BYTES_MAX), Source::Unmeasured),
        (false, false) => (None, Source::Unmeasured),
    }
}

/// The limit of a collective on GPUs of a measured kind, from a measured cell or the model.
fn of_known(negotiated: &NegotiatedConfig, collective: Collective) -> Option<(u64, Source)> {
    let ranks = negotiated.members.len();
    let has = |bit| negotiated.capabilities & bit != 0;
    let multicast = has(capability::MULTICAST);
    let cells = CELLS.iter().find(|cells| cells.ranks == ranks);
    let measured = cells.and_then(|cells| cells.of(collective));
    match measured {
        Some(bytes) if !multicast => Some((bytes, Source::BuiltIn)),
        // Here NCCL runs with multicast what it runs without.
        Some(bytes) if has(capability::RINGS_IN_FOURS) => {
            let is_bounded = ranks > 2 && collective == Collective::AllReduce;
            let most = if is_bounded { ALL_REDUCE_BYTES_MAX_WITH_MULTICAST } else { u64::MAX };
            Some((bytes.min(most), Source::BuiltIn))
        }
        // Elsewhere NCCL may run multicast already, and nobody timed it.
        Some(_) => None,
        _ => model_bytes_max(collective).map(|bytes| (bytes, Source::Model)),
    }
}

/// Writes all that is built in, for the number that ranks compare.
pub(super) fn put(writer: &mut Writer) {
    writer.u64(ALL_REDUCE_BYTES_MAX_WITH_MULTICAST);
    writer.u64(REGISTERED_BYTES_MIN).u16(REGISTERS_ON);
    for gpu in MEASURED {
        writer.u16(gpu.capability).u16(gpu.multiprocessors_min);
    }
    for cells in CELLS {
        writer.u64(cells.ranks as u64);
        cells.bytes_max.iter().chain(cells.other_bytes_max).for_each(|bytes| {
            writer.u64(*bytes);
        });
    }
    for collective in Collective::ALL {
        for bytes in [model_bytes_max(collective), unmeasured_bytes_max(collective)] {
            writer.u64(bytes.map_or(0, |bytes| bytes + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::negotiated;
    use super::super::{NEEDED, agreed};
    use super::*;

    /// The limit of a collective that always has one.
    fn of(negotiated: &NegotiatedConfig, collective: Collective) -> (u64, Source) {
        let (bytes, source) = limits(negotiated)[collective as usize];
        (bytes.unwrap(), source)
    }

    fn all_reduce(negotiated: &NegotiatedConfig) -> (u64, Source) {
        of(negotiated, Collective::AllReduce)
    }

    /// A measured cell has its own limit, 5 to 8 ranks have that of the model, any other cell has the small one.
    #[test]
    fn cells() {
        assert_eq!(all_reduce(&negotiated(2, NEEDED, 90, 132)), (256 << 20, Source::BuiltIn));
        assert_eq!(all_reduce(&negotiated(4, NEEDED, 90, 114)), (32 << 20, Source::BuiltIn));
        for ranks in 5..=8 {
            for multicast in [0, capability::MULTICAST] {
                let negotiated = negotiated(ranks, NEEDED | multicast, 90, 132);
                use Collective::{AllGather, AllReduce, Broadcast, Reduce, ReduceScatter};
                assert_eq!(of(&negotiated, AllReduce), (256 << 10, Source::Model));
                for collective in [Broadcast, AllGather, ReduceScatter] {
                    assert_eq!(of(&negotiated, collective), (1 << 20, Source::Model), "{ranks}");
                }
                assert_eq!(of(&negotiated, Reduce), (UNMEASURED_BYTES_MAX, Source::Unmeasured));
            }
        }
        for unmeasured in [negotiated(4, NEEDED, 90, 32), negotiated(4, NEEDED, 80, 132)] {
            let native = |one: &Collective| *one != Collective::RegisteredAllGather;
            for collective in Collective::ALL.into_iter().filter(native) {
                let expected = (unmeasured_bytes_max(collective), Source::Unmeasured);
                assert_eq!(limits(&unmeasured)[collective as usize], expected);
            }
        }
        let mut mixed = negotiated(4, NEEDED, 90, 132);
        mixed.members[3].device.capability = 100;
        assert_eq!(all_reduce(&mixed), (16 << 10, Source::Unmeasured));
    }

    /// With multicast, 2 to 4 ranks have the measured cells if NCCL's release is known to run rings, except for large all-reduces of 3 and 4.
    /// Otherwise they have the small one.
    #[test]
    fn with_multicast() {
        let of = |ranks, rings| {
            let bits = NEEDED | capability::MULTICAST | if rings { capability::RINGS_IN_FOURS } else { 0 };
            limits(&negotiated(ranks, bits, 90, 132))
        };
        let without = |ranks| limits(&negotiated(ranks, NEEDED, 90, 132));
        assert_eq!(of(2, true)[..USUAL_COLLECTIVES], without(2)[..USUAL_COLLECTIVES]);
        for ranks in [3, 4] {
            assert_eq!(of(ranks, true)[1..USUAL_COLLECTIVES], without(ranks)[1..USUAL_COLLECTIVES]);
            assert_eq!(of(ranks, true)[0], (Some(2 << 20), Source::BuiltIn));
        }
        for ranks in [2, 3, 4] {
            assert_eq!(of(ranks, false)[0], (Some(16 << 10), Source::Unmeasured));
        }
    }

    /// No limit is below that of unmeasured cells, except of reduces that were slower at any size.
    #[test]
    fn none_is_below_the_least() {
        for ranks in 2..=8 {
            let of = limits(&negotiated(ranks, NEEDED, 90, 132));
            let none: Vec<usize> = (0..of.len()).filter(|cell| of[*cell].0.is_none()).collect();
            let unmeasured = (ranks > 2).then_some(Collective::OtherReduce as usize);
            assert_eq!(none, Vec::from_iter(unmeasured));
            assert!(of.iter().all(|(bytes, _)| bytes.unwrap_or(u64::MAX) >= UNMEASURED_BYTES_MAX));
        }
        let decided = agreed::decide(&negotiated(8, NEEDED, 90, 132));
        assert_eq!(decided.limits.0[0], (256 << 10) + 1);
    }

    /// Buffers are registered where that was measured, and where all ranks ask for it.
    #[test]
    fn who_registers() {
        let of = |bits, gpu| {
            limits(&negotiated(2, NEEDED | bits, gpu, 132))[Collective::RegisteredAllGather as usize]
        };
        let all = Some(NATIVE_BYTES_MAX);
        assert_eq!(of(0, 90), (all, Source::BuiltIn));
        for (bits, gpu) in [(0, 100), (capability::MULTICAST, 90)] {
            assert_eq!(of(bits, gpu), (None, Source::Unmeasured));
            assert_eq!(of(bits | capability::REGISTERS_ANYWHERE, gpu), (all, Source::Unmeasured));
        }
    }
}
