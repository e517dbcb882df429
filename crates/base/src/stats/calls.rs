//! The last calls of each communicator, and who still owes whom a message. They lie in the process's segment, so they can be read
//! of a process that hangs or was killed.

use std::path::{Path as FilePath, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nccl_sys::CODES;
use serde::Serialize;

use crate::call::{Call, FUNCTIONS, Function};
use crate::path::Path;
use crate::stats::files;
use crate::stats::segment::{self, Clock, ENDED, FREE, Opened, Segment};

/// How many calls a communicator keeps.
pub const CALLS_MAX: usize = 256;
/// Peers that are told apart. Of a larger communicator, several peers share a count.
pub const PEERS_MAX: usize = 64;
/// Stands for no peer and no root, and for numbers that do not fit.
const NOBODY: u16 = u16::MAX;

/// The last calls of a communicator, written by the one thread that NCCL allows in its calls.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct CallRing {
    /// How many calls were made. Written after the call's place.
    made: AtomicU64,
    /// Sends, then receives, by peer.
    messages: [[AtomicU32; PEERS_MAX]; 2],
    calls: [CallPlace; CALLS_MAX],
}

/// One call. Four words, since a call stores all of them.
#[repr(C)]
#[derive(Debug)]
struct CallPlace {
    /// The low half of the call's number, then a byte each: function, type, path.
    what: AtomicU64,
    bytes: AtomicU64,
    tick: AtomicU64,
    /// The low 48 bits of the stream, then the peer or root.
    whereabouts: AtomicU64,
}

impl CallRing {
    /// Adds a call. The bytes are those of the call's larger buffer.
    #[inline]
    pub(super) fn add(&self, call: &Call, path: Path, bytes: u64) {
        let number = self.made.load(Ordering::Relaxed) + 1;
        let place = &self.calls[number as usize % CALLS_MAX];
        let function = call.local.called;
        let other = match (function as usize).checked_sub(Function::Send as usize) {
            None => call.shared.root,
            Some(kind) => {
                let count = &self.messages[kind & 1][call.local.peer.unwrap_or(0) as usize % PEERS_MAX];
                count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
                call.local.peer
            }
        };
        let what = number & 0xffff_ffff
            | (function as u64) << 32
            | (call.shared.datatype.0 as u64 & 0xff) << 40
            | (path as u64) << 48;
        // A negative number is a large one.
        let other = u64::from((other.unwrap_or(-1) as u32).min(NOBODY.into()));
        place.what.store(what, Ordering::Relaxed);
        place.bytes.store(bytes, Ordering::Relaxed);
        place.tick.store(segment::tick(), Ordering::Relaxed);
        place.whereabouts.store(call.local.stream as u64 & 0xffff_ffff_ffff | other << 48, Ordering::Relaxed);
        self.made.store(number, Ordering::Release);
    }

    /// Empties the ring for another communicator.
    pub(super) fn clear(&self) {
        self.made.store(0, Ordering::Relaxed);
        self.messages.iter().flatten().for_each(|count| count.store(0, Ordering::Relaxed));
    }

    /// The calls that the ring has, oldest first. `collectives`: how many the communicator has made.
    fn read(&self, collectives: u64, clock: &Clock) -> Vec<CallMade> {
        let made = self.made.load(Ordering::Acquire);
        let mut ordinal = collectives;
        let numbers = (made.saturating_sub(CALLS_MAX as u64)..made).rev().map(|before| before + 1);
        let mut calls: Vec<CallMade> = numbers
            .filter_map(|number| {
                let mut call = self.calls[number as usize % CALLS_MAX].read(number, clock)?;
                if !call.is_message() {
                    call.collective = Some(ordinal);
                    ordinal = ordinal.saturating_sub(1);
                }
                Some(call)
            })
            .collect();
        calls.reverse();
        calls
    }
}

impl CallPlace {
    /// The call, if it is the one with this number: others may have written anything.
    fn read(&self, number: u64, clock: &Clock) -> Option<CallMade> {
        let [what, bytes, tick, whereabouts] =
            [&self.what, &self.bytes, &self.tick, &self.whereabouts].map(|word| word.load(Ordering::Relaxed));
        let function = Function::ALL.get((what >> 32 & 0xff) as usize)?;
        let path = Path::ALL.get((what >> 48 & 0xff) as usize)?;
        let code = (what >> 40 & 0xff) as i32;
        let datatype = CODES[2].values.iter().find(|(_, value)| *value == code);
        let other = (whereabouts >> 48) as u16;
        (what as u32 == number as u32).then(|| CallMade {
            number,
            collective: None,
            function: function.entry().description().name.into(),
            bytes,
            datatype: datatype.map_or_else(|| code.to_string(), |(name, _)| (*name).into()),
            other: (other != NOBODY).then_some(other.into()),
            stream: format!("{:#x}", whereabouts & 0xffff_ffff_ffff),
            path: path.name().into(),
            seconds_ago: clock.seconds_since(tick),
        })
    }
}

/// A call that a communicator has made.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CallMade {
    /// Its number among all calls of the communicator, from 1.
    pub number: u64,
    /// Its number among the collectives, from 1; none for a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub collective: Option<u64>,
    /// NCCL's name of the function.
    pub function: String,
    /// Bytes of the larger buffer.
    pub bytes: u64,
    /// NCCL's name of the type.
    pub datatype: String,
    /// The peer of a message, the root of a collective.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub other: Option<u32>,
    /// The stream's handle.
    pub stream: String,
    /// The path.
    pub path: String,
    /// The time since the call.
    pub seconds_ago: f64,
}

impl CallMade {
    /// Whether it is a send or a receive.
    pub fn is_message(&self) -> bool {
        ["ncclSend", "ncclRecv"].contains(&self.function.as_str())
    }
}

/// The last calls of one rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CallsOfRank {
    /// The communicator's serial number in its process.
    pub serial: u64,
    /// The communicator's name, the same on all its ranks; empty if none is known.
    pub name: String,
    /// A half of its peer group's token, by which its process is asked about it; 0 without one.
    #[serde(skip)]
    pub token: u64,
    /// The process's rank in it.
    pub rank: i32,
    /// The number of ranks.
    pub ranks: i32,
    /// Whether the communicator lives, as far as its process has said.
    pub is_live: bool,
    /// How many calls it has made.
    pub made: u64,
    /// How many of them are collectives.
    pub collectives: u64,
    /// Sends by peer, as far as peers are told apart.
    pub sends: Vec<u32>,
    /// Receives by peer.
    pub receives: Vec<u32>,
    /// The last calls, oldest first.
    pub calls: Vec<CallMade>,
}

/// The last calls of a process.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProcessCalls {
    /// The process's number.
    pub process: u32,
    /// The program's file name.
    pub program: String,
    /// Whether the process lives.
    pub is_alive: bool,
    /// The name of the socket at which it answers others; zeros for none.
    #[serde(skip)]
    pub request_socket: [u8; 16],
    /// Its communicators.
    pub communicators: Vec<CallsOfRank>,
}

/// The last calls of all processes whose segments can be read.
pub fn processes(folder: &FilePath, clock: &Clock) -> Vec<ProcessCalls> {
    let read = |path: PathBuf| {
        let process = files::owner(&path)?.process;
        let segment = Opened::open(&path).and_then(|opened| opened.read()).ok()?;
        let (program, is_alive) = (segment::read_text(&segment.program), !files::has_ended(&path));
        let request_socket = segment.request_socket.each_ref().map(|byte| byte.load(Ordering::Relaxed));
        let communicators = of(&segment, clock);
        Some(ProcessCalls { process, program, is_alive, request_socket, communicators })
    };
    files::list(folder).into_iter().filter_map(read).collect()
}

/// The last calls of each communicator of a segment that has a ring.
pub fn of(segment: &Segment, clock: &Clock) -> Vec<CallsOfRank> {
    let has_exited = segment.exited.load(Ordering::Relaxed) != 0;
    let places = (0u32..).zip(segment::places(segment)).skip(1);
    let mut all: Vec<CallsOfRank> = places
        .filter_map(|(index, place)| {
            let number = place.ring.load(Ordering::Acquire).wrapping_sub(1) as usize;
            let owner = segment.ring_owners.get(number)?.load(Ordering::Acquire);
            let ring = segment.rings.get(number).filter(|_| owner == index)?;
            let state = place.state.load(Ordering::Acquire);
            let ranks = place.ranks.load(Ordering::Relaxed);
            let name = place.name.load(Ordering::Relaxed);
            let cells = place.cells[..FUNCTIONS].iter().take(Function::Send as usize).flatten();
            let collectives =
                cells.fold(0u64, |sum, cell| sum.saturating_add(cell.calls.load(Ordering::Relaxed)));
            let peers = ranks.clamp(0, PEERS_MAX as i32) as usize;
            let of_peers = |counts: &[AtomicU32; PEERS_MAX]| {
                counts[..peers].iter().map(|count| count.load(Ordering::Relaxed)).collect()
            };
            (state != FREE).then(|| CallsOfRank {
                serial: place.serial.load(Ordering::Relaxed),
                name: if name == 0 { String::new() } else { format!("{name:016x}") },
                token: place.token.load(Ordering::Relaxed),
                rank: place.rank.load(Ordering::Relaxed),
                ranks,
                is_live: state != ENDED && !has_exited,
                made: ring.made.load(Ordering::Acquire),
                collectives,
                sends: of_peers(&ring.messages[0]),
                receives: of_peers(&ring.messages[1]),
                calls: ring.read(collectives, clock),
            })
        })
        .collect();
    all.sort_by_key(|one| one.serial);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::tests::{call, send};
    use crate::stats::count::{self, Identity};
    use crate::stats::segment::RINGS_MAX;

    const IDENTITY: Identity = Identity { rank: 1, ranks: 2, device: 1 };

    fn seen() -> Vec<CallsOfRank> {
        of(segment::current(), &Clock::measure())
    }

    /// The last 256 calls are kept, oldest first. Collectives have their numbers, whatever the ring has forgotten.
    #[test]
    fn last_calls() {
        let place = count::begin(IDENTITY);
        count::name(place, 0xabc);
        count::name(place, 0xdef);
        (0..300).for_each(|_| count::call(place, &call(Function::Broadcast, 64, 1), Path::Native, 2));
        count::call(place, &send(8), Path::P2p, 2);
        let one = seen().pop().unwrap();
        assert_eq!((one.name.as_str(), one.made, one.collectives), ("0000000000000abc", 301, 300));
        assert_eq!((one.sends, one.receives), (vec![1, 0], vec![0, 0]));
        assert_eq!((one.calls.len(), one.calls[0].number, one.calls[0].collective), (256, 46, Some(46)));
        let [before, last] = &one.calls[254..] else { panic!() };
        assert_eq!(
            (before.function.as_str(), before.collective, before.other),
            ("ncclBroadcast", Some(300), Some(1))
        );
        assert_eq!(
            (before.bytes, before.datatype.as_str(), before.path.as_str()),
            (64, "ncclInt8", "native")
        );
        assert_eq!((last.function.as_str(), last.collective, last.other), ("ncclSend", None, Some(0)));
        assert!(last.seconds_ago > 0.0 && last.seconds_ago < 60.0, "{}", last.seconds_ago);
        segment::current().exited.store(1, Ordering::Relaxed);
        assert!(!seen()[0].is_live, "a process that exits ends its communicators");
        segment::current().exited.store(0, Ordering::Relaxed);
        assert!(seen()[0].is_live);
        count::end(place);
        assert!(!seen()[0].is_live);
        // The next communicator with this ring begins with an empty one.
        for _ in 0..RINGS_MAX {
            count::begin(IDENTITY);
        }
        assert_eq!(seen().len(), RINGS_MAX);
        assert!(seen().iter().all(|one| one.made == 0 && one.calls.is_empty() && one.name.is_empty()));
    }

    /// Communicators that live keep their rings, and one that ended gives its own to the next.
    #[test]
    fn rings_run_out() {
        let places: Vec<usize> = (0..RINGS_MAX + 2).map(|_| count::begin(IDENTITY)).collect();
        places.iter().for_each(|place| count::call(*place, &send(8), Path::P2p, 2));
        assert_eq!(
            (seen().len(), seen().iter().map(|one| one.made).sum::<u64>()),
            (RINGS_MAX, RINGS_MAX as u64)
        );
        count::end(places[7]);
        count::end(places[5]);
        count::begin(IDENTITY);
        let serials: Vec<u64> = seen().iter().filter(|one| one.made == 0).map(|one| one.serial).collect();
        assert_eq!((serials, seen().len()), (vec![RINGS_MAX as u64 + 3], RINGS_MAX));
        assert!(seen().iter().all(|one| one.serial != 6), "the communicator that ended first keeps its ring");
    }

    /// A peer or a root beyond what a place can hold is left out, and wrong ones do no harm.
    #[test]
    fn wild_peers() {
        let place = count::begin(IDENTITY);
        for peer in [-1, i32::MIN, i32::MAX] {
            count::call(place, &call(Function::Recv, 8, peer), Path::Forward, 2);
        }
        assert_eq!(seen()[0].calls.iter().map(|call| call.other).collect::<Vec<_>>(), [None, None, None]);
    }
}
