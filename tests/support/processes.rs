//! Two processes of a test: the second is the same program, which runs one ignored test and has a socket to the first.

use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use windlass_transport::heap::{Announcement, Place};

const SOCKET: &str = "ENGINE_TEST_SOCKET";

/// Runs the ignored test `processes::NAME` of this program in a new process.
pub fn child(name: &str, there: &UnixStream) -> Child {
    // SAFETY: clears close-on-exec of a descriptor of ours, so that the child inherits it.
    unsafe { libc::fcntl(there.as_raw_fd(), libc::F_SETFD, 0) };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("processes::{name}"), "--ignored", "--nocapture"]);
    command.env(SOCKET, there.as_raw_fd().to_string()).stdout(Stdio::null()).spawn().unwrap()
}

/// In the second process: its socket.
pub fn inherited() -> UnixStream {
    let number = std::env::var(SOCKET).unwrap().parse().unwrap();
    // SAFETY: inherited for this purpose; nobody else in this process knows it.
    unsafe { UnixStream::from_raw_fd(number) }
}

pub fn tell(socket: &UnixStream, announcement: &Announcement) {
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
        libc::CMSG_DATA(header).cast::<i32>().write_unaligned(announcement.descriptor.as_fd().as_raw_fd());
        assert_eq!(libc::sendmsg(socket.as_raw_fd(), &raw mut message, 0), wire.len() as isize);
    }
}

pub fn hear(socket: &UnixStream) -> (Place, OwnedFd) {
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

/// Waits until the other process has come to the same point.
pub fn meet(mut socket: &UnixStream) {
    socket.write_all(&[1]).unwrap();
    let mut byte = [0];
    socket.read_exact(&mut byte).unwrap();
}
