//! A rank of a peer group: what it has, and what a call asks of it.

use std::sync::Arc;
use std::time::Duration;

use nccl_sys::{ncclInternalError, ncclResult_t, ncclSuccess};
use once_cell::sync::OnceCell;

use crate::features::memory::pool;
use crate::forward::configuration;
use windlass_base::error::refuse;
use windlass_base::gpu::{self, Address, Ordinal, StreamHandle};
use windlass_base::shared_page::SharedPage;
use windlass_bootstrap::negotiated::NegotiatedConfig;
use windlass_transport::TransportError;
use windlass_transport::heap::{Heap, Region};
use windlass_transport::native::Task;
use windlass_transport::p2p::{Operation, P2p};
use windlass_transport::sequencer::{Afterwards, Sequencer};
use windlass_transport::tuning::{Collective, Limits, Terms, agreed};

use super::attempts::Attempts;
use super::children::Lineage;
use super::growing::Growing;
use super::ids::Ids;
use super::requests::Others;
use super::scalars::Scalars;
use crate::background::{process_exit, worker};
use crate::features::check;
use crate::features::check::Checking;
use crate::features::registration::registering::{End, Registering};
use crate::features::windows::{self, Windows};
use crate::peers::health::error_propagation::{self, Loss, Went};
use crate::peers::health::ranks::Ranks;
use crate::peers::setup::preparing::{self, Prepared};
use crate::peers::setup::transports::{LEAVES_WITHIN, Transports};
use crate::peers::setup::tuned;
use crate::peers::shutdown::closing::{ClosedSignal, Closing};
use crate::peers::shutdown::draining::{Draining, Mapped};

/// What all agreed on, and what this rank has of it.
#[derive(Debug)]
pub struct PeerGroup {
    others: Others,
    ranks: Ranks,
    /// None while being dropped.
    mapped: Option<Mapped>,
    growing: Growing,
    features: Features,
    /// What communicators made from this one need.
    lineage: Arc<Lineage>,
    /// With which NCCL's communicators are made later.
    ids: Ids,
    attempts: Attempts,
    scalars: Scalars,
    configuration: OnceCell<configuration::Kept>,
    /// Zeros at first; all ranks write to it.
    page: Arc<SharedPage>,
}

/// What it has beside.
#[derive(Debug)]
struct Features {
    /// Up to which size native collectives serve it.
    limits: Limits,
    /// Where its limits come from, as bits of [`agreed::Source`].
    limits_from: u32,
    /// None where the ranks do not, or this process has ended.
    registering: Option<Arc<Registering>>,
    /// Where the negotiated config keeps windows.
    windows: Option<Arc<Windows>>,
    /// Where the negotiated config compares calls.
    checking: Option<Arc<Checking>>,
}

impl Features {
    fn new(negotiated: &NegotiatedConfig, page: &Arc<SharedPage>, rank: u32, device: Ordinal) -> Features {
        let ranks = negotiated.members.len() as u32;
        check::say_who_does_not(negotiated, rank);
        let decided = agreed::decide(negotiated);
        tuned::say(&decided);
        let pays = decided.limits.serve(Collective::RegisteredAllGather, 0);
        let registers = (negotiated.registers() && pays).then(|| page.clone());
        Features {
            limits: decided.limits,
            limits_from: decided.source_bits(),
            registering: registers.and_then(|page| Registering::new(page, rank, ranks, device)),
            windows: Windows::new(negotiated, page, rank, device),
            checking: Checking::new(negotiated, page, rank),
        }
    }
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
        let (page, transports) = (page?, transports?);
        let features = Features::new(&negotiated, &page, rank, region.device());
        let signal = ClosedSignal::shared(page.clone(), rank);
        let closing = Closing::new(&region, signal, lives.clone(), holds.clone());
        release_sockets.into_iter().for_each(|socket| socket.keep(rank));
        let lineage = Lineage::of_peer_group(&negotiated, rank, lives.clone(), transports.sequencer.graphs());
        let others = Others::new(negotiated, rank);
        Some(Arc::new(PeerGroup {
            ranks: Ranks::new(lives),
            mapped: Some(Mapped { transports, peers, region, closing }),
            growing: Growing::new(others.clone(), holds),
            ids: Ids::new(others.clone()),
            attempts: Attempts::new(others.clone()),
            others,
            features,
            lineage,
            scalars: Scalars::default(),
            configuration: OnceCell::new(),
            page,
        }))
    }

    /// What all agreed on.
    pub fn negotiated(&self) -> &Arc<NegotiatedConfig> {
        self.others.negotiated()
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.others.rank()
    }

    /// What decides the path of a call.
    pub fn terms(&self) -> Terms {
        Terms::of(self.negotiated(), self.features.limits)
    }

    /// Memory that all ranks share, zeros at first. Kept by whoever holds it, also beyond the peer group.
    pub fn shared_page(&self) -> &Arc<SharedPage> {
        &self.page
    }

    /// What the program's own reductions multiply by.
    pub fn scalars(&self) -> &Scalars {
        &self.scalars
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
        self.features.registering.as_ref()
    }

    /// The windows that it keeps.
    pub fn windows(&self) -> Option<&Arc<Windows>> {
        self.features.windows.as_ref()
    }

    /// What it tells the others of its calls.
    pub fn checking(&self) -> Option<&Arc<Checking>> {
        self.features.checking.as_ref()
    }

    /// From now on calls are not told any more.
    pub fn end_checking(&self) {
        self.features.checking.iter().for_each(|checking| checking.end(|| self.ranks.gone()));
    }

    /// The communicator ends. Its windows that the application has deregistered go, unless it is stopped: then all stay.
    pub fn end_windows(&self, aborts: bool) -> End {
        let Some(windows) = &self.features.windows else { return End::Clean };
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
        self.mapped.as_ref().map(|mapped| &mapped.transports)
    }

    fn sequencer(&self) -> Option<&Arc<Sequencer>> {
        self.transports().map(|transports| &transports.sequencer)
    }

    fn region(&self) -> Option<&Region> {
        self.mapped.as_ref().map(|mapped| &mapped.region)
    }

    /// What rings grow by; none while the peer group is being dropped.
    pub(super) fn p2p_and_heap(&self) -> Option<(&P2p, &Arc<Heap>)> {
        Some((&self.transports()?.p2p, self.region()?.heap()))
    }

    /// The other ranks.
    pub(super) fn others(&self) -> &Others {
        &self.others
    }

    /// How the ranks are.
    pub(super) fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Where the limits of native collectives come from, as bits of [`agreed::Source`]; none where it has no native collectives.
    pub fn limits_from(&self) -> u32 {
        self.features.limits_from
    }

    /// Up to which size native collectives serve it.
    pub fn limits(&self) -> &Limits {
        &self.features.limits
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
        self.ranks.runs_one();
        if self.has_failed() {
            return refuse(self.error(), format_args!("the communicator has failed"));
        }
        let Some(transports) = self.transports() else { return ncclInternalError };
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
        let of_messages = operations.iter().fold(0, |peers, operation| peers | 1 << operation.peer);
        let of_collectives = if tasks.is_empty() { 0 } else { (1 << self.negotiated().members.len()) - 1 };
        // After it was issued.
        self.ranks.awaits(of_messages | of_collectives);
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
        let order = |sequencer: &Arc<Sequencer>| sequencer.order(stream).unwrap_or(Afterwards::Nothing);
        self.sequencer().map_or(Afterwards::Nothing, order)
    }

    /// Lets all that comes here run after what was issued on that stream then: see [`Sequencer::follow`]. Whether it does, whatever graphs run.
    pub fn follow(&self, stream: StreamHandle) -> bool {
        self.sequencer().is_some_and(|sequencer| sequencer.follow(stream) == Ok(true))
    }

    /// The asynchronous error of what ran here; `ncclSuccess` if there is none.
    pub fn error(&self) -> ncclResult_t {
        self.ranks.error()
    }

    fn has_failed(&self) -> bool {
        self.error() != ncclSuccess
    }

    /// The first error stays, and the peers hear of it.
    pub fn fail(&self, error: ncclResult_t) {
        if self.ranks.fail(error) {
            self.features.windows.iter().for_each(|windows| windows.leave_alone());
            pool::distrust(self.device());
            let (comm, from) = (self.others.comm(), self.rank());
            self.others.tell(|to| Loss { comm, from, to }.encode());
        }
    }

    /// Frees the GPU of this rank's kernels at once, and refuses more. Any thread.
    pub fn abort(&self) {
        self.sequencer().into_iter().for_each(|sequencer| sequencer.abort());
    }

    /// Waits until all sends and receives are done, as NCCL does before it ends a communicator. An abort ends it; and where
    /// this rank has failed its peers may have given up what it waits for, and where something was issued in part nobody knows when
    /// it ends: that gets a moment.
    pub fn wait_idle(&self) {
        let Some(sequencer) = self.sequencer() else { return };
        if self.has_failed() || sequencer.is_doubtful() {
            drop(sequencer.wait_idle(LEAVES_WITHIN));
            return self.abort();
        }
        // A driver that answers nothing any more has nothing in flight either.
        drop(sequencer.wait_idle(Duration::MAX));
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
        if let Some(mapped) = self.mapped.take() {
            Draining { mapped, grown: self.growing.take() }.begin();
        }
        worker::wake();
    }
}

impl windows::Health for PeerGroup {
    fn error(&self) -> ncclResult_t {
        self.error()
    }

    fn gone(&self) -> u64 {
        self.ranks.gone()
    }

    fn fail(&self, error: ncclResult_t) {
        self.fail(error);
    }
}
