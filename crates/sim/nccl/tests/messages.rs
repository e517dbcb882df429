//! Sends, receives, groups, the total order and the depth of the FIFO.

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
    ]);
}

/// Grouped sends and receives progress together, whatever their sizes.
#[test]
fn rings() {
    expect_success("ring", Ranks::Threads(4));
    expect_success("ring", Ranks::Processes(3));
    expect_success("ring", Ranks::Processes(2));
}

/// A group may send to its own rank; unmatched, that is refused.
#[test]
fn self_sends() {
    expect_success("self_send", Ranks::Threads(2));
}

/// Eight messages complete before a receive is posted, the ninth does not.
#[test]
fn fifo_of_messages() {
    expect_success("eight_messages", Ranks::Processes(2));
    expect_failure("nine_messages", Ranks::Processes(2), &[("WINDLASS_SIM_TIMEOUT_MS", "300")], &[
        "no progress for 300 ms, waits for rank 1 to receive",
        "8 messages",
    ]);
}

/// 64 MiB complete before their receive is posted, 72 MiB do not; with four ranks 32 and 40.
#[test]
fn fifo_of_bytes() {
    let short = [("WINDLASS_SIM_TIMEOUT_MS", "500")];
    expect_success("fits", Ranks::Processes(2));
    expect_failure("exceeds", Ranks::Processes(2), &short, &["Send of 75497472 bytes, 67108864 taken"]);
    expect_success("fits_four", Ranks::Threads(4));
    expect_failure("exceeds_four", Ranks::Threads(4), &short, &["Send of 41943040 bytes, 33554432 taken"]);
}

/// An operation starts only when the rank's earlier ones have finished, also on other streams.
#[test]
fn one_order_for_all_streams() {
    expect_failure("total_order", Ranks::Processes(2), &[("WINDLASS_SIM_TIMEOUT_MS", "300")], &[
        "an earlier operation of this rank that has not started",
    ]);
}

/// Two communicators in one group, and one group over several streams.
#[test]
fn groups_over_communicators_and_streams() {
    expect_success("two_communicators", Ranks::Threads(2));
    expect_success("many_streams", Ranks::Processes(2));
}

fn pattern(rank: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| (index * 31 + rank * 7 + index / 251) as u8).collect()
}

fn ring(rank: &mut Rank) {
    rank.join();
    let (next, previous) = ((rank.rank + 1) % rank.ranks, (rank.rank + rank.ranks - 1) % rank.ranks);
    for bytes in [0, 1, 1000, 300_000, 5 * MIB + 3] {
        let send = rank.upload(&pattern(rank.rank, bytes));
        let receive = rank.upload(&vec![0u8; bytes]);
        let code = rank.nccl.group(|| {
            assert_eq!(rank.send(send, bytes, next), SUCCESS);
            assert_eq!(rank.recv(receive, bytes, previous), SUCCESS);
        });
        assert_eq!(code, SUCCESS);
        assert_eq!(rank.download::<u8>(receive, bytes), pattern(previous, bytes), "{bytes} bytes");
    }
    // Larger than the FIFO, both ways at once.
    let bytes = 70 * MIB;
    let (send, receive) = (rank.upload(&vec![rank.rank as u8; bytes]), rank.upload(&vec![9u8; bytes]));
    let code = rank.nccl.group(|| {
        assert_eq!(rank.recv(receive, bytes, previous), SUCCESS);
        assert_eq!(rank.send(send, bytes, next), SUCCESS);
    });
    assert_eq!(code, SUCCESS);
    assert_eq!(rank.download::<u8>(receive + bytes - 4, 4), [previous as u8; 4]);
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
    let mut id = rank.id;
    id[0] ^= 0xff;
    let other = rank.nccl.init_rank(rank.ranks, id, rank.rank).expect("init");
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

/// Each rank receives on one stream before it sends on another: two communicators would do, one does not.
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
    let mut id = rank.id;
    id[0] ^= 0xff;
    let other = rank.nccl.init_rank(rank.ranks, id, rank.rank).expect("init");
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
