//! Two processes and their arenas. Tests named `child_…` are ignored; their parents run them in a process of its own.

use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use windlass_engine::arena::{Announcement, Event, Holds, Member, PeerArena, Place};

use crate::support::*;

fn child(name: &str, there: &UnixStream) -> Child {
    // SAFETY: clears close-on-exec of a descriptor of ours, so that the child inherits it.
    unsafe { libc::fcntl(there.as_raw_fd(), libc::F_SETFD, 0) };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("processes::{name}"), "--ignored", "--nocapture"]);
    command.env("ARENA_TEST_SOCKET", there.as_raw_fd().to_string()).stdout(Stdio::null()).spawn().unwrap()
}

fn inherited() -> UnixStream {
    let number = std::env::var("ARENA_TEST_SOCKET").unwrap().parse().unwrap();
    // SAFETY: inherited for this purpose; nobody else in this process knows it.
    unsafe { UnixStream::from_raw_fd(number) }
}

fn send(socket: &UnixStream, announcement: &Announcement) {
    let mut wire = announcement.place.to_wire();
    let mut part = libc::iovec { iov_base: wire.as_mut_ptr().cast(), iov_len: wire.len() };
    let mut control = [0_u64; 4];
    let mut message = message(&mut part, &mut control);
    // SAFETY: the control buffer is aligned and larger than one header with one descriptor.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(header).cast::<i32>().write_unaligned(announcement.descriptor.as_raw_fd());
        assert_eq!(libc::sendmsg(socket.as_raw_fd(), &raw mut message, 0), wire.len() as isize);
    }
}

fn receive(socket: &UnixStream) -> (Place, OwnedFd) {
    let mut wire = [0; Place::WIRE_BYTES];
    let mut part = libc::iovec { iov_base: wire.as_mut_ptr().cast(), iov_len: wire.len() };
    let mut control = [0_u64; 4];
    let mut message = message(&mut part, &mut control);
    // SAFETY: as above; the descriptor is new and ours.
    unsafe {
        assert_eq!(
            libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_WAITALL),
            wire.len() as isize
        );
        let number = libc::CMSG_DATA(libc::CMSG_FIRSTHDR(&message)).cast::<i32>().read_unaligned();
        (Place::from_wire(wire), OwnedFd::from_raw_fd(number))
    }
}

fn message(part: &mut libc::iovec, control: &mut [u64; 4]) -> libc::msghdr {
    // SAFETY: all zero is an empty message.
    let mut message = unsafe { MaybeUninit::<libc::msghdr>::zeroed().assume_init() };
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: a computation only.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(4) } as usize;
    message
}

/// Both ends come to the same point.
fn meet(mut socket: &UnixStream) {
    socket.write_all(&[1]).unwrap();
    let mut byte = [0];
    socket.read_exact(&mut byte).unwrap();
}

/// One rank of two, on its device: every slice is announced, mapped and probed both ways; a later one grows the arena;
/// all goes back at the end.
fn rank(me: u32, socket: &UnixStream) {
    let application = Application::on(me as i32);
    let arena = application.arena(256 * MIB);
    let peer = PeerArena::new(application.driver);
    let other = [Member { rank: 1 - me, process: u64::from(1 - me) }];
    let mut all = Vec::new();
    for (turn, bytes) in [MIB, MIB, 48 * MIB].into_iter().enumerate() {
        let slice = lend(&arena, bytes);
        let word = |rank: u32| 1000 * (turn as u32 + 1) + rank;
        arena.store(slice.address(), word(me)).unwrap();
        send(socket, &slice.announce(&other).unwrap());
        let (place, descriptor) = receive(socket);
        let mapped = peer.map(place, descriptor.as_fd(), &arena, &Holds::new()).unwrap();
        assert_eq!(mapped.bytes(), slice.bytes());
        let last = mapped.address() + mapped.bytes() - 4;
        arena.probe(mapped.address(), word(1 - me), last, word(me) + 10).unwrap();
        meet(socket);
        assert_eq!(arena.load(slice.address() + slice.bytes() - 4).unwrap(), word(1 - me) + 10);
        all.push((slice, mapped));
    }
    assert_eq!(peer.mapped(), (2, 52 * MIB), "two slices of the first chunk, mapped once");
    let leases: Vec<_> = all.iter().map(|(slice, _)| slice.lease()).collect();
    drop(all);
    arena.settle().unwrap();
    assert_eq!(arena.counters().waiting_bytes, 50 * MIB, "the other may still touch them");
    peer.settle();
    assert_eq!(peer.mapped(), (0, 0));
    meet(socket);
    leases.into_iter().for_each(|lease| arena.note(Event::Closed(lease, 1 - me)));
    arena.settle().unwrap();
    assert_eq!(arena.counters().mapped_bytes, 0);
    assert!(on_a_gpu() || application.free_bytes() == 1 << 30);
}

/// Both processes see each other's stores, in slices of a shared chunk and after growth.
#[test]
fn two_processes() {
    let (here, there) = UnixStream::pair().unwrap();
    let mut process = child("child_rank", &there);
    drop(there);
    rank(0, &here);
    assert!(process.wait().unwrap().success());
}

#[test]
#[ignore = "a child process of the test above"]
fn child_rank() {
    rank(1, &inherited());
}

/// A peer that is killed counts as closed, and what it had mapped of ours goes back. Its own memory stays readable for
/// us until we let go.
#[test]
fn a_peer_is_killed() {
    let application = Application::on(0);
    let arena = application.arena(64 * MIB);
    let peer = PeerArena::new(application.driver);
    let (here, there) = UnixStream::pair().unwrap();
    let mut process = child("child_that_is_killed", &there);
    drop(there);
    let slice = lend(&arena, MIB);
    send(&here, &slice.announce(&[Member { rank: 1, process: 7 }]).unwrap());
    let (place, descriptor) = receive(&here);
    let mapped = peer.map(place, descriptor.as_fd(), &arena, &Holds::new()).unwrap();
    drop(descriptor);
    process.kill().unwrap();
    assert!(!process.wait().unwrap().success());
    assert_eq!(arena.load(mapped.address()).unwrap(), 77);
    drop((slice, mapped));
    arena.settle().unwrap();
    assert_eq!(arena.counters().waiting_bytes, MIB);
    arena.note(Event::Died(7));
    arena.settle().unwrap();
    peer.settle();
    assert_eq!((arena.counters().mapped_bytes, peer.mapped().0), (0, 0));
}

#[test]
#[ignore = "a child process of the test above"]
fn child_that_is_killed() {
    let socket = inherited();
    let application = Application::on(1);
    let arena = application.arena(64 * MIB);
    let peer = PeerArena::new(application.driver);
    let (place, descriptor) = receive(&socket);
    let _mapped = peer.map(place, descriptor.as_fd(), &arena, &Holds::new()).unwrap();
    let slice = lend(&arena, MIB);
    arena.store(slice.address(), 77).unwrap();
    send(&socket, &slice.announce(&[Member { rank: 0, process: 6 }]).unwrap());
    // Until it is killed.
    let _ = (&socket).read(&mut [0]);
    unreachable!("the parent lives");
}

/// Strictness sees what these tests must not leave: a slice that nobody closes fails its process.
#[test]
fn leaks_are_seen() {
    if on_a_gpu() {
        return;
    }
    let (_here, there) = UnixStream::pair().unwrap();
    let mut process = child("child_that_leaks", &there);
    assert_eq!(process.wait().unwrap().code(), Some(86));
}

#[test]
#[ignore = "a child process of the test above"]
fn child_that_leaks() {
    let application = Application::on(0);
    std::mem::forget(lend(&application.arena(16 * MIB), MIB));
}
