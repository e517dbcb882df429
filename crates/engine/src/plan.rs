//! Decides which path a call takes. Pure, and a function of what all ranks share: facts of one rank cannot even be passed in.

use nccl_sys::{ncclAvg, ncclBfloat16, ncclFloat16, ncclFloat32, ncclInt8, ncclSum};

use windlass_base::call::{Function, Shared};
use windlass_base::path::Path;
pub(crate) use windlass_transport::tuning::Terms;
use windlass_transport::tuning::{Collective, REGISTERED_BYTES_MIN};

/// What all ranks of a communicator know of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Standing<'terms> {
    /// Its ranks can write each other's memory.
    PeerGroup(&'terms Terms),
    /// The same, and the ranks have agreed that NCCL uses registered buffers in this call.
    Registering(&'terms Terms),
}

/// Whether ranks that may register decide together about this call, if it is not captured: in graphs NCCL registers by itself.
/// A call with a configuration is no candidate.
#[inline]
pub(crate) fn is_candidate(call: &Shared, terms: &Terms) -> bool {
    call.function == Function::AllGather
        && call.bytes(terms.ranks) >= REGISTERED_BYTES_MIN
        && terms.native.serve(Collective::RegisteredAllGather, call.bytes(terms.ranks))
        && !is_native(call, terms)
}

/// Chooses the path of a call.
#[inline]
pub(crate) fn plan(call: &Shared, standing: Standing<'_>) -> Path {
    let (Standing::PeerGroup(terms) | Standing::Registering(terms)) = standing;
    if is_native(call, terms) {
        return Path::Native;
    }
    match (call.function, standing) {
        // NCCL makes these collectives of sends and receives, too. With a configuration they stay on NCCL.
        (Function::Send | Function::Recv | Function::AlltoAll | Function::Gather | Function::Scatter, _) => {
            Path::P2p
        }
        (Function::AllGather, Standing::Registering(_)) => Path::Registered,
        _ => Path::Forward,
    }
}

/// Whether a native collective runs a call, by its function, size, type and operation.
#[inline]
fn is_native(call: &Shared, terms: &Terms) -> bool {
    if is_in_fixed_order(call, terms) {
        return true;
    }
    let Some(collective) = Collective::of(call.function) else { return false };
    let bytes = call.bytes(terms.ranks);
    terms.native.serve(collective, bytes) && serves_elements(call, collective, bytes, terms)
}

/// Whether a call is native because of fixed order: at every size, also with a configuration or an operation that the program made.
/// A call of more bytes than there are addresses is left to NCCL, which refuses it.
#[inline]
pub(crate) fn is_in_fixed_order(call: &Shared, terms: &Terms) -> bool {
    terms.fixed_order && call.rounds() && call.bytes(terms.ranks) <= ADDRESSES
}

const ADDRESSES: u64 = 1 << 62;

/// Whether one kernel runs these calls of one group, which follow each other: all broadcasts, or all reduces of one type and
/// operation, each with another root.
pub(crate) fn are_native_fused<'a>(calls: impl Iterator<Item = &'a Shared> + Clone, terms: &Terms) -> bool {
    let Some(each) = calls.clone().next().and_then(|call| Collective::of(call.function)) else {
        return false;
    };
    let bytes = calls.clone().map(|call| call.bytes(terms.ranks));
    let total = bytes.clone().fold(0, u64::saturating_add);
    if calls.clone().all(|call| is_in_fixed_order(call, terms)) {
        return total <= ADDRESSES;
    }
    terms.native.serve_fused(each, bytes, terms.ranks)
        && calls.clone().all(|call| serves_elements(call, each, total, terms))
}

/// Whether a call of a group could be fused with later ones: then it is held, and the group's end decides its path. So it is also if the
/// call alone is too large, as the end must see all calls of a run.
#[inline]
pub(crate) fn may_be_fused(call: &Shared, terms: &Terms) -> bool {
    Collective::of(call.function).is_some_and(|each| {
        each.fused().is_some() && terms.native.serve(each, 0) && serves_elements(call, each, 0, terms)
    })
}

/// Whether native collectives take a call's type and operation at so many bytes.
fn serves_elements(call: &Shared, collective: Collective, bytes: u64, terms: &Terms) -> bool {
    cell_of(call, collective).is_some_and(|cell| cell == collective || terms.native.serve(cell, bytes))
}

/// The cell whose limit bounds a call by its type and operation; none if the kernels do not reduce so. A call that only moves may have any type.
/// The usual cells were measured with sums and averages of short floats; other types and operations that the kernels know have cells of their
/// own. By NCCL's numbers: types int8 to bfloat16, operations sum to average; a program's own operations have higher numbers. The kernels know
/// no averages of integers.
pub(crate) fn cell_of(call: &Shared, collective: Collective) -> Option<Collective> {
    let Some(operation) = call.operation else { return call.datatype.size_bytes().map(|_| collective) };
    let is_integer = (ncclInt8.0..ncclFloat16.0).contains(&call.datatype.0);
    let is_known = (ncclInt8.0..=ncclBfloat16.0).contains(&call.datatype.0)
        && (ncclSum.0..=ncclAvg.0).contains(&operation.0)
        && !(is_integer && operation == ncclAvg);
    let is_summed = operation == ncclSum || operation == ncclAvg;
    let is_short_float = [ncclFloat16, ncclFloat32, ncclBfloat16].contains(&call.datatype);
    match is_known {
        true if is_summed && is_short_float => Some(collective),
        true => collective.other(),
        false => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_sys::{ncclDataType_t, ncclFloat8e4m3, ncclFloat64, ncclMax, ncclRedOp_t, ncclUint64};
    use proptest::prelude::*;
    use windlass_transport::tuning::{COLLECTIVES, Limits};

    const SLOW: Terms = Terms { ranks: 4, native: Limits::NONE, fixed_order: false };

    fn call(function: Function, count: usize, datatype: ncclDataType_t) -> Shared {
        use Function::{AllReduce, Reduce, ReduceScatter};
        let reduces = matches!(function, AllReduce | Reduce | ReduceScatter);
        Shared { function, count, datatype, operation: reduces.then_some(ncclSum), root: None }
    }

    /// Sends and receives of any size, and collectives made of them, are p2p; all other calls go to NCCL.
    #[test]
    fn sends_and_receives_stay_in_the_peer_group() {
        for function in Function::ALL {
            use Function::{AlltoAll, Gather, Recv, Scatter, Send};
            let point_to_point = matches!(function, Send | Recv | AlltoAll | Gather | Scatter);
            for count in [0, 1, usize::MAX] {
                let call = call(function, count, ncclFloat32);
                let expected = if point_to_point { Path::P2p } else { Path::Forward };
                assert_eq!(plan(&call, Standing::PeerGroup(&SLOW)), expected);
            }
        }
    }

    /// A broadcast or reduce is held if native collectives run any.
    #[test]
    fn what_waits_for_the_end_of_its_group() {
        let mut terms = SLOW;
        for collective in [Collective::Broadcast, Collective::UnevenAllGather] {
            terms.native.0[collective as usize] = 1 << 20;
        }
        let waits = |function, count| may_be_fused(&call(function, count, ncclInt8), &terms);
        assert!(waits(Function::Broadcast, 1) && waits(Function::Broadcast, 1 << 30));
        assert!(!waits(Function::Reduce, 1) && !waits(Function::AllGather, 1));
    }

    /// A call is registered if and only if it is a candidate and the ranks agreed.
    #[test]
    fn large_all_gathers_are_candidates() {
        let mut registers = SLOW;
        registers.native.0[Collective::RegisteredAllGather as usize] = u64::MAX;
        for function in Function::ALL {
            for bytes in [0, REGISTERED_BYTES_MIN - 4, REGISTERED_BYTES_MIN, 1 << 40] {
                let call = call(function, bytes as usize / 16, ncclFloat32);
                let expected = function == Function::AllGather && bytes >= REGISTERED_BYTES_MIN;
                assert_eq!(is_candidate(&call, &registers), expected, "{function:?} of {bytes} bytes");
                assert!(!is_candidate(&call, &SLOW));
                let registers = plan(&call, Standing::Registering(&SLOW)) == Path::Registered;
                assert_eq!(registers, function == Function::AllGather);
                assert_ne!(plan(&call, Standing::PeerGroup(&SLOW)), Path::Registered);
            }
        }
    }

    /// Up to its limit each collective is native, and no other function is; a native call is no candidate.
    #[test]
    fn up_to_the_limit() {
        for limit in [0, 1, 1 << 14, 64 << 20] {
            let terms = Terms { native: Limits([limit + 1; COLLECTIVES]), ..SLOW };
            for function in Function::ALL {
                let elements = |bytes| bytes / (call(function, 1, ncclInt8).bytes(4)) as usize;
                for (bytes, within) in [(limit as usize, true), (limit as usize + 4, false)] {
                    let call = call(function, elements(bytes), ncclInt8);
                    let expected = within && Collective::of(function).is_some();
                    assert_eq!(
                        plan(&call, Standing::PeerGroup(&terms)) == Path::Native,
                        expected,
                        "{call:?}"
                    );
                    assert!(!expected || !is_candidate(&call, &terms));
                }
            }
        }
    }

    /// Reductions with the program's own operations, or of types that kernels do not sum, go to NCCL; such types may be moved.
    #[test]
    fn elements() {
        let mut native = Limits([1 << 20; COLLECTIVES]);
        native.0[Collective::OtherAllReduce as usize] = 64 << 10;
        let terms = Terms { native, ..SLOW };
        let terms = Standing::PeerGroup(&terms);
        let reduce = |datatype, operation| Shared {
            operation: Some(operation),
            ..call(Function::AllReduce, 4, datatype)
        };
        let (own, negative) = (ncclRedOp_t(5), ncclRedOp_t(-1));
        for native in [reduce(ncclBfloat16, ncclAvg), reduce(ncclFloat64, ncclAvg), reduce(ncclInt8, ncclMax)]
        {
            assert_eq!(plan(&native, terms), Path::Native);
        }
        for not in [
            reduce(ncclFloat8e4m3, ncclSum),
            reduce(ncclInt8, ncclAvg),
            reduce(ncclUint64, ncclAvg),
            reduce(ncclFloat32, own),
            reduce(ncclFloat32, negative),
            reduce(ncclDataType_t(-1), ncclSum),
            call(Function::AllGather, 4, ncclDataType_t(77)),
        ] {
            assert_eq!(plan(&not, terms), Path::Forward, "{not:?}");
        }
        assert_eq!(plan(&call(Function::AllGather, 4, ncclFloat8e4m3), terms), Path::Native);
        // NCCL makes an all-to-all of sends and receives: some ranks may call one, others the other.
        assert_eq!(plan(&call(Function::AlltoAll, 4, ncclFloat32), terms), Path::P2p);
        let many = |datatype, operation| Shared { count: 100_000, ..reduce(datatype, operation) };
        assert_eq!(plan(&many(ncclBfloat16, ncclAvg), terms), Path::Native);
        assert_eq!(plan(&many(ncclInt8, ncclSum), terms), Path::Forward);
        assert_eq!(plan(&many(ncclFloat32, ncclMax), terms), Path::Forward);
    }

    /// In fixed order a reduction that rounds is native at every size, also with a configuration or an operation of the program's; other
    /// calls take their usual path.
    #[test]
    fn fixed_order() {
        use Function::{
            AllGather, AllReduce, AllReduceConfig, Broadcast, Reduce, ReduceConfig, ReduceScatter,
            ReduceScatterConfig,
        };
        let terms = Terms { fixed_order: true, ..SLOW };
        let path = |call: &Shared| plan(call, Standing::PeerGroup(&terms));
        for function in [AllReduce, Reduce, ReduceScatter, AllReduceConfig, ReduceConfig, ReduceScatterConfig]
        {
            for count in [0, 1, 1 << 20, 1 << 40] {
                for operation in [ncclSum, ncclAvg, ncclRedOp_t(9)].map(Some) {
                    for datatype in [ncclFloat16, ncclFloat32, ncclFloat8e4m3] {
                        let call = Shared { operation, ..call(function, count, datatype) };
                        assert_eq!(path(&call), Path::Native, "{call:?}");
                        assert_eq!(plan(&call, Standing::PeerGroup(&SLOW)), Path::Forward);
                    }
                }
                let others = [(ncclFloat32, ncclMax), (ncclInt8, ncclSum), (ncclInt8, ncclRedOp_t(9))];
                for (datatype, operation) in others {
                    let call = Shared { operation: Some(operation), ..call(function, count, datatype) };
                    assert_eq!(path(&call), Path::Forward, "{call:?}");
                }
            }
            let endless = Shared { operation: Some(ncclSum), ..call(function, usize::MAX, ncclFloat16) };
            assert_eq!(path(&endless), Path::Forward);
        }
        for function in [AllGather, Broadcast] {
            assert_eq!(path(&call(function, 1, ncclFloat32)), Path::Forward);
        }
        let reduce = |count| call(Reduce, count, ncclFloat32);
        assert!(are_native_fused([reduce(1), reduce(1 << 40)].iter(), &terms));
        assert!(!are_native_fused([reduce(1 << 59), reduce(1 << 59), reduce(1 << 59)].iter(), &terms));
    }

    proptest! {
        /// With growing size a call leaves a path only once, so one limit describes the change.
        #[test]
        fn one_crossover(
            function in 0..Function::ALL.len(),
            counts in (0..1_usize << 30, 0..1_usize << 30),
            limits in any::<[u32; COLLECTIVES]>(),
            ranks in 2..17_usize,
        ) {
            let terms = Terms { ranks, native: Limits(limits.map(u64::from)), fixed_order: false };
            let standing = Standing::PeerGroup(&terms);
            let native = |count| plan(&call(Function::ALL[function], count, ncclFloat32), standing) == Path::Native;
            let (small, large) = (counts.0.min(counts.1), counts.0.max(counts.1));
            prop_assert!(native(small) || !native(large));
        }
    }
}
