//! Prepares a rank between the negotiated config and its confirmation: lends a region, maps the other ranks' regions, and tests a load and a
//! store through every mapping. Ranks of one process reach each other's regions at their own addresses, without descriptors.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use once_cell::sync::OnceCell;

use windlass_base::descriptor::Ours;
use windlass_base::shared_page::SharedPage;
use windlass_bootstrap::Preparation;
use windlass_bootstrap::descriptors::{Parcel, Sending};
use windlass_bootstrap::negotiated::{NegotiatedConfig, RANKS_MAX, Token, capability};
use windlass_transport::heap::{self, Heap, Holds, Member, Peer, PeerRegion, Place, Region};

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

/// A rank that prepares.
struct Preparing<'a> {
    negotiated: &'a NegotiatedConfig,
    heap: &'a Arc<Heap>,
    rings: Rings,
    prepared: Prepared,
}

impl<'a> Preparing<'a> {
    /// Lends a region that holds zeros and this rank's word.
    fn new(
        negotiated: &'a NegotiatedConfig,
        rank: u32,
        heap: &'a Arc<Heap>,
    ) -> Result<Preparing<'a>, String> {
        let holds = Holds::new();
        let rings = Rings::of(negotiated, rank, wires(negotiated, rank, heap));
        let lend = || heap.lend(rings.bytes + WORDS_BYTES, &holds);
        let make_room = |is_enough: &mut dyn FnMut() -> bool| room::make_soon(heap.device(), is_enough);
        let region = recycling::lend(heap, make_room, lend).map_err(words)?;
        region.wait_zeroed(ZEROED_WITHIN).map_err(words)?;
        mark(negotiated, rank, &region)?;
        let others = negotiated.members.iter().filter(|member| member.rank != rank);
        let lives = others.map(|member| {
            let (rank, process) = (member.rank, member.process.number());
            Arc::new(Life { rank, process, ends: OnceCell::new() })
        });
        let prepared = Prepared {
            region,
            peers: negotiated.members.iter().map(|_| None).collect(),
            lives: lives.collect(),
            holds,
            transports: None,
            release_socket: None,
            release_sockets: Vec::new(),
            page: None,
            rank,
        };
        Ok(Preparing { negotiated, heap, rings, prepared })
    }

    /// The other ranks, to which the region is announced.
    fn others(&self) -> Vec<Member> {
        let lives = self.prepared.lives.iter();
        lives.map(|life| Member { rank: life.rank, process: life.process }).collect()
    }

    /// Maps and tests the region of a peer; `memory` is that of one in another process. Without wires nothing is mapped.
    fn map(&mut self, rank: u32, place: Place, memory: Option<BorrowedFd<'_>>) -> Result<(), String> {
        if self.rings.wires == Wires::None {
            return self.check_size(rank, place.bytes);
        }
        let (own, began) = (self.prepared.rank, Instant::now());
        let member = self.negotiated.members.get(rank as usize).ok_or("no such rank")?;
        let peer = Peer { process: member.process.number(), device_uuid: member.device.uuid };
        let region = heap::map(peer, place, memory, self.heap, &self.prepared.holds).map_err(words)?;
        let mapped_us = began.elapsed().as_micros();
        self.check_link(rank)?;
        self.check_size(rank, place.bytes)?;
        probe(self.negotiated, (own, rank), self.heap, &region)?;
        let tested_us = began.elapsed().as_micros();
        log::debug!(
            "rank {own} mapped rank {rank}'s region in {mapped_us} us, had tested it after {tested_us} us"
        );
        self.prepared.peers[rank as usize] = Some(region);
        Ok(())
    }

    /// Fails if that rank lends another size, as a rank with wires does to one without.
    fn check_size(&self, rank: u32, bytes: u64) -> Result<(), String> {
        match self.prepared.region.bytes() {
            own if own == bytes => Ok(()),
            own => Err(format!("rank {rank} lends {bytes} bytes, expected {own}")),
        }
    }

    /// Fails without NVLink to that rank, which the LL128 lines of the p2p transport need.
    fn check_link(&self, rank: u32) -> Result<(), String> {
        match link(self.negotiated, rank, self.heap) {
            Some(true) => Ok(()),
            Some(false) => {
                Err(format!("no NVLink joins ranks {} and {rank}, which Windlass needs", self.prepared.rank))
            }
            None => Err(format!(
                "rank {rank}'s GPU is hidden from this process; show all GPUs to all ranks (Slurm: --gpu-bind=none)"
            )),
        }
    }

    /// Makes the transports, over the regions of all peers.
    fn connect(&mut self, share: Share) -> Result<(), String> {
        let Prepared { region, peers, holds, rank: own, .. } = &self.prepared;
        let address = |(rank, peer): (u32, &Option<PeerRegion>)| match peer {
            Some(region) => region.address,
            None if rank == *own || self.rings.wires == Wires::None => region.address(),
            None => 0,
        };
        let regions = (0..).zip(peers).map(address).collect();
        let transports = share.transports(&self.rings, regions, holds).map_err(words)?;
        self.prepared.transports = Some(transports);
        Ok(())
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
    let mut preparing = Preparing::new(negotiated, rank, heap)?;
    let lent_at = began.elapsed();
    let (release_socket, others_end) = ReleaseSocket::new().map_err(words)?;
    preparing.prepared.release_socket = Some(release_socket);
    let exchanged = exchange(preparation, &mut preparing, others_end);
    let exchanged_at = began.elapsed();
    let result = exchanged.and_then(|()| preparing.connect(share));
    log::debug!(
        "init {:?} rank {rank} lent after {} us, knew all regions after {} us, had its p2p transport after {} us",
        negotiated.comm,
        lent_at.as_micros(),
        exchanged_at.as_micros(),
        began.elapsed().as_micros()
    );
    Ok((preparing.prepared, result))
}

/// Exchanges announcements with all other processes, and waits for theirs. Closes this process's copy of `release_socket` at the end;
/// the copies in the receivers' queues stay open.
fn exchange(
    preparation: &Preparation<'_>,
    own: &mut Preparing<'_>,
    release_socket: Hold,
) -> Result<(), String> {
    let others = own.others();
    let (own_rank, negotiated) = (own.prepared.rank, own.negotiated);
    let descriptor_sockets = preparation.peers();
    // Each process has a descriptor socket of its own.
    let is_near = |descriptor_socket: &Token| {
        let mut there =
            negotiated.members.iter().filter(|member| member.descriptor_socket == *descriptor_socket);
        there.any(|member| negotiated.are_in_one_process(own_rank, member.rank))
    };
    // `Ours`, so that a child forked meanwhile closes these.
    let (place, far) = match descriptor_sockets.iter().all(is_near) {
        true => (own.prepared.region.announce_here(&others).map_err(words)?, None),
        false => {
            let announcement = own.prepared.region.announce(&others).map_err(words)?;
            let ends = negotiated.sees_ends().then(life::for_peers).transpose().map_err(words)?;
            (announcement.place, Some((announcement.descriptor, ends)))
        }
    };
    let made = (own_rank == PAGE_MAKER).then(page_layout::make).transpose()?;
    let (page, file) = made.unzip();
    own.prepared.page = page;
    let far = far.iter().flat_map(|(memory, ends)| {
        let ends = ends.iter().flat_map(|(pidfd, socket)| [pidfd.as_fd(), *socket]);
        std::iter::once(memory.as_fd()).chain(ends)
    });
    let file = file.iter().map(AsFd::as_fd);
    let to_near: Vec<BorrowedFd<'_>> = [release_socket.as_fd()].into_iter().chain(file.clone()).collect();
    let to_far: Vec<BorrowedFd<'_>> = [release_socket.as_fd()].into_iter().chain(far).chain(file).collect();
    let mut payload = own_rank.to_le_bytes().to_vec();
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
        own_rank,
        began.elapsed().as_micros()
    );
    let mut heard = 1_u64 << own_rank;
    for (descriptor_socket, parcel) in descriptor_sockets.iter().zip(parcels) {
        let (rank, place, descriptors) = read(parcel).ok_or("a peer sent what cannot be read")?;
        let member = negotiated.members.get(rank as usize);
        if rank == own_rank || member.is_none_or(|member| member.descriptor_socket != *descriptor_socket) {
            return Err("a peer spoke for another rank".into());
        }
        let mut descriptors = descriptors.into_iter();
        own.prepared.release_sockets.extend(descriptors.next().map(Hold));
        let mut memory = None;
        if !negotiated.are_in_one_process(own_rank, rank) {
            let mut next = || descriptors.next().ok_or("a peer sent too few descriptors");
            memory = Some(next()?);
            if negotiated.sees_ends() {
                let ends = [next()?, next()?];
                if let Some(life) = own.prepared.lives.iter().find(|life| life.rank == rank) {
                    life.ends_with(ends);
                }
            }
        }
        own.map(rank, place, memory.as_ref().map(AsFd::as_fd))?;
        heard |= 1 << rank;
        if rank == PAGE_MAKER {
            own.prepared.page = Some(Arc::new(page_layout::open(descriptors.next())?));
        }
    }
    let missing = (0..negotiated.members.len()).find(|rank| heard & (1 << rank) == 0);
    missing.map_or(Ok(()), |rank| Err(format!("nothing came from rank {rank}")))
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
    // All ranks are in this process, so none opens the file again.
    let (page, _) = page_layout::make().map_err(|words| (PAGE_MAKER, words))?;
    let mut all = Vec::new();
    for (rank, heap) in (0..).zip(heaps) {
        let mut one = Preparing::new(negotiated, rank, heap).map_err(|words| (rank, words))?;
        one.prepared.page = Some(page.clone());
        all.push(one);
    }
    let connected = connect_all(&mut all, shares);
    let prepared = all.into_iter().map(|one| one.prepared);
    match connected {
        Ok(()) => Ok(prepared.collect()),
        Err(failure) => {
            prepared.for_each(Prepared::abandon);
            Err(failure)
        }
    }
}

/// Lets every rank reach all regions. The error names the rank that failed.
fn connect_all(all: &mut [Preparing<'_>], shares: Vec<Share>) -> Result<(), (u32, String)> {
    for owner in 0..all.len() {
        let region = &all[owner].prepared.region;
        let place = region.announce_here(&all[owner].others());
        let (rank, place) = (owner as u32, place.map_err(|refusal| (owner as u32, words(refusal)))?);
        for other in all.iter_mut().filter(|other| other.prepared.rank != rank) {
            other.map(rank, place, None).map_err(|words| (other.prepared.rank, words))?;
        }
    }
    for (one, share) in all.iter_mut().zip(shares) {
        one.connect(share).map_err(|words| (one.prepared.rank, words))?;
    }
    Ok(())
}
