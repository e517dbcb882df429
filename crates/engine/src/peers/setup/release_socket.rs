//! Tells a rank, after an init that failed, when no other rank touches its region any more. The session is over then and tells nothing.
//! So each rank that comes to know a region gets an end of a socket pair with it, and closes that end once it has unmapped the region.
//! The owner holds the other end, and reads its close when no rank is left.
//!
//! If the session's host dies, one rank may have heard that there is a peer group and another that there is none. The first one
//! then says that it keeps the region, and only the end of its process tells more. Where an init succeeds, all ends are closed
//! at once.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use windlass_base::descriptor::Ours;

/// The end of the socket pair that the region's owner holds.
#[derive(Debug)]
pub(in crate::peers) struct ReleaseSocket {
    end: Ours,
    /// The ranks that said that they keep the region, one bit each.
    keepers: AtomicU64,
    over: AtomicBool,
}

/// The end of a rank that knows the region.
#[derive(Debug)]
pub(in crate::peers) struct Hold(pub Ours);

impl ReleaseSocket {
    /// Makes the two ends. The second one is for the other ranks.
    pub(in crate::peers) fn new() -> rustix::io::Result<(ReleaseSocket, Hold)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (end, others) =
            Ours::open_pair(|| net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None))?;
        Ok((ReleaseSocket { end, keepers: AtomicU64::new(0), over: AtomicBool::new(false) }, Hold(others)))
    }

    /// The ranks that do not touch the region any more, one bit each. Does not wait.
    pub(in crate::peers) fn let_go(&self) -> u64 {
        let mut said = [0; 64];
        while !self.over.load(Ordering::Relaxed) {
            match net::recv(&self.end, &mut said, RecvFlags::empty()) {
                Ok((_, 0)) | Err(Errno::CONNRESET) => self.over.store(true, Ordering::Relaxed),
                Ok((_, count)) => {
                    let bits = said.iter().take(count);
                    let bits =
                        bits.fold(0, |all, rank| all | 1_u64.checked_shl(u32::from(*rank)).unwrap_or(0));
                    self.keepers.fetch_or(bits, Ordering::Relaxed);
                }
                Err(Errno::INTR) => {}
                // No message yet, or an error: the end of a process is noticed all the same.
                Err(_) => return 0,
            }
        }
        !self.keepers.load(Ordering::Relaxed)
    }
}

impl Hold {
    /// Says that this rank keeps the region, and closes.
    pub(in crate::peers) fn keep(self, rank: u32) {
        // If the owner does not hear it any more, it needs no message.
        let _ = net::send(&self.0, &[rank as u8], SendFlags::NOSIGNAL);
    }
}

impl AsFd for Hold {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn another(hold: &Hold) -> Hold {
        Hold(Ours::new(hold.as_fd().try_clone_to_owned().unwrap()).unwrap())
    }

    /// No rank has let go while one end is open. Then all have, except those that said that they keep the region.
    #[test]
    fn ends() {
        let (release_socket, first) = ReleaseSocket::new().unwrap();
        let (second, third) = (another(&first), another(&first));
        assert_eq!(release_socket.let_go(), 0);
        drop(first);
        second.keep(2);
        assert_eq!(release_socket.let_go(), 0, "one holds it");
        drop(third);
        assert_eq!((release_socket.let_go(), release_socket.let_go()), (!4, !4));
    }

    /// A closed owner's end causes neither a signal nor an error.
    #[test]
    fn nobody_hears() {
        let (release_socket, hold) = ReleaseSocket::new().unwrap();
        drop(release_socket);
        hold.keep(1);
    }
}
