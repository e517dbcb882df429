//! One turn of a sequencer: what an operation's kernel needs, and its place in the order.

use crate::sequencer::captures::Captures;
use crate::sequencer::order::{Order, Runner};
use crate::sequencer::{Graphs, Joins, LaunchResources, Sequencer};
use std::sync::atomic::Ordering;
use windlass_base::gpu::context::Current;
use windlass_base::gpu::stream::Ordering::Inside;
use windlass_base::gpu::stream::{Capture, Place};
use windlass_base::gpu::{Driver, Failure, StreamHandle};
use windlass_base::observers::profiler::times;

/// One turn: an operation's place in the order, and what its kernel needs.
pub struct Turn<'sequencer> {
    pub(crate) sequencer: &'sequencer Sequencer,
    /// The communicator's launch resources.
    pub resources: &'sequencer LaunchResources,
    pub(super) issued: &'sequencer mut Issued,
    /// The stream on which the turn runs.
    pub stream: StreamHandle,
    pub(super) others: Joins<'sequencer>,
    pub(super) placed: Option<(Lane, Current<'sequencer>)>,
    pub(super) begun: bool,
}

impl<'sequencer> Turn<'sequencer> {
    /// The cluster size to give at a launch of clusters of `blocks` blocks, 0 before 9.0. A size of 1 is given, too. Otherwise an update of a
    /// graph keeps the former cluster size, and the driver (580) leaves out a kernel whose grid that size does not divide, without an error.
    pub fn cluster(&self, blocks: u32) -> u32 {
        if self.sequencer.device_resources.is_since_hopper() { blocks } else { 0 }
    }

    /// Makes the device's context current and returns the capture that the stream is part of. Its graph then keeps all that the turn needs.
    pub fn place(&mut self) -> Result<Option<Capture>, Failure> {
        if let Some((lane, _)) = &self.placed {
            return Ok(lane.capture());
        }
        let home = &self.sequencer.device_resources.home;
        let current = home.be_current()?;
        let lane = Lane { stream: self.stream, place: home.driver.place_of(self.stream)? };
        self.sequencer.hold_all_in(self.issued, lane)?;
        if lane.capture().is_some() {
            self.sequencer.captured.store(true, Ordering::Relaxed);
        }
        self.placed = Some((lane, current));
        Ok(lane.capture())
    }

    /// The capture that the stream is part of, once the turn [is placed](Turn::place).
    pub fn capture(&self) -> Option<Capture> {
        self.placed.as_ref().and_then(|(lane, _)| lane.capture())
    }

    /// Orders the turn after all earlier ones. Call it before anything is issued to the stream. Returns the capture that the stream is part of.
    pub fn begin(&mut self) -> Result<Option<Capture>, Failure> {
        let capture = self.place()?;
        if self.begun {
            return Ok(capture);
        }
        let (driver, Some((lane, _))) = (self.sequencer.device_resources.home.driver, &self.placed) else {
            return Ok(capture);
        };
        self.resources.join(driver, self.stream, self.others.before)?;
        self.issued.come_behind((driver, self.resources), self.sequencer.graphs, *lane)?;
        self.begun = true;
        Ok(capture)
    }

    /// Launches the kernel of so many collectives, or of messages, in the turn, which has begun. Profilers hear how long it runs.
    pub fn launch(
        &self,
        collectives: Option<usize>,
        launch: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let home = &self.sequencer.device_resources.home;
        times::timed(home, self.stream, self.capture().is_some(), collectives, launch)
    }

    /// Enters the issued work as the last in the order.
    pub(super) fn end(&mut self) -> Result<(), Failure> {
        let (true, driver, Some((lane, _))) =
            (self.begun, self.sequencer.device_resources.home.driver, &self.placed)
        else {
            return Ok(());
        };
        self.issued.note((driver, self.resources), self.sequencer.graphs, *lane, Runner::Windlass)?;
        if !self.others.after.is_empty() {
            self.resources.joined.record(self.stream, Inside)?;
        }
        for other in self.others.after {
            driver.wait(*other, &self.resources.joined, Inside)?;
        }
        Ok(())
    }
}

/// What a sequencer has issued: the order, and the driver calls that keep it. The sequencer's lock is held.
#[derive(Debug, Default)]
pub(super) struct Issued {
    pub(super) order: Order,
    pub(super) captures: Captures,
    /// Id of the capture whose graph already keeps the launch resources.
    pub(super) held: Option<u64>,
    /// Id of the capture whose graph already keeps the regions, too: it has kernels of Windlass.
    pub(super) held_regions: Option<u64>,
}

/// Where an operation runs: on a stream that is eager or captured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    pub(super) stream: StreamHandle,
    pub(super) place: Place,
}

impl Issued {
    /// Makes the operation that comes now in `lane` run after all before it.
    pub(super) fn come_behind(
        &mut self,
        (driver, resources): (&Driver, &LaunchResources),
        graphs: Graphs,
        lane: Lane,
    ) -> Result<(), Failure> {
        match lane.place {
            Place::Eager(id) if !self.order.waits(id) => Ok(()),
            Place::Eager(_) => driver.wait(lane.stream, &resources.done, Inside),
            Place::Captured(capture) => {
                let at = (lane.stream, capture);
                self.captures.before(driver, resources, at, (&mut self.order, graphs))
            }
        }
    }

    /// Notes that the operation was issued in `lane`.
    pub(super) fn note(
        &mut self,
        (driver, resources): (&Driver, &LaunchResources),
        graphs: Graphs,
        lane: Lane,
        by: Runner,
    ) -> Result<(), Failure> {
        match lane.place {
            Place::Eager(id) => {
                resources.done.record(lane.stream, Inside)?;
                self.order.record(id, by);
                Ok(())
            }
            Place::Captured(capture) => {
                self.order.record_in_capture(graphs);
                self.captures.after(driver, resources, (lane.stream, capture), graphs)
            }
        }
    }
}

impl Lane {
    pub(super) fn capture(&self) -> Option<Capture> {
        match self.place {
            Place::Captured(capture) => Some(capture),
            Place::Eager(_) => None,
        }
    }
}
