//! What a sequencer has issued: the order, and the driver calls that keep it. The sequencer's lock is held.

use crate::sequencer::captures::Captures;
use crate::sequencer::device_resources::LaunchResources;
use crate::sequencer::order::{Graphs, Order, Runner};
use windlass_base::gpu::stream::{Capture, Ordering::Inside, Place};
use windlass_base::gpu::{Driver, Failure, StreamHandle};

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
