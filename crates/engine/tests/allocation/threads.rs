//! Tests of eight threads at once, as with eight ranks in one process.

use windlass_engine::features::memory::allocation::{Allocation, Allocations, Kind};

use crate::memory::*;
use crate::support::*;

/// Every thread frees and allocates at addresses that others use meanwhile, in a table too small for all. Each always finds
/// its own allocations as they are, and those that stay never change.
#[test]
fn eight_threads() {
    const THREADS: u64 = 8;
    let primary = Primary::of(0);
    primary.make_current();
    let allocations = Allocations::new(start(), 24);
    let staying: Vec<Allocation> = (0..8).map(|_| allocations.look(allocated(65_536))).collect();
    assert!(
        staying.iter().all(|found| (found.range.bytes, found.kind, found.device) == (65_536, Kind::Cuda, 0))
    );
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (allocations, staying, primary) = (&allocations, &staying, &primary);
            scope.spawn(move || {
                primary.make_current();
                for turn in 0..600_u64 {
                    let bytes = 4096 << ((turn + thread) % 4);
                    let at = allocated(bytes);
                    for inside in [0, bytes / 2, bytes - 1] {
                        let found = allocations.look(at + inside);
                        assert_eq!(
                            (found.range, found.kind),
                            (range(at, bytes), Kind::Cuda),
                            "thread {thread}"
                        );
                    }
                    let other = staying[(turn * 5 + thread) as usize % staying.len()];
                    assert_eq!(allocations.look(other.range.base + turn), other);
                    free(at);
                }
            });
        }
    });
    for found in &staying {
        assert_eq!(allocations.look(found.range.base), *found);
    }
    staying.into_iter().for_each(|found| free(found.range.base));
}
