//! A communicator's operations on a GPU come one after the other, as NCCL's do, whatever runs them and on whatever streams.
//!
//! A [`Sequencer`] is one rank's: the order, the word that tells its kernels to leave, and where they say what they waited for. Whoever
//! runs an operation [takes a turn](Sequencer::take), gets what its kernel needs from it and launches there. A [`DeviceResources`] per device
//! has what goes from one communicator to the next.
//!
//! # The end
//! NCCL's destroy waits for the work that was issued: [`Sequencer::wait_idle`], then all that uses it is dropped, then the regions.
//! A sequencer that is dropped with work in flight aborts it, so that the GPU gets free; the regions must then stay until
//! [`Sequencer::is_idle`] would have said so, or for ever. Graphs that captured a turn keep the word for the kernel, the
//! events and, by [`SequencerParts::hold`], the regions; they may run after the communicator is gone, in order with each other.

pub mod host;

mod order;

pub mod stuck;

pub mod device_resources;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use windlass_kernels::launch::{CONTROL_ABORT, CONTROL_ASK, CONTROL_RUN};

use crate::error::TransportError;
pub use device_resources::{DeviceResources, LaunchResources, Lent};
pub use order::Graphs;
use order::{Lane, Order};
pub use stuck::{Carries, Stuck, Wait};
use windlass_base::gpu::context::Current;
use windlass_base::gpu::graph::Released;
use windlass_base::gpu::module::MemoryDomain;
use windlass_base::gpu::stream::{Capture, Ordering::Inside};
use windlass_base::gpu::{Address, Driver, Failure, StreamHandle};

/// Lets the graph of a capture hold the communicator's regions; called by the first operation in a capture.
pub type Hold = Box<dyn Fn(&Driver, Capture) -> Result<(), Failure> + Send + Sync>;

/// What a sequencer is made of.
pub struct SequencerParts {
    /// This rank's device's.
    pub device_resources: Arc<DeviceResources>,
    /// This rank.
    pub rank: u32,
    /// Where kernels report: a report in a region of this rank, zero.
    pub report: Address,
    /// For regions that graphs still need.
    pub hold: Hold,
    /// Of this rank alone.
    pub graphs: Graphs,
}

/// One rank's sequencer of one communicator.
pub struct Sequencer {
    device_resources: Arc<DeviceResources>,
    lent: Arc<Lent>,
    rank: u32,
    report: Address,
    hold: Hold,
    graphs: Graphs,
    aborted: AtomicBool,
    /// Kernels that wait are told to leave, so that they say so: see [`Sequencer::ask_who_waits`].
    asked: AtomicBool,
    /// The driver failed in the middle of a turn: what it left is never known to be done, and all that it may touch stays.
    doubtful: AtomicBool,
    /// A graph has taken turns: it may take them again at any time.
    captured: AtomicBool,
    /// Taken by operations, which NCCL has one thread at a time issue, and held across calls of the driver.
    issued: Mutex<Issued>,
}

#[derive(Debug)]
struct Issued {
    order: Order,
    /// The capture that holds the launch resources already.
    held: Option<u64>,
}

/// What is to be done once what [was ordered](Sequencer::order) is issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Afterwards {
    /// No graph is to be ordered against what is eager: whoever runs the next looks at streams.
    Nothing,
    /// A graph may run on any stream and looks at none: it waits for the sequencer's event.
    Follow,
    /// It is part of a capture, and the same.
    FollowInCapture,
}

/// One turn: what its operations need, in the order in which they ask for it.
pub struct Turn<'sequencer> {
    sequencer: &'sequencer Sequencer,
    resources: &'sequencer LaunchResources,
    issued: &'sequencer mut Issued,
    stream: StreamHandle,
    others: &'sequencer [StreamHandle],
    placed: Option<(Lane, Current<'sequencer>)>,
    begun: bool,
}

/// Kept by a graph.
struct HeldResources {
    _lent: Arc<Lent>,
}

impl Released for HeldResources {
    fn released(&self) {}
}

impl Sequencer {
    /// Makes this rank's. At init only.
    pub fn new(parts: SequencerParts) -> Result<Arc<Sequencer>, TransportError> {
        let SequencerParts { device_resources, rank, report, hold, graphs } = parts;
        let lend = || -> Result<Lent, Failure> {
            let _entered = device_resources.home().enter()?;
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
            issued: Mutex::new(Issued { order: Order::new(graphs), held: None }),
        }))
    }

    /// How graphs of it run.
    pub fn graphs(&self) -> Graphs {
        self.graphs
    }

    /// The launch resources, to be kept where it must outlive the sequencer.
    pub fn lent(&self) -> &Arc<Lent> {
        &self.lent
    }

    /// Runs what `run` issues, on one stream, after all turns before it. It runs after what the other streams hold now, and what
    /// they get later runs after it, as in NCCL. Also into a capture of that stream.
    ///
    /// A failure after something was issued leaves peers waiting: all of this rank's kernels are told to leave, and the
    /// communicator is for its owner to abort. It is idle when what was issued is done.
    pub fn take(
        &self,
        stream: StreamHandle,
        others: &[StreamHandle],
        run: impl FnOnce(&mut Turn<'_>) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        if self.is_aborted() {
            return Err(TransportError::Aborted { rank: self.rank });
        }
        let issued = &mut *self.lock();
        let resources = self.resources()?;
        let mut turn =
            Turn { sequencer: self, resources, issued, stream, others, placed: None, begun: false };
        let ran = run(&mut turn);
        let may_run = turn.begun && turn.capture().is_none();
        if ran.is_err() && !may_run {
            return ran;
        }
        // What was issued may run, also where more was to come.
        let ended = turn.end();
        let is_doubtful = ended.is_err() || matches!(ran, Err(TransportError::Cuda(_)));
        let ran = ran.and(ended.map_err(TransportError::from));
        if ran.is_err() && may_run {
            // Of what is doubtful nothing says when it is done.
            self.doubtful.fetch_or(is_doubtful, Ordering::Relaxed);
            self.abort();
        }
        ran
    }

    /// Lets what comes next on a stream run after all turns so far, in its captures too. Where it may be of a graph, or graphs have
    /// turns, [`Sequencer::follow`] is to be called when it was issued.
    pub fn order(&self, stream: StreamHandle) -> Result<Afterwards, TransportError> {
        let order = || -> Result<Afterwards, TransportError> {
            let issued = &mut *self.lock();
            let home = self.device_resources.home();
            let _current = home.be_current()?;
            let lane = Lane::of(home.driver, stream)?;
            if issued.order.is_all_in(lane) {
                return Ok(Afterwards::Nothing);
            }
            let resources = self.resources()?;
            self.hold_in(&mut issued.held, lane)?;
            issued.order.before(home.driver, resources, lane)?;
            Ok(match lane.capture() {
                Some(_) => Afterwards::FollowInCapture,
                None if issued.order.is_shared_with_graphs() => Afterwards::Follow,
                None => Afterwards::Nothing,
            })
        };
        order().map_err(TransportError::told)
    }

    /// Lets all turns to come run after what was issued on a stream since [`Sequencer::order`] said so, in captures too. Whether
    /// that is all: of a capture it is what its graph will run.
    pub fn follow(&self, stream: StreamHandle) -> Result<bool, TransportError> {
        let follow = || -> Result<bool, TransportError> {
            let issued = &mut *self.lock();
            let resources = self.resources()?;
            let home = self.device_resources.home();
            let _current = home.be_current()?;
            let lane = Lane::of(home.driver, stream)?;
            if lane.capture().is_none() && self.graphs == Graphs::Apart {
                return Ok(false);
            }
            issued.order.after(home.driver, resources, lane)?;
            Ok(lane.capture().is_none())
        };
        follow().map_err(TransportError::told)
    }

    /// A capture that takes a turn keeps what that needs, as long as its graph lives.
    fn hold_in(&self, held: &mut Option<u64>, lane: Lane) -> Result<(), Failure> {
        let driver = self.device_resources.home().driver;
        if let Some(capture) = lane.capture()
            && *held != Some(capture.id)
        {
            (self.hold)(driver, capture)?;
            driver.retain_in_graph(capture.graph, Arc::new(HeldResources { _lent: self.lent.clone() }))?;
            *held = Some(capture.id);
        }
        Ok(())
    }

    /// Lets kernels leave wherever they are, and refuses all that comes. From any thread; calls no driver and takes no lock.
    pub fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.tell_kernels(CONTROL_ABORT);
    }

    /// Learns whether kernels wait, where whoever waits is lost anyway: one that has long found nothing [says what it waited for and
    /// leaves](Sequencer::stuck). One that has not begun hears nothing of it, nor one that finds what it needs when it begins; until
    /// [`Sequencer::ask_no_more`]. Nothing counts as done until [`Sequencer::have_asked`]. From one thread; calls no driver.
    ///
    /// No abort, which also ends what waits for warps of its own kernel alone, without a word: a kernel whose peers are there would
    /// end with a part of its work not done.
    pub fn ask_who_waits(&self) {
        self.asked.store(true, Ordering::SeqCst);
        self.tell_unless_aborted(CONTROL_ASK);
    }

    /// Whoever begins to wait from now on stays. Who has heard the question just before still leaves.
    pub fn ask_no_more(&self) {
        self.tell_unless_aborted(CONTROL_RUN);
    }

    fn tell_unless_aborted(&self, word: u32) {
        self.tell_kernels(word);
        // Another thread's abort may have come first.
        if self.is_aborted() {
            self.tell_kernels(CONTROL_ABORT);
        }
    }

    /// All that heard the question have left by now, and none did.
    pub fn have_asked(&self) {
        self.asked.store(false, Ordering::SeqCst);
    }

    fn tell_kernels(&self, word: u32) {
        if let Some(resources) = self.lent.resources() {
            resources.host.control().store(word, Ordering::SeqCst);
        }
    }

    /// Whether it was aborted.
    pub fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::SeqCst)
    }

    /// Whether graphs may run what they once captured.
    pub fn is_captured(&self) -> bool {
        self.captured.load(Ordering::Relaxed)
    }

    /// Whether the driver failed in the middle of a turn, so that nobody knows what has ended: then it is never idle.
    pub fn is_doubtful(&self) -> bool {
        self.doubtful.load(Ordering::Relaxed)
    }

    /// Whether all that was issued is done. Waits for nothing.
    pub fn is_idle(&self) -> Result<bool, TransportError> {
        let is_asked = self.asked.load(Ordering::SeqCst) && !self.is_aborted();
        if self.is_doubtful() || is_asked {
            return Ok(false);
        }
        let resources = self.resources()?;
        let _entered = self.device_resources.home().enter()?;
        Ok(resources.is_idle()?)
    }

    /// Waits until all that was issued is done, at most so long, as NCCL's destroy does. Blocks no stream.
    pub fn wait_idle(&self, at_most: Duration) -> Result<(), TransportError> {
        let began = Instant::now();
        while !self.is_idle().map_err(TransportError::told)? {
            if began.elapsed() >= at_most {
                let waited_ms = began.elapsed().as_millis() as u64;
                return Err(TransportError::Busy { rank: self.rank, waited_ms }.told());
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// What kernels waited for when they left on an abort; nothing was stuck if there are no waits. Complete once all
    /// [is idle](Sequencer::is_idle).
    pub fn stuck(&self) -> Result<Stuck, TransportError> {
        let home = self.device_resources.home();
        let read = || -> Result<Stuck, Failure> {
            let _entered = home.enter()?;
            let report = host::report(home.driver, self.report, &self.device_resources.stream)?;
            Ok(Stuck::of(&report, self.rank))
        };
        read().map_err(|failure| TransportError::from(failure).told())
    }

    /// Reads words of a region of this rank: allocates nothing, waits for a copy of ours.
    pub fn read(&self, at: Address, words: &mut [u64]) -> Result<(), Failure> {
        let home = self.device_resources.home();
        let _entered = home.enter()?;
        host::words(home.driver, at, words, &self.device_resources.stream)
    }

    /// There are launch resources until this is dropped.
    fn resources(&self) -> Result<&LaunchResources, TransportError> {
        self.lent.resources().ok_or(TransportError::Aborted { rank: self.rank })
    }

    /// A panic elsewhere leaves the order whole.
    fn lock(&self) -> MutexGuard<'_, Issued> {
        self.issued.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'sequencer> Turn<'sequencer> {
    /// The driver, in whose current context a turn is once it [is placed](Turn::place).
    pub fn driver(&self) -> &'static Driver {
        self.sequencer.device_resources.home().driver
    }

    /// Where it runs.
    pub fn stream(&self) -> StreamHandle {
        self.stream
    }

    /// The communicator's own.
    pub fn resources(&self) -> &'sequencer LaunchResources {
        self.resources
    }

    /// Where kernels find the word that tells them to leave.
    pub fn control(&self) -> Address {
        self.resources.host.control_address()
    }

    /// Where they report.
    pub fn report(&self) -> Address {
        self.sequencer.report
    }

    /// Whether nothing else launches kernels on this device, as far as this process knows ([`DeviceResources::is_of_one`]).
    pub fn is_alone(&self) -> bool {
        self.sequencer.device_resources.is_of_one()
    }

    /// What a launch says of clusters of so many blocks. One block is said, too: an update of a graph lets a cluster stand of which the
    /// new launch says nothing, and a kernel whose grid that does not divide is then left out without an error (driver 580).
    /// Devices before 9.0 have none.
    pub fn cluster(&self, blocks: u32) -> u32 {
        if self.sequencer.device_resources.is_since_hopper() { blocks } else { 0 }
    }

    /// That of all kernels.
    pub fn domain(&self) -> MemoryDomain {
        self.sequencer.device_resources.domain()
    }

    /// Makes the context current and looks whether the stream is part of a capture, which then holds all that it needs.
    pub fn place(&mut self) -> Result<Option<Capture>, Failure> {
        if let Some((lane, _)) = &self.placed {
            return Ok(lane.capture());
        }
        let home = self.sequencer.device_resources.home();
        let current = home.be_current()?;
        let lane = Lane::of(home.driver, self.stream)?;
        self.sequencer.hold_in(&mut self.issued.held, lane)?;
        if lane.capture().is_some() {
            self.sequencer.captured.store(true, Ordering::Relaxed);
        }
        self.placed = Some((lane, current));
        Ok(lane.capture())
    }

    fn capture(&self) -> Option<Capture> {
        self.placed.as_ref().and_then(|(lane, _)| lane.capture())
    }

    /// To be called before anything is issued to the stream: what comes now runs after all turns before. Whether it is
    /// captured.
    pub fn begin(&mut self) -> Result<Option<Capture>, Failure> {
        let capture = self.place()?;
        if self.begun {
            return Ok(capture);
        }
        let (driver, Some((lane, _))) = (self.driver(), &self.placed) else { return Ok(capture) };
        for other in self.others {
            self.resources.joined.record(*other, Inside)?;
            driver.wait(self.stream, &self.resources.joined, Inside)?;
        }
        self.issued.order.before(driver, self.resources, *lane)?;
        self.begun = true;
        Ok(capture)
    }

    /// What was issued is the last so far.
    fn end(&mut self) -> Result<(), Failure> {
        let (true, driver, Some((lane, _))) = (self.begun, self.driver(), &self.placed) else {
            return Ok(());
        };
        self.issued.order.after(driver, self.resources, *lane)?;
        if !self.others.is_empty() {
            self.resources.joined.record(self.stream, Inside)?;
        }
        for other in self.others {
            driver.wait(*other, &self.resources.joined, Inside)?;
        }
        Ok(())
    }
}

impl Drop for Sequencer {
    /// See the module's "The end". Work in flight is aborted, also a graph's; a graph that runs later is not touched.
    fn drop(&mut self) {
        // The word that tells kernels to leave ended with the context.
        if self.device_resources.home().driver.is_in_forked_child()
            || !self.device_resources.home().is_there()
        {
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
