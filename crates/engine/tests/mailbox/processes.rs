//! Two processes, each with one rank, over arenas that are announced and mapped. Tests named `child_…` are ignored; their
//! parents run them in a process of its own.

use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use windlass_engine::arena::{Announcement, Event, Holds, Member, PeerArena, Place};
use windlass_engine::mailbox::{Direction, Layout};
use windlass_kernels::launch::Geometry;

use crate::support::*;

fn child(name: &str, there: &UnixStream) -> Child {
    // SAFETY: clears close-on-exec of a descriptor of ours, so that the child inherits it.
    unsafe { libc::fcntl(there.as_raw_fd(), libc::F_SETFD, 0) };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("processes::{name}"), "--ignored", "--nocapture"]);
    command.env("MAIL_TEST_SOCKET", there.as_raw_fd().to_string()).stdout(Stdio::null()).spawn().unwrap()
}

fn inherited() -> UnixStream {
    let number = std::env::var("MAIL_TEST_SOCKET").unwrap().parse().unwrap();
    // SAFETY: inherited for this purpose; nobody else in this process knows it.
    unsafe { UnixStream::from_raw_fd(number) }
}

fn tell(socket: &UnixStream, announcement: &Announcement) {
    let mut wire = announcement.place.to_wire();
    let mut part = libc::iovec { iov_base: wire.as_mut_ptr().cast(), iov_len: wire.len() };
    let mut control = [0_u64; 4];
    let mut message = header(&mut part, &mut control);
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

fn hear(socket: &UnixStream) -> (Place, OwnedFd) {
    let mut wire = [0; Place::WIRE_BYTES];
    let mut part = libc::iovec { iov_base: wire.as_mut_ptr().cast(), iov_len: wire.len() };
    let mut control = [0_u64; 4];
    let mut message = header(&mut part, &mut control);
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

fn header(part: &mut libc::iovec, control: &mut [u64; 4]) -> libc::msghdr {
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

/// A rank of two on its device: born over the socket, `body`, and an end that gives all back.
fn live(me: u32, socket: &UnixStream, body: impl FnOnce(&Device, &Rank)) {
    let other = 1 - me;
    let device = Device::new(me as i32);
    device.make_current();
    let holds = Holds::new();
    let slice = device.arena.lend(Layout::of(2, &GEOMETRY).bytes, &holds).unwrap();
    slice.wait_zeroed(SOON).unwrap();
    tell(socket, &slice.announce(&[Member { rank: other, process: u64::from(other) }]).unwrap());
    let peer = PeerArena::new(device.driver);
    let (place, descriptor) = hear(socket);
    let mapped = peer.map(place, descriptor.as_fd(), &device.arena, &holds).unwrap();
    drop(descriptor);
    let mut slices = vec![slice.address(); 2];
    slices[other as usize] = mapped.address();
    let mailbox = mailbox(&device, Geometry { rank: me, ..GEOMETRY }, BLOCKS, slices, &holds);
    let rank = Rank { rank: me, mailbox, slice, holds };
    meet(socket);
    body(&device, &rank);
    eventually("idle", || rank.mailbox.is_idle().unwrap());
    drop((rank, mapped));
    device.arena.note(Event::Died(u64::from(other)));
    peer.settle();
    assert_eq!(peer.mapped(), (0, 0));
}

fn exchanges(me: u32, socket: &UnixStream) {
    live(me, socket, |device, rank| {
        let stream = device.stream();
        for bytes in [1, 1920, 31_000, 90_001, 400_000] {
            let messages =
                [message(0, 1, bytes), message(1, 0, bytes / 2), message(0, 1, 17), message(me, me, 5)];
            let side = Side::of(me, &messages);
            for _ in 0..3 {
                rank.mailbox.run(&side.operations, stream.handle()).unwrap();
            }
            stream.synchronize();
            side.check();
        }
        // Neither unmaps before both are done.
        meet(socket);
    });
}

/// Ranks in processes of their own exchange messages of both wires, larger than the rings, and give all back.
#[test]
fn two_processes() {
    let (here, there) = UnixStream::pair().unwrap();
    let mut process = child("child_rank", &there);
    drop(there);
    exchanges(0, &here);
    assert!(process.wait().unwrap().success());
}

#[test]
#[ignore = "a child process of the test above"]
fn child_rank() {
    exchanges(1, &inherited());
}

/// A peer is killed in the middle of a transfer: the operation waits, an abort ends it, and the report names the peer.
#[test]
fn a_peer_is_killed() {
    let (here, there) = UnixStream::pair().unwrap();
    let mut process = child("child_that_is_killed", &there);
    drop(there);
    live(0, &here, |device, rank| {
        let stream = device.stream();
        let side = Side::of(0, &[message(1, 0, 8), message(1, 0, 300_000)]);
        rank.mailbox.run(&side.operations, stream.handle()).unwrap();
        meet(&here);
        process.kill().unwrap();
        assert!(!process.wait().unwrap().success());
        std::thread::sleep(Duration::from_millis(20));
        assert!(stream.is_busy());
        rank.mailbox.abort();
        stream.synchronize();
        let stuck = rank.mailbox.stuck().unwrap();
        assert!(!stuck.waits.is_empty());
        assert!(
            stuck.waits.iter().all(|wait| wait.peer == 1 && wait.direction == Direction::Receive),
            "{stuck}"
        );
    });
}

#[test]
#[ignore = "a child process of the test above"]
fn child_that_is_killed() {
    let socket = inherited();
    live(1, &socket, |device, rank| {
        let stream = device.stream();
        let side = Side::of(1, &[message(1, 0, 8)]);
        rank.mailbox.run(&side.operations, stream.handle()).unwrap();
        stream.synchronize();
        meet(&socket);
        // Until it is killed.
        let _ = (&socket).read(&mut [0]);
        unreachable!("the parent lives");
    });
}
