//! Shared by the tests: collectives of 32-bit integers that are verified.

use windlass_transport::native::{Collective, Kind, Reduction, Task};
use windlass_transport::p2p::{Direction, Operation};

use crate::support::*;

/// `ncclInt32` and `ncclSum`.
const SUM: Reduction = Reduction { datatype: 2, operation: 0 };

/// Device memory of the application.
pub struct Numbers {
    pub address: u64,
    count: usize,
}

impl Numbers {
    pub fn new(values: Vec<i32>) -> Numbers {
        let mut address = 0;
        ok(cuMemAlloc_v2(&mut address, (4 * values.len()).max(4)));
        let numbers = Numbers { address, count: values.len() };
        numbers.set(&values);
        numbers
    }

    pub fn set(&self, values: &[i32]) {
        if !values.is_empty() {
            ok(cuMemcpyHtoD_v2(self.address, values.as_ptr().cast(), 4 * values.len()));
            ok(cuStreamSynchronize(0));
        }
    }

    pub fn get(&self) -> Vec<i32> {
        let mut values = vec![0; self.count];
        if self.count > 0 {
            ok(cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), self.address, 4 * self.count));
        }
        values
    }
}

impl Drop for Numbers {
    fn drop(&mut self) {
        // Freeing waits for all kernels, also for one that a failed test left waiting.
        if !std::thread::panicking() {
            ok(cuMemFree_v2(self.address));
        }
    }
}

/// One rank's part in a collective: its buffers, and the expected bytes of the second one.
pub struct Part {
    pub task: Task,
    _input: Numbers,
    output: Numbers,
    expected: Vec<i32>,
}

fn value(rank: u32, index: usize) -> i32 {
    (rank as i32 + 1) * 1_000_003 + index as i32 * 7
}

const UNTOUCHED: i32 = -1;

impl Part {
    /// A part of `count` elements, as NCCL counts them.
    pub fn of(kind: Kind, count: usize, rank: u32, ranks: u32) -> Part {
        let all = 0..ranks as usize;
        let (sent, got) = match kind {
            Kind::AllGather => (count, count * ranks as usize),
            Kind::ReduceScatter => (count * ranks as usize, count),
            _ => (count, count),
        };
        let sum = |index| (0..ranks).fold(0_i32, |sum, rank| sum.wrapping_add(value(rank, index)));
        let mine = rank as usize * count;
        let expected: Vec<i32> = match kind {
            Kind::AllReduce => (0..count).map(sum).collect(),
            Kind::Reduce { root } if root == rank => (0..count).map(sum).collect(),
            Kind::Reduce { .. } => vec![UNTOUCHED; count],
            Kind::Broadcast { root } => (0..count).map(|index| value(root, index)).collect(),
            Kind::AllGather => {
                all.flat_map(|from| (0..count).map(move |index| value(from as u32, index))).collect()
            }
            Kind::ReduceScatter => (mine..mine + count).map(sum).collect(),
        };
        let input = Numbers::new((0..sent).map(|index| value(rank, index)).collect());
        let output = Numbers::new(vec![UNTOUCHED; got]);
        let reduces = matches!(kind, Kind::AllReduce | Kind::Reduce { .. } | Kind::ReduceScatter);
        let task = Task::One(Collective {
            kind,
            count: count as u64,
            element_bytes: 4,
            reduction: reduces.then_some(SUM),
            scalar: None,
            send: input.address,
            receive: output.address,
        });
        Part { task, _input: input, output, expected }
    }

    pub fn check(&self) {
        let found = self.output.get();
        let wrong = (0..found.len()).find(|index| found[*index] != self.expected[*index]);
        assert_eq!(wrong.map(|index| (index, found[index], self.expected[index])), None, "{:?}", self.task);
    }

    pub fn clear(&self) {
        self.output.set(&vec![UNTOUCHED; self.expected.len()]);
    }
}

/// A message of one number.
pub fn message(number: &Numbers, peer: u32, direction: Direction) -> Operation {
    Operation { address: number.address, bytes: 4, peer, direction }
}
