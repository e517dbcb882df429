//! Runs collectives between ranks that can write each other's memory: one kernel (`crates/kernels`) each, over rings in regions of the ranks'
//! symmetric heaps, on any pointers of the application.
//!
//! All state of a collective lies in the regions. The host fills the kernel's parameter and launches the kernel in a
//! [turn](crate::sequencer). The engine decides which collectives run here; every rank of the communicator must run them here. A
//! [`NativeDeviceResources`] per device has the loaded kernels. At init a rank lends a region with [`Layout::bytes`] zeros for this, tells
//! its peers and makes its [`Native`]. After that nothing allocates, nothing loads, and nothing waits.

mod calls;

pub mod device_resources;

use std::sync::Arc;

use windlass_bootstrap::awaited::Awaited;
use windlass_kernels::collective::{
    BatchLaunch, CHANNEL_BYTES, CHANNEL_RECEIVED, COLLECTIVE_EARLY_NEXT, CollectiveLaunch, LL_COUNT_BYTES,
    RANKS_MAX as KERNEL_RANKS_MAX,
};
use windlass_kernels::collectives::{self as kernels, arrange, arrange_batch, arrange_uneven};

pub use device_resources::{Kernels, NativeDeviceResources};
pub use windlass_kernels::collectives::{
    Collective, Geometry, Kind, Layout, Limits, Part, Reduction, SCALED_SUM, Scalar, Tuning, Uneven,
};

use calls::Parameter;

use crate::error::TransportError;
use crate::sequencer::{Sequencer, Turn};
use windlass_base::gpu::module::{Shape, Start};
use windlass_base::gpu::{Address, Failure};
use windlass_base::stats::count;

/// The most ranks of a communicator with native collectives.
pub const RANKS_MAX: usize = KERNEL_RANKS_MAX;

/// What [`Native`] is made from.
#[derive(Debug)]
pub struct NativeParts {
    /// The kernels for so many ranks, of this rank's device.
    pub kernels: Arc<Kernels>,
    /// The communicator's sequencer.
    pub sequencer: Arc<Sequencer>,
    /// What the ranks agreed on, and this rank's number.
    pub geometry: Geometry,
    /// Which kernel serves which size: the same on all ranks.
    pub tuning: Tuning,
    /// The limits of all grids, on which the ranks agreed.
    pub limits: Limits,
    /// The address, for this rank's device, of the part for collectives in each rank's region, this rank's own too. The regions must stay as long
    /// as [`Native`].
    pub regions: Vec<Address>,
}

/// What one kernel does.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Task {
    One(Collective),
    /// Several collectives of a group that are one: all-gather-v, reduce-scatter-v.
    Fused(Uneven),
    /// Several collectives of a group beside each other.
    Batch(Vec<Collective>),
}

/// One rank's native collectives of one communicator.
#[derive(Debug)]
pub struct Native {
    kernels: Arc<Kernels>,
    sequencer: Arc<Sequencer>,
    geometry: Geometry,
    layout: Layout,
    tuning: Tuning,
    limits: Limits,
    regions: Vec<Address>,
}

impl Native {
    /// Makes this rank's native collectives. Every rank's region must hold zeros before any rank runs a collective.
    pub fn new(parts: NativeParts) -> Result<Native, TransportError> {
        let NativeParts { kernels, sequencer, geometry, tuning, limits, regions } = parts;
        let ranks = regions.len() as u32;
        if ranks != geometry.ranks || regions.iter().any(|region| *region == 0 || !region.is_multiple_of(128))
        {
            return Err(TransportError::Regions { regions: regions.len(), ranks: geometry.ranks }.told());
        }
        let layout = Layout::of(&geometry);
        let native = Native { kernels, sequencer, geometry, layout, tuning, limits, regions };
        native.try_one().map_err(TransportError::told)?;
        Ok(native)
    }

    /// Refuses at init what could not be arranged later, by arranging one collective: whether that succeeds depends on no call.
    fn try_one(&self) -> Result<(), TransportError> {
        let (kind, count, element_bytes) = (Kind::AllGather, 1, 1);
        let (reduction, scalar) = (None, None);
        let one = Collective { kind, count, element_bytes, reduction, scalar, send: 1, receive: 1 };
        let Native { geometry, layout, regions, tuning, limits, .. } = self;
        arrange(&one, geometry, layout, regions, tuning, limits, &mut CollectiveLaunch::default())
            .map(drop)
            .map_err(TransportError::Arranged)
    }

    /// Launches one task's kernel in a turn; nothing if the task is empty. Errors are not logged here.
    ///
    /// After a failure of the driver peers wait, and the owner must abort the communicator.
    pub fn launch(&self, turn: &mut Turn<'_>, task: &Task) -> Result<(), TransportError> {
        let Native { geometry, layout, regions, tuning, limits, .. } = self;
        match task {
            Task::One(collective) => {
                let mut launch = CollectiveLaunch::default();
                let shape = arrange(collective, geometry, layout, regions, tuning, limits, &mut launch);
                self.start(turn, shape, Parameter::One(&mut launch), None)
            }
            Task::Fused(uneven) => {
                let mut launch = CollectiveLaunch::default();
                let shape = arrange_uneven(uneven, geometry, layout, regions, tuning, limits, &mut launch);
                let calls = uneven.parts.iter().filter(|part| part.bytes > 0).count();
                self.start(turn, shape, Parameter::One(&mut launch), Some(calls))
            }
            Task::Batch(collectives) => {
                let mut batch = BatchLaunch::default();
                let shape = arrange_batch(collectives, geometry, layout, regions, tuning, limits, &mut batch);
                self.start(turn, shape, Parameter::Several(&mut batch), Some(collectives.len()))
            }
        }
    }

    /// Launches an arranged kernel, if there is one. `fused`: how many collectives it runs, if several.
    fn start(
        &self,
        turn: &mut Turn<'_>,
        shape: Result<Option<kernels::Shape>, kernels::Refused>,
        mut parameter: Parameter<'_>,
        fused: Option<usize>,
    ) -> Result<(), TransportError> {
        let Some(shape) = shape.map_err(TransportError::Arranged)? else { return Ok(()) };
        if shape.kernel.runs_several() != matches!(parameter, Parameter::Several(_)) {
            return Err(TransportError::NoKernel { name: shape.kernel.name() });
        }
        let captured = turn.begin()?.is_some();
        // Not in a graph, where the edge would say that nothing before it need be done. A kernel that begins early is resident beside the one
        // before it, and takes room that kernels of others may need.
        let early = shape.early
            && !captured
            && self.kernels.may_be_early
            && turn.sequencer.device_resources.is_of_one();
        let launch = parameter.launch();
        launch.control = turn.resources.host.control_address();
        launch.report = turn.sequencer.report;
        if early {
            launch.flags |= COLLECTIVE_EARLY_NEXT;
        }
        let function = self.kernels.function(shape.kernel)?;
        let shape = Shape {
            blocks: shape.blocks,
            threads: shape.threads,
            shared_bytes: shape.shared_bytes,
            cluster: turn.cluster(shape.cluster),
            domain: turn.sequencer.device_resources.domain,
            start: if early { Start::WhenAllowed } else { Start::AfterStream },
        };
        let (driver, stream) = (turn.sequencer.device_resources.home.driver, turn.stream);
        let launch = || calls::launch(driver, function, stream, &shape, parameter);
        turn.launch(Some(fused.unwrap_or(1)), launch)?;
        fused.into_iter().for_each(|calls| count::fused(calls as u64));
        Ok(())
    }

    /// How many packets this rank has received on all channels since init, for the hang detector. Kernels write these counts, those of LL128 and
    /// Simple when they end. Waits for copies on a stream of Windlass.
    pub fn progress(&self) -> Result<u64, TransportError> {
        let own = self.regions.get(self.geometry.rank as usize).copied().unwrap_or_default();
        let Layout { ll, ll128, results, one_shot, .. } = self.layout;
        let Geometry { channels, one_shot_channels, .. } = self.geometry;
        // Of each wire: its channels, the bytes of one, and the index of the word that counts.
        let wires = [
            (ll, channels, LL_COUNT_BYTES, 0),
            (ll128, channels, CHANNEL_BYTES, CHANNEL_RECEIVED),
            (results, channels, CHANNEL_BYTES, CHANNEL_RECEIVED),
            (one_shot, one_shot_channels, LL_COUNT_BYTES, 0),
        ];
        let mut sum = 0_u64;
        for (wire, channels, channel_bytes, received) in wires {
            let words_a_channel = channel_bytes as usize / size_of::<u64>();
            let mut words = vec![0; channels as usize * words_a_channel];
            self.sequencer
                .read(own + wire.channels, &mut words)
                .map_err(|failure| TransportError::from(failure).told())?;
            let counts = words.iter().skip(received).step_by(words_a_channel);
            sum = counts.fold(sum, |sum, count| sum.wrapping_add(*count));
        }
        Ok(sum)
    }

    /// The launches in which this rank waits now, and for whom, of the even wires. Waits for copies on a stream of Windlass. A launch that goes on
    /// meanwhile may be among them, so only one that is there again later stands still.
    pub fn awaited(&self) -> Result<Vec<Awaited>, Failure> {
        let Geometry { first_tag, rank: own, ranks, .. } = self.geometry;
        let peers = (0..ranks).filter(|rank| *rank != own);
        let word = |rank: u32, at: u64| {
            let mut word = [0];
            self.sequencer.read(self.regions[rank as usize] + at, &mut word).map(|()| word[0])
        };
        let mut all = Vec::new();
        for (wire, marks) in (0..).zip(self.layout.marks(&self.geometry)) {
            let launch = word(own, marks.count())?;
            // A later launch of the same place is later than this one, too.
            let has_come = |source: u32, receiver: u32| {
                let tag = word(receiver, marks.tag(launch, source, receiver))?;
                Ok(tag.wrapping_sub(first_tag.wrapping_add(launch)) as i64 >= 0)
            };
            let mut missing = 0;
            for peer in peers.clone() {
                missing |= u64::from(!has_come(peer, own)?) << peer;
            }
            // This rank stores to all peers, so that any of them shows that it has come.
            if missing != 0 && has_come(own, (own + 1) % ranks)? {
                all.push(Awaited { wire, launch, ranks: missing });
            }
        }
        Ok(all)
    }
}

#[cfg(any(test, feature = "test-support"))]
mod test_support {
    use super::*;
    use crate::sequencer::Joins;
    use windlass_base::gpu::StreamHandle;

    impl Native {
        /// Runs one task on a stream, in a turn of its own.
        pub fn run(&self, task: &Task, stream: StreamHandle) -> Result<(), TransportError> {
            let run = self.sequencer.take(stream, Joins::default(), |turn| self.launch(turn, task));
            run.map_err(TransportError::told)
        }
    }
}
