//! Describes a launch for the modelled clock of the simulated driver, from the kernel's name and parameter alone. Pure.

use windlass_kernels::collective::{
    BatchLaunch, COLLECTIVE_ROOT_SHIFT, COLLECTIVE_SAME, CollectiveLaunch, RANKS_MAX,
};
use windlass_kernels::launch::{BLOCKS_SHIFT, CONNECTION_WORDS, Launch, Operation};

use std::ffi::{CStr, c_char};

/// `SimWork` of the simulated driver.
#[repr(C)]
pub struct SimWork {
    side: *const c_char,
    operation: *const c_char,
    bytes: u64,
    ranks: u32,
    reserved: u32,
}

/// The parameter of a kernel.
pub trait Parameter {
    /// The work of the launch with this parameter of the kernel with this name.
    ///
    /// # Safety
    /// Lists that the parameter points to can be read.
    unsafe fn work(&self, kernel: &str) -> Work;
}

/// The content of a [`SimWork`].
#[derive(Debug, PartialEq, Eq)]
pub struct Work {
    operation: &'static CStr,
    /// Bytes of this rank's larger buffer, as `windlass bench` counts them.
    bytes: u64,
    /// 0 if the parameter does not say.
    ranks: u32,
}

impl From<Work> for SimWork {
    fn from(work: Work) -> SimWork {
        let Work { operation, bytes, ranks } = work;
        SimWork { side: c"windlass".as_ptr(), operation: operation.as_ptr(), bytes, ranks, reserved: 0 }
    }
}

impl Parameter for CollectiveLaunch {
    unsafe fn work(&self, kernel: &str) -> Work {
        let (operation, bytes) = if copies(kernel) { gathered(self) } else { reduced(self, kernel) };
        Work { operation, bytes, ranks: self.ranks }
    }
}

fn copies(kernel: &str) -> bool {
    kernel.contains("_Copy_")
}

/// Whether a kernel is an all-reduce in two phases. These kernels also run reduces in two phases.
fn is_all_reduce(kernel: &str) -> bool {
    kernel.contains("AllReduce")
}

/// The operation and bytes of a copy kernel: one rank has data, all have the same bytes, or each its own.
fn gathered(launch: &CollectiveLaunch) -> (&'static CStr, u64) {
    match parts(&launch.receive_bytes, launch.ranks) {
        Parts::One(bytes) => (c"broadcast", bytes),
        Parts::Alike(bytes) => (c"all_gather", bytes),
        Parts::Uneven(bytes) => (c"uneven_all_gather", bytes),
    }
}

/// The operation and bytes of a reducing kernel, by the bytes that go to each rank. If all get the same data it is an all-reduce in one
/// phase.
fn reduced(launch: &CollectiveLaunch, kernel: &str) -> (&'static CStr, u64) {
    if is_all_reduce(kernel) {
        let is_rooted = launch.flags >> COLLECTIVE_ROOT_SHIFT != 0;
        let operation = if is_rooted { c"reduce" } else { c"all_reduce" };
        return (operation, launch.send_bytes.iter().sum());
    }
    if launch.flags & COLLECTIVE_SAME != 0 {
        return (c"all_reduce", launch.send_bytes[0]);
    }
    match parts(&launch.send_bytes, launch.ranks) {
        Parts::One(bytes) => (c"reduce", bytes),
        Parts::Alike(bytes) => (c"reduce_scatter", bytes),
        Parts::Uneven(bytes) => (c"uneven_reduce_scatter", bytes),
    }
}

/// Which ranks have a part; each with the sum of the bytes.
enum Parts {
    One(u64),
    Alike(u64),
    Uneven(u64),
}

fn parts(bytes: &[u64; RANKS_MAX], ranks: u32) -> Parts {
    let parts = &bytes[..ranks as usize];
    let all = parts.iter().sum();
    if parts.iter().all(|part| *part == parts[0]) {
        Parts::Alike(all)
    } else if parts.iter().filter(|part| **part > 0).count() == 1 {
        Parts::One(all)
    } else {
        Parts::Uneven(all)
    }
}

impl Parameter for BatchLaunch {
    /// The operation of the first call, with the bytes of all calls.
    unsafe fn work(&self, kernel: &str) -> Work {
        let ranks = self.launch.ranks;
        let calls = &self.calls[..self.count as usize];
        let is_gather = copies(kernel);
        let of = |send_step: u32| match (is_gather, send_step) {
            (true, _) => c"all_gather",
            (false, 0) => c"all_reduce",
            (false, _) if is_all_reduce(kernel) => c"all_reduce",
            (false, _) => c"reduce_scatter",
        };
        let bytes = |send_step: u32, bytes: u32| {
            let parts = if of(send_step) == c"all_reduce" { 1 } else { ranks };
            u64::from(bytes) * u64::from(parts)
        };
        Work {
            operation: calls.first().map_or(c"all_reduce", |call| of(call.send_step)),
            bytes: calls.iter().map(|call| bytes(call.send_step, call.bytes)).sum(),
            ranks,
        }
    }
}

impl Parameter for Launch {
    /// Bytes are the larger of the sent and the received; what a rank sends to itself counts as both.
    unsafe fn work(&self, _kernel: &str) -> Work {
        let connections = (self.send_connections + self.receive_connections) as usize;
        let all = (self.operations + 2 * self.copies) as usize;
        let listed: Vec<u64> = if self.operation_list == 0 {
            let first = connections * CONNECTION_WORDS;
            self.storage[first..first + 2 * all].chunks_exact(2).map(|operation| operation[1]).collect()
        } else {
            let list = self.operation_list as *const Operation;
            // SAFETY: the caller's guarantee: so many operations stand there.
            (0..all).map(|at| unsafe { list.add(at).read() }.bytes).collect()
        };
        let sum = |operations: &[u64]| {
            operations.iter().map(|bytes| bytes & ((1 << BLOCKS_SHIFT) - 1)).sum::<u64>()
        };
        // Sends come first, then receives, then two entries for each copy.
        let (messages, copies) = listed.split_at(self.operations as usize);
        let (sent, received) = messages.split_at(first_received(self));
        Work { operation: c"send_recv", bytes: sum(sent).max(sum(received)) + sum(copies) / 2, ranks: 0 }
    }
}

/// The index of the first receive operation: receiving connections come after sending ones.
fn first_received(launch: &Launch) -> usize {
    if launch.receive_connections == 0 {
        return launch.operations as usize;
    }
    let connection = &launch.storage[launch.send_connections as usize * CONNECTION_WORDS..];
    // The low half of the word before the last is `first_operation`.
    connection[CONNECTION_WORDS - 2] as u32 as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_kernels::arrange::{self, BulkSend, Call, Direction, Peer};
    use windlass_kernels::collectives::{
        Collective, Crossover, Geometry, Kind, Layout, Limits, Part, Reduction, Tuning, Uneven,
        arrange_batch, arrange_uneven,
    };
    use windlass_kernels::{collectives, launch};

    const FLOAT_SUM: Reduction = Reduction { datatype: 7, operation: 0 };
    const LIMITS: Limits = Limits { blocks_max: 8, clusters: true };
    const RANKS: u32 = 3;
    const KINDS: [(Kind, &CStr, u64); 5] = [
        (Kind::AllReduce, c"all_reduce", 1),
        (Kind::Broadcast { root: 1 }, c"broadcast", 1),
        (Kind::Reduce { root: 1 }, c"reduce", 1),
        (Kind::AllGather, c"all_gather", RANKS as u64),
        (Kind::ReduceScatter, c"reduce_scatter", RANKS as u64),
    ];

    /// Tunings by which all collectives run by LL, by LL128, or by Simple and in two phases.
    fn tunings() -> [Tuning; 3] {
        [(u64::MAX, u64::MAX), (0, u64::MAX), (0, 0)].map(|(ll_bytes_max, large_bytes_min)| {
            let every = Crossover {
                ll_bytes_max,
                two_groups_bytes_max: 0,
                one_shot_bytes_max: if large_bytes_min > 0 && ll_bytes_max == 0 { u64::MAX } else { 0 },
                large_bytes_min,
            };
            Tuning {
                all_reduce: every,
                broadcast: every,
                reduce: every,
                all_gather: every,
                reduce_scatter: every,
            }
        })
    }

    fn collective(kind: Kind, count: u64) -> Collective {
        let reduction = Some(FLOAT_SUM);
        Collective { kind, count, element_bytes: 4, reduction, scalar: None, send: 1 << 20, receive: 2 << 20 }
    }

    fn geometry(rank: u32) -> Geometry {
        Geometry::recommended(8, RANKS, rank, 1)
    }

    fn work(parameter: &impl Parameter, kernel: &str) -> Work {
        // SAFETY: the tests' launches name no lists that are not there.
        unsafe { parameter.work(kernel) }
    }

    /// Every kind is recognised, with the bytes of the larger buffer, alike on every rank and for every kernel.
    #[test]
    fn collectives_alone() {
        for (rank, tuning) in (0..RANKS).flat_map(|rank| tunings().map(|tuning| (rank, tuning))) {
            let (geometry, regions) = (geometry(rank), [1 << 40, 2 << 40, 3 << 40]);
            let layout = Layout::of(&geometry);
            for ((kind, operation, parts), count) in
                KINDS.into_iter().flat_map(|kind| [1, 1000].map(|count| (kind, count)))
            {
                let mut launch = CollectiveLaunch::default();
                let collective = collective(kind, count);
                let shape = collectives::arrange(
                    &collective,
                    &geometry,
                    &layout,
                    &regions,
                    &tuning,
                    &LIMITS,
                    &mut launch,
                );
                let kernel = shape.unwrap().unwrap().kernel.name();
                let expected = Work { operation, bytes: 4 * count * parts, ranks: RANKS };
                assert_eq!(work(&launch, kernel), expected, "{kind:?} of {count} on {rank}: {kernel}");
            }
        }
    }

    /// Parts of different sizes are told from equal ones.
    #[test]
    fn uneven() {
        let of = |reduction, bytes: [u64; 3]| {
            let (geometry, mut launch) = (geometry(2), CollectiveLaunch::default());
            let mut uneven = Uneven { reduction, scalar: None, parts: Default::default(), own: 1 << 20 };
            for (part, bytes) in uneven.parts.iter_mut().zip(bytes) {
                *part = Part { address: 2 << 20, bytes };
            }
            let (layout, regions) = (Layout::of(&geometry), [1 << 40, 2 << 40, 3 << 40]);
            let [tuning, ..] = tunings();
            let shape = arrange_uneven(&uneven, &geometry, &layout, &regions, &tuning, &LIMITS, &mut launch);
            let Work { operation, bytes, .. } = work(&launch, shape.unwrap().unwrap().kernel.name());
            (operation, bytes)
        };
        assert_eq!(of(None, [4, 8, 0]), (c"uneven_all_gather", 12));
        assert_eq!(of(None, [4, 4, 4]), (c"all_gather", 12));
        assert_eq!(of(Some(FLOAT_SUM), [4, 8, 0]), (c"uneven_reduce_scatter", 12));
        assert_eq!(of(Some(FLOAT_SUM), [4, 4, 4]), (c"reduce_scatter", 12));
    }

    /// A batch has the bytes of all its calls.
    #[test]
    fn batches() {
        let [ll, ll128, _] = tunings();
        for (kind, operation, parts) in KINDS.into_iter().filter(|(_, _, parts)| *parts > 1).chain([KINDS[0]])
        {
            for tuning in [ll, ll128] {
                let (geometry, mut batch) = (geometry(0), BatchLaunch::default());
                let (layout, regions) = (Layout::of(&geometry), [1 << 40, 2 << 40, 3 << 40]);
                let calls = [collective(kind, 10), collective(kind, 100)];
                let shape = arrange_batch(&calls, &geometry, &layout, &regions, &tuning, &LIMITS, &mut batch);
                let kernel = shape.unwrap().unwrap().kernel.name();
                let expected = Work { operation, bytes: 440 * parts, ranks: RANKS };
                assert_eq!(work(&batch, kernel), expected, "{kind:?}: {kernel}");
            }
        }
    }

    /// The larger of sent and received bytes counts, and copies within the rank count for both; operations may be in the parameter or in a
    /// list.
    #[test]
    fn messages() {
        let geometry = launch::Geometry::recommended(8, 0);
        let limits = arrange::Limits { bulk: BulkSend::OrdinaryStores, shared_bytes_max: 200 << 10 };
        let of = |calls: &[(u64, u32, Direction)]| {
            let calls: Vec<Call> = calls
                .iter()
                .zip(1..)
                .map(|((bytes, peer, direction), at)| Call {
                    address: at << 30,
                    bytes: *bytes,
                    peer: *peer,
                    direction: *direction,
                })
                .collect();
            let (mut launch, mut listed) = (Launch::default(), Vec::new());
            let peers = [Peer::default(); 3];
            let shape =
                arrange::arrange(&calls, &peers, &geometry, &limits, &mut launch, &mut listed).unwrap();
            if shape.lists_operations {
                launch.operation_list = listed.as_ptr() as u64;
            }
            let found = work(&launch, "ncclWindlassMail");
            assert_eq!((found.operation, found.ranks), (c"send_recv", 0));
            (found.bytes, shape.lists_operations)
        };
        use Direction::{Receive, Send};
        assert_eq!(of(&[(8, 1, Send)]), (8, false));
        assert_eq!(of(&[(8, 1, Receive), (16, 2, Receive)]), (24, false));
        assert_eq!(of(&[(8, 1, Send), (64 << 20, 2, Send), (100, 1, Receive)]), (8 + (64 << 20), false));
        assert_eq!(of(&[(8, 1, Send), (9, 1, Receive), (5, 0, Send), (5, 0, Receive)]), (14, false));
        let many = [(8, 1, Send); 400].into_iter().chain([(4, 2, Receive); 20]).collect::<Vec<_>>();
        assert_eq!(of(&many), (3200, true));
    }
}
