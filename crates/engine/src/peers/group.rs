//! [`PeerGroup`]: one rank's part of a peer group. It holds what was prepared at init, and runs the calls of the p2p and native paths.

use std::sync::Arc;
use std::time::Duration;

use nccl_sys::{ncclInternalError, ncclResult_t, ncclSuccess};

use crate::features::memory::pool;
use windlass_base::error::refuse;
use windlass_base::gpu::{self, Address, Ordinal, StreamHandle};
use windlass_base::shared_page::SharedPage;
use windlass_bootstrap::negotiated::NegotiatedConfig;
use windlass_transport::TransportError;
use windlass_transport::heap::{Heap, Region};
use windlass_transport::native::Task;
use windlass_transport::p2p::{Direction, Operation, P2p};
use windlass_transport::sequencer::{Afterwards, History, Joins, Sequencer};
use windlass_transport::tuning::{Collective, Limits, Terms, agreed};

use super::attempts::Attempts;
use super::children::Lineage;
use super::growing::Growing;
use super::ids::Ids;
use super::requests::{Matter, Others};
use super::scalars::Scalars;
use super::sleep::Sleep;
use crate::background::{own_thread, process_exit, worker};
use crate::features::registration::registering::{End, Registering};
use crate::features::windows::{self, Windows};
use crate::peers::health::error_propagation::{self, Went};
use crate::peers::health::ranks::Ranks;
use crate::peers::setup::preparing::{self, Prepared};
use crate::peers::setup::transports::{LEAVES_WITHIN, Transports};
use crate::peers::setup::tuned;
use crate::peers::shutdown::closing::{ClosedSignal, Closing};
use crate::peers::shutdown::draining::{Draining, Mapped};

/// One rank's part of a peer group: what all ranks agreed on, and this rank's own resources.
#[derive(Debug)]
pub struct PeerGroup {
    /// The way to the other ranks' processes.
    pub(super) others: Others,
    /// What this rank knows of the state of the ranks.
    pub(super) ranks: Ranks,
    /// None while being dropped.
    mapped: Option<Mapped>,
    /// The growth of this rank's rings.
    pub(super) growing: Growing,
    /// What was decided for it, and its features.
    pub features: Features,
    /// What communicators made from this one need.
    pub lineage: Arc<Lineage>,
    /// The ids from which NCCL's communicator is made later, when a lazy communicator is materialized.
    pub(crate) ids: Ids,
    /// The attempts to materialize this lazy communicator.
    pub(crate) attempts: Attempts,
    /// The scalars of the program's own reductions.
    pub scalars: Scalars,
    /// What suspends and resumes have done.
    pub(super) sleep: Sleep,
}

/// The features of a peer group beside moving bytes.
#[derive(Debug)]
pub struct Features {
    /// Up to how many bytes each collective is native.
    pub limits: Limits,
    /// Where the limits come from, as bits of [`agreed::Source`].
    pub limits_from: u32,
    /// None where the ranks do not register buffers, or where this process has ended.
    pub registering: Option<Arc<Registering>>,
    /// Where the negotiated config keeps windows.
    pub windows: Option<Arc<Windows>>,
}

impl Features {
    fn new(
        negotiated: &NegotiatedConfig,
        page: &Arc<SharedPage>,
        rank: u32,
        device: Ordinal,
        has_wires: bool,
    ) -> Features {
        let ranks = negotiated.members.len() as u32;
        if !has_wires {
            let (registering, windows) = (None, None);
            return Features { limits: Limits::NONE, limits_from: 0, registering, windows };
        }
        let decided = agreed::decide(negotiated);
        tuned::say(&decided);
        let pays = decided.limits.serve(Collective::RegisteredAllGather, 0);
        let registers = (negotiated.registers() && pays).then(|| page.clone());
        Features {
            limits: decided.limits,
            limits_from: decided.source_bits(),
            registering: registers.and_then(|page| Registering::new(page, rank, ranks, device)),
            windows: Windows::new(negotiated, page, rank, device),
        }
    }
}

impl PeerGroup {
    /// Makes the peer group from what was prepared, once all ranks have confirmed. None if the page or the transports are missing.
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
        let features = Features::new(&negotiated, &page, rank, region.device(), transports.has_wires());
        let signal = ClosedSignal::shared(page, rank);
        let closing = Closing::new(&region, signal, lives.clone(), holds.clone());
        release_sockets.into_iter().for_each(|socket| socket.keep(rank));
        let lineage = Lineage::of_peer_group(&negotiated, rank, lives.clone(), transports.sequencer.graphs);
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
            sleep: Sleep::default(),
        }))
    }

    /// What all ranks agreed on.
    pub fn negotiated(&self) -> &Arc<NegotiatedConfig> {
        &self.others.negotiated
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.others.rank
    }

    /// Whether kernels of Windlass move bytes between its ranks. While it is being dropped, none do.
    pub fn has_wires(&self) -> bool {
        self.transports().is_some_and(Transports::has_wires)
    }

    /// What the plan needs to decide the path of a call.
    pub fn terms(&self) -> Terms {
        Terms::of(self.negotiated(), self.features.limits)
    }

    /// The shared page, zeros at first. None while the peer group is being dropped.
    #[cfg(feature = "test-support")]
    pub fn shared_page(&self) -> Option<&Arc<SharedPage>> {
        self.mapped.as_ref()?.closing.page()
    }

    /// From now on NCCL may share the communicator's resources with another.
    pub fn share(&self) {
        self.features.registering.iter().for_each(|one| one.share());
        self.features.windows.iter().for_each(|one| one.share());
    }

    /// For the end of the communicator: ends the kept windows that the program has deregistered. After an abort or a failure all stay in NCCL.
    pub fn end_windows(&self, aborts: bool) -> End {
        let Some(windows) = &self.features.windows else { return End::Clean };
        if aborts || self.has_failed() {
            return windows.abort();
        }
        windows.end_all();
        End::Clean
    }

    /// The transports on this rank's GPU. None while the peer group is being dropped.
    pub(super) fn transports(&self) -> Option<&Transports> {
        self.mapped.as_ref().map(|mapped| &mapped.transports)
    }

    fn sequencer(&self) -> Option<&Arc<Sequencer>> {
        self.transports().map(|transports| &transports.sequencer)
    }

    pub(super) fn region(&self) -> Option<&Region> {
        self.mapped.as_ref().map(|mapped| &mapped.region)
    }

    /// The memory of all ranks. None while the peer group is being dropped.
    pub(super) fn mapped(&self) -> Option<&Mapped> {
        self.mapped.as_ref()
    }

    /// What growing a ring needs. None while the peer group is being dropped.
    pub(super) fn p2p_and_heap(&self) -> Option<(&P2p, &Arc<Heap>)> {
        Some((&self.transports()?.p2p, &self.region()?.heap))
    }

    /// Launches the tasks of native collectives in order, then the sends and receives as one kernel, on `stream`, in order with the streams
    /// that it joins. Returns where the work went.
    pub fn run(
        &self,
        tasks: &[Task],
        operations: &[Operation],
        stream: StreamHandle,
        joins: Joins<'_>,
    ) -> Result<Went, ncclResult_t> {
        process_exit::go_on();
        self.ranks.runs_one();
        if self.has_failed() {
            return Err(refuse(self.error(), format_args!("the communicator has failed")));
        }
        let Some(transports) = self.transports() else { return Err(ncclInternalError) };
        let (mut went, mut asks_early) = (Went::ToStream, false);
        let ran = transports.sequencer.take(stream, joins, |turn| {
            if let Some(native) = &transports.native {
                tasks.iter().try_for_each(|task| native.launch(turn, task))?;
            }
            if !operations.is_empty() {
                asks_early = transports.p2p.launch(turn, operations)?;
            }
            // Messages without bytes launch nothing, and are yet a part of the group's operation.
            if !joins.before.is_empty() || !joins.after.is_empty() {
                turn.begin()?;
            }
            went = turn.capture().map_or(Went::ToStream, |_| Went::IntoCapture);
            Ok(())
        });
        let result = ran.map(|()| went).map_err(|refused| self.refused(&refused, stream));
        let of_messages = operations.iter().fold(0, |peers, operation| peers | 1 << operation.peer);
        let of_collectives = if tasks.is_empty() { 0 } else { (1 << self.negotiated().members.len()) - 1 };
        // Noted only after the launch, as the hang detector takes the awaited ranks before it asks whether all is done.
        self.ranks.awaits(of_messages | of_collectives);
        let sends = operations.iter().any(|one| one.direction == Direction::Send);
        if sends && (self.growing.note_sends() || asks_early) {
            worker::wake();
        }
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

    /// Makes NCCL's next call on `stream` run after all that ran here: see [`Sequencer::before_nccl`]. None if it failed. A failure is only logged,
    /// since the caller then meets the same failing device.
    pub fn before_nccl(&self, stream: StreamHandle, is_certain: bool) -> Option<Afterwards> {
        self.sequencer()?.before_nccl(stream, is_certain).ok()
    }

    /// Makes all later work here run after NCCL's calls on `stream`: see [`Sequencer::after_nccl`]. Whether it could.
    pub fn after_nccl(&self, stream: StreamHandle, is_eager: bool) -> bool {
        self.sequencer().is_some_and(|sequencer| sequencer.after_nccl(stream, is_eager).is_ok())
    }

    /// Notes that NCCL has launched a call: see [`Sequencer::nccl_ran`].
    pub fn nccl_ran(&self) {
        self.sequencer().into_iter().for_each(|sequencer| sequencer.nccl_ran());
    }

    /// Notes that NCCL has refused a call, or that its group has failed.
    pub fn nccl_refused(&self) {
        self.sequencer().into_iter().for_each(|sequencer| sequencer.nccl_refused());
    }

    /// What the next kernel on `stream` needs to come behind NCCL's eager work. None if the driver failed.
    pub fn history(&self, stream: StreamHandle) -> Option<History> {
        self.sequencer()?.history(stream).ok()
    }

    /// The communicator's own stream, for a message of NCCL's beside a capture.
    pub fn history_stream(&self) -> Option<StreamHandle> {
        self.sequencer()?.history_stream()
    }

    /// Makes the next work on a stream run after what other streams hold now. An error was logged.
    pub fn join(&self, later: StreamHandle, earlier: &[StreamHandle]) -> Result<(), ncclResult_t> {
        let Some(sequencer) = self.sequencer() else { return Ok(()) };
        sequencer.join(later, earlier).map_err(|failure| failure.result())
    }

    /// The asynchronous error of this rank. `ncclSuccess` if there is none.
    pub fn error(&self) -> ncclResult_t {
        self.ranks.error()
    }

    fn has_failed(&self) -> bool {
        self.error() != ncclSuccess
    }

    /// Notes an asynchronous error and tells the peers. Only the first error counts.
    pub fn fail(&self, error: ncclResult_t) {
        if self.ranks.fail(error) {
            self.features.windows.iter().for_each(|windows| windows.leave_alone());
            pool::distrust(self.device());
            self.others.tell(Matter::Failed);
        }
    }

    /// Has this rank's kernels leave the GPU at once, and refuses more. Callable on any thread.
    pub fn abort(&self) {
        self.mapped().into_iter().for_each(|mapped| mapped.closing.leave());
        self.sequencer().into_iter().for_each(|sequencer| sequencer.abort());
    }

    /// Waits until all sends, receives and collectives are done, as NCCL does before it ends a communicator. An abort ends the wait.
    /// If this rank has failed, or a launch is in doubt, the kernels may never finish: then it waits for `LEAVES_WITHIN` at most, and aborts.
    pub fn wait_idle(&self) {
        let Some(sequencer) = self.sequencer() else { return };
        if self.has_failed() || sequencer.is_doubtful() {
            drop(sequencer.wait_idle(LEAVES_WITHIN));
            return self.abort();
        }
        // The wait fails only if the driver answers nothing any more. Then nothing is in flight either.
        drop(sequencer.wait_idle(Duration::MAX));
    }

    /// This rank's device. None once its memory has been given back.
    pub fn device(&self) -> Option<i32> {
        self.region().map(Region::device)
    }

    /// Two addresses in this rank's device memory, each of a byte that nothing else uses. None while it sleeps.
    pub fn scratch(&self) -> Option<[Address; 2]> {
        self.region().filter(|_| !self.sleeps()).map(preparing::scratch)
    }
}

/// Whether a stream is being captured. Queries the driver, so it is called only after a refused launch.
fn went(stream: StreamHandle) -> Went {
    match gpu::driver().and_then(|driver| driver.capture_of(stream)) {
        Ok(Some(_)) => Went::IntoCapture,
        _ => Went::ToStream,
    }
}

impl Drop for PeerGroup {
    fn drop(&mut self) {
        self.lineage.end();
        own_thread::run(|| {
            if let Some(mapped) = self.mapped.take() {
                mapped.closing.leave();
                Draining { mapped, grown: self.growing.take() }.begin();
            }
        });
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
