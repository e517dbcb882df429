//! Tests of sends, receives, groups, the total order and the depth of the FIFO.

#![allow(clippy::undocumented_unsafe_blocks, reason = "C calls with the scenario's own buffers, all of them")]

mod support;

use support::*;

const MIB: usize = 1 << 20;

#[test]
#[ignore = "started by the other tests"]
fn child() {
    support::child(&[
        ("ring", ring),
        ("self_send", self_send),
        ("eight_messages", eight_messages),
        ("nine_messages", nine_messages),
        ("fits", fits),
        ("exceeds", exceeds),
        ("fits_four", fits_four),
        ("exceeds_four", exceeds_four),
        ("total_order", total_order),
        ("two_communicators", two_communicators),
        ("many_streams", many_streams),
        ("mixture", mixture),
    ]);
}

/// Grouped sends and receives progress together, whatever their sizes.
#[test]
fn rings() {
    expect_success("ring", Ranks::Threads(4));
    expect_success("ring", Ranks::Processes(3));
    expect_success("ring", Ranks::Processes(2));
}

/// A rank may send to itself inside a group; without a matching receive that is refused.
#[test]
fn self_sends() {
    expect_success("self_send", Ranks::Threads(2));
}

/// Eight messages complete before a receive is posted, the ninth does not.
#[test]
fn fifo_of_messages() {
    expect_success("eight_messages", Ranks::Processes(2));
    expect_failure(
        "nine_messages",
        Ranks::Processes(2),
        &[("WINDLASS_SIM_TIMEOUT_MS", "1000")],
        &["no progress for 1000 ms, waits for rank 1 to receive", "8 messages"],
    );
}

/// 64 MiB complete before their receive is posted, 72 MiB do not; with four ranks 32 and 40.
#[test]
fn fifo_of_bytes() {
    let short = [("WINDLASS_SIM_TIMEOUT_MS", "1000")];
    expect_success("fits", Ranks::Processes(2));
    expect_failure("exceeds", Ranks::Processes(2), &short, &["Send of 75497472 bytes, 67108864 taken"]);
    expect_success("fits_four", Ranks::Threads(4));
    expect_failure("exceeds_four", Ranks::Processes(4), &short, &["Send of 41943040 bytes, 33554432 taken"]);
}

/// An operation starts only when the rank's earlier ones have finished, also on other streams.
#[test]
fn one_order_for_all_streams() {
    expect_failure(
        "total_order",
        Ranks::Processes(2),
        &[("WINDLASS_SIM_TIMEOUT_MS", "1000")],
        &["an earlier operation of this rank that has not started"],
    );
}

/// A group may have two communicators, and several streams.
#[test]
fn groups_over_communicators_and_streams() {
    expect_success("two_communicators", Ranks::Threads(2));
    expect_success("many_streams", Ranks::Processes(2));
}

/// A long random mixture of calls on two communicators keeps its data. Each rank picks one of two streams by itself.
#[test]
fn mixtures() {
    expect_success("mixture", Ranks::Processes(4));
    expect_success("mixture", Ranks::Threads(8));
}

/// Numbers that are equal on all ranks that start with the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

fn mixture(rank: &mut Rank) {
    rank.join();
    let (me, ranks, nccl, world) = (rank.rank, rank.ranks, rank.nccl, rank.comm);
    // A child in reverse order.
    let mut reversed = Comm(0);
    assert_eq!(unsafe { (nccl.split)(world, 0, -(me as i32), &mut reversed, std::ptr::null_mut()) }, SUCCESS);
    let streams = [rank.stream, rank.cuda.stream()];
    let (mut shared, mut own) = (Random(1), Random(me as u64 + 7));
    let mut expected: Vec<(usize, Vec<u8>)> = Vec::new();
    for _ in 0..60 {
        let child = shared.below(2) == 1;
        let (comm, position) = if child { (reversed, ranks - 1 - me) } else { (world, me) };
        (rank.comm, rank.stream) = (comm, streams[own.below(2)]);
        match shared.below(3) {
            0 => {
                let (bytes, shift) = (shared.below(600_000), 1 + shared.below(ranks - 1));
                let (to, from) = ((position + shift) % ranks, (position + ranks - shift) % ranks);
                let send = rank.upload(&vec![position as u8 + 1; bytes]);
                let receive = rank.upload(&vec![0u8; bytes]);
                let code = nccl.group(|| {
                    assert_eq!(rank.recv(receive, bytes, from), SUCCESS);
                    assert_eq!(rank.send(send, bytes, to), SUCCESS);
                });
                assert_eq!(code, SUCCESS);
                expected.push((receive, vec![from as u8 + 1; bytes]));
            }
            1 => {
                let count = 1 + shared.below(40_000);
                let buffer = rank.upload(&vec![position as u8 + 1; count]);
                let code = unsafe { (nccl.all_reduce)(buffer, buffer, count, INT8, SUM, comm, rank.stream) };
                assert_eq!(code, SUCCESS);
                expected.push((buffer, vec![(ranks * (ranks + 1) / 2) as u8; count]));
            }
            _ => {
                let (count, root) = (1 + shared.below(300_000), shared.below(ranks));
                let buffer = rank.upload(&vec![position as u8 + 1; count]);
                let code = unsafe { (nccl.bcast)(buffer, count, INT8, root as i32, comm, rank.stream) };
                assert_eq!(code, SUCCESS);
                expected.push((buffer, vec![root as u8 + 1; count]));
            }
        }
    }
    streams.iter().for_each(|stream| rank.cuda.synchronize(*stream));
    for (step, (buffer, bytes)) in expected.iter().enumerate() {
        assert!(rank.download::<u8>(*buffer, bytes.len()) == *bytes, "step {step}");
    }
    rank.comm = world;
    assert_eq!(nccl.destroy(reversed), SUCCESS);
    rank.leave();
}

fn pattern(rank: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| (index * 31 + rank * 7 + index / 251) as u8).collect()
}

fn ring(rank: &mut Rank) {
    rank.join();
    let (next, previous) = ((rank.rank + 1) % rank.ranks, (rank.rank + rank.ranks - 1) % rank.ranks);
    for bytes in [0, 1, 1000, 300_000, MIB + 3] {
        let send = rank.upload(&pattern(rank.rank, bytes));
        let receive = rank.upload(&vec![0u8; bytes]);
        let code = rank.nccl.group(|| {
            assert_eq!(rank.send(send, bytes, next), SUCCESS);
            assert_eq!(rank.recv(receive, bytes, previous), SUCCESS);
        });
        assert_eq!(code, SUCCESS);
        assert_eq!(rank.download::<u8>(receive, bytes), pattern(previous, bytes), "{bytes} bytes");
    }
    // Larger than the FIFO, in both directions at once, from an odd position in the ring on.
    let bytes = if rank.ranks == 2 { 70 * MIB } else { 34 * MIB };
    let block = |rank| pattern(rank, 999_983);
    let fill = |rank| {
        let mut all = block(rank).repeat(bytes.div_ceil(999_983));
        all.truncate(bytes);
        all
    };
    let (send, receive) = (rank.upload(&fill(rank.rank)), rank.upload(&vec![9u8; bytes]));
    let code = rank.nccl.group(|| {
        assert_eq!(rank.recv(receive, bytes, previous), SUCCESS);
        assert_eq!(rank.send(send, bytes, next), SUCCESS);
    });
    assert_eq!(code, SUCCESS);
    let got = rank.download::<u8>(receive, bytes);
    assert!(got == fill(previous));
    rank.leave();
}

fn self_send(rank: &mut Rank) {
    rank.join();
    let (send, receive) = (rank.upload(&[5u8, 6]), rank.upload(&[0u8; 2]));
    let code = rank.nccl.group(|| {
        rank.send(send, 2, rank.rank);
        rank.recv(receive, 2, rank.rank);
    });
    assert_eq!(code, SUCCESS);
    assert_eq!(rank.download::<u8>(receive, 2), [5, 6]);
    assert_eq!(rank.send(send, 2, rank.rank), INVALID_USAGE);
    rank.leave();
}

/// Rank 0 sends and its stream drains before rank 1, which waits for a second communicator, receives.
fn send_then_receive(rank: &mut Rank, sizes: &[usize]) {
    rank.join();
    let other = rank.nccl.init_rank(rank.ranks, rank.other_id, rank.rank).expect("init");
    let buffer = rank.upload(&vec![0u8; *sizes.iter().max().expect("sizes")]);
    let signal = |rank: &Rank| {
        let code = unsafe { (rank.nccl.all_reduce)(buffer, buffer, 1, INT8, SUM, other, rank.stream) };
        assert_eq!(code, SUCCESS);
        rank.synchronize();
    };
    if rank.rank == 0 {
        sizes.iter().for_each(|bytes| assert_eq!(rank.send(buffer, *bytes, 1), SUCCESS));
        rank.synchronize();
    }
    signal(rank);
    if rank.rank == 1 {
        sizes.iter().for_each(|bytes| assert_eq!(rank.recv(buffer, *bytes, 0), SUCCESS));
    }
    rank.synchronize();
    assert_eq!(rank.nccl.destroy(other), SUCCESS);
    rank.leave();
}

fn eight_messages(rank: &mut Rank) {
    send_then_receive(rank, &[100; 8]);
}

fn nine_messages(rank: &mut Rank) {
    send_then_receive(rank, &[100; 9]);
}

fn fits(rank: &mut Rank) {
    send_then_receive(rank, &[64 * MIB]);
}

fn exceeds(rank: &mut Rank) {
    send_then_receive(rank, &[72 * MIB]);
}

fn fits_four(rank: &mut Rank) {
    send_then_receive(rank, &[32 * MIB]);
}

fn exceeds_four(rank: &mut Rank) {
    send_then_receive(rank, &[40 * MIB]);
}

/// Each rank receives on one stream before it sends on another: that works with two communicators, but not with one.
fn total_order(rank: &mut Rank) {
    rank.join();
    let peer = 1 - rank.rank;
    let buffer = rank.upload(&[0u8; 8]);
    let first = rank.stream;
    rank.stream = rank.cuda.stream();
    extern "C" fn nap(_: *mut libc::c_void) {
        std::thread::sleep(std::time::Duration::from_secs(5));
    }
    // The first operation cannot start; the second must not overtake it.
    unsafe { (rank.cuda.launch_host)(first, nap, std::ptr::null_mut()) };
    let (second, earlier) = (rank.stream, first);
    rank.stream = earlier;
    assert_eq!(rank.send(buffer, 8, peer), SUCCESS);
    rank.stream = second;
    assert_eq!(rank.recv(buffer, 8, peer), SUCCESS);
    rank.synchronize();
}

fn two_communicators(rank: &mut Rank) {
    rank.join();
    let other = rank.nccl.init_rank(rank.ranks, rank.other_id, rank.rank).expect("init");
    let (first, second) = (rank.upload(&[1f32]), rank.upload(&[2f32]));
    let code = rank.nccl.group(|| {
        assert_eq!(rank.all_reduce(first, first, 1), SUCCESS);
        let code = unsafe { (rank.nccl.all_reduce)(second, second, 1, FLOAT32, SUM, other, rank.stream) };
        assert_eq!(code, SUCCESS);
    });
    assert_eq!(code, SUCCESS);
    assert_eq!(rank.download::<f32>(first, 1), [2.0]);
    assert_eq!(rank.download::<f32>(second, 1), [4.0]);
    assert_eq!(rank.nccl.destroy(other), SUCCESS);
    rank.leave();
}

fn many_streams(rank: &mut Rank) {
    rank.join();
    let peer = 1 - rank.rank;
    let (send, receive) = (rank.upload(&[rank.rank as u8]), rank.upload(&[9u8]));
    let (first, second) = (rank.stream, rank.cuda.stream());
    assert_eq!(unsafe { (rank.nccl.group_start)() }, SUCCESS);
    assert_eq!(rank.send(send, 1, peer), SUCCESS);
    rank.stream = second;
    assert_eq!(rank.recv(receive, 1, peer), SUCCESS);
    assert_eq!(unsafe { (rank.nccl.group_end)() }, SUCCESS);
    // The second stream waits for the whole group.
    assert_eq!(rank.download::<u8>(receive, 1), [peer as u8]);
    rank.stream = first;
    rank.leave();
}
