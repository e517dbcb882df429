//! Tests of the cost of finding a registered buffer again: no heap allocation, and a limited time in release builds.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::time::Instant;

use windlass_engine::features::registration::cache::{Key, Use};

use crate::strict::{Run, range};

struct Counting;

thread_local! {
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
    static HELD: Cell<i64> = const { Cell::new(0) };
}

/// Bytes on the heap that this thread allocated and did not free.
pub fn held() -> i64 {
    HELD.get()
}

// SAFETY: the system's allocator does all of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.set(ALLOCATED.get() + 1);
        HELD.set(HELD.get() + layout.size() as i64);
        // SAFETY: the caller's layout, unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.set(HELD.get() - layout.size() as i64);
        // SAFETY: the caller's pointer and layout, unchanged.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A registered buffer is found within 15 ns among 64 others in random order, without a heap allocation. The time is the best of
/// many rounds, so that a busy machine does not matter.
#[test]
fn known_buffers() {
    const MIB: u64 = 1 << 20;
    const ROUNDS: u64 = 100;
    for entries in [1_u64, 16, 64, 1024] {
        let mut run = Run::new(1024, u64::MAX);
        let keys: Vec<Key> = (0..entries).map(|i| run.strict.allocate(range(i * 4 * MIB, 2 * MIB))).collect();
        keys.iter().for_each(|key| assert!(run.want_whole(*key, 1).is_ok()));
        let Run { mut cache, mut strict, .. } = run;
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut wanted = Vec::new();
        for _ in 0..4096 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let key = keys[(state >> 33) as usize % keys.len()];
            wanted.push((key, range(key.range.base + (state >> 44) % MIB, 4096)));
        }
        let before = ALLOCATED.get();
        let (mut best_ns, mut hits) = (f64::INFINITY, 0);
        for round in 0..ROUNDS {
            let start = Instant::now();
            for (key, part) in &wanted {
                let found = cache.want(&mut strict, black_box(*key), black_box(*part), Use(2 + round));
                hits += u64::from(found.is_ok());
            }
            best_ns = best_ns.min(start.elapsed().as_secs_f64() * 1e9 / wanted.len() as f64);
        }
        assert_eq!(ALLOCATED.get(), before, "looking up allocates");
        assert_eq!((hits, strict.registered), (ROUNDS * wanted.len() as u64, entries));
        println!("{entries} registered: found in {best_ns:.1} ns");
        if cfg!(not(debug_assertions)) && entries <= 64 {
            assert!(best_ns <= 15.0, "{best_ns:.1} ns with {entries} registered");
        }
    }
}
