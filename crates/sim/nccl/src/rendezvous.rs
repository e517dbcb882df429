//! How the ranks of a new communicator find each other: they report to the [root] of the unique id, then open a shared-memory file
//! that is named after the id.

use crate::refusal::{Outcome, refuse};
use crate::segment::{RANKS_MAX, Segment, standing};
use crate::settings::settings;
use crate::{leaks, legacy, root, strict};
use nccl_sys::*;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Identifies a communicator; the same on all its ranks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Token(u128);

impl Token {
    /// All bytes of the id count, as in NCCL.
    pub fn of_ids(ids: &[ncclUniqueId]) -> Token {
        Token(fold(OFFSET, ids.iter().flat_map(|id| id.internal).map(|byte| byte as u8)))
    }

    /// The token of the `number`th child with `color`.
    pub fn child(self, kind: &str, number: u64, color: i64) -> Token {
        let bytes = kind.bytes().chain(number.to_le_bytes()).chain(color.to_le_bytes());
        Token(fold(fold(OFFSET, self.0.to_le_bytes().into_iter()), bytes))
    }

    /// What profilers call it.
    pub fn number(self) -> u64 {
        self.0 as u64
    }

    pub fn name(self) -> String {
        format!("{:032x}", self.0)
    }
}

/// FNV-1a.
const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;

fn fold(start: u128, bytes: impl Iterator<Item = u8>) -> u128 {
    bytes.fold(start, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b))
}

/// A new id, laid out as NCCL's: a random magic, then the IPv4 address of its [root].
pub fn unique_id() -> Outcome<ncclUniqueId> {
    let mut random = [0u8; 20];
    // SAFETY: the buffer is as long as said.
    let got = unsafe { libc::getrandom(random.as_mut_ptr().cast(), random.len(), 0) };
    if got != random.len() as isize {
        return refuse(ncclSystemError, "getrandom failed");
    }
    let mut bytes = [0u8; NCCL_UNIQUE_ID_BYTES];
    bytes[..8].copy_from_slice(&random[..8]);
    let place = root::start(std::array::from_fn(|index| bytes[index]))?;
    bytes[8..36].copy_from_slice(&root::write_address(place));
    // NCCL leaves these zero or unset in an IPv4 address; here they carry more randomness.
    bytes[16..28].copy_from_slice(&random[8..]);
    Ok(ncclUniqueId { internal: bytes.map(|byte| byte as libc::c_char) })
}

/// The rank that joins.
pub struct Member {
    /// Empty for a child communicator.
    pub ids: Vec<ncclUniqueId>,
    pub rank: usize,
    pub ranks: usize,
    pub device: i32,
    pub bus_id: u64,
}

/// The result of an init that `WINDLASS_SIM_LOST_INITS` names.
pub const LOST: ncclResult_t = ncclRemoteError;

/// The number of an init of this process.
fn number() -> u64 {
    static INITS: AtomicU64 = AtomicU64::new(0);
    INITS.fetch_add(1, SeqCst) + 1
}

/// Joins the segment of `token` and waits for all ranks. `leave` ends the wait. Fails if two ranks have the same device.
pub fn join(token: Token, member: &Member, leave: &AtomicBool) -> Outcome<Segment> {
    let &Member { ref ids, rank, ranks, device, bus_id } = member;
    if ranks > RANKS_MAX {
        return refuse(
            ncclSystemError,
            format!("the simulator has at most {RANKS_MAX} ranks, asked for {ranks}"),
        );
    }
    leaks::watch_exit();
    let number = number();
    if settings().refused_inits.contains(&number) {
        return refuse(ncclSystemError, "WINDLASS_SIM_REFUSED_INITS names this init");
    }
    let lost = settings().lost_inits.contains(&number);
    let reported = root::report(ids, rank, ranks)?;
    let segment = Segment::open(&token.name(), ranks)?;
    let header = segment.header();
    if let Err(other) = header.ranks.compare_exchange(0, ranks as u32, SeqCst, SeqCst)
        && other != ranks as u32
    {
        strict::fail(
            &segment,
            rank,
            &[format!("ncclCommInitRank with {ranks} ranks, but a peer said {other}")],
        );
    }
    header.name.set(&token.name()[..8]);
    let record = segment.rank(rank);
    if record.claimed.swap(1, SeqCst) != 0 {
        strict::fail(&segment, rank, &["ncclCommInitRank: two callers joined as this rank".to_owned()]);
    }
    // SAFETY: getpid has no preconditions.
    record.process.store(unsafe { libc::getpid() }, SeqCst);
    record.device.store(device, SeqCst);
    record.bus_id.store(bus_id, SeqCst);
    record.call.set("CommInitRank");
    record.standing.store(standing::ALIVE, SeqCst);
    if header.joined.fetch_add(1, SeqCst) + 1 == ranks as u32 {
        segment.unlink();
    }
    segment.ring_all();
    let all = || header.joined.load(SeqCst) >= ranks as u32;
    if segment.wait(rank, leave, || "all ranks to join".to_owned(), all).is_err() {
        record.standing.store(standing::ABORTED, SeqCst);
        return refuse(ncclInternalError, "aborted while joining");
    }
    segment.leave_name();
    record.call.set("");
    // An error ends the init here: a root that cannot answer one rank does not answer the ranks after it.
    reported.map_or(Ok(()), |reported| reported.wait(&segment, rank, leave))?;
    for (first, second) in (0..ranks).flat_map(|first| (first + 1..ranks).map(move |second| (first, second)))
    {
        if segment.rank(first).bus_id.load(SeqCst) == segment.rank(second).bus_id.load(SeqCst) {
            record.standing.store(standing::DESTROYED, SeqCst);
            let bus_id = segment.rank(first).bus_id.load(SeqCst);
            let text = format!(
                "Duplicate GPU detected : rank {first} and rank {second} both on CUDA device {bus_id:x}"
            );
            return refuse(ncclInvalidUsage, text);
        }
    }
    if lost {
        record.standing.store(standing::DESTROYED, SeqCst);
        return refuse(LOST, "WINDLASS_SIM_LOST_INITS names this init");
    }
    legacy::try_ipc(ranks)?;
    Ok(segment)
}
