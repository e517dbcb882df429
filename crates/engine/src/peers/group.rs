//! A rank of a peer group: what it has, and what a call asks of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use nccl_sys::{ncclInternalError, ncclResult_t, ncclSuccess};
use once_cell::sync::OnceCell;

use crate::features::memory::pool;
use crate::forward::configuration;
use windlass_base::error::refuse;
use windlass_base::gpu::{self, Address, StreamHandle};
use windlass_base::shared_page::SharedPage;
use windlass_bootstrap::negotiated::NegotiatedConfig;
use windlass_transport::TransportError;
use windlass_transport::heap::{Heap, PeerRegion, Region};
use windlass_transport::native::Task;
use windlass_transport::p2p::{Operation, P2p};
use windlass_transport::sequencer::Afterwards;
#[cfg(doc)]
use windlass_transport::sequencer::Sequencer;
use windlass_transport::tuning::Limits;

use super::attempts::Attempts;
use super::children::Lineage;
use super::growing::Growing;
use super::ids::Ids;
use super::requests::Others;
use crate::background::life::Life;
use crate::background::{process_exit, worker};
use crate::features::check;
use crate::features::check::Checking;
use crate::features::registration::registering::{End, Registering};
use crate::features::windows::{self, Windows};
use crate::peers::health::error_propagation::{self, Loss, Went};
use crate::peers::setup::preparing::{self, Prepared};
use crate::peers::setup::transports::{LEAVES_WITHIN, Transports};
use crate::peers::setup::tuned;
use crate::peers::shutdown::closing::{ClosedSignal, Closing};
use crate::peers::shutdown::draining::Draining;

/// What all agreed on, and what this rank has of it.
#[derive(Debug)]
pub struct PeerGroup {
    negotiated: Arc<NegotiatedConfig>,
    rank: u32,
    /// None while being dropped: the first to go.
    transports: Option<Transports>,
    limits: Limits,
    /// What communicators made from this one need.
    lineage: Arc<Lineage>,
    /// By rank, none at this rank's place. Dropped before the others hear that this rank has closed.
    peers: Vec<Option<PeerRegion>>,
    growing: Growing,
    /// With which NCCL's communicators are made later.
    ids: Ids,
    attempts: Attempts,
    others: Others,
    configuration: OnceCell<configuration::Kept>,
    /// None where the ranks do not, or this process has ended.
    registering: Option<Arc<Registering>>,
    /// Where the negotiated config keeps windows.
    windows: Option<Arc<Windows>>,
    /// Where the negotiated config compares calls.
    checking: Option<Arc<Checking>>,
    /// None while being dropped.
    own: Option<(Region, Closing)>,
    lives: Vec<Arc<Life>>,
    /// Zeros at first; all ranks write to it.
    page: Arc<SharedPage>,
    /// Turns that were taken.
    runs: AtomicU64,
    /// Peers of groups that may not be done, a bit each.
    awaited: AtomicU64,
    /// Ranks that said that they have failed, a bit each.
    lost: AtomicU64,
    /// The asynchronous error; `ncclSuccess` while there is none.
    failed: AtomicI32,
}

impl PeerGroup {
    /// What was prepared, once all have confirmed.
    pub(super) fn new(negotiated: Arc<NegotiatedConfig>, prepared: Prepared) -> Option<Arc<PeerGroup>> {
        let Prepared {
            region,
            peers,
            lives,
            holds,
            transports,
            release_socket: _,
            release_sockets,
            page,
            rank,
        } = prepared;
        let page = page?;
        let ranks = negotiated.members.len() as u32;
        let registers = negotiated.registers().then(|| page.clone());
        let registering = registers.and_then(|page| Registering::new(page, rank, ranks, region.device()));
        let windows = Windows::new(&negotiated, &page, rank, region.device());
        let checking = Checking::new(&negotiated, &page, rank);
        check::say_who_does_not(&negotiated, rank);
        let transports = transports?;
        let signal = ClosedSignal::shared(page.clone(), rank);
        let closing = Closing::new(&region, signal, lives.clone(), holds.clone());
        release_sockets.into_iter().for_each(|socket| socket.keep(rank));
        let lineage = Lineage::of_peer_group(&negotiated, rank, lives.clone(), transports.sequencer.graphs());
        tuned::say(&negotiated);
        let others = Others::new(&negotiated, rank);
        Some(Arc::new(PeerGroup {
            limits: Limits::of(&negotiated, tuned::table()),
            negotiated,
            rank,
            transports: Some(transports),
            peers,
            growing: Growing::new(others.clone(), holds),
            ids: Ids::new(others.clone()),
            attempts: Attempts::new(others.clone()),
            others,
            configuration: OnceCell::new(),
            registering,
            windows,
            checking,
            lineage,
            own: Some((region, closing)),
            lives,
            page,
            runs: AtomicU64::new(0),
            awaited: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            failed: AtomicI32::new(ncclSuccess.0),
        }))
    }

    /// What all agreed on.
    pub fn negotiated(&self) -> &Arc<NegotiatedConfig> {
        &self.negotiated
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Memory that all ranks share, zeros at first. Kept by whoever holds it, also beyond the peer group.
    pub fn shared_page(&self) -> &Arc<SharedPage> {
        &self.page
    }

    /// Notes the communicator's configuration, once.
    pub fn keep_configuration(&self, configuration: configuration::Kept) {
        let _ = self.configuration.set(configuration);
    }

    /// The communicator's configuration.
    pub fn configuration(&self) -> &configuration::Kept {
        self.configuration.get().unwrap_or(&configuration::Kept::Unknown)
    }

    /// What this rank registers by itself.
    pub fn registering(&self) -> Option<&Arc<Registering>> {
        self.registering.as_ref()
    }

    /// The windows that it keeps.
    pub fn windows(&self) -> Option<&Arc<Windows>> {
        self.windows.as_ref()
    }

    /// What it tells the others of its calls.
    pub fn checking(&self) -> Option<&Arc<Checking>> {
        self.checking.as_ref()
    }

    /// From now on calls are not told any more.
    pub fn end_checking(&self) {
        self.checking.iter().for_each(|checking| checking.end(|| self.gone()));
    }

    /// Ranks whose processes have ended or that said that they have failed, a bit each.
    pub(super) fn gone(&self) -> u64 {
        let dead = self.lives.iter().filter(|life| life.is_over());
        dead.fold(self.lost.load(Ordering::Relaxed), |gone, life| gone | 1 << life.rank)
    }

    /// The communicator ends. Its windows that the application has deregistered go, unless it is stopped: then all stay.
    pub fn end_windows(&self, aborts: bool) -> End {
        let Some(windows) = &self.windows else { return End::Clean };
        if aborts || self.has_failed() {
            return windows.abort();
        }
        windows.end_all();
        End::Clean
    }

    /// What communicators made from this one need.
    pub fn lineage(&self) -> &Arc<Lineage> {
        &self.lineage
    }

    /// The ids with which NCCL's communicators are made later.
    pub(crate) fn ids(&self) -> &Ids {
        &self.ids
    }

    /// The attempts to have NCCL build the communicator behind a lazy one.
    pub(crate) fn attempts(&self) -> &Attempts {
        &self.attempts
    }

    /// How its rings grow.
    pub(super) fn growing(&self) -> &Growing {
        &self.growing
    }

    /// What runs on this rank's GPU; none while the peer group is being dropped.
    pub(super) fn transports(&self) -> Option<&Transports> {
        self.transports.as_ref()
    }

    /// This rank's region; none while the peer group is being dropped.
    pub(super) fn region(&self) -> Option<&Region> {
        self.own.as_ref().map(|(region, _)| region)
    }

    /// What rings grow by; none while the peer group is being dropped.
    pub(super) fn p2p_and_heap(&self) -> Option<(&P2p, &Arc<Heap>)> {
        Some((&self.transports()?.p2p, self.region()?.heap()))
    }

    /// The other ranks.
    pub(super) fn others(&self) -> &Others {
        &self.others
    }

    /// The other ranks' processes.
    pub(super) fn lives(&self) -> &[Arc<Life>] {
        &self.lives
    }

    /// Groups and calls that were issued.
    pub(super) fn runs(&self) -> u64 {
        self.runs.load(Ordering::Relaxed)
    }

    /// Peers with whom something may not be done, a bit each, from what was noted so far; [`PeerGroup::await_still`] takes them back.
    pub(super) fn take_awaited(&self) -> u64 {
        self.awaited.swap(0, Ordering::Acquire)
    }

    /// These may still not be done; gives all that may not.
    pub(super) fn await_still(&self, peers: u64) -> u64 {
        self.awaited.fetch_or(peers, Ordering::Relaxed) | peers
    }

    /// A rank says that it has failed.
    pub(super) fn lose(&self, rank: u32) {
        self.lost.fetch_or(1 << rank, Ordering::Relaxed);
    }

    /// Whether a rank has said that it has failed.
    pub(super) fn has_lost(&self, rank: u32) -> bool {
        self.lost.load(Ordering::Relaxed) & (1 << rank) != 0
    }

    /// Up to which size native collectives serve it.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Runs tasks of collectives, in their order, then sends and receives as one kernel, on the first stream; what the other streams hold
    /// comes before, and what they get later after it.
    pub fn run(
        &self,
        tasks: &[Task],
        operations: &[Operation],
        stream: StreamHandle,
        others: &[StreamHandle],
    ) -> ncclResult_t {
        process_exit::go_on();
        self.runs.fetch_add(1, Ordering::Relaxed);
        if self.has_failed() {
            return refuse(self.error(), format_args!("the communicator has failed"));
        }
        let Some(transports) = &self.transports else { return ncclInternalError };
        let ran = transports.sequencer.take(stream, others, |turn| {
            if let Some(native) = &transports.native {
                tasks.iter().try_for_each(|task| native.launch(turn, task))?;
            }
            match operations {
                [] => Ok(()),
                operations => transports.p2p.launch(turn, operations),
            }
        });
        let result = ran.map_or_else(|refused| self.refused(&refused, stream), |()| ncclSuccess);
        // After it was issued: who looks takes them before it asks whether all is done.
        let of_messages = operations.iter().fold(0, |peers, operation| peers | 1 << operation.peer);
        let of_collectives = if tasks.is_empty() { 0 } else { (1 << self.negotiated.members.len()) - 1 };
        self.awaited.fetch_or(of_messages | of_collectives, Ordering::Release);
        result
    }

    #[cold]
    fn refused(&self, refused: &TransportError, stream: StreamHandle) -> ncclResult_t {
        let result = refuse(refused.result(), format_args!("{refused}"));
        if error_propagation::is_lost(refused, went(stream)) {
            self.fail(result);
        }
        result
    }

    /// Lets what comes next on a stream run after all that ran here: see [`Sequencer::order`]. What fails is logged; whoever issues it meets
    /// the same device.
    pub fn order(&self, stream: StreamHandle) -> Afterwards {
        let order =
            |transports: &Transports| transports.sequencer.order(stream).unwrap_or(Afterwards::Nothing);
        self.transports.as_ref().map_or(Afterwards::Nothing, order)
    }

    /// Lets all that comes here run after what was issued on that stream then: see [`Sequencer::follow`]. Whether it does, whatever graphs run.
    pub fn follow(&self, stream: StreamHandle) -> bool {
        self.transports.as_ref().is_some_and(|transports| transports.sequencer.follow(stream) == Ok(true))
    }

    /// The asynchronous error of what ran here; `ncclSuccess` if there is none.
    pub fn error(&self) -> ncclResult_t {
        ncclResult_t(self.failed.load(Ordering::Acquire))
    }

    fn has_failed(&self) -> bool {
        self.error() != ncclSuccess
    }

    /// The first error stays, and the peers hear of it.
    pub fn fail(&self, error: ncclResult_t) {
        let (none, relaxed) = (ncclSuccess.0, Ordering::Relaxed);
        if self.failed.compare_exchange(none, error.0, Ordering::Release, relaxed).is_ok() {
            self.windows.iter().for_each(|windows| windows.leave_alone());
            pool::distrust(self.device());
            let (comm, from) = (self.negotiated.comm, self.rank);
            self.others.tell(|to| Loss { comm, from, to }.encode());
        }
    }

    /// Frees the GPU of this rank's kernels at once, and refuses more. Any thread.
    pub fn abort(&self) {
        self.transports.iter().for_each(|transports| transports.sequencer.abort());
    }

    /// Waits until all sends and receives are done, as NCCL does before it ends a communicator. An abort ends it; and where
    /// this rank has failed its peers may have given up what it waits for, and where something was issued in part nobody knows when
    /// it ends: that gets a moment.
    pub fn wait_idle(&self) {
        if self.has_failed()
            || self.transports.as_ref().is_some_and(|transports| transports.sequencer.is_doubtful())
        {
            self.transports.iter().for_each(|transports| drop(transports.sequencer.wait_idle(LEAVES_WITHIN)));
            return self.abort();
        }
        // A driver that answers nothing any more has nothing in flight either.
        self.transports.iter().for_each(|transports| drop(transports.sequencer.wait_idle(Duration::MAX)));
    }

    /// This rank's device, until its memory has been given back.
    pub fn device(&self) -> Option<i32> {
        self.region().map(Region::device)
    }

    /// Bytes of this rank's device that nobody uses: two places for one byte each.
    pub fn scratch(&self) -> Option<[Address; 2]> {
        self.region().map(preparing::scratch)
    }
}

/// Asked where something was refused only.
fn went(stream: StreamHandle) -> Went {
    match gpu::driver().and_then(|driver| driver.capture_of(stream)) {
        Ok(Some(_)) => Went::IntoCapture,
        _ => Went::ToStream,
    }
}

impl Drop for PeerGroup {
    fn drop(&mut self) {
        self.lineage.end();
        let draining = Draining {
            transports: self.transports.take(),
            peers: std::mem::take(&mut self.peers),
            grown: self.growing.take(),
            own: self.own.take(),
        };
        draining.begin();
        worker::wake();
    }
}

impl windows::Health for PeerGroup {
    fn error(&self) -> ncclResult_t {
        self.error()
    }

    fn gone(&self) -> u64 {
        self.gone()
    }

    fn fail(&self, error: ncclResult_t) {
        self.fail(error);
    }
}
