//! Compares what the kernels do with all ranks' launches with the collectives by their definition.

use super::*;
use crate::collective::COLLECTIVE_ROOT_SHIFT;

/// All ranks' launches, under arbitrary limits.
fn everyone(
    of: impl Fn(usize) -> Collective,
    ranks: u32,
    channels_for: u32,
    tuning: &Tuning,
) -> Vec<Arranged> {
    (0..ranks as usize)
        .map(|rank| {
            let geometry = Geometry::recommended(channels_for, ranks, rank as u32, 1 << 20);
            let limits = Limits {
                blocks_max: BLOCKS[(ranks + channels_for) as usize * 5 % BLOCKS.len()],
                clusters: !ranks.is_multiple_of(3),
            };
            arranged(&of(rank), &geometry, tuning, &limits)
        })
        .collect()
}

/// Holds that all ranks have the same fields where they must, and that each expects from each what that rank sends.
fn assert_agreed(all: &[Arranged]) {
    let first = &all[0];
    let reduces = first.launch.reduction_of_kernel(first.shape.kernel);
    for (me, Arranged { shape, launch }) in all.iter().enumerate() {
        assert_eq!(shape.kernel, first.shape.kernel);
        assert_eq!((launch.rank as usize, launch.ranks as usize), (me, all.len()));
        let shared = |launch: &CollectiveLaunch| {
            let CollectiveLaunch {
                regions, wires, first_tag, channels_log2, ring_slots, used_channels, ..
            } = *launch;
            (
                regions,
                wires,
                first_tag,
                channels_log2,
                ring_slots,
                used_channels,
                launch.reduction,
                launch.scale,
            )
        };
        assert_eq!(shared(launch), shared(&first.launch));
        if root_of(launch).is_some() {
            assert_eq!((launch.send_bytes, launch.flags), (first.launch.send_bytes, first.launch.flags));
            let gotten = if root_of(launch) == Some(me) { launch.send_bytes } else { [0; RANKS_MAX] };
            assert_eq!(launch.receive_bytes, gotten, "results of {me}");
            continue;
        }
        for (peer, Arranged { launch: theirs, .. }) in all.iter().enumerate() {
            let expected = theirs.receive_bytes[if reduces { peer } else { me }];
            assert_eq!(launch.send_bytes[peer], expected, "from {me} to {peer}");
            if shape.kernel.family == Family::AllReduce {
                assert_eq!(launch.receive_bytes[me], theirs.receive_bytes[me], "result of {me} to {peer}");
            }
            let packets = launch.send_bytes[peer].div_ceil(shape.kernel.family.packet_bytes());
            assert!(packets <= launch.packets && launch.used_channels <= 1 << launch.channels_log2);
        }
    }
}

/// The root of a reduce in two phases.
fn root_of(launch: &CollectiveLaunch) -> Option<usize> {
    (launch.flags >> COLLECTIVE_ROOT_SHIFT).checked_sub(1).map(|root| root as usize)
}

impl CollectiveLaunch {
    /// Whether the kernel reduces what the ranks send.
    fn reduction_of_kernel(&self, kernel: Kernel) -> bool {
        !kernel.name().contains("Copy")
    }
}

/// One rank's memory: two buffers, or one.
#[derive(Clone)]
struct Memory {
    send: Vec<u8>,
    receive: Vec<u8>,
    in_place: bool,
}

impl Memory {
    fn at(&mut self, address: u64, bytes: u64) -> &mut [u8] {
        let (buffer, from) = match address.checked_sub(RECEIVE) {
            Some(from) => (&mut self.receive, from),
            None if self.in_place => panic!("{address:x}"),
            None => (&mut self.send, address - SEND),
        };
        &mut buffer[from as usize..][..bytes as usize]
    }
}

/// Does what the kernels do with the launches, all of a step at once.
fn run(all: &[Arranged], memories: &mut [Memory]) {
    let reduces = all[0].launch.reduction_of_kernel(all[0].shape.kernel);
    let mut before = memories.to_vec();
    if let Some(root) = root_of(&all[0].launch) {
        let launch = &all[root].launch;
        for (rank, bytes) in launch.send_bytes.into_iter().enumerate().filter(|(_, bytes)| *bytes > 0) {
            let mut result = vec![0u8; bytes as usize];
            for (peer, Arranged { launch: theirs, .. }) in all.iter().enumerate() {
                let sent = before[peer].at(theirs.send[rank], bytes);
                result.iter_mut().zip(sent).for_each(|(sum, term)| *sum = sum.wrapping_add(*term));
            }
            memories[root].at(launch.receive[rank], bytes).copy_from_slice(&result);
        }
        return;
    }
    for (me, Arranged { launch, .. }) in all.iter().enumerate() {
        if reduces && launch.receive_bytes[me] > 0 {
            memories[me].at(launch.receive[me], launch.receive_bytes[me]).fill(0);
        }
        for (peer, Arranged { launch: theirs, .. }) in all.iter().enumerate() {
            let bytes = theirs.send_bytes[me];
            if bytes == 0 {
                continue;
            }
            let sent = before[peer].at(theirs.send[me], bytes).to_vec();
            let received = memories[me].at(launch.receive[if reduces { me } else { peer }], bytes);
            for (to, from) in received.iter_mut().zip(sent) {
                *to = if reduces { to.wrapping_add(from) } else { from };
            }
        }
    }
    if all[0].shape.kernel.family == Family::AllReduce {
        let mut results = memories.to_vec();
        for (me, Arranged { launch, .. }) in all.iter().enumerate() {
            for (peer, Arranged { launch: theirs, .. }) in
                all.iter().enumerate().filter(|(peer, _)| *peer != me)
            {
                let bytes = launch.receive_bytes[peer];
                let result = results[peer].at(theirs.receive[peer], bytes).to_vec();
                memories[me].at(launch.receive[peer], bytes).copy_from_slice(&result);
            }
        }
    }
}

/// The collective by its definition: the `receive` of each rank that gets a result.
fn reference(kind: Kind, count: usize, inputs: &[Vec<u8>]) -> Vec<Option<Vec<u8>>> {
    let sum = |at: usize| {
        let terms = |i| inputs.iter().fold(0u8, |sum, input| sum.wrapping_add(input[i]));
        (at..at + count).map(terms).collect::<Vec<u8>>()
    };
    (0..inputs.len())
        .map(|rank| match kind {
            Kind::AllReduce => Some(sum(0)),
            Kind::Broadcast { root } => Some(inputs[root as usize].clone()),
            Kind::Reduce { root } => (rank == root as usize).then(|| sum(0)),
            Kind::AllGather => Some(inputs.concat()),
            Kind::ReduceScatter => Some(sum(rank * count)),
        })
        .collect()
}

/// Every kind moves the right bytes, in place and out of place, on every wire, and all ranks agree.
#[test]
fn launches_are_the_collectives() {
    let counts = [1, 16, 17, 127, 961, 4097];
    let mut run_so_far = 0;
    for ranks in 2..=8 {
        for (kind, tuning) in kinds(ranks).iter().flat_map(|kind| tunings().map(|tuning| (*kind, tuning))) {
            for (count, in_place) in counts.into_iter().flat_map(|count| [(count, false), (count, true)]) {
                let parts = |wide: bool| if wide { ranks as usize } else { 1 };
                let sent = parts(kind == Kind::ReduceScatter) * count;
                let received = parts(kind == Kind::AllGather) * count;
                let inputs: Vec<Vec<u8>> = (0..ranks as usize)
                    .map(|rank| (0..sent).map(|at| (at * 7 + rank * 31 + at / 251) as u8).collect())
                    .collect();
                // In place as NCCL defines it: all data lies in the receiving buffer.
                let input_at = |rank: usize| if kind == Kind::AllGather { rank * count } else { 0 };
                let result_at = |rank: usize| if kind == Kind::ReduceScatter { rank * count } else { 0 };
                let mut memories: Vec<Memory> = Vec::new();
                let of = |rank: usize| {
                    let mut call = collective(kind, count as u64);
                    if in_place {
                        call.send = RECEIVE + input_at(rank) as u64;
                        call.receive = RECEIVE + result_at(rank) as u64;
                    }
                    call
                };
                for (rank, input) in inputs.iter().enumerate() {
                    let mut memory =
                        Memory { send: input.clone(), receive: vec![0xee; received.max(sent)], in_place };
                    if in_place {
                        memory.receive[input_at(rank)..][..sent].copy_from_slice(input);
                    }
                    memories.push(memory);
                }
                let all = everyone(of, ranks, [1, 8, 32][count % 3], &tuning);
                assert_agreed(&all);
                run(&all, &mut memories);
                for (rank, expected) in reference(kind, count, &inputs).into_iter().enumerate() {
                    let Some(expected) = expected else { continue };
                    let at = if in_place { result_at(rank) } else { 0 };
                    assert_eq!(
                        &memories[rank].receive[at..at + expected.len()],
                        expected,
                        "{kind:?} {count}"
                    );
                }
                run_so_far += 1;
            }
        }
    }
    assert!(run_so_far > 1500, "{run_so_far}");
}
