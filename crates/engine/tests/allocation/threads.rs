//! Tests of eight threads at once, as with eight ranks in one process.

use std::sync::atomic::{AtomicBool, Ordering};

use windlass_engine::features::memory::allocation::{Allocations, Kind};

use crate::memory::*;
use crate::support::*;

/// Every thread frees and allocates at addresses that others use meanwhile, in a table too small for all; some threads tell frees.
/// Each always finds its own allocations as they are, and those that stay never change.
#[test]
fn eight_threads() {
    const THREADS: u64 = 8;
    let primary = Primary::of(0);
    primary.make_current();
    let allocations = Allocations::new(start(), 24);
    let staying: Vec<u64> = (0..8).map(|_| allocated(65_536)).collect();
    let ids: Vec<u64> = staying.iter().map(|at| allocations.look(*at).id).collect();
    let stopped = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (allocations, staying, ids, primary) = (&allocations, &staying, &ids, &primary);
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
                    let other = (turn * 5 + thread) as usize % staying.len();
                    assert_eq!(allocations.look(staying[other] + turn).id, ids[other]);
                    if thread % 2 == 0 {
                        allocations.forget(range(at, bytes));
                    }
                    free(at);
                }
            });
        }
        // A reader of the table alone sees whole entries or none.
        let (allocations, staying, stopped) = (&allocations, &staying, &stopped);
        let watcher = scope.spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                for at in staying {
                    if let Some(known) = allocations.known(at + 99) {
                        assert_eq!(
                            (known.range, known.kind, known.device),
                            (range(*at, 65_536), Kind::Cuda, 0)
                        );
                    }
                }
            }
        });
        for _ in 0..200 {
            allocations.look(staying[0]);
            std::thread::yield_now();
        }
        stopped.store(true, Ordering::Relaxed);
        watcher.join().unwrap();
    });
    let counters = allocations.counters();
    println!("{counters:?}");
    assert!(counters.entries <= 24 && counters.forgotten > 0 && counters.asked >= 8 * 600);
    for (at, id) in staying.iter().zip(&ids) {
        assert_eq!(allocations.look(*at).id, *id);
    }
    staying.into_iter().for_each(free);
}
