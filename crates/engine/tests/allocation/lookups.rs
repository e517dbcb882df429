//! Tests of the cost of finding a known allocation: no heap allocation, and a limited time in release builds.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::c_void;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use windlass_base::gpu::Driver;
use windlass_base::gpu::failure::Code;
use windlass_engine::features::memory::allocation::Allocations;

use crate::memory::*;
use crate::support::*;

struct Counting;

thread_local! {
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does all of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.set(ALLOCATED.get() + 1);
        // SAFETY: the caller's layout, unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's pointer and layout, unchanged.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const EACH: u64 = 4 * MIB;

/// How often the driver below was asked for more than an id.
static ASKED: AtomicU64 = AtomicU64::new(0);

/// A driver with an allocation at every multiple of 4 MiB, which answers at once.
unsafe extern "C" fn instant(count: u32, asked: *const u32, places: *mut *mut c_void, at: u64) -> Code {
    if count > 1 {
        ASKED.fetch_add(1, Ordering::Relaxed);
    }
    for index in 0..count as usize {
        // SAFETY: so many attributes, and as many places of eight bytes.
        unsafe {
            let value = match *asked.add(index) {
                7 => at / EACH + 1,
                11 | 19 => at / EACH * EACH,
                12 | 18 => EACH,
                2 => 2,
                10 => 1,
                _ => 0,
            };
            (*places.add(index)).cast::<u64>().write(value);
        }
    }
    Code(0)
}

/// A pointer's allocation is found within 60 ns among 1024 others in random order, with a driver that takes no time. Nothing is
/// allocated on the heap, not even for a new one. The time is the best of many rounds, so that a busy machine does not matter.
#[test]
fn known_pointers() {
    let mut calls = start().calls;
    calls.cuPointerGetAttributes = instant;
    let driver: &'static Driver = Box::leak(Box::new(Driver::of(calls)));
    for entries in [1_u64, 16, 256, 1024] {
        let allocations = Allocations::new(driver, 1024);
        let before = ALLOCATED.get();
        for entry in 0..entries {
            assert_eq!(allocations.look((1 + entry) * EACH).range.bytes, EACH);
        }
        assert_eq!(ALLOCATED.get(), before, "taking one in allocates");
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut pointers = Vec::new();
        for _ in 0..4096 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            pointers.push((1 + (state >> 33) % entries) * EACH + (state >> 44) % EACH);
        }
        let best = |find: &dyn Fn(u64)| {
            let mut best_ns = f64::INFINITY;
            for _ in 0..100 {
                let start = Instant::now();
                pointers.iter().for_each(|pointer| find(black_box(*pointer)));
                best_ns = best_ns.min(start.elapsed().as_secs_f64() * 1e9 / pointers.len() as f64);
            }
            best_ns
        };
        let before = ALLOCATED.get();
        let asking = best(&|pointer| assert_ne!(black_box(allocations.look(pointer)).id, 0));
        assert_eq!(ALLOCATED.get(), before, "looking allocates");
        assert_eq!(ASKED.swap(0, Ordering::Relaxed), entries, "each was asked for once and has stayed");
        println!("{entries} known: looked for in {asking:.1} ns beside the driver's time");
        if cfg!(not(debug_assertions)) {
            assert!(asking <= 60.0, "{asking:.1} ns with {entries} known");
        }
    }
}
