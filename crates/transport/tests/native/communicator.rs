//! Shared by the tests: communicators of ranks on devices of the simulated driver, each rank on a thread.

use std::ops::Deref;
use std::sync::Arc;

use windlass_base::gpu::Home;
use windlass_kernels::launch::Geometry;
use windlass_transport::heap::{Heap, Holds, Region};
use windlass_transport::native::{self, Limits, Native, NativeDeviceResources, NativeParts, Tuning};
use windlass_transport::p2p::{self, P2p, P2pDeviceResources, P2pParts};
use windlass_transport::sequencer::{self, Sequencer, SequencerParts};

use crate::support::*;

const MESSAGES: Geometry = Geometry {
    first_tag: 1,
    bulk_from_bytes: 40_000,
    ll128_channels: 4,
    ll128_slots: 4,
    bulk_channels: 2,
    bulk_slots: 4,
    bulk_chunk_bytes: 4096,
    rank: 0,
};
pub const BLOCKS: u32 = 2;

/// Few channels, so that ordinary collectives use ring slots again.
pub fn geometry(ranks: u32, rank: u32) -> native::Geometry {
    native::Geometry {
        first_tag: 7,
        rank,
        ranks,
        channels: 4,
        slots: 2,
        one_shot_channels: 5,
        one_shot_slots: 20,
    }
}

/// A device that the program uses, with Windlass's resources of it.
pub struct Device {
    primary: Primary,
    pub heap: Arc<Heap>,
    pub sequencer: Arc<sequencer::DeviceResources>,
    pub p2p: Arc<P2pDeviceResources>,
    pub native: Arc<NativeDeviceResources>,
}

impl Deref for Device {
    type Target = Primary;

    fn deref(&self) -> &Primary {
        &self.primary
    }
}

impl Device {
    pub fn new(ordinal: i32) -> Device {
        let primary = Primary::of(ordinal);
        let heap = Heap::open(primary.driver, ordinal, 256 << 20).unwrap();
        let home = Home::of(primary.driver, ordinal).unwrap();
        let sequencer = sequencer::DeviceResources::new(home, p2p::HOST_BYTES).unwrap();
        let p2p = P2pDeviceResources::new(sequencer.clone()).unwrap();
        let native = NativeDeviceResources::new(sequencer.clone(), true).unwrap();
        Device { primary, heap, sequencer, p2p, native }
    }

    pub fn stream(&self) -> AppStream {
        self.make_current();
        AppStream::new()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        eventually("graphs let go", || self.sequencer.is_unused());
        self.heap.settle().unwrap();
        assert_eq!(self.heap.counters().regions, 0, "regions are left");
    }
}

/// One rank. Fields are dropped in this order: the transports before their region.
pub struct Rank {
    pub rank: u32,
    pub native: Native,
    pub p2p: P2p,
    pub sequencer: Arc<Sequencer>,
    _region: Region,
    pub holds: Arc<Holds>,
}

pub fn devices(count: usize) -> Vec<Device> {
    (0..count as i32).map(Device::new).collect()
}

/// A communicator with one rank on each device.
pub fn communicator(devices: &[Device]) -> Vec<Rank> {
    let ranks = devices.len() as u32;
    let layout = p2p::Layout::of(ranks, &MESSAGES);
    let bytes = layout.bytes + native::Layout::of(&geometry(ranks, 0)).bytes;
    let lent: Vec<(Region, Arc<Holds>)> = devices
        .iter()
        .map(|device| {
            let holds = Holds::new();
            let region = device.heap.lend(bytes, &holds).unwrap();
            region.wait_zeroed(soon()).unwrap();
            let others = devices.iter().filter(|other| other.device != device.device);
            others.for_each(|other| region.allow(other.device).unwrap());
            (region, holds)
        })
        .collect();
    let regions: Vec<u64> = lent.iter().map(|(region, _)| region.address()).collect();
    let rank = |(rank, ((region, holds), device)): (u32, ((Region, Arc<Holds>), &Device))| {
        let held = holds.clone();
        let sequencer = Sequencer::new(SequencerParts {
            device_resources: device.sequencer.clone(),
            rank,
            report: region.address() + layout.report,
            hold: Box::new(move |driver, capture| held.hold(driver, capture)),
            graphs: sequencer::Graphs::Mixed,
        })
        .unwrap();
        let native = Native::new(NativeParts {
            kernels: device.native.kernels(ranks).unwrap(),
            sequencer: sequencer.clone(),
            geometry: geometry(ranks, rank),
            tuning: Tuning::default(),
            limits: Limits { blocks_max: BLOCKS, clusters: true },
            regions: regions.iter().map(|region| region + layout.bytes).collect(),
        });
        let p2p = P2p::new(P2pParts {
            device_resources: device.p2p.clone(),
            sequencer: sequencer.clone(),
            geometry: Geometry { rank, ..MESSAGES },
            regions: regions.clone(),
        });
        Rank { rank, native: native.unwrap(), p2p: p2p.unwrap(), sequencer, _region: region, holds }
    };
    (0..).zip(lent.into_iter().zip(devices)).map(rank).collect()
}

/// Runs `body` for every rank on its own thread, with its device current. If one fails all are aborted, so that none waits for it.
pub fn all<'a>(devices: &'a [Device], ranks: &'a [Rank], body: impl Fn(&'a Device, &'a Rank) + Sync) {
    struct Together<'a>(&'a [Rank]);

    impl Drop for Together<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                self.0.iter().for_each(|rank| rank.sequencer.abort());
            }
        }
    }

    std::thread::scope(|scope| {
        for (device, rank) in devices.iter().zip(ranks) {
            let body = &body;
            scope.spawn(move || {
                let _together = Together(ranks);
                device.make_current();
                body(device, rank);
            });
        }
    });
}

/// Ends a communicator as its owner does.
pub fn end(ranks: Vec<Rank>) {
    for rank in &ranks {
        rank.sequencer.wait_idle(soon()).unwrap();
    }
    drop(ranks);
}
