//! Prepares a rank between the negotiated config and its confirmation: lends a region, maps the other ranks' regions, and tests a load and a
//! store through every mapping. Ranks of one process reach each other's regions at their own addresses, without descriptors.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use windlass_base::descriptor::Ours;
use windlass_base::shared_page::SharedPage;
use windlass_bootstrap::Preparation;
use windlass_bootstrap::descriptors::{Parcel, Sending};
use windlass_bootstrap::negotiated::{NegotiatedConfig, RANKS_MAX, Token, capability};
use windlass_transport::heap::{self, Heap, Holds, Member, Peer, PeerHeap, PeerRegion, Place, Region};

use crate::background::life::{self, Life};
use crate::features::page_layout::{self, PAGE_MAKER};
use crate::features::recycling;
use crate::peers::setup::release_socket::{Hold, ReleaseSocket};
use crate::peers::setup::transports::{Rings, Share, Transports, Wires};
use crate::peers::shutdown::closing::{ClosedSignal, Closing};
use crate::peers::shutdown::room;

/// The end of a region, where ranks store words to be tested. All bytes before it are zero.
const WORDS_BYTES: u64 = 128;
const _: () = assert!(4 * RANKS_MAX as u64 <= WORDS_BYTES / 2);

/// Two addresses in the second half of these bytes, which nothing reads.
pub(in crate::peers) fn scratch(region: &Region) -> [u64; 2] {
    let end = region.address() + region.bytes();
    [end - 32, end - 16]
}

/// Zeroing some MiB takes microseconds. A device that has not done it after this time never will.
pub(in crate::peers) const ZEROED_WITHIN: Duration = Duration::from_secs(300);

/// What a rank has prepared.
#[derive(Debug)]
pub(in crate::peers) struct Prepared {
    pub region: Region,
    /// By rank, none for itself.
    pub peers: Vec<Option<PeerRegion>>,
    pub lives: Vec<Arc<Life>>,
    pub holds: Arc<Holds>,
    /// None if the rank could not prepare.
    pub transports: Option<Transports>,
    /// This rank's end for the ranks that came to know its region in a session.
    pub release_socket: Option<ReleaseSocket>,
    /// The ends from the owners of regions that this rank came to know there.
    pub release_sockets: Vec<Hold>,
    /// Made by rank 0. None where it did not arrive.
    pub page: Option<Arc<SharedPage>>,
    pub rank: u32,
}

impl Prepared {
    /// Ends what was prepared, where there is no peer group and no rank touches the announced region any more.
    pub(in crate::peers) fn abandon(mut self) {
        self.release_socket = None;
        self.fail();
    }

    /// Ends what was prepared, where there is no peer group but other ranks may still be testing the region.
    pub(in crate::peers) fn fail(self) {
        let closing = Closing::new(
            &self.region,
            ClosedSignal::failed(self.page, self.rank, self.release_socket),
            self.lives,
            self.holds,
        );
        drop((self.transports, self.peers, self.region));
        drop(self.release_sockets);
        closing.begin();
    }
}

/// A lent region that holds zeros and this rank's word.
struct Lent<'a> {
    negotiated: &'a NegotiatedConfig,
    rank: u32,
    heap: &'a Arc<Heap>,
    holds: Arc<Holds>,
    region: Region,
    rings: Rings,
}

impl<'a> Lent<'a> {
    fn new(negotiated: &'a NegotiatedConfig, rank: u32, heap: &'a Arc<Heap>) -> Result<Lent<'a>, String> {
        let holds = Holds::new();
        let rings = Rings::of(negotiated, rank, wires(negotiated, rank, heap));
        let lend = || heap.lend(rings.bytes + WORDS_BYTES, &holds);
        let make_room = |is_enough: &mut dyn FnMut() -> bool| room::make_soon(heap.device(), is_enough);
        let region = recycling::lend(heap, make_room, lend).map_err(words)?;
        region.wait_zeroed(ZEROED_WITHIN).map_err(words)?;
        let lent = Lent { negotiated, rank, heap, holds, region, rings };
        mark(negotiated, rank, &lent.region)?;
        Ok(lent)
    }

    /// The other ranks, to which the region is announced.
    fn others(&self) -> Vec<Member> {
        let others = self.negotiated.members.iter().filter(|member| member.rank != self.rank);
        others.map(|member| Member { rank: member.rank, process: member.process.number() }).collect()
    }

    /// Whether that rank is in this process, too.
    fn is_near(&self, rank: u32) -> bool {
        let process = |rank: u32| self.negotiated.members.get(rank as usize).map(|member| member.process);
        process(rank) == process(self.rank)
    }

    /// Maps the region of a peer in another process. None without wires.
    fn map(&self, rank: u32, place: Place, memory: BorrowedFd<'_>) -> Result<Option<PeerRegion>, String> {
        if self.rings.wires == Wires::None {
            return self.check_size(rank, place.bytes).map(|()| None);
        }
        let member = self.negotiated.members.get(rank as usize).ok_or("no such rank")?;
        let peer = Peer { process: member.process.number(), device_uuid: member.device.uuid };
        let heap = PeerHeap::of(peer).map_err(words)?;
        let began = Instant::now();
        let mapped = heap.map(place, memory, self.heap, &self.holds).map_err(words)?;
        let mapped_at = began.elapsed();
        let tested = self.tested(rank, mapped);
        let (mapped_us, tested_us) = (mapped_at.as_micros(), began.elapsed().as_micros());
        log::debug!(
            "rank {} mapped rank {rank}'s region in {mapped_us} us, had tested it after {tested_us} us",
            self.rank
        );
        tested.map(Some)
    }

    /// Reaches the region of a peer in this process. None without wires.
    fn reach(&self, rank: u32, place: Place) -> Result<Option<PeerRegion>, String> {
        if self.rings.wires == Wires::None {
            return self.check_size(rank, place.bytes).map(|()| None);
        }
        self.tested(rank, heap::reach(place, self.heap).map_err(words)?).map(Some)
    }

    /// Fails if that rank lends another size, as a rank with wires does to one without.
    fn check_size(&self, rank: u32, bytes: u64) -> Result<(), String> {
        match self.region.bytes() {
            own if own == bytes => Ok(()),
            own => Err(format!("rank {rank} lends {bytes} bytes, expected {own}")),
        }
    }

    /// Fails without NVLink to that rank, which the LL128 lines of the p2p transport need.
    fn check_link(&self, rank: u32) -> Result<(), String> {
        match link(self.negotiated, rank, self.heap) {
            Some(true) => Ok(()),
            Some(false) => {
                Err(format!("no NVLink joins ranks {} and {rank}, which Windlass needs", self.rank))
            }
            None => Err(format!(
                "rank {rank}'s GPU is hidden from this process; show all GPUs to all ranks (Slurm: --gpu-bind=none)"
            )),
        }
    }

    /// Loads the peer's word from its region and stores this rank's word beside it.
    fn tested(&self, rank: u32, region: PeerRegion) -> Result<PeerRegion, String> {
        self.check_link(rank)?;
        self.check_size(rank, region.bytes)?;
        probe(self.negotiated, (self.rank, rank), self.heap, &region)?;
        Ok(region)
    }

    /// The transports, over the mapped regions of all peers.
    fn transports(&self, peers: &[Option<PeerRegion>], share: Share) -> Result<Transports, String> {
        let address = |(rank, peer): (u32, &Option<PeerRegion>)| match peer {
            Some(region) => region.address,
            None if rank == self.rank || self.rings.wires == Wires::None => self.region.address(),
            None => 0,
        };
        let regions = (0..).zip(peers).map(address).collect();
        share.transports(&self.rings, regions, &self.holds).map_err(words)
    }
}

/// Stores this rank's word in its region, for the other ranks' tests.
pub(in crate::peers) fn mark(
    negotiated: &NegotiatedConfig,
    rank: u32,
    region: &Region,
) -> Result<(), String> {
    let at = word_at(region.address(), region.bytes(), rank);
    region.heap.store(at, word(negotiated, rank)).map_err(words)
}

/// Loads the word of another rank from its region and stores this rank's word beside it.
pub(in crate::peers) fn probe(
    negotiated: &NegotiatedConfig,
    (own, rank): (u32, u32),
    heap: &Heap,
    region: &PeerRegion,
) -> Result<(), String> {
    let at = |rank| word_at(region.address, region.bytes, rank);
    heap.probe(at(rank), word(negotiated, rank), at(own), word(negotiated, own)).map_err(words)
}

fn word_at(address: u64, bytes: u64, rank: u32) -> u64 {
    address + bytes - WORDS_BYTES + 4 * u64::from(rank)
}

/// The test word of one rank of a communicator. Never what zeroed memory holds.
fn word(negotiated: &NegotiatedConfig, rank: u32) -> u32 {
    let comm = negotiated.comm.0;
    (u32::from_le_bytes([comm[0], comm[1], comm[2], comm[3]]) << 8) | (rank + 1)
}

fn words(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Whether NVLink joins this rank's device to that of another rank. None if that is not known.
fn link(negotiated: &NegotiatedConfig, rank: u32, heap: &Heap) -> Option<bool> {
    let device = &negotiated.members.get(rank as usize)?.device;
    heap.home.driver.nvlink(heap.device(), &device.uuid, device.pci)
}

/// A lazy pair without NVLink has a peer group without wires: both ranks see the same, and come to each call that NCCL runs between them.
/// With fixed order it has none, as NCCL's sums have another.
fn wires(negotiated: &NegotiatedConfig, rank: u32, heap: &Heap) -> Wires {
    let is_fixed = negotiated.capabilities & capability::FIXED_ORDER != 0;
    match negotiated.members.len() {
        2 if negotiated.is_lazy() && !is_fixed && link(negotiated, 1 - rank, heap) == Some(false) => {
            Wires::None
        }
        _ => Wires::NvLink,
    }
}

/// Prepares one rank of a session. The inner result is why it cannot confirm. `Prepared` is returned even then, because other ranks may
/// know its region.
pub(in crate::peers) fn for_session(
    preparation: &Preparation<'_>,
    heap: &Arc<Heap>,
    share: Share,
) -> Result<(Prepared, Result<(), String>), String> {
    let Preparation { negotiated, rank, .. } = *preparation;
    let began = Instant::now();
    let lent = Lent::new(negotiated, rank, heap)?;
    let lent_at = began.elapsed();
    let mut peers: Vec<Option<PeerRegion>> = negotiated.members.iter().map(|_| None).collect();
    let mut lives = lives_of(negotiated, rank);
    let (release_socket, others_end) = ReleaseSocket::new().map_err(words)?;
    let mut known = Known { peers: &mut peers, lives: &mut lives, release_sockets: Vec::new(), page: None };
    let exchanged = exchange(preparation, &lent, others_end, &mut known);
    let Known { release_sockets, page, .. } = known;
    let exchanged_at = began.elapsed();
    let made = exchanged.and_then(|()| lent.transports(&peers, share));
    let (transports, result) = match made {
        Ok(transports) => (Some(transports), Ok(())),
        Err(words) => (None, Err(words)),
    };
    log::debug!(
        "init {:?} rank {rank} lent after {} us, knew all regions after {} us, had its p2p transport after {} us",
        negotiated.comm,
        lent_at.as_micros(),
        exchanged_at.as_micros(),
        began.elapsed().as_micros()
    );
    let (region, holds) = (lent.region, lent.holds);
    let lives = lives.into_iter().map(Arc::new).collect();
    Ok((
        Prepared {
            region,
            peers,
            lives,
            holds,
            transports,
            release_socket: Some(release_socket),
            release_sockets,
            page,
            rank,
        },
        result,
    ))
}

/// What a rank has received from its peers.
struct Known<'a> {
    peers: &'a mut [Option<PeerRegion>],
    lives: &'a mut [Life],
    release_sockets: Vec<Hold>,
    page: Option<Arc<SharedPage>>,
}

/// Exchanges announcements with all other processes, and waits for theirs. Closes this process's copy of `release_socket` at the end;
/// the copies in the receivers' queues stay open.
fn exchange(
    preparation: &Preparation<'_>,
    lent: &Lent<'_>,
    release_socket: Hold,
    known: &mut Known<'_>,
) -> Result<(), String> {
    let others = lent.others();
    let descriptor_sockets = preparation.peers();
    // Each process has a descriptor socket of its own.
    let is_near = |descriptor_socket: &Token| {
        let mut there =
            lent.negotiated.members.iter().filter(|member| member.descriptor_socket == *descriptor_socket);
        there.any(|member| lent.is_near(member.rank))
    };
    // `Ours`, so that a child forked meanwhile closes these.
    let (place, far) = match descriptor_sockets.iter().all(is_near) {
        true => (lent.region.announce_here(&others).map_err(words)?, None),
        false => {
            let announcement = lent.region.announce(&others).map_err(words)?;
            let ends = lent.negotiated.sees_ends().then(life::for_peers).transpose().map_err(words)?;
            (announcement.place, Some((announcement.descriptor, ends)))
        }
    };
    let made = (lent.rank == PAGE_MAKER).then(page_layout::make).transpose()?;
    let (page, file) = made.unzip();
    known.page = page;
    let far = far.iter().flat_map(|(memory, ends)| {
        let ends = ends.iter().flat_map(|(pidfd, socket)| [pidfd.as_fd(), *socket]);
        std::iter::once(memory.as_fd()).chain(ends)
    });
    let file = file.iter().map(AsFd::as_fd);
    let to_near: Vec<BorrowedFd<'_>> = [release_socket.as_fd()].into_iter().chain(file.clone()).collect();
    let to_far: Vec<BorrowedFd<'_>> = [release_socket.as_fd()].into_iter().chain(far).chain(file).collect();
    let mut payload = lent.rank.to_le_bytes().to_vec();
    payload.extend(place.to_wire());
    let sending = |to: &Token| {
        let descriptors = if is_near(to) { &to_near } else { &to_far };
        Sending { to: *to, payload: &payload, descriptors }
    };
    let sendings: Vec<Sending<'_>> = descriptor_sockets.iter().map(sending).collect();
    let began = Instant::now();
    let parcels = preparation
        .descriptor_socket
        .exchange(preparation.token, &sendings, preparation.stop)
        .map_err(words)?;
    log::debug!(
        "rank {} had the others' announcements {} us after its own",
        lent.rank,
        began.elapsed().as_micros()
    );
    let mut heard = 1_u64 << lent.rank;
    for (descriptor_socket, parcel) in descriptor_sockets.iter().zip(parcels) {
        let (rank, place, descriptors) = read(parcel).ok_or("a peer sent what cannot be read")?;
        let member = lent.negotiated.members.get(rank as usize);
        if rank == lent.rank || member.is_none_or(|member| member.descriptor_socket != *descriptor_socket) {
            return Err("a peer spoke for another rank".into());
        }
        let mut descriptors = descriptors.into_iter();
        known.release_sockets.extend(descriptors.next().map(Hold));
        let region = if lent.is_near(rank) {
            lent.reach(rank, place)?
        } else {
            let mut next = || descriptors.next().ok_or("a peer sent too few descriptors");
            let memory = next()?;
            if lent.negotiated.sees_ends() {
                let ends = [next()?, next()?];
                if let Some(life) = known.lives.iter_mut().find(|life| life.rank == rank) {
                    life.ends_with(ends);
                }
            }
            lent.map(rank, place, memory.as_fd())?
        };
        known.peers[rank as usize] = region;
        heard |= 1 << rank;
        if rank == PAGE_MAKER {
            known.page = Some(Arc::new(page_layout::open(descriptors.next())?));
        }
    }
    let missing = (0..known.peers.len()).find(|rank| heard & (1 << rank) == 0);
    missing.map_or(Ok(()), |rank| Err(format!("nothing came from rank {rank}")))
}

/// The other ranks, whose pidfds are not known yet.
fn lives_of(negotiated: &NegotiatedConfig, own: u32) -> Vec<Life> {
    let others = negotiated.members.iter().filter(|member| member.rank != own);
    others.map(|member| Life { rank: member.rank, process: member.process.number(), ends: None }).collect()
}

/// Decodes a parcel: the rank, the place of its region, and its descriptors. These are a release socket; from another process also the
/// region's memory, and what tells its end; last, from rank 0, the shared page.
fn read(parcel: Parcel) -> Option<(u32, Place, Vec<Ours>)> {
    let (rank, place) = parcel.payload.split_first_chunk::<4>()?;
    let place = Place::from_wire(place.try_into().ok()?);
    Some((u32::from_le_bytes(*rank), place, parcel.descriptors))
}

/// Prepares all ranks of a negotiated config in this process, without a session. An error names the rank that failed.
pub(in crate::peers) fn in_one_hand(
    negotiated: &NegotiatedConfig,
    heaps: &[Arc<Heap>],
    shares: Vec<Share>,
) -> Result<Vec<Prepared>, (u32, String)> {
    let mut lent = Vec::new();
    for (rank, heap) in (0..).zip(heaps) {
        lent.push(Lent::new(negotiated, rank, heap).map_err(|words| (rank, words))?);
    }
    let mut peers: Vec<Vec<Option<PeerRegion>>> =
        lent.iter().map(|_| lent.iter().map(|_| None).collect()).collect();
    let mut failed = reach_all(&lent, &mut peers).err();
    let made = page_layout::make().map_err(|words| failed = failed.take().or(Some((PAGE_MAKER, words))));
    // All ranks are in this process, so none opens the file again.
    let page = made.ok().map(|(page, _)| page);
    let mut prepared = Vec::new();
    for ((lent, peers), share) in lent.into_iter().zip(peers).zip(shares) {
        let transports = match &failed {
            None => lent.transports(&peers, share).map_err(|words| failed = Some((lent.rank, words))).ok(),
            Some(_) => None,
        };
        let lives = lives_of(negotiated, lent.rank).into_iter().map(Arc::new).collect();
        let (region, holds) = (lent.region, lent.holds);
        let (release_sockets, page, rank) = (Vec::new(), page.clone(), lent.rank);
        prepared.push(Prepared {
            lives,
            region,
            peers,
            holds,
            transports,
            release_socket: None,
            release_sockets,
            page,
            rank,
        });
    }
    match failed {
        None => Ok(prepared),
        Some(failure) => {
            prepared.into_iter().for_each(|prepared| prepared.abandon());
            Err(failure)
        }
    }
}

fn reach_all(lent: &[Lent<'_>], peers: &mut [Vec<Option<PeerRegion>>]) -> Result<(), (u32, String)> {
    for owner in lent {
        let place = owner.region.announce_here(&owner.others());
        let place = place.map_err(|refusal| (owner.rank, words(refusal)))?;
        for other in lent.iter().filter(|other| other.rank != owner.rank) {
            let region = other.reach(owner.rank, place).map_err(|words| (other.rank, words))?;
            peers[other.rank as usize][owner.rank as usize] = region;
        }
    }
    Ok(())
}
