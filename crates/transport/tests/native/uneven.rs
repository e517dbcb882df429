//! Tests that all-gather-v and reduce-scatter-v write every byte that they should, and no other.

use windlass_transport::native::{Part, Reduction, Task, Uneven};

use crate::communicator::*;
use crate::support::*;

const RANKS_MAX: usize = 8;
const GUARD: u8 = 0x5e;

/// Device memory of the application, byte by byte.
struct Bytes {
    address: u64,
    length: usize,
}

impl Bytes {
    fn new(values: &[u8]) -> Bytes {
        let mut address = 0;
        ok(cuMemAlloc_v2(&mut address, values.len()));
        let bytes = Bytes { address, length: values.len() };
        bytes.set(values);
        bytes
    }

    fn set(&self, values: &[u8]) {
        ok(cuMemcpyHtoD_v2(self.address, values.as_ptr().cast(), values.len()));
        ok(cuStreamSynchronize(0));
    }

    fn get(&self) -> Vec<u8> {
        let mut values = vec![0; self.length];
        ok(cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), self.address, self.length));
        values
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        // See `numbers`.
        if !std::thread::panicking() {
            ok(cuMemFree_v2(self.address));
        }
    }
}

/// The parameters of a call, which all ranks share.
#[derive(Clone, Debug)]
struct Shape {
    sizes: Vec<usize>,
    /// Whether it is a reduce-scatter-v of 32-bit integers; else an all-gather-v of bytes.
    reduces: bool,
    in_place: bool,
    /// Bytes before the first part and between parts; odd for an all-gather-v, so that addresses are unaligned.
    gap: usize,
}

/// One rank's buffers: the parts, the last rank's first, and its own part behind them.
struct Side {
    task: Task,
    memory: Bytes,
    before: Vec<u8>,
    after: Vec<u8>,
}

fn word(rank: usize, part: usize, index: usize) -> u8 {
    (rank * 89 + part * 31 + index * 7 + index / 251) as u8
}

/// The bytes that `rank` gives to `part`.
fn given(shape: &Shape, rank: usize, part: usize) -> Vec<u8> {
    (0..shape.sizes[part]).map(|index| word(rank, part, index)).collect()
}

/// Sums of 32-bit integers of all ranks.
fn result(shape: &Shape, part: usize) -> Vec<u8> {
    let mut sums = vec![0_u32; shape.sizes[part] / 4];
    for rank in 0..shape.sizes.len() {
        let bytes = given(shape, rank, part);
        for (sum, four) in sums.iter_mut().zip(bytes.chunks_exact(4)) {
            *sum = sum.wrapping_add(u32::from_le_bytes(four.try_into().unwrap()));
        }
    }
    sums.into_iter().flat_map(u32::to_le_bytes).collect()
}

impl Side {
    fn of(shape: &Shape, me: usize) -> Side {
        let ranks = shape.sizes.len();
        let mut places = vec![0; ranks];
        let mut end = shape.gap;
        for rank in (0..ranks).rev() {
            places[rank] = end;
            end += shape.sizes[rank] + shape.gap;
        }
        let own = if shape.in_place { places[me] } else { end };
        let mut before = vec![GUARD; end + shape.sizes[me] + shape.gap + 1];
        let put = |memory: &mut Vec<u8>, at: usize, bytes: Vec<u8>| {
            memory[at..at + bytes.len()].copy_from_slice(&bytes);
        };
        if shape.reduces {
            (0..ranks).for_each(|part| put(&mut before, places[part], given(shape, me, part)));
        } else {
            put(&mut before, own, given(shape, me, me));
        }
        let mut after = before.clone();
        if shape.reduces {
            put(&mut after, own, result(shape, me));
        } else {
            (0..ranks).for_each(|part| put(&mut after, places[part], given(shape, part, part)));
        }
        let memory = Bytes::new(&before);
        let mut parts = [Part::default(); RANKS_MAX];
        for rank in 0..ranks {
            let (address, bytes) = (memory.address + places[rank] as u64, shape.sizes[rank] as u64);
            parts[rank] = Part { address, bytes };
        }
        let reduction = shape.reduces.then_some(Reduction { datatype: 2, operation: 0 });
        let task = Task::Fused(Uneven { reduction, scalar: None, parts, own: memory.address + own as u64 });
        Side { task, memory, before, after }
    }

    fn check(&self, shape: &Shape) {
        let found = self.memory.get();
        let wrong = (0..found.len()).find(|at| found[*at] != self.after[*at]);
        assert_eq!(wrong.map(|at| (at, found[at], self.after[at])), None, "{shape:?}");
    }
}

/// Empty parts, parts of one byte, around packets and beyond rings, missing roots, in place and not, at odd addresses.
fn shapes(ranks: usize) -> Vec<Shape> {
    let lists: [[usize; 3]; 8] = [
        [1, 0, 0],
        [0, 7, 961],
        [960, 1920, 1921],
        [30_000, 5, 64],
        [3, 100_001, 9],
        [0, 0, 50_000],
        [4096, 4096, 4096],
        [12_345, 0, 23_456],
    ];
    let mut shapes = Vec::new();
    for (number, list) in lists.iter().enumerate() {
        for (reduces, in_place) in [(false, false), (false, true), (true, false), (true, true)] {
            let element = if reduces { 4 } else { 1 };
            let sizes = (0..ranks).map(|rank| list[(rank + number) % 3] / element * element).collect();
            let gap = if reduces { 4 * (number % 5) } else { number + 1 };
            shapes.push(Shape { sizes, reduces, in_place, gap });
        }
    }
    shapes
}

/// One call after the other, without a wait of the host between.
#[test]
fn every_byte_and_no_other() {
    for count in [2, 3, 4] {
        if !has_devices(count) {
            continue;
        }
        let devices = devices(count as usize);
        let ranks = communicator(&devices);
        all(&devices, &ranks, |device, rank| {
            let stream = device.stream();
            let shapes = shapes(count as usize);
            let sides: Vec<Side> = shapes.iter().map(|shape| Side::of(shape, rank.rank as usize)).collect();
            for side in &sides {
                rank.native.run(&side.task, stream.handle()).unwrap();
            }
            stream.synchronize();
            sides.iter().zip(&shapes).for_each(|(side, shape)| side.check(shape));
        });
        end(ranks);
    }
}

/// From graphs, between eager ones.
#[test]
fn replayed() {
    let devices = devices(2);
    let ranks = communicator(&devices);
    all(&devices, &ranks, |device, rank| {
        let stream = device.stream();
        let shapes = shapes(2);
        let of = |number: usize| (Side::of(&shapes[number], rank.rank as usize), &shapes[number]);
        // An all-gather-v and a reduce-scatter-v, both out of place, so that each run repeats the same work.
        let (captured_ones, eager) = ([of(4), of(14)], of(18));
        let graph = captured(&stream, || {
            captured_ones.iter().for_each(|(side, _)| rank.native.run(&side.task, stream.handle()).unwrap());
        });
        for _ in 0..4 {
            captured_ones.iter().for_each(|(side, _)| side.memory.set(&side.before));
            ok(cuGraphLaunch(graph, stream.0));
            rank.native.run(&eager.0.task, stream.handle()).unwrap();
            stream.synchronize();
            captured_ones.iter().for_each(|(side, shape)| side.check(shape));
            eager.0.check(eager.1);
        }
        ok(cuGraphExecDestroy(graph));
    });
    for rank in &ranks {
        eventually("graphs let go", || rank.holds.are_none());
    }
    end(ranks);
}
