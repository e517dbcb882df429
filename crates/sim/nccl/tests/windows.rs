//! Tests of windows as in NCCL, and of misuse that NCCL does not detect.

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
        ("reach", reach),
        ("abandoned", abandoned),
        ("unlike_offsets", unlike_offsets),
        ("large_block", large_block),
    ]);
}

/// Each registration makes a window with a handle of its own; after deregistering none is left.
#[test]
fn windows_come_and_go() {
    for ranks in [Ranks::Threads(2), BOTH] {
        expect_success("cycles", ranks);
        expect_success("end_of_another", ranks);
    }
}

/// A window keeps its memory, also after `ncclMemFree`.
#[test]
fn windows_keep_memory() {
    expect_success("late_end", BOTH);
}

/// A window's handle leads to the memory of all ranks until it is deregistered; then all its memory is freed.
#[test]
fn windows_reach_all_ranks() {
    // The large blocks are sparse: only the written part takes memory.
    let environment = [("WINDLASS_SIM_STRICT", "1"), ("WINDLASS_SIM_DEVICE_MEMORY", "8192")];
    for ranks in [Ranks::Threads(1), Ranks::Threads(2), BOTH, Ranks::Threads(3), Ranks::Processes(3)] {
        for scenario in ["reach", "abandoned", "unlike_offsets", "large_block"] {
            let ended = run(scenario, ranks, &environment);
            assert!(ended.iter().all(|ended| ended.status == Some(0)), "{scenario} {ranks:?}: {ended:?}");
        }
    }
}

/// The first registration waits for all ranks before it checks its arguments; later ones do not.
#[test]
fn misaligned_windows() {
    expect_success("misaligned", BOTH);
}

/// Ranks hang in NCCL 2.28.9 if their allocations differ in size, or only some have a window already; later releases allow both.
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

/// NCCL 2.28.9 confuses two windows at one address.
#[test]
fn two_windows_at_one_start() {
    expect_failure("twice_at_one_start", BOTH, &[], &["of one of two windows at"]);
}

/// Deregistering does not wait, and is misuse while an operation uses the window.
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

/// The part of a window's record that device code reads.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    host: usize,
    lsa_flat_base: usize,
    lsa_rank: i32,
    world_rank: i32,
    stride_4g: u32,
}

impl Record {
    /// The start of `rank`'s window in this process.
    fn place(&self, rank: usize) -> usize {
        self.lsa_flat_base + rank * ((self.stride_4g as usize) << 32)
    }
}

impl Rank {
    fn read<T: Default>(&self, at: usize) -> T {
        let mut value = T::default();
        let code = unsafe { (self.cuda.copy_to_host)((&raw mut value).cast(), at, std::mem::size_of::<T>()) };
        assert_eq!(code, 0, "cuMemcpyDtoH from {at:#x}");
        value
    }

    fn write(&self, at: usize, value: u64) {
        let code = unsafe { (self.cuda.copy_to_device)(at, (&raw const value).cast(), 8) };
        assert_eq!(code, 0, "cuMemcpyHtoD to {at:#x}");
    }

    fn is_mapped(&self, at: usize) -> bool {
        let (mut base, mut bytes) = (0, 0);
        unsafe { (self.cuda.address_range)(&mut base, &mut bytes, at) == 0 }
    }

    /// Waits for all ranks; `word` is device memory.
    fn meet(&self, word: usize) {
        assert_eq!(self.all_reduce(word, word, 1), SUCCESS);
        self.synchronize();
    }

    /// Frees `word` and destroys the stream, so that the driver counts no leaks.
    fn leave_nothing(&mut self, word: usize) {
        unsafe {
            assert_eq!((self.cuda.memory_free)(word), 0);
            assert_eq!((self.cuda.stream_destroy)(self.stream), 0);
        }
    }
}

fn reach(rank: &mut Rank) {
    const OFFSET: usize = 2 * MIB + 4096;
    const BYTES: usize = 4 * MIB;
    rank.join();
    let word = rank.cuda.allocate(4);
    rank.meet(word);
    let free = rank.cuda.free_bytes();
    let block = rank.nccl.allocate(BLOCK);
    let mine = block + OFFSET;
    let window = rank.window(mine, BYTES);
    let record: Record = rank.read(window);
    assert_ne!(record.host, 0);
    assert_eq!(
        (record.lsa_rank, record.world_rank, record.stride_4g),
        (rank.rank as i32, rank.rank as i32, 1)
    );
    rank.write(mine, 100 + rank.rank as u64);
    rank.write(mine + BYTES - 8, 200 + rank.rank as u64);
    rank.meet(word);
    for peer in 0..rank.ranks {
        let place = record.place(peer);
        assert_ne!(place, mine, "a mapping of its own");
        assert_eq!(rank.read::<u64>(place), 100 + peer as u64);
        assert_eq!(rank.read::<u64>(place + BYTES - 8), 200 + peer as u64);
    }
    let next = (rank.rank + 1) % rank.ranks;
    rank.write(record.place(next) + MIB, 300 + rank.rank as u64);
    rank.meet(word);
    let previous = (rank.rank + rank.ranks - 1) % rank.ranks;
    assert_eq!(rank.read::<u64>(mine + MIB), 300 + previous as u64);
    rank.end_window(window);
    for at in (0..rank.ranks).map(|peer| record.place(peer)).chain([window]) {
        assert!(!rank.is_mapped(at), "{at:#x} is still mapped");
    }
    rank.free(block);
    rank.meet(word);
    assert_eq!(rank.cuda.free_bytes(), free, "a peer holds it");
    rank.leave();
    rank.leave_nothing(word);
}

/// Each rank uses its own offset for all ranks, as in NCCL.
fn unlike_offsets(rank: &mut Rank) {
    rank.join();
    let word = rank.cuda.allocate(4);
    let block = rank.nccl.allocate(BLOCK);
    for other in 0..rank.ranks {
        rank.write(block + other * 4096, (10 * rank.rank + other) as u64);
    }
    let window = rank.window(block + rank.rank * 4096, MIB);
    let record: Record = rank.read(window);
    rank.meet(word);
    for peer in 0..rank.ranks {
        assert_eq!(rank.read::<u64>(record.place(peer)), (10 * peer + rank.rank) as u64);
    }
    rank.end_window(window);
    rank.free(block);
    rank.leave();
    rank.leave_nothing(word);
}

/// The stride between ranks' memory grows with the largest block.
fn large_block(rank: &mut Rank) {
    const OFFSET: usize = 4 << 30;
    rank.join();
    let word = rank.cuda.allocate(4);
    let block = rank.nccl.allocate(OFFSET + BLOCK);
    let window = rank.window(block + OFFSET, BLOCK);
    let record: Record = rank.read(window);
    assert_eq!(record.stride_4g, 2);
    rank.write(block + OFFSET, rank.rank as u64);
    rank.meet(word);
    for peer in 0..rank.ranks {
        assert_eq!(rank.read::<u64>(record.place(peer)), peer as u64);
    }
    rank.end_window(window);
    rank.free(block);
    rank.leave();
    rank.leave_nothing(word);
}

/// The windows of an aborted communicator end with it.
fn abandoned(rank: &mut Rank) {
    rank.join();
    let word = rank.cuda.allocate(4);
    let block = rank.nccl.allocate(BLOCK);
    let window = rank.window(block, BLOCK);
    rank.meet(word);
    assert_eq!(unsafe { (rank.nccl.abort)(rank.comm) }, SUCCESS);
    assert!(!rank.is_mapped(window));
    rank.free(block);
    rank.leave_nothing(word);
}

fn late_end(rank: &mut Rank) {
    rank.join();
    let word = rank.cuda.allocate(4);
    let free = rank.cuda.free_bytes();
    let block = rank.nccl.allocate(BLOCK);
    let window = rank.window(block, BLOCK);
    rank.free(block);
    assert_eq!(rank.cuda.free_bytes(), free - BLOCK);
    rank.end_window(window);
    // Peers keep the memory until they have ended their windows.
    rank.meet(word);
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

/// Blocks a stream until the flag is set.
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

/// An operation in flight forbids deregistering its own window only.
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
