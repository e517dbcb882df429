//! Windows as NCCL makes them, and what it lets go wrong.

#![allow(clippy::undocumented_unsafe_blocks, reason = "C calls with the scenario's own buffers, all of them")]

mod support;

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use support::*;

const MIB: usize = 1 << 20;
const BLOCK: usize = 8 * MIB;
const BOTH: Ranks = Ranks::Processes(2);

#[test]
#[ignore = "started by the other tests"]
fn child() {
    support::child(&[
        ("cycles", cycles),
        ("late_end", late_end),
        ("unlike_allocations", unlike_allocations),
        ("known_on_one", known_on_one),
        ("known_on_both", known_on_both),
        ("twice_at_one_start", twice_at_one_start),
        ("in_flight", in_flight),
        ("end_of_another", end_of_another),
        ("misaligned", misaligned),
    ]);
}

/// Each registration makes a window with a handle of its own; none is left.
#[test]
fn windows_come_and_go() {
    for ranks in [Ranks::Threads(2), BOTH] {
        expect_success("cycles", ranks);
        expect_success("end_of_another", ranks);
    }
}

/// A window keeps its memory, also beyond the free.
#[test]
fn windows_keep_memory() {
    expect_success("late_end", BOTH);
}

/// The first registration waits for all ranks before it looks at what is registered; no later one does.
#[test]
fn misaligned_windows() {
    expect_success("misaligned", BOTH);
}

/// Ranks whose allocations differ, or of which only some have a window of theirs, hang in NCCL 2.28.9; later releases take them.
#[test]
fn allocations_that_differ() {
    let text = "window registered of unequal allocations";
    expect_failure("unlike_allocations", BOTH, &[], &[text, "rank 1: ncclCommWindowRegister of 2097152"]);
    let text = "that have one on some ranks only";
    expect_failure(
        "known_on_one",
        BOTH,
        &[],
        &[text, "of an allocation of 8388608 bytes, which has a window"],
    );
    expect_success("known_on_both", BOTH);
    for scenario in ["unlike_allocations", "known_on_one"] {
        let ended = run(scenario, BOTH, &[("WINDLASS_SIM_NCCL_VERSION", "23007")]);
        assert!(ended.iter().all(|ended| ended.status == Some(0)), "{scenario}: {ended:?}");
    }
}

/// NCCL 2.28.9 takes one of two windows at one address for the other.
#[test]
fn two_windows_at_one_start() {
    expect_failure("twice_at_one_start", BOTH, &[], &["of one of two windows at"]);
}

/// Deregistering waits for nothing, and must not end what an operation uses.
#[test]
fn deregistering_beside_operations() {
    let text = "while 2 buffers of operations in flight lie in it";
    expect_failure("in_flight", BOTH, &[], &["ncclCommWindowDeregister of 8388608 bytes", text]);
}

impl Rank {
    fn window(&self, address: usize, bytes: usize) -> usize {
        let mut window = 0;
        assert_eq!(
            unsafe { (self.nccl.window_register)(self.comm, address, bytes, &mut window, 1) },
            SUCCESS
        );
        window
    }

    fn end_window(&self, window: usize) {
        assert_eq!(unsafe { (self.nccl.window_deregister)(self.comm, window) }, SUCCESS);
    }

    fn free(&self, address: usize) {
        assert_eq!(unsafe { (self.nccl.mem_free)(address) }, SUCCESS);
    }
}

fn cycles(rank: &mut Rank) {
    rank.join();
    let mut handles = Vec::new();
    for round in 1..=10 {
        let block = rank.nccl.allocate(BLOCK);
        let window = rank.window(block, BLOCK);
        assert!(!handles.contains(&window), "a handle comes once");
        handles.push(window);
        assert_eq!(rank.all_reduce(block, block, 64), SUCCESS);
        rank.synchronize();
        assert_eq!(rank.nccl.ask("simWindows", rank.comm), 1);
        rank.end_window(window);
        rank.free(block);
        assert_eq!(rank.nccl.ask("simWindowsMade", rank.comm), round);
    }
    let unknown = unsafe { (rank.nccl.window_deregister)(rank.comm, handles[0]) };
    assert_eq!(unknown, INTERNAL_ERROR, "as NCCL's table of handles has it");
    rank.leave();
}

fn misaligned(rank: &mut Rank) {
    rank.join();
    let block = rank.nccl.allocate(BLOCK);
    let register = |address| {
        let mut window = 0;
        unsafe { (rank.nccl.window_register)(rank.comm, address, 4096, &mut window, 1) }
    };
    if rank.rank == 0 {
        std::thread::sleep(std::time::Duration::from_secs(2));
    }
    let began = std::time::Instant::now();
    assert_eq!(register(block + 8), INVALID_ARGUMENT);
    if rank.rank == 1 {
        assert!(began.elapsed().as_millis() > 100, "it has not waited");
        assert_eq!(register(block + 8), INVALID_ARGUMENT, "alone");
    }
    let window = rank.window(block, BLOCK);
    rank.end_window(window);
    rank.free(block);
    rank.leave();
}

fn late_end(rank: &mut Rank) {
    rank.join();
    let free = rank.cuda.free_bytes();
    let block = rank.nccl.allocate(BLOCK);
    let window = rank.window(block, BLOCK);
    rank.free(block);
    assert_eq!(rank.cuda.free_bytes(), free - BLOCK);
    rank.end_window(window);
    assert_eq!(rank.cuda.free_bytes(), free);
    rank.leave();
}

fn unlike_allocations(rank: &mut Rank) {
    rank.join();
    let block = rank.nccl.allocate(BLOCK * (1 + rank.rank));
    let window = rank.window(block, 2 * MIB);
    rank.end_window(window);
    rank.free(block);
    rank.leave();
}

fn known_on_one(rank: &mut Rank) {
    rank.join();
    let blocks = [rank.nccl.allocate(BLOCK), rank.nccl.allocate(BLOCK)];
    let first = rank.window(blocks[0], 2 * MIB);
    let second = rank.window(blocks[rank.rank] + 2 * MIB, 2 * MIB);
    [first, second].into_iter().for_each(|window| rank.end_window(window));
    blocks.into_iter().for_each(|block| rank.free(block));
    rank.leave();
}

fn known_on_both(rank: &mut Rank) {
    rank.join();
    let block = rank.nccl.allocate(BLOCK);
    let windows = [rank.window(block, 2 * MIB), rank.window(block + 2 * MIB, 2 * MIB)];
    windows.into_iter().for_each(|window| rank.end_window(window));
    rank.free(block);
    rank.leave();
}

fn twice_at_one_start(rank: &mut Rank) {
    rank.join();
    let block = rank.nccl.allocate(BLOCK);
    let windows = [rank.window(block, BLOCK), rank.window(block, 2 * MIB)];
    rank.end_window(windows[0]);
}

/// Holds a stream until it is let go.
fn hold(rank: &Rank) -> &'static AtomicBool {
    extern "C" fn wait(data: *mut libc::c_void) {
        let open = unsafe { &*data.cast::<AtomicBool>() };
        while !open.load(SeqCst) {
            std::thread::yield_now();
        }
    }
    let open: &'static AtomicBool = Box::leak(Box::new(AtomicBool::new(false)));
    let data = std::ptr::from_ref(open).cast_mut().cast();
    assert_eq!(unsafe { (rank.cuda.launch_host)(rank.stream, wait, data) }, 0);
    open
}

fn in_flight(rank: &mut Rank) {
    rank.join();
    let block = rank.nccl.allocate(BLOCK);
    let window = rank.window(block, BLOCK);
    let open = hold(rank);
    rank.all_reduce(block, block, 64);
    rank.end_window(window);
    open.store(true, SeqCst);
    rank.synchronize();
}

/// An operation in flight holds up the end of its own window only.
fn end_of_another(rank: &mut Rank) {
    rank.join();
    let blocks = [rank.nccl.allocate(BLOCK), rank.nccl.allocate(BLOCK)];
    let windows = blocks.map(|block| rank.window(block, BLOCK));
    let open = hold(rank);
    rank.all_reduce(blocks[0], blocks[0], 64);
    rank.end_window(windows[1]);
    open.store(true, SeqCst);
    rank.synchronize();
    rank.end_window(windows[0]);
    blocks.into_iter().for_each(|block| rank.free(block));
    rank.leave();
}
