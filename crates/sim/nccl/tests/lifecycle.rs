//! Tests of inits, child communicators and ends; of arguments and exports.

#![allow(clippy::undocumented_unsafe_blocks, reason = "C calls with the scenario's own buffers, all of them")]

mod support;

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use support::*;

#[test]
#[ignore = "started by the other tests"]
fn child() {
    support::child(&[
        ("queries", queries),
        ("init_all", init_all),
        ("grouped_init", grouped_init),
        ("nonblocking", nonblocking),
        ("splits", splits),
        ("shrinks", shrinks),
        ("aborts", aborts),
        ("abort_queued", abort_queued),
        ("abort_shared_order", abort_shared_order),
        ("abort_init", abort_init),
        ("full", full),
        ("scalable", scalable),
        ("grouped_ends", grouped_ends),
        ("exits", exits),
        ("revokes", revokes),
        ("duplicate_device", duplicate_device),
        ("arguments", arguments),
        ("memory", memory),
        ("forks", forks),
        ("id_twice", id_twice),
        ("unknown_connections", unknown_connections),
        ("early_leaver", early_leaver),
        ("limit_of_files", limit_of_files),
        ("no_context", no_context),
        ("at_exit", at_exit),
    ]);
}

/// Queries give the rank, count and device of the init; then finalize and destroy.
#[test]
fn queries_answer() {
    expect_success("queries", Ranks::Processes(3));
}

/// One thread makes all communicators of a process.
#[test]
fn one_thread_makes_all() {
    expect_success("init_all", Ranks::Threads(1));
    expect_success("grouped_init", Ranks::Threads(1));
}

/// A nonblocking init is in progress until all ranks are there.
#[test]
fn nonblocking_inits() {
    expect_success("nonblocking", Ranks::Processes(2));
}

/// Splits order ranks by key, leave NOCOLOR out, and write the handle when the group ends.
#[test]
fn children_by_color() {
    expect_success("splits", Ranks::Threads(4));
    expect_success("splits", Ranks::Processes(4));
}

/// Survivors make a shrunk communicator without the excluded ranks.
#[test]
fn children_by_exclusion() {
    expect_success("shrinks", Ranks::Processes(3));
}

/// An abort from another thread ends a stuck operation.
#[test]
fn aborts_free_streams() {
    expect_success("aborts", Ranks::Processes(2));
}

/// An abort also ends operations that are queued after a stuck one, on other streams and in shared orders, and inits.
#[test]
fn aborts_reach_everything() {
    expect_success("abort_queued", Ranks::Threads(2));
    expect_success("abort_shared_order", Ranks::Processes(2));
    expect_success("abort_init", Ranks::Processes(1));
}

/// A full /dev/shm is an error code.
#[test]
fn no_shared_memory_is_an_error() {
    expect_success("full", Ranks::Processes(1));
}

/// Several ids name one communicator; a simulated group runs nothing.
#[test]
fn several_ids_and_simulated_groups() {
    expect_success("scalable", Ranks::Processes(2));
}

/// Ends of communicators inside a group wait for the group's end, also for nonblocking communicators.
#[test]
fn ends_in_groups() {
    expect_success("grouped_ends", Ranks::Threads(2));
}

/// A program that fails keeps its own status, and its leaks are still listed.
#[test]
fn leaks_do_not_hide_a_failure() {
    let ended = run("exits", Ranks::Processes(1), &[]);
    assert_eq!(ended[0].status, Some(3), "{ended:?}");
    assert!(ended[0].stderr.contains("leak: never destroyed"), "{ended:?}");
}

/// A revoked communicator refuses operations and still splits.
#[test]
fn revoked_communicators_split() {
    expect_success("revokes", Ranks::Threads(2));
}

/// Two ranks on one device are refused.
#[test]
fn one_device_one_rank() {
    expect_success("duplicate_device", Ranks::Threads(2));
}

/// Bad arguments get NCCL's codes and messages.
#[test]
fn bad_arguments() {
    expect_success("arguments", Ranks::Threads(1));
}

/// `ncclMemAlloc`, nested registrations and windows work.
#[test]
fn memory_and_registrations() {
    expect_success("memory", Ranks::Processes(2));
}

/// A child forked after the first communicator is refused.
#[test]
fn forked_children_are_refused() {
    expect_success("forks", Ranks::Threads(1));
}

/// Every entry point of 2.28 is exported under both names, and nothing else but the counters for tests.
#[test]
fn exports_are_those_of_2_28() {
    let library = libraries().join("libnccl.so.2");
    let output =
        Command::new("nm").args(["-D", "--defined-only"]).arg(library).stderr(Stdio::null()).output();
    let text = String::from_utf8(output.expect("nm runs").stdout).expect("names");
    let mut names: Vec<&str> = text.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    names.sort();
    let mut wanted: Vec<&str> = vec![
        "simAllocations",
        "simFrees",
        "simRegisteredCollectives",
        "simRegistrations",
        "simWindows",
        "simWindowsMade",
    ];
    macro_rules! collect {
        (calls { $($(#[$doc:meta])* [$first:literal $role:ident] fn $name:ident | $twin:ident ($($arguments:tt)*) $(-> $result:ty)?;)* }
         opaque { $([$opaque_first:literal $opaque_role:ident] $opaque:ident $(| $opaque_twin:ident)? -> $opaque_result:ty;)* }) => {
            $(if $first < 22900 { wanted.extend([stringify!($name), stringify!($twin)]); })*
            $(if $opaque_first < 22900 { wanted.push(stringify!($opaque)); $(wanted.push(stringify!($opaque_twin));)? })*
        };
    }
    nccl_sys::for_each_entry!(collect);
    wanted.sort();
    assert_eq!(names, wanted);
}

/// Like the real library, the simulator calls some of its own functions through public names that a preloaded library can replace.
#[test]
fn own_names_can_be_taken() {
    let library = libraries().join("libnccl.so.2");
    let output = Command::new("readelf").args(["-rW"]).arg(library).output().expect("readelf runs");
    let text = String::from_utf8(output.stdout).expect("names");
    for name in ["ncclBroadcast", "ncclGetUniqueId", "ncclCommGetAsyncError"] {
        assert!(
            text.lines().any(|line| line.contains("GLOB_DAT") && line.contains(&format!(" {name} "))),
            "{name}"
        );
    }
}

/// An id makes one communicator only: its root ends when all ranks have reported.
#[test]
fn used_id_is_refused() {
    expect_success("id_twice", Ranks::Processes(3));
    expect_success("id_twice", Ranks::Threads(1));
}

/// Unknown connections do not harm the root: other bytes, or a connection that is closed or reset before it has sent the magic.
#[test]
fn root_takes_unknown_connections() {
    expect_success("unknown_connections", Ranks::Processes(3));
}

/// The process that makes an id may open as many descriptors as its hard limit allows, from then on.
#[test]
fn root_raises_the_limit_of_files() {
    expect_success("limit_of_files", Ranks::Threads(1));
}

/// Before 2.27.3 a connection that closes before it has sent the magic ends the root.
#[test]
fn root_can_be_ended() {
    let is_harmless = |version: &str| {
        let environment = [("WINDLASS_SIM_NCCL_VERSION", version), ("WINDLASS_SIM_TIMEOUT_MS", "500")];
        run("early_leaver", Ranks::Threads(1), &environment).remove(0).status == Some(0)
    };
    assert!(!is_harmless("22605"));
    assert!(is_harmless("22703"));
}

/// Threads without a current context, or with another device's, run operations and end communicators.
#[test]
fn any_context_will_do() {
    expect_success("no_context", Ranks::Processes(2));
}

/// The main thread can use a communicator in exit handlers, after its thread-local storage was destroyed.
#[test]
fn usable_in_exit_handlers() {
    for ended in run("at_exit", Ranks::Processes(2), &[]) {
        assert_eq!(ended.status, Some(7), "{}", ended.stderr);
    }
}

fn queries(rank: &mut Rank) {
    rank.join();
    let (mut count, mut me, mut device, mut version) = (0, 0, 0, 0);
    unsafe {
        assert_eq!((rank.nccl.count)(rank.comm, &mut count), SUCCESS);
        assert_eq!((rank.nccl.user_rank)(rank.comm, &mut me), SUCCESS);
        assert_eq!((rank.nccl.device)(rank.comm, &mut device), SUCCESS);
        assert_eq!((rank.nccl.get_version)(&mut version), SUCCESS);
        assert_eq!(
            (count, me, device, version),
            (rank.ranks as i32, rank.rank as i32, rank.rank as i32, 22809)
        );
        assert_eq!((rank.nccl.finalize)(rank.comm), SUCCESS);
        assert_eq!((rank.nccl.finalize)(rank.comm), INVALID_ARGUMENT);
    }
    rank.leave();
    assert_eq!(rank.nccl.destroy(rank.comm), INVALID_ARGUMENT);
    assert!(rank.nccl.last_error().contains("was destroyed"), "{}", rank.nccl.last_error());
}

/// Sums over the communicators of devices 0, 1 and so on, all in this thread.
fn sum_over(rank: &Rank, comms: &[Comm]) {
    let streams: Vec<usize> = (0..comms.len() as i32)
        .map(|device| {
            rank.cuda.use_device(device);
            rank.cuda.stream()
        })
        .collect();
    let buffers: Vec<usize> = comms.iter().map(|_| rank.upload(&[1f32])).collect();
    let code = rank.nccl.group(|| {
        for (index, comm) in comms.iter().enumerate() {
            let buffer = buffers[index];
            let code =
                unsafe { (rank.nccl.all_reduce)(buffer, buffer, 1, FLOAT32, SUM, *comm, streams[index]) };
            assert_eq!(code, SUCCESS);
        }
    });
    assert_eq!(code, SUCCESS);
    for (index, comm) in comms.iter().enumerate() {
        rank.cuda.synchronize(streams[index]);
        assert_eq!(rank.download::<f32>(buffers[index], 1), [comms.len() as f32]);
        assert_eq!(rank.nccl.destroy(*comm), SUCCESS);
    }
}

fn init_all(rank: &mut Rank) {
    let mut comms = [Comm(0); 4];
    assert_eq!(unsafe { (rank.nccl.init_all)(comms.as_mut_ptr(), 4, std::ptr::null()) }, SUCCESS);
    sum_over(rank, &comms);
}

fn grouped_init(rank: &mut Rank) {
    let mut comms = [Comm(0); 3];
    let code = rank.nccl.group(|| {
        for (index, comm) in comms.iter_mut().enumerate() {
            rank.cuda.use_device(index as i32);
            assert_eq!(unsafe { (rank.nccl.init_rank_c)(comm, 3, UniqueId(rank.id), index as i32) }, SUCCESS);
        }
    });
    assert_eq!(code, SUCCESS);
    sum_over(rank, &comms);
    assert_eq!(unsafe { (rank.nccl.group_end)() }, INVALID_USAGE);
    assert_eq!(rank.nccl.last_error(), "ncclGroupEnd: not in a group call.");
}

/// Waits until the communicator's state is no longer "in progress", and gives it.
fn settle(rank: &Rank, comm: Comm) -> i32 {
    let mut code = IN_PROGRESS;
    while code == IN_PROGRESS {
        std::thread::yield_now();
        assert_eq!(unsafe { (rank.nccl.async_error)(comm, &mut code) }, SUCCESS);
    }
    code
}

fn nonblocking(rank: &mut Rank) {
    let mut config = Config { blocking: 0, ..Config::default() };
    let (ranks, me) = (rank.ranks as i32, rank.rank as i32);
    let mut comm = Comm(0);
    let code = unsafe { (rank.nccl.init_rank_config)(&mut comm, ranks, UniqueId(rank.id), me, &mut config) };
    assert_eq!(code, IN_PROGRESS);
    assert_ne!(comm, Comm(0));
    assert_eq!(settle(rank, comm), SUCCESS);
    rank.comm = comm;
    let buffer = rank.upload(&[1f32]);
    assert!(matches!(rank.all_reduce(buffer, buffer, 1), SUCCESS | IN_PROGRESS));
    assert_eq!(settle(rank, comm), SUCCESS);
    assert_eq!(rank.download::<f32>(buffer, 1), [2.0]);
    assert!(matches!(unsafe { (rank.nccl.finalize)(comm) }, SUCCESS | IN_PROGRESS));
    assert_eq!(settle(rank, comm), SUCCESS);
    rank.leave();
}

fn splits(rank: &mut Rank) {
    rank.join();
    // Ranks 0 and 2 in reverse order, 1 and 3 in none.
    let me = rank.rank as i32;
    let color = if me % 2 == 0 { 7 } else { -1 };
    let mut child = Comm(1);
    let code = rank.nccl.group(|| {
        let code = unsafe { (rank.nccl.split)(rank.comm, color, -me, &mut child, std::ptr::null_mut()) };
        assert_eq!(code, SUCCESS);
        assert_eq!(child, Comm(0));
    });
    assert_eq!(code, SUCCESS);
    assert_eq!(child == Comm(0), color == -1);
    if color == 7 {
        let (mut position, mut count) = (0, 0);
        unsafe {
            assert_eq!((rank.nccl.user_rank)(child, &mut position), SUCCESS);
            assert_eq!((rank.nccl.count)(child, &mut count), SUCCESS);
        }
        assert_eq!((position, count), (1 - me / 2, 2));
    }
    // A second split is another communicator; with splitShare it shares the order.
    let mut config = Config { split_share: 1, ..Config::default() };
    let mut second = Comm(0);
    assert_eq!(unsafe { (rank.nccl.split)(rank.comm, 0, 0, &mut second, &mut config) }, SUCCESS);
    let buffer = rank.upload(&[1f32]);
    assert_eq!(
        unsafe { (rank.nccl.all_reduce)(buffer, buffer, 1, FLOAT32, SUM, second, rank.stream) },
        SUCCESS
    );
    assert_eq!(rank.all_reduce(buffer, buffer, 1), SUCCESS);
    assert_eq!(rank.download::<f32>(buffer, 1), [16.0]);
    assert_eq!(rank.nccl.destroy(child), SUCCESS);
    assert_eq!(rank.nccl.destroy(second), SUCCESS);
    rank.leave();
}

fn shrinks(rank: &mut Rank) {
    rank.join();
    if rank.rank != 1 {
        let mut excluded = [1];
        let mut child = Comm(0);
        let code = unsafe {
            (rank.nccl.shrink)(rank.comm, excluded.as_mut_ptr(), 1, &mut child, std::ptr::null_mut(), 0)
        };
        assert_eq!(code, SUCCESS);
        let buffer = rank.upload(&[1f32]);
        assert_eq!(
            unsafe { (rank.nccl.all_reduce)(buffer, buffer, 1, FLOAT32, SUM, child, rank.stream) },
            SUCCESS
        );
        assert_eq!(rank.download::<f32>(buffer, 1), [2.0]);
        assert_eq!(rank.nccl.destroy(child), SUCCESS);
    }
    rank.leave();
}

fn aborts(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[1f32]);
    if rank.rank == 0 {
        // The peers do not take part in this one.
        assert_eq!(rank.all_reduce(buffer, buffer, 1), SUCCESS);
        assert!(!rank.cuda.is_idle(rank.stream));
    }
    let (nccl, comm) = (rank.nccl, rank.comm);
    let aborting = std::thread::spawn(move || unsafe { (nccl.abort)(comm) });
    rank.synchronize();
    assert_eq!(aborting.join().expect("a thread"), SUCCESS);
    let mut code = 0;
    assert_eq!(unsafe { (rank.nccl.async_error)(rank.comm, &mut code) }, INVALID_ARGUMENT);
}

fn abort_queued(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[1f32]);
    let first = rank.stream;
    if rank.rank == 0 {
        assert_eq!(rank.all_reduce(buffer, buffer, 1), SUCCESS);
        rank.stream = rank.cuda.stream();
        assert_eq!(rank.recv(buffer, 4, 1), SUCCESS);
    }
    assert_eq!(unsafe { (rank.nccl.abort)(rank.comm) }, SUCCESS);
    rank.synchronize();
    rank.cuda.synchronize(first);
}

/// An abort ends the child's stuck operation; then the parent's runs.
fn abort_shared_order(rank: &mut Rank) {
    rank.join();
    let mut config = Config { split_share: 1, ..Config::default() };
    let mut child = Comm(0);
    assert_eq!(unsafe { (rank.nccl.split)(rank.comm, 0, 0, &mut child, &mut config) }, SUCCESS);
    let buffer = rank.upload(&[1f32]);
    let other = rank.cuda.stream();
    if rank.rank == 0 {
        assert_eq!(unsafe { (rank.nccl.recv)(buffer, 1, FLOAT32, 1, child, other) }, SUCCESS);
    }
    assert_eq!(rank.all_reduce(buffer, buffer, 1), SUCCESS);
    assert_eq!(unsafe { (rank.nccl.abort)(child) }, SUCCESS);
    assert_eq!(rank.download::<f32>(buffer, 1), [2.0]);
    rank.cuda.synchronize(other);
    rank.leave();
}

fn abort_init(rank: &mut Rank) {
    let mut config = Config { blocking: 0, ..Config::default() };
    let mut comm = Comm(0);
    let code = unsafe { (rank.nccl.init_rank_config)(&mut comm, 2, UniqueId(rank.id), 0, &mut config) };
    assert_eq!(code, IN_PROGRESS);
    assert_eq!(unsafe { (rank.nccl.abort)(comm) }, SUCCESS);
}

fn scalable(rank: &mut Rank) {
    let mut ids = [UniqueId(rank.id), UniqueId(rank.other_id)];
    let (ranks, me) = (rank.ranks as i32, rank.rank as i32);
    let (mut comm, mut config) = (Comm(0), Config::default());
    let code =
        unsafe { (rank.nccl.init_rank_scalable)(&mut comm, ranks, me, 2, ids.as_mut_ptr(), &mut config) };
    assert_eq!(code, SUCCESS);
    rank.comm = comm;
    let buffer = rank.upload(&[1f32]);
    assert_eq!(unsafe { (rank.nccl.group_start)() }, SUCCESS);
    assert_eq!(rank.all_reduce(buffer, buffer, 1), SUCCESS);
    let mut info = SimInfo { size: size_of::<SimInfo>(), magic: 0x7468_5283, version: 22809, time: -1.0 };
    assert_eq!(unsafe { (rank.nccl.group_simulate_end)(&mut info) }, SUCCESS);
    assert!(info.time > 0.0);
    assert_eq!(rank.download::<f32>(buffer, 1), [1.0]);
    rank.leave();
}

fn grouped_ends(rank: &mut Rank) {
    rank.join();
    let mut config = Config { blocking: 0, ..Config::default() };
    let (ranks, me) = (rank.ranks as i32, rank.rank as i32);
    let mut other = Comm(0);
    unsafe { (rank.nccl.init_rank_config)(&mut other, ranks, UniqueId(rank.other_id), me, &mut config) };
    assert_eq!(settle(rank, other), SUCCESS);
    let code = rank.nccl.group(|| {
        assert_eq!(rank.nccl.destroy(other), SUCCESS);
        assert_eq!(rank.nccl.destroy(rank.comm), SUCCESS);
    });
    assert_eq!(code, SUCCESS);
    assert_eq!(rank.nccl.destroy(rank.comm), INVALID_ARGUMENT);
}

fn exits(rank: &mut Rank) {
    rank.join();
    std::process::exit(3);
}

/// A limit on file sizes has the effect of a full file system.
fn full(rank: &mut Rank) {
    let limit = libc::rlimit { rlim_cur: 4096, rlim_max: 4096 };
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        libc::setrlimit(libc::RLIMIT_FSIZE, &limit);
    }
    assert_eq!(rank.nccl.init_rank(1, rank.id, 0), Err(SYSTEM_ERROR));
    assert!(rank.nccl.last_error().starts_with("/dev/shm"), "{}", rank.nccl.last_error());
}

fn revokes(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[1f32]);
    if rank.rank == 0 {
        assert_eq!(rank.all_reduce(buffer, buffer, 1), SUCCESS);
    }
    assert_eq!(unsafe { (rank.nccl.revoke)(rank.comm, 0) }, SUCCESS);
    rank.synchronize();
    assert_eq!(rank.all_reduce(buffer, buffer, 1), INVALID_USAGE);
    let mut child = Comm(0);
    assert_eq!(unsafe { (rank.nccl.split)(rank.comm, 0, 0, &mut child, std::ptr::null_mut()) }, SUCCESS);
    assert_eq!(
        unsafe { (rank.nccl.all_reduce)(buffer, buffer, 1, FLOAT32, SUM, child, rank.stream) },
        SUCCESS
    );
    assert_eq!(rank.download::<f32>(buffer, 1), [2.0]);
    assert_eq!(rank.nccl.destroy(child), SUCCESS);
    rank.leave();
}

fn duplicate_device(rank: &mut Rank) {
    rank.cuda.use_device(0);
    assert_eq!(rank.nccl.init_rank(rank.ranks, rank.id, rank.rank), Err(INVALID_USAGE));
    assert!(rank.nccl.last_error().starts_with("Duplicate GPU detected"), "{}", rank.nccl.last_error());
}

fn arguments(rank: &mut Rank) {
    let nccl = rank.nccl;
    let mut comm = Comm(0);
    assert_eq!(unsafe { (nccl.init_rank_c)(&mut comm, 1, UniqueId(rank.id), 1) }, INVALID_ARGUMENT);
    let mut config = Config { magic: 0, ..Config::default() };
    let code = unsafe { (nccl.init_rank_config)(&mut comm, 1, UniqueId(rank.id), 0, &mut config) };
    assert_eq!(code, INVALID_ARGUMENT);
    rank.join();
    let buffer = rank.upload(&[0f32]);
    let reduce = |datatype, operator, comm| unsafe {
        (nccl.all_reduce)(buffer, buffer, 1, datatype, operator, comm, rank.stream)
    };
    assert_eq!(reduce(99, SUM, rank.comm), INVALID_ARGUMENT);
    assert_eq!(nccl.last_error(), "AllReduce : invalid type 99");
    assert_eq!(reduce(FLOAT32, -1, rank.comm), INVALID_ARGUMENT);
    assert_eq!(reduce(FLOAT32, 77, rank.comm), INVALID_ARGUMENT);
    assert_eq!(reduce(FLOAT32, SUM, Comm(0)), INVALID_ARGUMENT);
    assert_eq!(nccl.last_error(), "AllReduce : comm argument is NULL");
    let foreign = [0u64; 8];
    assert_eq!(reduce(FLOAT32, SUM, Comm(foreign.as_ptr() as usize)), INVALID_ARGUMENT);
    assert_eq!(nccl.last_error(), "Error: corrupted comm object detected");
    let code = unsafe { (nccl.broadcast)(buffer, buffer, 1, FLOAT32, 1, rank.comm, rank.stream) };
    assert_eq!(code, INVALID_ARGUMENT);
    assert_eq!(rank.send(buffer, 4, 9), INVALID_ARGUMENT);
    assert_eq!(rank.all_reduce(0, 0, 1), INVALID_ARGUMENT);
    assert_eq!(rank.all_reduce(0, 0, 0), SUCCESS);
    // An error inside a group comes again at its end, and nothing of the group runs.
    let code = nccl.group(|| {
        assert_eq!(rank.send(buffer, 4, 9), INVALID_ARGUMENT);
    });
    assert_eq!(code, INVALID_ARGUMENT);
    rank.leave();
}

fn memory(rank: &mut Rank) {
    rank.join();
    let nccl = rank.nccl;
    let bytes = 2 << 20;
    let (first, second) = (nccl.allocate(bytes), nccl.allocate(bytes));
    let (mut whole, mut part) = (0, 0);
    unsafe {
        assert_eq!((nccl.register)(rank.comm, first, bytes, &mut whole), SUCCESS);
        assert_eq!((nccl.register)(rank.comm, first + 4096, 4096, &mut part), SUCCESS);
        assert_eq!(whole, part);
        assert_eq!((nccl.register)(rank.comm, second, bytes, &mut part), SUCCESS);
    }
    assert_eq!(rank.all_reduce(first, second, bytes / 4), SUCCESS);
    rank.synchronize();
    unsafe {
        assert_eq!((nccl.deregister)(rank.comm, whole), SUCCESS);
        assert_eq!((nccl.deregister)(rank.comm, whole), SUCCESS);
        assert_eq!((nccl.deregister)(rank.comm, whole), INVALID_USAGE);
        assert_eq!((nccl.deregister)(rank.comm, part), SUCCESS);
    }
    let mut window = 0;
    unsafe {
        assert_eq!((nccl.window_register)(rank.comm, first, bytes, &mut window, 1), SUCCESS);
        assert_ne!(window, 0);
        assert_eq!(rank.all_reduce(first + 64, first + 128, 8), SUCCESS);
        rank.synchronize();
        assert_eq!((nccl.window_deregister)(rank.comm, window), SUCCESS);
        assert_eq!((nccl.mem_free)(first), SUCCESS);
        assert_eq!((nccl.mem_free)(second), SUCCESS);
    }
    rank.leave();
}

fn forks(rank: &mut Rank) {
    rank.join();
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut count = 0;
        let code = unsafe { (rank.nccl.count)(rank.comm, &mut count) };
        unsafe { libc::_exit(if code == SYSTEM_ERROR { 0 } else { 1 }) };
    }
    let mut status = 0;
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0);
    rank.leave();
}

/// Checks the helper: it must report a process that fails.
#[test]
fn a_child_that_fails_is_seen() {
    let started = Instant::now();
    let ended = run("no such scenario", Ranks::Threads(1), &[]);
    assert_ne!(ended[0].status, Some(0));
    assert!(started.elapsed() < Duration::from_secs(10));
}

fn id_twice(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[1f32]);
    assert_eq!(rank.all_reduce(buffer, buffer, 1), SUCCESS);
    assert_eq!(rank.download::<f32>(buffer, 1), [rank.ranks as f32]);
    rank.leave();
    // The root closes its socket a moment after its last answer.
    while TcpStream::connect(root_of(&rank.id)).is_ok() {
        std::thread::yield_now();
    }
    let (ranks, me, mut comm) = (rank.ranks as i32, rank.rank as i32, Comm(0));
    assert_eq!(unsafe { (rank.nccl.init_rank_c)(&mut comm, ranks, UniqueId(rank.id), me) }, REMOTE_ERROR);
    assert!(rank.nccl.last_error().contains("the root of the id"), "{}", rank.nccl.last_error());
    assert_eq!(unsafe { (rank.nccl.abort)(comm) }, SUCCESS);
}

/// The address of an id's root.
fn root_of(id: &[u8; 128]) -> SocketAddr {
    SocketAddr::from(([id[12], id[13], id[14], id[15]], u16::from_be_bytes([id[10], id[11]])))
}

fn unknown_connections(rank: &mut Rank) {
    if rank.rank == 0 {
        let root = root_of(&rank.id);
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 4096], b"seven b", b""] {
            let mut unknown_connection = TcpStream::connect(root).expect("the root listens");
            unknown_connection.write_all(bytes).expect("sent");
        }
        let reset = TcpStream::connect(root).expect("the root listens");
        let hard = libc::linger { l_onoff: 1, l_linger: 0 };
        let size = size_of_val(&hard) as libc::socklen_t;
        let place = (&raw const hard).cast();
        unsafe { libc::setsockopt(reset.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, place, size) };
    }
    rank.join();
    rank.leave();
}

fn limit_of_files(rank: &mut Rank) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    limit.rlim_cur = limit.rlim_max - 1;
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    assert_eq!(unsafe { (rank.nccl.get_unique_id)(&mut UniqueId([0; 128])) }, SUCCESS);
    while limit.rlim_cur != limit.rlim_max {
        unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
        std::thread::yield_now();
    }
    rank.join();
    rank.leave();
}

fn early_leaver(rank: &mut Rank) {
    // The root runs in this process, with its environment.
    let mut id = UniqueId([0; 128]);
    assert_eq!(unsafe { (rank.nccl.get_unique_id)(&mut id) }, SUCCESS);
    drop(TcpStream::connect(root_of(&id.0)));
    rank.comm = rank.nccl.init_rank(1, id.0, 0).expect("init");
    rank.leave();
}

fn no_context(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[1f32]);
    let other = (rank.rank as i32 + 1) % 2;
    assert_eq!(unsafe { (rank.cuda.set_current)(0) }, 0);
    assert_eq!(rank.all_reduce(buffer, buffer, 1), SUCCESS);
    rank.synchronize();
    rank.cuda.use_device(other);
    assert_eq!(rank.all_reduce(buffer, buffer, 1), SUCCESS);
    assert_eq!(rank.download::<f32>(buffer, 1), [4.0]);
    assert_eq!(unsafe { (rank.cuda.set_current)(0) }, 0);
    let (mut child, mut registration, mut window) = (Comm(0), 0, 0);
    unsafe {
        assert_eq!((rank.nccl.split)(rank.comm, 0, 0, &mut child, std::ptr::null_mut()), SUCCESS);
        assert_eq!(rank.nccl.destroy(child), SUCCESS);
        rank.cuda.use_device(rank.rank as i32);
        let block = rank.nccl.allocate(1 << 21);
        assert_eq!((rank.cuda.set_current)(0), 0);
        assert_eq!((rank.nccl.register)(rank.comm, block, 1 << 21, &mut registration), SUCCESS);
        assert_eq!((rank.nccl.deregister)(rank.comm, registration), SUCCESS);
        assert_eq!((rank.nccl.window_register)(rank.comm, block, 1 << 21, &mut window, 0), SUCCESS);
        assert_eq!((rank.nccl.window_deregister)(rank.comm, window), SUCCESS);
        assert_eq!((rank.nccl.mem_free)(block), SUCCESS);
        let of_first_device = rank.nccl.allocate(1 << 21);
        assert_eq!((rank.nccl.mem_free)(of_first_device), SUCCESS);
    }
    assert_eq!(unsafe { (rank.cuda.set_current)(0) }, 0);
    rank.leave();
}

/// The communicator that an exit handler uses and ends.
static LEFT: Mutex<Option<Rank>> = Mutex::new(None);

fn at_exit(rank: &mut Rank) {
    unsafe { libc::atexit(ends_at_exit) };
    rank.join();
    let buffer = rank.upload(&[1f32]);
    assert_eq!(rank.nccl.group(|| assert_eq!(rank.all_reduce(buffer, buffer, 1), SUCCESS)), SUCCESS);
    let Rank { rank, ranks, comm, stream, cuda, nccl, ref local, id, other_id } = *rank;
    let local = local.clone();
    *LEFT.lock().expect("nobody panicked") =
        Some(Rank { rank, ranks, comm, stream, cuda, nccl, local, id, other_id });
    // Handlers run on this thread, after the destructors of its thread-local storage.
    std::process::exit(0);
}

extern "C" fn ends_at_exit() {
    let mut rank = LEFT.lock().expect("nobody panicked").take().expect("a communicator");
    let buffer = rank.upload(&[1f32]);
    let code = rank.nccl.group(|| assert_eq!(rank.all_reduce(buffer, buffer, 1), SUCCESS));
    assert_eq!(code, SUCCESS);
    assert_eq!(rank.download::<f32>(buffer, 1), [2.0]);
    rank.leave();
    unsafe { libc::_exit(7) };
}
