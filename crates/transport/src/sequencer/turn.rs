//! One turn of a sequencer: what an operation's kernel needs, and its place in the order.

use crate::sequencer::device_resources::LaunchResources;
use crate::sequencer::issued::{Issued, Lane};
use crate::sequencer::order::Runner;
use crate::sequencer::{Joins, Sequencer};
use std::sync::atomic::Ordering;
use windlass_base::gpu::context::Current;
use windlass_base::gpu::module::MemoryDomain;
use windlass_base::gpu::stream::{Capture, Ordering::Inside};
use windlass_base::gpu::{Address, Driver, Failure, StreamHandle};
use windlass_base::observers::profiler::times;

/// One turn: an operation's place in the order, and what its kernel needs.
pub struct Turn<'sequencer> {
    pub(super) sequencer: &'sequencer Sequencer,
    pub(super) resources: &'sequencer LaunchResources,
    pub(super) issued: &'sequencer mut Issued,
    pub(super) stream: StreamHandle,
    pub(super) others: Joins<'sequencer>,
    pub(super) placed: Option<(Lane, Current<'sequencer>)>,
    pub(super) begun: bool,
}

impl<'sequencer> Turn<'sequencer> {
    /// The driver. The device's context is current once the turn [is placed](Turn::place).
    pub fn driver(&self) -> &'static Driver {
        self.sequencer.device_resources.home().driver
    }

    /// The stream on which the turn runs.
    pub fn stream(&self) -> StreamHandle {
        self.stream
    }

    /// The communicator's launch resources.
    pub fn resources(&self) -> &'sequencer LaunchResources {
        self.resources
    }

    /// Address of the control word, which tells kernels to leave.
    pub fn control(&self) -> Address {
        self.resources.host.control_address()
    }

    /// Address of the report that kernels write.
    pub fn report(&self) -> Address {
        self.sequencer.report
    }

    /// Whether nothing else launches kernels on this device, as far as this process knows ([`DeviceResources::is_of_one`]).
    pub fn is_alone(&self) -> bool {
        self.sequencer.device_resources.is_of_one()
    }

    /// The cluster size to give at a launch of clusters of `blocks` blocks, 0 before 9.0. A size of 1 is given, too. Otherwise an update of a
    /// graph keeps the former cluster size, and the driver (580) leaves out a kernel whose grid that size does not divide, without an error.
    pub fn cluster(&self, blocks: u32) -> u32 {
        if self.sequencer.device_resources.is_since_hopper() { blocks } else { 0 }
    }

    /// The memory domain in which all kernels are launched.
    pub fn domain(&self) -> MemoryDomain {
        self.sequencer.device_resources.domain()
    }

    /// Makes the device's context current and returns the capture that the stream is part of. Its graph then keeps all that the turn needs.
    pub fn place(&mut self) -> Result<Option<Capture>, Failure> {
        if let Some((lane, _)) = &self.placed {
            return Ok(lane.capture());
        }
        let home = self.sequencer.device_resources.home();
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
        let (driver, Some((lane, _))) = (self.driver(), &self.placed) else { return Ok(capture) };
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
        let home = self.sequencer.device_resources.home();
        times::timed(home, self.stream, self.capture().is_some(), collectives, launch)
    }

    /// Enters the issued work as the last in the order.
    pub(super) fn end(&mut self) -> Result<(), Failure> {
        let (true, driver, Some((lane, _))) = (self.begun, self.driver(), &self.placed) else {
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
