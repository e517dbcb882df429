//! Tests of other connections: NCCL's are relayed to its root byte for byte, unknown ones are bounded and harm no rank.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use windlass_bootstrap::id_tag::IdTag;
use windlass_bootstrap::message::{FromRank, GREETING_MAGIC, greeting};
use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::outcome::{Failure, FallbackReason};
use windlass_bootstrap::{Limits, Outcome};

use crate::support::{
    BringAll, MAGIC, complete_all, facts, hosted, hosted_with, id_of, is_peer_group, join, ready,
};

fn noise(bytes: usize, mut state: u64) -> Vec<u8> {
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..bytes).map(|_| next()).collect()
}

fn send_and_shut(mut stream: &TcpStream, bytes: &[u8]) {
    stream.write_all(bytes).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
}

fn read_all(mut stream: &TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Megabytes pass both ways at once, byte for byte. Each side's end is passed on by itself, and the bytes are counted.
#[test]
fn relay_is_exact() {
    let hosted = hosted();
    let (forth, back) = (noise(9_000_001, 3), noise(5_000_003, 4));
    let forth = [&MAGIC[..], &forth].concat();
    let client = hosted.connect();
    thread::scope(|scope| {
        scope.spawn(|| send_and_shut(&client, &forth));
        let at_root = hosted.root.accept().unwrap().0;
        let read = scope.spawn(|| read_all(&client));
        // The root reads the client's end before it sends its own.
        assert!(read_all(&at_root) == forth);
        send_and_shut(&at_root, &back);
        assert!(read.join().unwrap() == back);
    });
    let counts = hosted.bootstrap.counts();
    while counts.relayed_bytes.load(Ordering::Relaxed) == 0 {
        thread::yield_now();
    }
    assert_eq!(counts.relayed_bytes.load(Ordering::Relaxed), (forth.len() + back.len()) as u64);
    assert_eq!(counts.relays_broken.load(Ordering::Relaxed), 0);
}

/// A root may end first while its client still sends, and a root that does not read stops only its own client.
#[test]
fn relay_holds_back() {
    let hosted = hosted();
    let stuck = hosted.connect();
    (&stuck).write_all(&MAGIC).unwrap();
    let stuck_root = hosted.root.accept().unwrap().0;
    stuck.set_nonblocking(true).unwrap();
    // Until no byte can be sent: the buffers of the kernel and of the relay are full.
    let chunk = [7u8; 65536];
    let mut sent = MAGIC.len();
    let mut refused = 0;
    while refused < 1000 {
        match (&stuck).write(&chunk) {
            Ok(count) => (sent, refused) = (sent + count, 0),
            Err(_) => {
                refused += 1;
                thread::yield_now();
            }
        }
    }
    // Another connection is relayed meanwhile.
    let quick = hosted.connect();
    thread::scope(|scope| {
        scope.spawn(|| send_and_shut(&quick, &[&MAGIC[..], &noise(1_000_000, 5)].concat()));
        let at_root = hosted.root.accept().unwrap().0;
        at_root.shutdown(Shutdown::Write).unwrap();
        assert!(read_all(&quick).is_empty());
        assert_eq!(read_all(&at_root).len(), 1_000_008);
    });
    stuck.set_nonblocking(false).unwrap();
    stuck.shutdown(Shutdown::Write).unwrap();
    // In small pieces, so that the last bytes are still buffered when the client's end is seen.
    let (mut read, mut piece) = (0, [0u8; 2048]);
    while read < sent {
        let count = (&stuck_root).read(&mut piece).unwrap();
        assert_ne!(count, 0, "{read} of {sent} bytes arrived");
        read += count;
    }
    assert!(read_all(&stuck_root).is_empty());
}

/// With NCCL's root gone its clients' connections are closed, and the thread goes on.
#[test]
fn root_is_gone() {
    let mut hosted = hosted();
    hosted.root = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let client = hosted.connect();
    (&client).write_all(&MAGIC).unwrap();
    let mut byte = [0];
    assert!(matches!((&client).read(&mut byte), Ok(0) | Err(_)));
    let late = join(&hosted.bootstrap, &hosted.id, facts(0, 2));
    assert!(matches!(late, Outcome::OnNccl(FallbackReason::NonWindlass)), "{late:?}");
}

/// Hundreds of silent connections, half greetings and wrong tokens do not count as ranks without Windlass and delay no rank. Only
/// `newcomers_max` of them are held.
#[test]
fn silent_and_stray() {
    let hosted = hosted_with(Limits { newcomers_max: 16, ..Limits::default() });
    let silent: Vec<TcpStream> = (0..100).map(|_| hosted.connect()).collect();
    let half: Vec<TcpStream> = (0..4)
        .map(|_| {
            let mut stream = hosted.connect();
            stream.write_all(&GREETING_MAGIC[..5]).unwrap();
            stream
        })
        .collect();
    let mut stray = hosted.connect();
    stray.write_all(&greeting(Token([9; 16]))).unwrap();
    assert_eq!(stray.read(&mut [0; 8]).unwrap_or(0), 0);
    drop(hosted.connect());
    let counts = hosted.bootstrap.counts();
    while counts.turned_away.load(Ordering::Relaxed) < 100 + 4 + 1 + 1 - 16 {
        thread::yield_now();
    }
    // The oldest were closed.
    for mut stream in &silent[..silent.len() - 16] {
        assert_eq!(stream.read(&mut [0; 8]).unwrap_or(0), 0);
    }
    let participant = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 2), facts(1, 2)]).unwrap();
    assert!(participant.complete(ready).iter().all(is_peer_group));
    assert_eq!(counts.relays.load(Ordering::Relaxed), 0);
    drop((silent, half));
}

/// Port scanners and health checks change nothing, before and after ranks have come: none of their bytes reaches NCCL's root, and
/// ranks meet. Bytes that begin like NCCL's magic do not count as one.
#[test]
fn scanners_change_nothing() {
    let hosted = hosted();
    let mut nearly = MAGIC;
    nearly[7] ^= 1;
    let said = [
        &b"GET /metrics HTTP/1.1\r\n\r\n"[..],
        &[22, 3, 1, 2, 0],
        &[0; 4096],
        &[0],
        &noise(100_000, 6),
        &nearly,
        &MAGIC[..7],
        &GREETING_MAGIC[..3],
    ];
    let visit = || {
        for bytes in said {
            let mut unknown_connection = hosted.connect();
            // The connection may have been closed before all was written.
            let _ = unknown_connection.write_all(bytes);
            let _ = unknown_connection.shutdown(Shutdown::Write);
            assert_eq!(unknown_connection.read(&mut [0; 8]).unwrap_or(0), 0);
        }
        let reset = hosted.connect();
        rustix::net::sockopt::set_socket_linger(&reset, Some(Duration::ZERO)).unwrap();
    };
    visit();
    let first = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 2)]).unwrap();
    visit();
    let second = hosted.bootstrap.join_all(&hosted.id, vec![facts(1, 2)]).unwrap();
    let outcomes = complete_all(vec![first, second], &ready);
    assert!(outcomes.iter().flatten().all(is_peer_group), "{outcomes:?}");
    let counts = hosted.bootstrap.counts();
    while counts.turned_away.load(Ordering::Relaxed) < 2 * (said.len() as u64 + 1) {
        thread::yield_now();
    }
    assert_eq!(counts.relays.load(Ordering::Relaxed), 0);
}

/// NCCL's magic is recognized when it comes byte by byte.
#[test]
fn magic_in_pieces() {
    let hosted = hosted();
    let participant = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 2)]).unwrap();
    let mut rank = hosted.connect();
    rank.set_nodelay(true).unwrap();
    for byte in MAGIC {
        rank.write_all(&[byte]).unwrap();
    }
    let outcomes = participant.complete(ready);
    assert!(matches!(outcomes[0], Outcome::OnNccl(FallbackReason::NonWindlass)), "{outcomes:?}");
    let mut relayed = [0; 8];
    hosted.root.accept().unwrap().0.read_exact(&mut relayed).unwrap();
    assert_eq!(relayed, MAGIC);
}

/// A greeting is recognized when it comes byte by byte. A connection with the token and an oversized or unreadable message is
/// closed and counted, and the session goes on without it.
#[test]
fn oversized_and_unreadable() {
    let hosted = hosted();
    let token = IdTag::decode(&hosted.id).unwrap().token;
    let mut bad: Vec<Vec<u8>> = vec![
        [0xff; 6].to_vec(),
        [&5u32.to_le_bytes()[..], &1u16.to_le_bytes(), b"hello"].concat(),
        [&0u32.to_le_bytes()[..], &9u16.to_le_bytes()].concat(),
    ];
    let mut cut = FromRank::Report(Box::new(facts(0, 2))).encode();
    cut[0] -= 1;
    bad.push(cut);
    for message in &bad {
        let mut stream = hosted.connect();
        for byte in greeting(token) {
            stream.write_all(&[byte]).unwrap();
        }
        stream.write_all(message).unwrap();
        assert_eq!(stream.read(&mut [0; 8]).unwrap_or(0), 0, "{message:?}");
    }
    assert_eq!(hosted.bootstrap.counts().unreadable.load(Ordering::Relaxed), bad.len() as u64);
    let participant = hosted.bootstrap.join_all(&hosted.id, vec![facts(0, 2), facts(1, 2)]).unwrap();
    assert!(participant.complete(ready).iter().all(is_peer_group));
}

/// NCCL's connections beyond the limit wait and are all served; the root never has more than the limit.
#[test]
fn limit_of_relays() {
    let hosted = hosted_with(Limits { relays_max: 2, ..Limits::default() });
    let relays = &hosted.bootstrap.counts().relays;
    let clients: Vec<TcpStream> = (0..20).map(|_| hosted.connect()).collect();
    thread::scope(|scope| {
        for client in &clients {
            scope.spawn(move || {
                send_and_shut(client, &[&MAGIC[..], &[3; 100]].concat());
                assert_eq!(read_all(client), b"ok");
            });
        }
        for served in 0..clients.len() as u64 {
            let at_root = hosted.root.accept().unwrap().0;
            assert_eq!(read_all(&at_root).len(), 108);
            assert!(relays.load(Ordering::Relaxed) <= served + 2);
            send_and_shut(&at_root, b"ok");
        }
    });
    assert_eq!(relays.load(Ordering::Relaxed), 20);
}

/// A root with as many connections as allowed, which serves none, delays no other session. All sessions together have a limit, too,
/// and a connection beyond it is served when there is room.
#[test]
fn limit_of_relays_is_a_roots_own() {
    let hosted = hosted_with(Limits { relays_max: 1, relays_of_all_max: 2, ..Limits::default() });
    let counts = hosted.bootstrap.counts();
    let another = || {
        let root = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let id = hosted.bootstrap.host(&id_of(&root.local_addr().unwrap())).unwrap();
        (root, windlass_bootstrap::id_tag::address(&id).unwrap())
    };
    let come = |to: &std::net::SocketAddr| {
        let client = TcpStream::connect(to).unwrap();
        send_and_shut(&client, &MAGIC);
        client
    };
    let stuck = [come(&hosted.address()), come(&hosted.address())];
    let at_stuck_root = hosted.root.accept().unwrap().0;
    let (second_root, second) = another();
    let second_client = come(&second);
    let at_second_root = second_root.accept().unwrap().0;
    // Two connections are relayed, so the third session's waits for one of them.
    let (third_root, third) = another();
    let third_client = come(&third);
    drop((at_second_root, second_client));
    assert_eq!(read_all(&third_root.accept().unwrap().0), MAGIC);
    assert_eq!(counts.relays.load(Ordering::Relaxed), 3);
    drop(at_stuck_root);
    assert_eq!(read_all(&hosted.root.accept().unwrap().0), MAGIC);
    drop((stuck, third_client));
}

/// Ranks that disagree on their number, and two with the same number, all hear the same failure.
#[test]
fn disagreement() {
    let hosted = hosted();
    let participants =
        [facts(0, 3), facts(1, 2)].map(|facts| hosted.bootstrap.join_all(&hosted.id, vec![facts]).unwrap());
    for outcome in complete_all(participants.into(), &ready).iter().flatten() {
        assert!(matches!(outcome, Outcome::Failed(Failure::Mismatch { .. })), "{outcome:?}");
    }
    let hosted = crate::support::hosted();
    let participants =
        [facts(1, 3), facts(1, 3)].map(|facts| hosted.bootstrap.join_all(&hosted.id, vec![facts]).unwrap());
    for outcome in complete_all(participants.into(), &ready).iter().flatten() {
        assert!(matches!(outcome, Outcome::Failed(Failure::Duplicate { rank: 1 })), "{outcome:?}");
    }
}

/// From an NCCL that is newer than those whose bootstrap is known, any bytes may be a rank's: they are relayed to the root, and the
/// other ranks do not wait.
#[test]
fn newer_nccl_may_say_anything() {
    windlass_base::config::nccl::note_version(23100);
    let hosted = hosted();
    let mut unknown = hosted.connect();
    unknown.write_all(&[9; 200]).unwrap();
    let outcome = join(&hosted.bootstrap, &hosted.id, facts(0, 2));
    assert!(matches!(outcome, Outcome::OnNccl(FallbackReason::NonWindlass)), "{outcome:?}");
    let (mut at_root, _) = hosted.root.accept().unwrap();
    let mut bytes = [0; 200];
    at_root.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes, [9; 200]);
}
