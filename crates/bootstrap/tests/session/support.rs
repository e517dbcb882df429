//! Shared by the tests: ids as NCCL makes them, reports, and sockets that act as NCCL's roots and ranks.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};

use windlass_bootstrap::facts::{Facts, Place};
use windlass_bootstrap::id_tag::Id;
use windlass_bootstrap::negotiated::{Device, Member, Token, Version, capability};
use windlass_bootstrap::{Bootstrap, Canceller, Limits, Outcome, Participant, Preparation, place};

pub const MAGIC: [u8; 8] = *b"\xa7ncclid\x01";

/// A report that fits all others made by this function.
pub fn facts(rank: u32, ranks: u32) -> Facts {
    Facts {
        ranks,
        version: Version::THIS,
        nccl: 22809,
        place: Place { host: Token([1; 16]), network: 7 },
        capabilities: capability::REQUIRED | capability::LAUNCHES_ALONE,
        options: 5,
        ctas_max: 0,
        member: Member {
            rank,
            process: Token([2; 16]),
            process_id: 1,
            device: Device {
                uuid: [rank as u8; 16],
                pci: (0, rank as u8, 0),
                capability: 90,
                multiprocessors: 132,
            },
            descriptor_socket: Token([0; 16]),
            process_listener: Token([0; 16]),
            cells: Vec::new(),
            attachment: Vec::new(),
        },
    }
}

/// The same, with this process's real place.
pub fn real_facts(rank: u32, ranks: u32) -> Facts {
    let mut facts = facts(rank, ranks);
    facts.place = place::here(None);
    facts.member.process = place::process().unwrap();
    facts.member.process_id = std::process::id();
    facts
}

/// An id whose root listens at this address.
pub fn id_of(root: &SocketAddr) -> Id {
    let mut id = [0xee; 128];
    id[..40].fill(0);
    id[..8].copy_from_slice(&MAGIC);
    id[8..10].copy_from_slice(&2u16.to_ne_bytes());
    id[10..12].copy_from_slice(&root.port().to_be_bytes());
    id[12..16].copy_from_slice(&Ipv4Addr::LOCALHOST.octets());
    id
}

/// A session with NCCL's root behind it, which is the test's own socket.
pub struct Hosted {
    pub bootstrap: Bootstrap,
    pub root: TcpListener,
    pub id: Id,
}

pub fn hosted() -> Hosted {
    hosted_with(Limits::default())
}

pub fn hosted_with(limits: Limits) -> Hosted {
    let bootstrap = Bootstrap::start(limits).unwrap();
    let root = TcpListener::bind("127.0.0.1:0").unwrap();
    let id = bootstrap.host(&id_of(&root.local_addr().unwrap())).unwrap();
    Hosted { bootstrap, root, id }
}

impl Hosted {
    pub fn address(&self) -> SocketAddr {
        windlass_bootstrap::id_tag::address(&self.id).unwrap()
    }

    pub fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address()).unwrap()
    }

    /// Does what a rank without Windlass does: sends NCCL's handshake and report, and closes. Returns once the root has read all of
    /// it.
    pub fn nccl_rank(&self) {
        let mut rank = self.connect();
        rank.write_all(&MAGIC).unwrap();
        rank.write_all(&[1; 180]).unwrap();
        let (mut at_root, _) = self.root.accept().unwrap();
        drop(rank);
        let mut bytes = Vec::new();
        at_root.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes.len(), 188);
        assert_eq!(bytes[..8], MAGIC);
    }
}

/// A preparation that does nothing.
pub fn ready(_: &Preparation<'_>) -> Result<(), String> {
    Ok(())
}

/// Brings one rank to the session and waits for its outcome.
pub fn join(bootstrap: &Bootstrap, id: &Id, facts: Facts) -> Outcome {
    bootstrap.join(id, facts).unwrap().complete(ready)
}

/// Ranks of this process in one session.
pub struct Brought(Vec<Participant>);

pub trait BringAll {
    /// Brings these ranks to the session.
    fn join_all(&self, id: &Id, facts: Vec<Facts>) -> std::io::Result<Brought>;
}

impl BringAll for Bootstrap {
    fn join_all(&self, id: &Id, facts: Vec<Facts>) -> std::io::Result<Brought> {
        facts.into_iter().map(|facts| self.join(id, facts)).collect::<Result<_, _>>().map(Brought)
    }
}

impl Brought {
    pub fn cancellers(&self) -> Vec<Canceller> {
        self.0.iter().map(Participant::canceller).collect()
    }

    /// All at once, each on a thread of its own.
    pub fn complete(self, prepare: impl Fn(&Preparation<'_>) -> Result<(), String> + Sync) -> Vec<Outcome> {
        complete_all(vec![self], &prepare).remove(0)
    }
}

/// Several sessions at once.
pub fn complete_all(
    brought: Vec<Brought>,
    prepare: &(dyn Fn(&Preparation<'_>) -> Result<(), String> + Sync),
) -> Vec<Vec<Outcome>> {
    let counts: Vec<usize> = brought.iter().map(|brought| brought.0.len()).collect();
    let participants = brought.into_iter().flat_map(|brought| brought.0);
    let mut outcomes =
        windlass_bootstrap::complete_all(participants.map(|one| (one, prepare)).collect()).into_iter();
    counts.into_iter().map(|count| outcomes.by_ref().take(count).collect()).collect()
}

pub fn is_peer_group(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::PeerGroup(_))
}
