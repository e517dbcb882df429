//! Tests that every strict check ends the process with status 86 and names the misuse.

#![allow(clippy::undocumented_unsafe_blocks, reason = "C calls with the scenario's own buffers, all of them")]

mod support;

use support::*;

const MIB: usize = 1 << 20;

#[test]
#[ignore = "started by the other tests"]
fn child() {
    support::child(&[
        ("different_calls", different_calls),
        ("different_counts", different_counts),
        ("different_operators", different_operators),
        ("different_roots", different_roots),
        ("different_sizes", different_sizes),
        ("two_threads", two_threads),
        ("mixed_registration", mixed_registration),
        ("mixed_messages", mixed_messages),
        ("unequal_offsets", unequal_offsets),
        ("unequal_windows", unequal_windows),
        ("freed_memory", freed_memory),
        ("after_destroy", after_destroy),
        ("captured_on_one", captured_on_one),
        ("leaks", leaks),
        ("missing_peer", missing_peer),
        ("dead_peer", dead_peer),
        ("never_joined", never_joined),
        ("replay_after_destroy", replay_after_destroy),
        ("after_finalize", after_finalize),
        ("same_rank", same_rank),
        ("different_ranks", different_ranks),
        ("after_abort", after_abort),
        ("different_exchanges", different_exchanges),
        ("destroyed_windows", destroyed_windows),
    ]);
}

const BOTH: Ranks = Ranks::Processes(2);
const SHORT: [(&str, &str); 1] = [("WINDLASS_SIM_TIMEOUT_MS", "1000")];

/// Ranks must make the same call with the same arguments.
#[test]
fn mismatched_collectives() {
    let failure = |scenario, text| expect_failure(scenario, BOTH, &[], &["sim-nccl: communicator", text]);
    failure("different_calls", "mismatched collectives: different calls");
    failure("different_calls", "rank 1: AllGather(");
    failure("different_counts", "mismatched collectives: different counts");
    failure("different_operators", "mismatched collectives: different operators");
    failure("different_roots", "mismatched collectives: different roots");
}

/// A receive must be as large as its send.
#[test]
fn mismatched_messages() {
    let text = "size mismatch: rank 0 Send of 100 bytes to rank 1, rank 1 Recv of 200 bytes";
    expect_failure("different_sizes", BOTH, &[], &[text]);
}

/// Only one thread at a time may be inside a communicator.
#[test]
fn threads_inside_one_communicator() {
    expect_failure("two_threads", Ranks::Processes(1), &[], &["are inside calls at once"]);
}

/// All ranks must register, or none.
#[test]
fn registration_on_some_ranks() {
    let text = "mixed registration of 2097152 bytes: rank 0 registered, rank 1 unregistered";
    expect_failure("mixed_registration", BOTH, &[], &[text]);
    let text =
        "rank 0 sends 2097152 bytes from a registered buffer, rank 1 receives into an unregistered buffer";
    expect_failure("mixed_messages", BOTH, &[], &[text]);
    let ended = run("mixed_messages", BOTH, &[("WINDLASS_SIM_STRICT", "0")]);
    assert!(ended.iter().all(|ended| ended.status == Some(0)), "{ended:?}");
}

/// Windows must be equal on all ranks, and used at equal offsets.
#[test]
fn windows_that_differ() {
    expect_failure(
        "unequal_offsets",
        BOTH,
        &[],
        &["unequal window offsets of sendbuff: rank 0 window 1 offset 0, rank 1"],
    );
    expect_failure(
        "unequal_windows",
        BOTH,
        &[],
        &["window registered with unequal sizes", "rank 1: ncclCommWindowRegister of"],
    );
}

/// Registered memory must not be freed before its registration ends.
#[test]
fn freed_memory_that_is_registered() {
    expect_failure("freed_memory", BOTH, &[], &["whose memory was freed"]);
}

/// A destroyed communicator must not be used, by calls or by graphs.
#[test]
fn use_after_destroy() {
    expect_failure("after_destroy", Ranks::Processes(1), &[], &["was destroyed, then used by AllReduce"]);
    expect_failure("replay_after_destroy", BOTH, &[], &["after the communicator was destroyed"]);
}

/// A communicator must not be used after an abort or a finalize.
#[test]
fn use_after_other_ends() {
    expect_failure("after_finalize", Ranks::Processes(1), &[], &["after ncclCommFinalize"]);
    expect_failure("after_abort", Ranks::Processes(1), &[], &["was aborted, then used by AllReduce"]);
}

/// The ranks of an init must agree on their number, have different ranks, and make the same call.
#[test]
fn mismatched_sessions() {
    expect_failure("same_rank", Ranks::Threads(2), &[], &["two callers joined as this rank"]);
    expect_failure("different_ranks", Ranks::Threads(2), &[], &["but a peer said"]);
    expect_failure(
        "different_exchanges",
        BOTH,
        &[],
        &["mismatched calls", "ncclCommSplit", "ncclCommWindowRegister"],
    );
}

/// Windows and registrations that end with their communicator are leaks.
#[test]
fn leaks_at_destroy() {
    expect_failure(
        "destroyed_windows",
        BOTH,
        &[],
        &["leak: window of 2097152 bytes", "leak: registration of 4096 bytes"],
    );
}

/// All ranks must capture a collective, or none.
#[test]
fn captured_on_some_ranks() {
    expect_failure(
        "captured_on_one",
        BOTH,
        &[],
        &["captured on some ranks only: rank 0 captured, rank 1 eager"],
    );
}

/// Objects that were never ended are listed.
#[test]
fn leaks_at_exit() {
    expect_failure(
        "leaks",
        BOTH,
        &[],
        &[
            "leak: never destroyed",
            "leak: registration of",
            "leak: ncclMemAlloc of 4096 bytes",
            "leak: 1 groups never ended",
            "leak: 1 reduction operators never destroyed",
        ],
    );
    let ended = run("leaks", BOTH, &[("WINDLASS_SIM_STRICT", "0")]);
    assert!(ended.iter().all(|ended| ended.status == Some(0)), "{ended:?}");
}

/// A stuck operation says what every rank waits for.
#[test]
fn deadlocks_are_dumped() {
    expect_failure(
        "missing_peer",
        Ranks::Processes(3),
        &SHORT,
        &[
            "no progress for 1000 ms, waits for rank",
            "waits for rank 2 to take part",
            "  rank 2 (process",
            "in Recv(",
            "waits for rank 0 to send",
        ],
    );
    expect_failure(
        "never_joined",
        Ranks::Processes(2),
        &SHORT,
        &["waits for all ranks to join", "rank 1: has not joined"],
    );
}

/// A peer that died is named.
#[test]
fn dead_peers_are_named() {
    let ended = run("dead_peer", BOTH, &SHORT);
    assert_eq!(ended[0].status, Some(86), "{ended:?}");
    assert!(ended[0].stderr.contains("dead (the process is gone; NCCL would hang)"), "{ended:?}");
}

fn different_calls(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[0f32; 64]);
    if rank.rank == 0 {
        rank.all_reduce(buffer, buffer, 8);
    } else {
        unsafe { (rank.nccl.all_gather)(buffer, buffer, 8, FLOAT32, rank.comm, rank.stream) };
    }
    rank.synchronize();
}

fn different_counts(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[0f32; 64]);
    rank.all_reduce(buffer, buffer, 8 + rank.rank);
    rank.synchronize();
}

fn different_operators(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[0f32; 64]);
    let operator = if rank.rank == 0 { SUM } else { AVERAGE };
    unsafe { (rank.nccl.all_reduce)(buffer, buffer, 8, FLOAT32, operator, rank.comm, rank.stream) };
    rank.synchronize();
}

fn different_roots(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[0f32; 64]);
    unsafe { (rank.nccl.broadcast)(buffer, buffer, 8, FLOAT32, rank.rank as i32, rank.comm, rank.stream) };
    rank.synchronize();
}

fn different_sizes(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[0u8; 256]);
    if rank.rank == 0 {
        rank.send(buffer, 100, 1);
    } else {
        rank.recv(buffer, 200, 0);
    }
    rank.synchronize();
    // The sender has long finished; it stays until the receiver has reported.
    rank.all_reduce(buffer, buffer, 1);
    rank.synchronize();
}

/// Many threads, so that sooner or later two are inside a call at once.
fn two_threads(rank: &mut Rank) {
    rank.join();
    let (nccl, comm, stream) = (rank.nccl, rank.comm, rank.stream);
    let buffer = rank.upload(&[0f32; 64]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(move || {
                loop {
                    unsafe { (nccl.all_reduce)(buffer, buffer, 8, FLOAT32, SUM, comm, stream) };
                }
            });
        }
    });
}

fn mixed_registration(rank: &mut Rank) {
    rank.join();
    let bytes = 2 * MIB;
    let buffer = rank.nccl.allocate(bytes);
    let mut handle = 0;
    if rank.rank == 0 {
        assert_eq!(unsafe { (rank.nccl.register)(rank.comm, buffer, bytes, &mut handle) }, SUCCESS);
    }
    rank.all_reduce(buffer, buffer, bytes / 4);
    rank.synchronize();
}

fn mixed_messages(rank: &mut Rank) {
    rank.join();
    let bytes = 2 * MIB;
    let buffer = rank.nccl.allocate(bytes);
    let mut handle = 0;
    if rank.rank == 0 {
        assert_eq!(unsafe { (rank.nccl.register)(rank.comm, buffer, bytes, &mut handle) }, SUCCESS);
        rank.send(buffer, bytes, 1);
    } else {
        rank.recv(buffer, bytes, 0);
    }
    rank.synchronize();
    let word = rank.upload(&[0f32]);
    rank.all_reduce(word, word, 1);
    rank.synchronize();
    assert_eq!(unsafe { (rank.nccl.deregister)(rank.comm, handle) }, SUCCESS);
    assert_eq!(unsafe { (rank.nccl.mem_free)(buffer) }, SUCCESS);
    rank.leave();
}

fn unequal_offsets(rank: &mut Rank) {
    rank.join();
    let bytes = 2 * MIB;
    let buffer = rank.nccl.allocate(bytes);
    let mut window = 0;
    assert_eq!(unsafe { (rank.nccl.window_register)(rank.comm, buffer, bytes, &mut window, 1) }, SUCCESS);
    let place = buffer + 64 * rank.rank;
    rank.all_reduce(place, place, 8);
    rank.synchronize();
}

fn unequal_windows(rank: &mut Rank) {
    rank.join();
    let bytes = 2 * MIB;
    let buffer = rank.nccl.allocate(bytes);
    let mut window = 0;
    unsafe { (rank.nccl.window_register)(rank.comm, buffer, bytes - 4096 * rank.rank, &mut window, 1) };
}

fn freed_memory(rank: &mut Rank) {
    rank.join();
    let bytes = 2 * MIB;
    let buffer = rank.nccl.allocate(bytes);
    let mut handle = 0;
    assert_eq!(unsafe { (rank.nccl.register)(rank.comm, buffer, bytes, &mut handle) }, SUCCESS);
    assert_eq!(unsafe { (rank.nccl.mem_free)(buffer) }, SUCCESS);
    let again = rank.nccl.allocate(bytes);
    // The new block may lie elsewhere than the old one; the call may fail before it uses the memory.
    let _ = again;
    rank.all_reduce(buffer, buffer, bytes / 4);
    rank.synchronize();
}

fn after_destroy(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[0f32; 64]);
    rank.leave();
    rank.all_reduce(buffer, buffer, 8);
}

fn replay_after_destroy(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[0f32; 64]);
    let graph = rank.cuda.capture(rank.stream, || assert_eq!(rank.all_reduce(buffer, buffer, 8), SUCCESS));
    rank.leave();
    rank.cuda.launch(graph, rank.stream);
    rank.synchronize();
}

fn captured_on_one(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[0f32; 64]);
    if rank.rank == 0 {
        let graph =
            rank.cuda.capture(rank.stream, || assert_eq!(rank.all_reduce(buffer, buffer, 8), SUCCESS));
        rank.cuda.launch(graph, rank.stream);
    } else {
        rank.all_reduce(buffer, buffer, 8);
    }
    rank.synchronize();
}

fn leaks(rank: &mut Rank) {
    rank.join();
    let buffer = rank.nccl.allocate(4096);
    let (mut handle, mut operator) = (0, 0);
    let one = 1f32.to_le_bytes();
    unsafe {
        assert_eq!((rank.nccl.register)(rank.comm, buffer, 4096, &mut handle), SUCCESS);
        assert_eq!((rank.nccl.pre_mul_sum)(&mut operator, one.as_ptr(), FLOAT32, 1, rank.comm), SUCCESS);
        assert_eq!((rank.nccl.group_start)(), SUCCESS);
    }
}

/// Ranks 0 and 1 reduce, rank 2 waits for a message of rank 0.
fn missing_peer(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[0f32; 64]);
    if rank.rank == 2 {
        rank.recv(buffer, 8, 0);
    } else {
        rank.all_reduce(buffer, buffer, 8);
    }
    rank.synchronize();
}

fn dead_peer(rank: &mut Rank) {
    rank.join();
    if rank.rank == 1 {
        unsafe { libc::_exit(3) };
    }
    let buffer = rank.upload(&[0f32; 64]);
    rank.all_reduce(buffer, buffer, 8);
    rank.synchronize();
}

fn never_joined(rank: &mut Rank) {
    if rank.rank == 0 {
        rank.join();
    } else {
        unsafe { libc::_exit(86) };
    }
}

fn after_finalize(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[0f32; 64]);
    assert_eq!(unsafe { (rank.nccl.finalize)(rank.comm) }, SUCCESS);
    rank.all_reduce(buffer, buffer, 8);
}

fn after_abort(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[0f32; 64]);
    assert_eq!(unsafe { (rank.nccl.abort)(rank.comm) }, SUCCESS);
    rank.all_reduce(buffer, buffer, 8);
}

fn same_rank(rank: &mut Rank) {
    rank.rank = 0;
    rank.join();
}

fn different_ranks(rank: &mut Rank) {
    rank.ranks += rank.rank;
    rank.join();
}

fn different_exchanges(rank: &mut Rank) {
    rank.join();
    if rank.rank == 0 {
        let mut child = Comm(0);
        unsafe { (rank.nccl.split)(rank.comm, 0, 0, &mut child, std::ptr::null_mut()) };
    } else {
        let (buffer, mut window) = (rank.nccl.allocate(2 * MIB), 0);
        unsafe { (rank.nccl.window_register)(rank.comm, buffer, 2 * MIB, &mut window, 1) };
    }
}

fn destroyed_windows(rank: &mut Rank) {
    rank.join();
    let (buffer, mut window, mut handle) = (rank.nccl.allocate(2 * MIB), 0, 0);
    unsafe {
        assert_eq!((rank.nccl.window_register)(rank.comm, buffer, 2 * MIB, &mut window, 1), SUCCESS);
        assert_eq!((rank.nccl.register)(rank.comm, buffer, 4096, &mut handle), SUCCESS);
    }
    rank.leave();
    assert_eq!(unsafe { (rank.nccl.mem_free)(buffer) }, SUCCESS);
}
