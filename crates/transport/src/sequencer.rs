//! Keeps a communicator's operations on a GPU in order, one after the other as NCCL does, whatever runs them and on whatever streams.
//!
//! Each rank has one [`Sequencer`] a communicator: the order, the control word that tells the rank's kernels to leave, and the report in
//! which kernels say what they waited for. To run an operation a caller [takes a turn](Sequencer::take), gets from it what the kernel needs,
//! and launches there. One [`DeviceResources`] per device keeps what passes from one communicator to the next.
//!
//! # The end
//! NCCL's destroy waits for issued work. So the owner calls [`Sequencer::wait_idle`], drops all users of the sequencer, then the regions.
//! A sequencer that is dropped with work in flight aborts that work to free the GPU. The regions must then stay until [`Sequencer::is_idle`]
//! would have said so, or for ever. Graphs that captured a turn keep the control word, the events and, by [`SequencerParts::hold`], the
//! regions. They may run after the communicator is gone, in order with each other.

pub mod host;

mod captures;
mod order;
mod turn;

pub mod stuck;

pub mod device_resources;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use windlass_kernels::launch::{CONTROL_ABORT, CONTROL_ASK, CONTROL_RUN};

use crate::error::TransportError;
pub use device_resources::{DeviceResources, LaunchResources, Lent};
use order::Runner;
pub use order::{Afterwards, Graphs, History};
pub use stuck::{Carries, Stuck, Wait};
pub use turn::Turn;
use turn::{Issued, Lane};
use windlass_base::gpu::graph::Released;
use windlass_base::gpu::stream::{Capture, Ordering::Inside, Place};
use windlass_base::gpu::{Address, Driver, Failure, StreamHandle};
use windlass_base::lock::Mutex;
use windlass_base::thread;

/// Makes the graph of a capture keep the communicator's regions. The first operation in a capture calls it.
pub type Hold = Box<dyn Fn(&Driver, Capture) -> Result<(), Failure> + Send + Sync>;

/// What a sequencer is made from.
pub struct SequencerParts {
    /// The resources of this rank's device.
    pub device_resources: Arc<DeviceResources>,
    /// This rank.
    pub rank: u32,
    /// Address of the report that kernels write: in a region of this rank, zero at first.
    pub report: Address,
    /// Makes the graph of a capture keep the regions.
    pub hold: Hold,
    /// How graphs of this rank run; other ranks may differ.
    pub graphs: Graphs,
}

/// One rank's sequencer of one communicator.
pub struct Sequencer {
    pub(crate) device_resources: Arc<DeviceResources>,
    /// The launch resources, for owners that must keep them longer than the sequencer.
    pub lent: Arc<Lent>,
    rank: u32,
    /// Address of the report that kernels write.
    pub(crate) report: Address,
    hold: Hold,
    /// How graphs that captured this communicator's operations run.
    pub graphs: Graphs,
    aborted: AtomicBool,
    /// The control word asks waiting kernels to report and leave: see [`Sequencer::ask_who_waits`].
    asked: AtomicBool,
    /// The driver failed during a turn: when the issued work is done is never known, so all memory that it may touch stays.
    doubtful: AtomicBool,
    /// A capture has taken turns: its graph may run them at any time.
    captured: AtomicBool,
    /// Held during a turn, across driver calls. NCCL lets one thread at a time issue operations of a communicator.
    issued: Mutex<Issued>,
}

/// The other streams of an operation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Joins<'a> {
    /// The operation waits for what these hold now.
    pub before: &'a [StreamHandle],
    /// What these get later waits for the operation.
    pub after: &'a [StreamHandle],
}

/// Keeps the launch resources as long as a graph lives.
struct HeldResources {
    _lent: Arc<Lent>,
}

impl Released for HeldResources {
    fn released(&self) {}
}

impl Sequencer {
    /// Makes this rank's sequencer, with launch resources. Call it at init only: it may wait for the device.
    pub fn new(parts: SequencerParts) -> Result<Arc<Sequencer>, TransportError> {
        let SequencerParts { device_resources, rank, report, hold, graphs } = parts;
        let lend = || -> Result<Lent, Failure> {
            let _entered = device_resources.home.enter()?;
            device_resources.lend()
        };
        let lent = Arc::new(lend().map_err(|failure| TransportError::from(failure).told())?);
        Ok(Arc::new(Sequencer {
            device_resources,
            lent,
            rank,
            report,
            hold,
            graphs,
            aborted: AtomicBool::new(false),
            asked: AtomicBool::new(false),
            doubtful: AtomicBool::new(false),
            captured: AtomicBool::new(false),
            issued: Mutex::default(),
        }))
    }

    /// The communicator's own stream for NCCL's [message beside a capture](History::MessageBeside).
    pub fn history_stream(&self) -> Option<StreamHandle> {
        self.lent.resources().map(|resources| resources.history.handle)
    }

    /// Issues the work of `run` to `stream`, after all earlier turns, and in order with [other streams](Joins). `stream` may be captured.
    ///
    /// A failure after something was issued leaves peers waiting. Then all of this rank's kernels are told to leave, and the owner must abort the
    /// communicator. It is idle when the issued work is done, unless the driver failed ([`Sequencer::is_doubtful`]).
    pub fn take(
        &self,
        stream: StreamHandle,
        others: Joins<'_>,
        run: impl FnOnce(&mut Turn<'_>) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        if self.is_aborted() {
            return Err(TransportError::Aborted { rank: self.rank });
        }
        let issued = &mut *self.issued.lock();
        let resources = self.resources()?;
        let mut turn =
            Turn { sequencer: self, resources, issued, stream, others, placed: None, begun: false };
        let ran = run(&mut turn);
        let may_run = turn.begun && turn.capture().is_none();
        if ran.is_err() && !may_run {
            return ran;
        }
        // Issued work may run even if `run` failed before it had issued everything.
        let ended = turn.end();
        let is_doubtful = ended.is_err() || matches!(ran, Err(TransportError::Cuda(_)));
        let ran = ran.and(ended.map_err(TransportError::from));
        if ran.is_err() && may_run {
            // After a failure of the driver no event tells when the work is done.
            self.doubtful.fetch_or(is_doubtful, Ordering::Relaxed);
            self.abort();
        }
        ran
    }

    /// What the next turn on `stream` needs, before it is taken, to come behind NCCL's eager work.
    pub fn history(&self, stream: StreamHandle) -> Result<History, TransportError> {
        let home = self.device_resources.home;
        let place = || {
            let _current = home.be_current()?;
            home.driver.place_of(stream)
        };
        let history = self.issued.lock().order.history(self.graphs, place);
        history.map_err(|failure| TransportError::from(failure).told())
    }

    /// Makes the call that NCCL gets next on `stream` run after all turns so far, also in a capture. `is_certain`: NCCL runs it unless it refuses it.
    pub fn before_nccl(&self, stream: StreamHandle, is_certain: bool) -> Result<Afterwards, TransportError> {
        let home = self.device_resources.home;
        let order = || -> Result<Afterwards, TransportError> {
            let issued = &mut *self.issued.lock();
            // Asked in the caller's context, as NCCL does.
            let capture = match home.driver.capture_of(stream) {
                Err(_) => home.be_current().and_then(|_current| home.driver.capture_of(stream))?,
                Ok(capture) => capture,
            };
            let Some(capture) = capture else {
                let id = || home.be_current().and_then(|_current| home.driver.stream_id(stream));
                let (waits, afterwards) = issued.order.forward(stream, is_certain, id)?;
                if waits {
                    let _current = home.be_current()?;
                    home.driver.wait(stream, &self.resources()?.done, Inside)?;
                }
                return Ok(afterwards);
            };
            let _current = home.be_current()?;
            let lane = Lane { stream, place: Place::Captured(capture) };
            self.hold_in(issued, lane)?;
            issued.come_behind((home.driver, self.resources()?), self.graphs, lane)?;
            Ok(Afterwards::FollowInCapture)
        };
        order().map_err(|failure| self.doubted(failure))
    }

    /// NCCL runs its call all the same, in whatever order.
    fn doubted(&self, failure: TransportError) -> TransportError {
        self.issued.lock().order.doubt();
        failure.told()
    }

    /// Makes the next work on `later` run after what the streams `earlier` hold now, also in a capture.
    pub fn join(&self, later: StreamHandle, earlier: &[StreamHandle]) -> Result<(), TransportError> {
        let join = || -> Result<(), TransportError> {
            let _issued = self.issued.lock();
            let home = self.device_resources.home;
            let _current = home.be_current()?;
            Ok(self.resources()?.join(home.driver, later, earlier)?)
        };
        join().map_err(TransportError::told)
    }

    /// Makes all later turns run after the calls of NCCL on `stream` since [`Sequencer::before_nccl`]. `is_eager`: the stream is known to be captured
    /// by nobody.
    pub fn after_nccl(&self, stream: StreamHandle, is_eager: bool) -> Result<(), TransportError> {
        let follow = || -> Result<(), TransportError> {
            let issued = &mut *self.issued.lock();
            let home = self.device_resources.home;
            let _current = home.be_current()?;
            let place = if is_eager { Place::Eager(0) } else { self.place_of(issued, stream)? };
            let with = (home.driver, self.resources()?);
            Ok(issued.note(with, self.graphs, Lane { stream, place }, Runner::Nccl)?)
        };
        follow().map_err(|failure| self.doubted(failure))
    }

    /// Notes that NCCL has launched a call as [`Afterwards::Confirm`] says.
    pub fn nccl_ran(&self) {
        self.issued.lock().order.confirm();
    }

    /// Notes that NCCL has refused a call after [`Sequencer::before_nccl`], or that its group has failed.
    pub fn nccl_refused(&self) {
        self.issued.lock().order.doubt();
    }

    /// Where work issued to a stream goes. Once graphs share the order nobody asks for the stream's id.
    fn place_of(&self, issued: &Issued, stream: StreamHandle) -> Result<Place, Failure> {
        let driver = self.device_resources.home.driver;
        match issued.order.is_shared {
            true => Ok(driver.capture_of(stream)?.map_or(Place::Eager(0), Place::Captured)),
            false => driver.place_of(stream),
        }
    }

    /// Makes the graph of a capture keep the launch resources, whose events its nodes use.
    fn hold_in(&self, issued: &mut Issued, lane: Lane) -> Result<(), Failure> {
        let driver = self.device_resources.home.driver;
        if let Some(capture) = lane.capture()
            && issued.held != Some(capture.id)
        {
            driver.retain_in_graph(capture.graph, Arc::new(HeldResources { _lent: self.lent.clone() }))?;
            issued.held = Some(capture.id);
        }
        Ok(())
    }

    /// Makes the graph of a capture keep all that the capture's turns need.
    fn hold_all_in(&self, issued: &mut Issued, lane: Lane) -> Result<(), Failure> {
        if let Some(capture) = lane.capture()
            && issued.held_regions != Some(capture.id)
        {
            (self.hold)(self.device_resources.home.driver, capture)?;
            issued.held_regions = Some(capture.id);
        }
        self.hold_in(issued, lane)
    }

    /// Tells kernels to leave wherever they are, and refuses later turns. Any thread may call it. It calls no driver and takes no lock.
    pub fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.tell_kernels(CONTROL_ABORT);
    }

    /// Asks kernels whether they wait for a peer, where a waiting kernel is lost anyway. A kernel that has long found nothing
    /// [reports its wait and leaves](Sequencer::stuck). A kernel that has not begun, or finds its data when it begins, does not answer.
    /// The question stands until [`Sequencer::ask_no_more`]. Nothing counts as done until [`Sequencer::have_asked`]. From one thread; calls no
    /// driver.
    ///
    /// An abort would not do: it also ends waits for warps of the same kernel, which report nothing. A kernel whose peers are there would end
    /// with a part of its work not done.
    pub fn ask_who_waits(&self) {
        self.asked.store(true, Ordering::SeqCst);
        self.tell_unless_aborted(CONTROL_ASK);
    }

    /// Takes the question back: waits that begin from now on go on. A kernel that has just seen the question still leaves.
    pub fn ask_no_more(&self) {
        self.tell_unless_aborted(CONTROL_RUN);
    }

    fn tell_unless_aborted(&self, word: u32) {
        self.tell_kernels(word);
        // Another thread may have aborted before the store: its word must stay.
        if self.is_aborted() {
            self.tell_kernels(CONTROL_ABORT);
        }
    }

    /// To be called when all kernels that saw the question have left and none has reported a wait. Finished work counts as done again.
    pub fn have_asked(&self) {
        self.asked.store(false, Ordering::SeqCst);
    }

    fn tell_kernels(&self, word: u32) {
        if let Some(resources) = self.lent.resources() {
            resources.host.control().store(word, Ordering::SeqCst);
        }
    }

    /// Whether [`Sequencer::abort`] was called.
    pub fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::SeqCst)
    }

    /// Whether a capture has taken turns, so that graphs may run them.
    pub fn is_captured(&self) -> bool {
        self.captured.load(Ordering::Relaxed)
    }

    /// Whether the driver failed during a turn, so that nobody knows what has ended. The sequencer is then never idle.
    pub fn is_doubtful(&self) -> bool {
        self.doubtful.load(Ordering::Relaxed)
    }

    /// Whether all issued work is done. Does not wait.
    pub fn is_idle(&self) -> Result<bool, TransportError> {
        let is_asked = self.asked.load(Ordering::SeqCst) && !self.is_aborted();
        if self.is_doubtful() || is_asked {
            return Ok(false);
        }
        let resources = self.resources()?;
        let _entered = self.device_resources.home.enter()?;
        Ok(resources.is_idle()?)
    }

    /// Waits until all issued work is done, at most for `at_most`, as NCCL's destroy does. Blocks no stream.
    pub fn wait_idle(&self, at_most: Duration) -> Result<(), TransportError> {
        let is_idle = || self.is_idle().map(|is_idle| is_idle.then_some(())).transpose();
        let idle = thread::look_until(at_most, Duration::from_micros(50), is_idle);
        let late = || Err(TransportError::Busy { rank: self.rank, waited_ms: at_most.as_millis() as u64 });
        idle.unwrap_or_else(late).map_err(TransportError::told)
    }

    /// What kernels waited for when they left on an abort or a question; empty if none waited. Complete once the sequencer
    /// [is idle](Sequencer::is_idle).
    pub fn stuck(&self) -> Result<Stuck, TransportError> {
        let home = self.device_resources.home;
        let read = || -> Result<Stuck, Failure> {
            let _entered = home.enter()?;
            let report = host::report(self.report, &self.device_resources.stream)?;
            Ok(Stuck::of(&report, self.rank))
        };
        read().map_err(|failure| TransportError::from(failure).told())
    }

    /// Reads words of a region of this rank, or of a peer's that it has mapped. Allocates nothing; waits for the copy on a stream of Windlass.
    pub fn read(&self, at: Address, words: &mut [u64]) -> Result<(), Failure> {
        let home = self.device_resources.home;
        let _entered = home.enter()?;
        host::words(at, words, &self.device_resources.stream)
    }

    /// Never fails: the launch resources are there until [`Lent`] is dropped.
    fn resources(&self) -> Result<&LaunchResources, TransportError> {
        self.lent.resources().ok_or(TransportError::Aborted { rank: self.rank })
    }
}

impl Drop for Sequencer {
    /// See "The end" of the module. Aborts if work is in flight, also a graph's. If none is, graphs that run later are not affected.
    fn drop(&mut self) {
        // No kernel runs without the context, and the control word may have gone with it.
        if self.device_resources.home.driver.is_in_forked_child() || !self.device_resources.home.is_there() {
            return;
        }
        if !matches!(self.is_idle(), Ok(true)) {
            self.abort();
        }
    }
}

impl fmt::Debug for Sequencer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Sequencer").field("rank", &self.rank).finish_non_exhaustive()
    }
}
