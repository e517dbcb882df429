//! Tests of passing descriptors between participants.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::thread;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, send, socket};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use windlass_base::descriptor::Ours;

use windlass_bootstrap::Preparation;
use windlass_bootstrap::descriptors::{
    DESCRIPTORS_MAX, DescriptorSocket, PAYLOAD_BYTES_MAX, Sending, Trouble,
};
use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::poll::Flag;

fn file_with(text: &str) -> OwnedFd {
    let mut file = std::fs::File::from(memfd_create("windlass test", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(text.as_bytes()).unwrap();
    file.into()
}

fn text_of(file: &Ours) -> String {
    assert!(fcntl_getfd(file).unwrap().contains(FdFlags::CLOEXEC));
    // Its position is shared by all who have the descriptor.
    let mut text = [0u8; 64];
    let length = rustix::io::pread(file, &mut text, 0).unwrap();
    String::from_utf8(text[..length].to_vec()).unwrap()
}

/// The pidfds of peers that [`swap_names`] received.
pub static PEERS: Mutex<Vec<Ours>> = Mutex::new(Vec::new());

/// A preparation in which every participant sends each other one two files, which name it and the receiver, and its pidfd, and
/// reads those of the others.
pub fn swap_names(preparation: &Preparation<'_>) -> Result<(), String> {
    let own = format!("{:?}", preparation.descriptor_socket.name);
    let peers = preparation.peers();
    let files: Vec<[OwnedFd; 2]> =
        peers.iter().map(|peer| [file_with(&own), file_with(&format!("for {peer:?}"))]).collect();
    let this = pidfd_open(getpid(), PidfdFlags::empty()).map_err(|error| error.to_string())?;
    let borrowed: Vec<[BorrowedFd<'_>; 3]> =
        files.iter().map(|pair| [pair[0].as_fd(), pair[1].as_fd(), this.as_fd()]).collect();
    let sendings: Vec<Sending<'_>> = peers
        .iter()
        .zip(&borrowed)
        .map(|(peer, pair)| Sending { to: *peer, payload: own.as_bytes(), descriptors: pair })
        .collect();
    let parcels = preparation
        .descriptor_socket
        .exchange(preparation.token, &sendings, preparation.stop)
        .map_err(|trouble| trouble.to_string())?;
    for (peer, mut parcel) in peers.iter().zip(parcels) {
        let name = format!("{peer:?}");
        let right = parcel.payload == name.as_bytes()
            && parcel.descriptors.len() == 3
            && text_of(&parcel.descriptors[0]) == name
            && text_of(&parcel.descriptors[1]) == format!("for {own}");
        if !right {
            return Err(format!("the parcel of {name} is not what it sent"));
        }
        PEERS.lock().unwrap().extend(parcel.descriptors.pop());
    }
    Ok(())
}

const TOKEN: Token = Token([4; 16]);

/// Parcels arrive: the largest, an empty one, and both at once.
#[test]
fn sizes() {
    let (one, other) = (DescriptorSocket::open().unwrap(), DescriptorSocket::open().unwrap());
    let stop = Flag::new().unwrap();
    let file = file_with("x");
    // Many descriptors of one file, a few less than the limit of open files that CI may have.
    let many = vec![file.as_fd(); 200];
    let payload: Vec<u8> = (0..PAYLOAD_BYTES_MAX).map(|index| index as u8).collect();
    let large = Sending { to: other.name, payload: &payload, descriptors: &many };
    thread::scope(|scope| {
        let sent = scope.spawn(|| one.exchange(TOKEN, &[large], &stop).unwrap());
        let empty = Sending { to: one.name, payload: &[], descriptors: &[] };
        let got = other.exchange(TOKEN, &[empty], &stop).unwrap().remove(0);
        assert!(got.payload == payload && got.descriptors.len() == 200);
        let nothing = sent.join().unwrap().remove(0);
        assert!(nothing.payload.is_empty() && nothing.descriptors.is_empty());
    });
    let too_many = vec![file.as_fd(); DESCRIPTORS_MAX + 1];
    let sending = Sending { to: other.name, payload: &[], descriptors: &too_many };
    assert!(matches!(one.exchange(TOKEN, &[sending], &stop), Err(Trouble::TooLarge)));
}

/// A wait for a peer that never sends ends with the session. A missing descriptor socket is an error at once.
#[test]
fn stopped_and_unreachable() {
    let (one, other) = (DescriptorSocket::open().unwrap(), DescriptorSocket::open().unwrap());
    let stop = Flag::new().unwrap();
    let to = |to| Sending { to, payload: b"hello", descriptors: &[] };
    thread::scope(|scope| {
        let waiting = scope.spawn(|| one.exchange(TOKEN, &[to(other.name)], &stop));
        stop.raise();
        assert!(matches!(waiting.join().unwrap(), Err(Trouble::Stopped)));
    });
    let gone = other.name;
    drop(other);
    let outcome = one.exchange(TOKEN, &[to(gone)], &stop);
    assert!(
        matches!(outcome, Err(Trouble::Unreachable(descriptor_socket, _)) if descriptor_socket == gone),
        "{outcome:?}"
    );
}

/// Hundreds of unknown connections at a descriptor socket, silent ones and those with a wrong token, are not trusted and delay no
/// rank.
#[test]
fn unknown_connections() {
    let (one, other) = (DescriptorSocket::open().unwrap(), DescriptorSocket::open().unwrap());
    let stop = Flag::new().unwrap();
    let name = format!("windlass-{:032x}", u128::from_be_bytes(one.name.0));
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let sending = Sending { to: other.name, payload: b"1", descriptors: &[] };
            one.exchange(TOKEN, &[sending], &stop)
        });
        let unknown_connections: Vec<OwnedFd> = (0..300)
            .map(|number| {
                let unknown_connection = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
                connect(&unknown_connection, &address).unwrap();
                if number % 2 == 0 {
                    let mut opening = b"wndlssfd".to_vec();
                    opening.extend([9; 16]);
                    opening.extend(other.name.0);
                    opening.extend([0; 8]);
                    let _ = send(&unknown_connection, &opening, rustix::net::SendFlags::NOSIGNAL);
                }
                unknown_connection
            })
            .collect();
        let sending = Sending { to: one.name, payload: b"2", descriptors: &[] };
        assert_eq!(other.exchange(TOKEN, &[sending], &stop).unwrap()[0].payload, b"1");
        assert_eq!(waiting.join().unwrap().unwrap()[0].payload, b"2");
        drop(unknown_connections);
    });
}

/// Five participants on threads exchange with each other.
#[test]
fn everyone_with_everyone() {
    let descriptor_sockets: Vec<DescriptorSocket> =
        (0..5).map(|_| DescriptorSocket::open().unwrap()).collect();
    let stop = Flag::new().unwrap();
    thread::scope(|scope| {
        for descriptor_socket in &descriptor_sockets {
            let (descriptor_sockets, stop) = (&descriptor_sockets, &stop);
            scope.spawn(move || {
                let own = file_with(&format!("{:?}", descriptor_socket.name));
                let fds = [own.as_fd()];
                let peers: Vec<Token> = descriptor_sockets
                    .iter()
                    .map(|socket| socket.name)
                    .filter(|peer| *peer != descriptor_socket.name)
                    .collect();
                let sendings: Vec<Sending<'_>> =
                    peers.iter().map(|peer| Sending { to: *peer, payload: &[], descriptors: &fds }).collect();
                let parcels = descriptor_socket.exchange(TOKEN, &sendings, stop).unwrap();
                for (peer, parcel) in peers.iter().zip(parcels) {
                    assert_eq!(text_of(&parcel.descriptors[0]), format!("{peer:?}"));
                }
            });
        }
    });
}
