//! Tests of registration as in NCCL, and of misuse that is unsafe there.

#![allow(clippy::undocumented_unsafe_blocks, reason = "C calls with the scenario's own buffers, all of them")]

mod support;

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};
use std::time::{Duration, Instant};
use support::*;

const MIB: usize = 1 << 20;
/// Bytes of all ranks together from which on NCCL looks up the buffers of all-gathers.
const LARGE: usize = 8 * MIB;

#[test]
#[ignore = "started by the other tests"]
fn child() {
    support::child(&[
        ("allocation", allocation),
        ("records", records),
        ("looked_up", looked_up),
        ("several_allocations", several_allocations),
        ("beyond_the_import", beyond_the_import),
        ("forgotten", forgotten),
        ("forgotten_at_destroy", forgotten_at_destroy),
        ("other_memory", other_memory),
        ("mixed_gather", mixed_gather),
        ("half_registered", half_registered),
        ("in_flight", in_flight),
        ("beside_others", beside_others),
        ("aborted_in_flight", aborted_in_flight),
        ("registering_threads", registering_threads),
        ("call_beside_deregister", call_beside_deregister),
        ("questions_beside_deregister", questions_beside_deregister),
        ("abort_beside_deregister", abort_beside_deregister),
    ]);
}

const BOTH: Ranks = Ranks::Processes(2);
const LAX: [(&str, &str); 1] = [("WINDLASS_SIM_STRICT", "0")];
const SLOW: [(&str, &str); 1] = [("WINDLASS_SIM_DEREGISTER_MS", "300")];

fn expect_success_with(scenario: &str, ranks: Ranks, environment: &[(&str, &str)]) {
    for ended in run(scenario, ranks, environment) {
        assert_eq!(ended.status, Some(0), "{scenario} {ranks:?}: {}", ended.stderr);
        assert!(!ended.stderr.contains("sim-cuda: "), "{scenario} {ranks:?}: {}", ended.stderr);
    }
}

/// `ncclMemAlloc` gives memory of one exportable handle, all of which is mapped.
#[test]
fn memory_of_nccl_can_be_mapped_again() {
    expect_success("allocation", Ranks::Processes(1));
}

/// Ranges are rounded to pages and counted.
#[test]
fn ranges_within_ranges_are_one_record() {
    expect_success("records", Ranks::Processes(1));
}

/// The right collectives run registered, by the simulator's count, with the same results.
#[test]
fn collectives_look_their_buffers_up() {
    for ranks in [Ranks::Threads(3), Ranks::Processes(2)] {
        expect_success("looked_up", ranks);
    }
}

/// A registration of several allocations serves buffers that lie in the first one used.
#[test]
fn peers_import_one_allocation() {
    expect_success("several_allocations", BOTH);
    expect_failure("beyond_the_import", BOTH, &[], &["beyond the allocation that peers imported"]);
}

/// Memory that peers have imported stays allocated until the registration ends.
#[test]
fn forgotten_registrations_keep_memory() {
    for ranks in [Ranks::Threads(2), BOTH] {
        expect_success("forgotten", ranks);
        expect_success_with("forgotten_at_destroy", ranks, &LAX);
    }
    expect_failure("forgotten_at_destroy", BOTH, &[], &["leak: registration of"]);
}

/// Other memory at registered addresses is detected, or gets none of the data that peers send.
#[test]
fn other_memory_at_registered_addresses() {
    expect_failure("other_memory", BOTH, &[], &["whose memory was freed"]);
    expect_success_with("other_memory", BOTH, &LAX);
}

/// For all-gathers both buffers must be registered, on all ranks or none.
#[test]
fn gathers_registered_on_some_ranks() {
    let text = "mixed registration of 8388608 bytes: rank 0 registered, rank 1 unregistered";
    expect_failure("mixed_gather", BOTH, &[], &[text]);
    expect_success("half_registered", BOTH);
}

/// Deregistering does not wait, and is misuse while an operation uses the registration.
#[test]
fn deregistering_beside_operations() {
    let text = "while 1 operations of this rank that use it are in flight";
    expect_failure("in_flight", BOTH, &[], &["ncclCommDeregister of 8388608 bytes", text]);
    expect_success_with("in_flight", BOTH, &LAX);
    expect_success_with("beside_others", BOTH, &[]);
    expect_success_with("aborted_in_flight", BOTH, &[]);
}

/// While a thread registers or deregisters, another must not call, except for counters and aborts.
#[test]
fn threads_beside_registrations() {
    expect_failure("registering_threads", Ranks::Processes(1), &[], &["are inside calls at once"]);
    expect_failure("call_beside_deregister", Ranks::Processes(1), &SLOW, &["are inside calls at once"]);
    expect_success_with("questions_beside_deregister", Ranks::Processes(1), &SLOW);
    expect_success_with("abort_beside_deregister", Ranks::Processes(1), &SLOW);
}

impl Rank {
    fn register(&self, address: usize, bytes: usize) -> usize {
        let mut handle = 0;
        assert_eq!(unsafe { (self.nccl.register)(self.comm, address, bytes, &mut handle) }, SUCCESS);
        handle
    }

    fn deregister(&self, handle: usize) {
        assert_eq!(unsafe { (self.nccl.deregister)(self.comm, handle) }, SUCCESS);
    }

    fn free(&self, address: usize) {
        assert_eq!(unsafe { (self.nccl.mem_free)(address) }, SUCCESS);
    }

    fn gather(&self, send: usize, receive: usize, bytes: usize) {
        let code = unsafe { (self.nccl.all_gather)(send, receive, bytes, INT8, self.comm, self.stream) };
        assert_eq!(code, SUCCESS);
    }

    fn registered(&self) -> u64 {
        self.nccl.ask("simRegisteredCollectives", self.comm)
    }

    fn registrations(&self) -> u64 {
        self.nccl.ask("simRegistrations", self.comm)
    }

    /// Fills a buffer with this rank's number and one more.
    fn fill(&self, address: usize, bytes: usize) {
        unsafe { std::ptr::write_bytes(address as *mut u8, 1 + self.rank as u8, bytes) };
    }

    /// The first byte of each rank's part, after waiting for the stream.
    fn parts(&self, address: usize, bytes: usize) -> Vec<u8> {
        self.synchronize();
        (0..self.ranks)
            .map(|rank| unsafe { ((address + rank * bytes + bytes / 2) as *const u8).read() })
            .collect()
    }

    fn all_parts(&self) -> Vec<u8> {
        (0..self.ranks).map(|rank| 1 + rank as u8).collect()
    }
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

fn allocation(rank: &mut Rank) {
    const ALLOWED_HANDLE_TYPES: u32 = 14;
    let address = rank.nccl.allocate(5 * MIB);
    let (mut types, mut base, mut bytes, mut handle, mut descriptor) = (0u64, 0, 0, 0, -1);
    unsafe {
        let place = (&raw mut types).cast();
        assert_eq!((rank.cuda.pointer_attribute)(place, ALLOWED_HANDLE_TYPES, address + 3 * MIB), 0);
        assert_eq!((rank.cuda.address_range)(&mut base, &mut bytes, address + 3 * MIB), 0);
        assert_eq!((types, base, bytes), (1, address, 6 * MIB));
        assert_eq!((rank.cuda.retain_handle)(&mut handle, address + 3 * MIB), 0);
        assert_eq!((rank.cuda.export_handle)(&mut descriptor, handle, 1, 0), 0);
        libc::close(descriptor);
    }
    let alias = rank.cuda.addresses(bytes, 0);
    rank.cuda.place(alias, bytes, handle, rank.rank);
    rank.fill(address, 5 * MIB);
    assert_eq!(unsafe { ((alias + 4 * MIB) as *const u8).read() }, 1);
    let free = rank.cuda.free_bytes();
    rank.free(address);
    assert_eq!(rank.cuda.free_bytes(), free);
    assert_eq!(unsafe { (rank.cuda.unmap)(alias, bytes) }, 0);
    assert_eq!(rank.cuda.free_bytes(), free + bytes);
}

fn records(rank: &mut Rank) {
    rank.join();
    let address = rank.nccl.allocate(4 * MIB);
    assert_eq!(rank.registrations(), 0);
    let whole = rank.register(address + 100, MIB);
    assert_eq!(rank.register(address, 4096), whole);
    assert_eq!(rank.register(address + MIB, 100), whole);
    assert_eq!(rank.registrations(), 1);
    let beyond = rank.register(address + MIB, 4097);
    assert_ne!(beyond, whole);
    assert_eq!(rank.registrations(), 2);
    (0..2).for_each(|_| rank.deregister(whole));
    assert_eq!(rank.registrations(), 2);
    rank.deregister(whole);
    assert_eq!(rank.registrations(), 1);
    assert_eq!(unsafe { (rank.nccl.deregister)(rank.comm, whole) }, INVALID_USAGE);
    rank.deregister(beyond);
    rank.free(address);
    rank.leave();
    assert_eq!(rank.registrations(), u64::MAX);
    assert_eq!(rank.nccl.ask("simRegisteredCollectives", Comm(64)), u64::MAX);
}

fn looked_up(rank: &mut Rank) {
    rank.join();
    let (all, one) = (rank.ranks * LARGE / 2, LARGE / 2);
    let (send, receive) = (rank.nccl.allocate(all), rank.nccl.allocate(all));
    let plain = rank.cuda.allocate(all);
    let (from, to) = (rank.register(send, all), rank.register(receive, all));
    rank.fill(send, all);
    rank.fill(plain, all);
    let expect = |count: u64, what: &str| {
        rank.synchronize();
        assert_eq!(rank.registered(), count, "{what}");
    };
    rank.gather(send, receive, one);
    expect(1, "both are registered");
    assert_eq!(rank.parts(receive, one), rank.all_parts());
    rank.gather(plain, receive, one);
    expect(1, "one is registered");
    rank.gather(send, plain, one);
    expect(1, "the other is registered");
    rank.gather(send, receive, LARGE / rank.ranks - 1);
    expect(1, "small");
    rank.gather(send, receive, LARGE.div_ceil(rank.ranks));
    expect(2, "just large enough");
    rank.fill(receive + rank.rank * one, one);
    rank.gather(receive + rank.rank * one, receive, one);
    expect(3, "in place");
    assert_eq!(rank.parts(receive, one), rank.all_parts());
    assert_eq!(rank.all_reduce(receive, receive, all / 4), SUCCESS);
    expect(3, "an all-reduce in place");
    rank.fill(send, all);
    let (nccl, comm, stream) = (rank.nccl, rank.comm, rank.stream);
    assert_eq!(unsafe { (nccl.broadcast)(send, receive, all, INT8, 1, comm, stream) }, SUCCESS);
    expect(4, "a broadcast");
    assert_eq!(rank.parts(receive, one), vec![2; rank.ranks]);
    let graph = rank.cuda.capture(stream, || rank.gather(send, receive, one));
    rank.cuda.launch(graph, stream);
    expect(4, "captured");
    assert_eq!(rank.parts(receive, one), rank.all_parts());
    [from, to].into_iter().for_each(|handle| rank.deregister(handle));
    rank.gather(send, receive, one);
    expect(4, "registered no more");
    [send, receive].into_iter().for_each(|address| rank.free(address));
    rank.leave();
}

/// Two allocations side by side, registered as one.
fn side_by_side(rank: &Rank) -> (usize, usize) {
    let at = rank.cuda.addresses(2 * LARGE, 0);
    for half in [at, at + LARGE] {
        rank.cuda.place(half, LARGE, rank.cuda.physical(LARGE, rank.rank), rank.rank);
    }
    (at, rank.register(at, 2 * LARGE))
}

fn several_allocations(rank: &mut Rank) {
    rank.join();
    let (at, handle) = side_by_side(rank);
    rank.gather(at + LARGE, at, LARGE / 2);
    rank.gather(at, at + LARGE / 2, LARGE / 2);
    rank.synchronize();
    assert_eq!(rank.registered(), 1);
    rank.deregister(handle);
    rank.leave();
}

fn beyond_the_import(rank: &mut Rank) {
    rank.join();
    let (at, _) = side_by_side(rank);
    rank.gather(at, at, LARGE / 2);
    rank.gather(at, at + LARGE, LARGE / 2);
    rank.synchronize();
}

fn forgotten(rank: &mut Rank) {
    rank.join();
    let send = rank.nccl.allocate(LARGE);
    let from = rank.register(send, LARGE);
    let free = rank.cuda.free_bytes();
    // A registration keeps no memory if it is unused, or used for sending only.
    for uses in 0..2 {
        let receive = rank.nccl.allocate(LARGE);
        let to = rank.register(receive, LARGE);
        if uses == 1 {
            rank.gather(send, receive, LARGE / 2);
            rank.gather(send, receive, LARGE / 2);
            rank.synchronize();
        }
        rank.free(receive);
        assert_eq!(rank.cuda.free_bytes(), free - uses * LARGE);
        rank.deregister(to);
        assert_eq!(rank.cuda.free_bytes(), free);
    }
    rank.free(send);
    assert_eq!(rank.cuda.free_bytes(), free + LARGE);
    rank.deregister(from);
    rank.leave();
}

fn forgotten_at_destroy(rank: &mut Rank) {
    rank.join();
    let free = rank.cuda.free_bytes();
    let both = rank.nccl.allocate(LARGE);
    rank.register(both, LARGE);
    rank.gather(both + rank.rank * LARGE / 2, both, LARGE / 2);
    rank.synchronize();
    rank.free(both);
    assert_eq!(rank.cuda.free_bytes(), free - LARGE);
    rank.leave();
    assert_eq!(rank.cuda.free_bytes(), free);
}

fn other_memory(rank: &mut Rank) {
    rank.join();
    let (send, receive) = (rank.nccl.allocate(LARGE), rank.nccl.allocate(LARGE));
    let (from, to) = (rank.register(send, LARGE), rank.register(receive, LARGE));
    rank.fill(send, LARGE);
    rank.gather(send, receive, LARGE / 2);
    rank.synchronize();
    rank.free(receive);
    assert_eq!(rank.cuda.addresses(LARGE, receive), receive);
    rank.cuda.place(receive, LARGE, rank.cuda.physical(LARGE, rank.rank), rank.rank);
    rank.gather(send, receive, LARGE / 2);
    let mut own = vec![0; rank.ranks];
    own[rank.rank] = 1 + rank.rank as u8;
    assert_eq!(rank.parts(receive, LARGE / 2), own, "what peers sent went to the old memory");
    [from, to].into_iter().for_each(|handle| rank.deregister(handle));
    rank.gather(send, receive, LARGE / 2);
    assert_eq!(rank.parts(receive, LARGE / 2), rank.all_parts());
    rank.free(send);
    rank.leave();
}

fn mixed_gather(rank: &mut Rank) {
    rank.join();
    let (send, receive) = (rank.nccl.allocate(LARGE), rank.nccl.allocate(LARGE));
    rank.register(receive, LARGE);
    if rank.rank == 0 {
        rank.register(send, LARGE);
    }
    rank.gather(send, receive, LARGE / 2);
    rank.synchronize();
}

fn half_registered(rank: &mut Rank) {
    rank.join();
    let (send, receive) = (rank.nccl.allocate(LARGE), rank.nccl.allocate(LARGE));
    let handle = rank.register(if rank.rank == 0 { send } else { receive }, LARGE);
    rank.fill(send, LARGE);
    rank.gather(send, receive, LARGE / 2);
    assert_eq!(rank.parts(receive, LARGE / 2), rank.all_parts());
    assert_eq!(rank.registered(), 0);
    rank.deregister(handle);
    [send, receive].into_iter().for_each(|address| rank.free(address));
    rank.leave();
}

fn in_flight(rank: &mut Rank) {
    rank.join();
    let (send, receive) = (rank.nccl.allocate(LARGE), rank.nccl.allocate(LARGE));
    let handles = [rank.register(send, LARGE), rank.register(receive, LARGE)];
    rank.fill(send, LARGE);
    let open = hold(rank);
    rank.gather(send, receive, LARGE / 2);
    handles.into_iter().for_each(|handle| rank.deregister(handle));
    open.store(true, SeqCst);
    assert_eq!(rank.parts(receive, LARGE / 2), rank.all_parts());
    [send, receive].into_iter().for_each(|address| rank.free(address));
    rank.leave();
}

/// Ends three registrations beside operations in flight: one used by small and unregistered operations, an unused one, and one that has
/// a second user.
fn beside_others(rank: &mut Rank) {
    rank.join();
    let (send, receive, other) =
        (rank.nccl.allocate(LARGE), rank.nccl.allocate(LARGE), rank.nccl.allocate(LARGE));
    let (from, to, unused) =
        (rank.register(send, LARGE), rank.register(receive, LARGE), rank.register(other, LARGE));
    assert_eq!(rank.register(receive, LARGE), to);
    let small = rank.register(rank.nccl.allocate(LARGE), LARGE);
    let open = hold(rank);
    rank.gather(send, receive, LARGE / 2);
    rank.gather(other, other, 4096);
    [unused, small, to].into_iter().for_each(|handle| rank.deregister(handle));
    assert!(!rank.cuda.is_idle(rank.stream), "nothing waited for");
    open.store(true, SeqCst);
    rank.synchronize();
    [from, to].into_iter().for_each(|handle| rank.deregister(handle));
    assert_eq!((rank.registered(), rank.registrations()), (1, 0));
    unsafe { libc::_exit(0) };
}

/// The operation keeps the aborted communicator, and with it the peers' imports.
fn aborted_in_flight(rank: &mut Rank) {
    rank.join();
    let free = rank.cuda.free_bytes();
    let both = rank.nccl.allocate(LARGE);
    rank.register(both, LARGE);
    let open = hold(rank);
    rank.gather(both + rank.rank * LARGE / 2, both, LARGE / 2);
    assert_eq!(unsafe { (rank.nccl.abort)(rank.comm) }, SUCCESS);
    rank.free(both);
    assert_eq!(rank.cuda.free_bytes(), free - LARGE);
    open.store(true, SeqCst);
    rank.synchronize();
    let began = Instant::now();
    while rank.cuda.free_bytes() != free {
        assert!(began.elapsed() < Duration::from_secs(10), "the import has gone");
        std::thread::yield_now();
    }
}

/// Many threads, so that sooner or later two are inside a call at once.
fn registering_threads(rank: &mut Rank) {
    rank.join();
    let (rank, buffer) = (&*rank, rank.nccl.allocate(MIB));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(move || {
                loop {
                    rank.deregister(rank.register(buffer, MIB));
                }
            });
        }
    });
}

/// Runs `body` once, then repeatedly while another thread deregisters.
fn beside_deregister(rank: &Rank, body: impl Fn()) {
    let handle = rank.register(rank.nccl.allocate(MIB), MIB);
    body();
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            let began = Instant::now();
            rank.deregister(handle);
            assert!(began.elapsed() >= Duration::from_millis(300));
        });
        while !thread.is_finished() {
            body();
        }
        thread.join().expect("it deregisters");
    });
}

fn call_beside_deregister(rank: &mut Rank) {
    rank.join();
    let buffer = rank.upload(&[0f32; 8]);
    beside_deregister(rank, || assert_eq!(rank.all_reduce(buffer, buffer, 8), SUCCESS));
}

fn questions_beside_deregister(rank: &mut Rank) {
    rank.join();
    beside_deregister(rank, || {
        let (mut state, mut number) = (-1, -1);
        unsafe {
            assert_eq!((rank.nccl.async_error)(rank.comm, &mut state), SUCCESS);
            assert_eq!((rank.nccl.count)(rank.comm, &mut number), SUCCESS);
            assert_eq!((rank.nccl.user_rank)(rank.comm, &mut number), SUCCESS);
            assert_eq!((rank.nccl.device)(rank.comm, &mut number), SUCCESS);
        }
        assert_eq!(state, SUCCESS);
        assert!(rank.registrations() <= 1);
    });
    assert_eq!(rank.registrations(), 0);
    unsafe { libc::_exit(0) };
}

fn abort_beside_deregister(rank: &mut Rank) {
    rank.join();
    let handle = rank.register(rank.nccl.allocate(MIB), MIB);
    let (nccl, comm) = (rank.nccl, rank.comm);
    let task = &AtomicI32::new(0);
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || unsafe {
            task.store(libc::gettid(), SeqCst);
            (nccl.deregister)(comm, handle)
        });
        // When it sleeps it is inside; earlier the communicator would be gone for it.
        let sleeps = || {
            let about = std::fs::read_to_string(format!("/proc/self/task/{}/stat", task.load(SeqCst)));
            about.is_ok_and(|about| about.contains(") S "))
        };
        while !sleeps() {
            std::thread::yield_now();
        }
        assert_eq!(unsafe { (nccl.abort)(comm) }, SUCCESS);
        assert_eq!(thread.join().expect("it deregisters"), SUCCESS);
    });
    unsafe { libc::_exit(0) };
}
