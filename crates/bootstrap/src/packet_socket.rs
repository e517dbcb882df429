//! Unix sockets of packets (`SOCK_SEQPACKET`), which keep a message and its descriptors together, with abstract names. None of them waits.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::negotiated::Token;
use windlass_base::descriptor::Ours;
use windlass_base::descriptor::fork_lock::without_forks;

/// The most descriptors of one packet.
pub(super) const PACKET_DESCRIPTORS: usize = 64;

pub(super) fn socket() -> rustix::io::Result<Ours> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ours::open(|| net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None))
}

pub(super) fn accepted(listener: &Ours) -> rustix::io::Result<Ours> {
    Ours::open(|| net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK))
}

pub(super) fn address(descriptor_socket: Token) -> rustix::io::Result<SocketAddrUnix> {
    let name = format!("windlass-{:032x}", u128::from_be_bytes(descriptor_socket.0));
    SocketAddrUnix::new_abstract_name(name.as_bytes())
}

/// Sends a packet with these descriptors.
pub(super) fn send_with(
    socket: impl AsFd,
    bytes: &[IoSlice<'_>],
    descriptors: &[BorrowedFd<'_>],
) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PACKET_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::NOBUFS);
    }
    net::sendmsg(socket, bytes, &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// Receives a packet with its descriptors, with no fork in between. Returns its bytes. A packet that is cut off is an error.
pub(super) fn received_with(
    socket: &Ours,
    buffers: &mut [IoSliceMut<'_>],
    descriptors: &mut Vec<Ours>,
) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PACKET_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    // Nothing may allocate later.
    descriptors.reserve(PACKET_DESCRIPTORS);
    let receive = || {
        without_forks(|| {
            let received = net::recvmsg(socket, buffers, &mut control, RecvFlags::CMSG_CLOEXEC)?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(new) = message {
                    for one in new {
                        descriptors.push(Ours::new(one)?);
                    }
                }
            }
            Ok(received)
        })
    };
    let received = received(receive, |received| received.bytes == 0)?;
    let is_cut = received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    if is_cut { Err(Errno::MSGSIZE) } else { Ok(received.bytes) }
}

/// Calls `receive` on a packet socket that does not block, and once more if the result is an end.
///
/// Linux looks for packets first, and then whether the other side has closed (`__unix_dgram_recvmsg`,
/// net/unix/af_unix.c). If the peer sends and closes between the two, it reports the end though packets are there.
/// After a reported end no more can come, so a second look finds all packets.
pub(super) fn received<T>(
    mut receive: impl FnMut() -> rustix::io::Result<T>,
    is_end: impl Fn(&T) -> bool,
) -> rustix::io::Result<T> {
    let first = receive()?;
    if is_end(&first) { receive() } else { Ok(first) }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    /// One end is checked, two are believed.
    #[test]
    fn ends_are_looked_at_twice() {
        let told = |answers: &[Result<usize, Errno>]| {
            let mut answers = answers.iter();
            let told = received(|| *answers.next().unwrap(), |length| *length == 0);
            (told, answers.len())
        };
        assert_eq!(told(&[Ok(0), Ok(3), Ok(0)]), (Ok(3), 1));
        assert_eq!(told(&[Ok(0), Ok(0)]), (Ok(0), 0));
        assert_eq!(told(&[Ok(3), Ok(0)]), (Ok(3), 1));
        assert_eq!(told(&[Err(Errno::AGAIN), Ok(3)]), (Err(Errno::AGAIN), 1));
    }
}
