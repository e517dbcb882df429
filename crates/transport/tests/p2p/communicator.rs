//! Shared by the tests: communicators of ranks on devices of the simulated driver, or of a GPU machine ([`on_a_gpu`]), each rank on
//! a thread.

use std::ops::Deref;
use std::sync::Arc;

use windlass_base::gpu::Home;
use windlass_kernels::launch::Geometry;
use windlass_transport::heap::{Heap, Holds, Region};
use windlass_transport::p2p::{HOST_BYTES, Layout, P2p, P2pDeviceResources, P2pParts};
use windlass_transport::sequencer::{self, Sequencer, SequencerParts};

use crate::support::*;
use crate::traffic::*;

/// Small rings, of 31 KB of LL128 and 32 KiB of chunks, so that ordinary messages use slots again.
pub const GEOMETRY: Geometry = Geometry {
    first_tag: 1,
    bulk_from_bytes: 40_000,
    ll128_channels: 4,
    ll128_slots: 4,
    bulk_channels: 2,
    bulk_slots: 4,
    bulk_chunk_bytes: 4096,
    rank: 0,
};

/// A device that the program uses, with Windlass's resources of it.
pub struct Device {
    primary: Primary,
    pub heap: Arc<Heap>,
    pub device_resources: Arc<P2pDeviceResources>,
    pub sequencer: Arc<sequencer::DeviceResources>,
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
        let sequencer = sequencer::DeviceResources::new(home, HOST_BYTES).unwrap();
        let device_resources = P2pDeviceResources::new(sequencer.clone()).unwrap();
        Device { primary, heap, device_resources, sequencer }
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

/// One rank. Fields are dropped in this order: the p2p transport before its region.
pub struct Rank {
    pub rank: u32,
    pub p2p: P2p,
    pub region: Region,
    pub holds: Arc<Holds>,
}

pub fn devices(count: usize) -> Vec<Device> {
    (0..count as i32).map(Device::new).collect()
}

/// A communicator with one rank on each device.
pub fn communicator(devices: &[Device]) -> Vec<Rank> {
    communicator_of(devices, GEOMETRY)
}

pub fn communicator_of(devices: &[Device], geometry: Geometry) -> Vec<Rank> {
    let bytes = Layout::of(devices.len() as u32, &geometry).bytes;
    let lent: Vec<(Region, Arc<Holds>)> = devices
        .iter()
        .map(|device| {
            let holds = Holds::new();
            let region = device.heap.lend(bytes, &holds).unwrap();
            region.wait_zeroed(soon()).unwrap();
            devices
                .iter()
                .filter(|other| other.device != device.device)
                .for_each(|other| region.allow(other.device).unwrap());
            (region, holds)
        })
        .collect();
    let regions: Vec<u64> = lent.iter().map(|(region, _)| region.address()).collect();
    lent.into_iter()
        .zip(devices)
        .enumerate()
        .map(|(rank, ((region, holds), device))| {
            let p2p = p2p(device, Geometry { rank: rank as u32, ..geometry }, regions.clone(), &holds);
            Rank { rank: rank as u32, p2p, region, holds }
        })
        .collect()
}

pub fn p2p(device: &Device, geometry: Geometry, regions: Vec<u64>, holds: &Arc<Holds>) -> P2p {
    let layout = Layout::of(regions.len() as u32, &geometry);
    let sequencer = sequencer(device, geometry.rank, regions[geometry.rank as usize] + layout.report, holds);
    P2p::new(P2pParts { device_resources: device.device_resources.clone(), sequencer, geometry, regions })
        .unwrap()
}

pub fn sequencer(device: &Device, rank: u32, report: u64, holds: &Arc<Holds>) -> Arc<Sequencer> {
    let holds = holds.clone();
    let parts = SequencerParts {
        device_resources: device.sequencer.clone(),
        rank,
        report,
        hold: Box::new(move |driver, capture| holds.hold(driver, capture)),
        graphs: sequencer::Graphs::Mixed,
    };
    Sequencer::new(parts).unwrap()
}

/// Runs `body` for every rank on its own thread, with its device current. If one fails all are aborted, so that none waits for it.
pub fn all<'a>(devices: &'a [Device], ranks: &'a [Rank], body: impl Fn(&'a Device, &'a Rank) + Sync) {
    struct Together<'a>(&'a [Rank]);

    impl Drop for Together<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                self.0.iter().for_each(|rank| rank.p2p.sequencer().abort());
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
        rank.p2p.sequencer().wait_idle(soon()).unwrap();
    }
    drop(ranks);
}

/// Runs all messages as one group on every rank, several times, and verifies them.
pub fn exchange(devices: &[Device], ranks: &[Rank], messages: &[Message], times: usize) {
    all(devices, ranks, |device, rank| {
        let stream = device.stream();
        let side = Side::of(rank.rank, messages);
        for _ in 0..times {
            rank.p2p.run(&side.operations, stream.handle()).unwrap();
            stream.synchronize();
            side.check();
            side.clear();
        }
    });
}
