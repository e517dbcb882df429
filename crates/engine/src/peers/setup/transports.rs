//! What runs on a rank's GPU: the transports, the resources that the communicators of one device share, and the shape of the rings.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use windlass_kernels::launch::{Geometry, bulk_from_bytes};

use windlass_base::config::{Collectives, config};
use windlass_base::gpu::{self, Address, Home, Ordinal};
use windlass_base::lock::Mutex;
use windlass_base::stats::features::Lacks;
use windlass_bootstrap::negotiated::{GRID_MAX, NegotiatedConfig};
use windlass_transport::TransportError;
use windlass_transport::heap::Holds;
use windlass_transport::native::{self, Kernels, Native, NativeDeviceResources, NativeParts};
use windlass_transport::p2p::{self, Layout, P2p, P2pDeviceResources, P2pParts};
use windlass_transport::sequencer::{self, Graphs, Sequencer, SequencerParts};
use windlass_transport::tuning;

use crate::peers::setup::capabilities;

/// How long a kernel that is told to leave is waited for. It sees the word within microseconds.
pub(in crate::peers) const LEAVES_WITHIN: Duration = Duration::from_secs(2);

/// What the communicators of one device share.
#[derive(Clone, Debug)]
struct DeviceTransports {
    p2p: Arc<P2pDeviceResources>,
    /// None where the option is off, or where there is no code for the device.
    native: Option<Arc<NativeDeviceResources>>,
    sequencer: Arc<sequencer::DeviceResources>,
}

/// One entry for each device that had communicators. Kept until the process or the context ends, since unloading code may wait for the
/// device. Locked while one is made, which only inits do.
static TRANSPORTS: Mutex<BTreeMap<Ordinal, DeviceTransports>> = Mutex::new(BTreeMap::new());

/// What a rank needs of its device to make its kernels, acquired before it reports.
#[derive(Debug)]
pub(in crate::peers) struct Share {
    transports: DeviceTransports,
    /// None where this rank has no native collectives.
    pub kernels: Option<Arc<Kernels>>,
    /// The features that this rank would lack, and why.
    pub lacks: Lacks,
    /// How the communicator's graphs are ordered among each other.
    pub graphs: Graphs,
}

/// What runs on a rank's GPU.
#[derive(Debug)]
pub(in crate::peers) struct Transports {
    pub p2p: P2p,
    /// None where the negotiated config has no native collectives.
    pub native: Option<Native>,
    pub sequencer: Arc<Sequencer>,
    /// The features that this rank would lack, and why.
    pub lacks: Lacks,
}

impl Transports {
    /// Whether kernels of Windlass move bytes between the ranks.
    pub(in crate::peers) fn has_wires(&self) -> bool {
        !self.lacks.is_without_link()
    }
}

impl Share {
    /// The share of a communicator with so many ranks.
    pub(in crate::peers) fn new(device: Ordinal, ranks: u32) -> Result<Share, String> {
        let transports = transports(device).map_err(|error| error.to_string())?;
        let kernels = transports.kernels(ranks);
        Ok(Share { transports, kernels, lacks: Lacks::default(), graphs: Graphs::default() })
    }

    /// Makes the transports, over the regions of all ranks as this rank's device addresses them.
    pub(in crate::peers) fn transports(
        self,
        rings: &Rings,
        regions: Vec<Address>,
        holds: &Arc<Holds>,
    ) -> Result<Transports, TransportError> {
        let Share { transports, kernels, lacks, graphs } = self;
        let lacks = if rings.wires == Wires::None { lacks.without_link() } else { lacks };
        let (geometry, holds) = (rings.p2p, holds.clone());
        let rank = geometry.rank;
        let own = regions.get(rank as usize).copied().unwrap_or_default();
        let sequencer = Sequencer::new(SequencerParts {
            device_resources: transports.sequencer,
            rank,
            report: own + Layout::of(regions.len() as u32, &geometry).report,
            hold: Box::new(move |driver: &_, capture| holds.hold(driver, capture)),
            graphs,
        })?;
        let native = match (rings.native, kernels) {
            (Some(geometry), Some(kernels)) => {
                let regions = regions.iter().map(|region| region + rings.native_at).collect();
                let (sequencer, tuning, limits) = (sequencer.clone(), tuning::kernels(), rings.limits);
                Some(Native::new(NativeParts { kernels, sequencer, geometry, tuning, limits, regions })?)
            }
            // A rank without kernels has said so, so the negotiated config has no native collectives.
            (_, _) => None,
        };
        let parts =
            P2pParts { device_resources: transports.p2p, sequencer: sequencer.clone(), geometry, regions };
        Ok(Transports { p2p: P2p::new(parts)?, native, sequencer, lacks })
    }
}

/// Whether the ranks' kernels can reach each other's memory in the way that they need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::peers) enum Wires {
    /// Over NVLink.
    NvLink,
    /// No. NCCL moves all bytes between the ranks.
    None,
}

/// The shape of all rings in a region, from what all ranks agreed on.
#[derive(Clone, Copy, Debug)]
pub(in crate::peers) struct Rings {
    p2p: Geometry,
    /// None where the negotiated config has no native collectives.
    native: Option<native::Geometry>,
    /// The limits of the grids of native collectives.
    limits: native::Limits,
    /// Where the rings of native collectives begin in a region, in bytes.
    native_at: u64,
    /// The size of all rings, in bytes.
    pub bytes: u64,
    pub wires: Wires,
}

impl Rings {
    /// Tags begin at a random number, because a ring that grows may lie in memory that holds anything, such as an earlier communicator's
    /// lines. Memory holds just the expected tag once in 2^60 lines.
    pub(in crate::peers) fn of(negotiated: &NegotiatedConfig, rank: u32, wires: Wires) -> Rings {
        let blocks = negotiated.grid_max();
        let ranks = negotiated.members.len() as u32;
        let tag = |number: u64| number >> 2 | 1;
        let measured = Geometry::recommended(blocks, rank);
        let measured = match wires {
            Wires::NvLink => measured,
            // Messages of a rank to itself need no rings.
            Wires::None => Geometry { ll128_slots: 1, bulk_slots: 1, bulk_chunk_bytes: 128, ..measured },
        };
        let (first_tag, bulk_from_bytes) = (tag(negotiated.comm.number()), bulk_from_bytes(ranks));
        let p2p = Geometry { first_tag, bulk_from_bytes, ..measured };
        let native_at = Layout::of(ranks, &p2p).bytes;
        let native = (wires == Wires::NvLink && tuning::serves(negotiated)).then(|| {
            native::Geometry::recommended(
                negotiated.ctas_max(),
                ranks,
                rank,
                tag(negotiated.comm.other_number()),
            )
        });
        let limits = native::Limits { blocks_max: blocks, clusters: negotiated.has_clusters() };
        let bytes = native_at + native.map_or(0, |geometry| native::Layout::of(&geometry).bytes);
        Rings { p2p, native, limits, native_at, bytes: bytes.next_multiple_of(128), wires }
    }
}

/// Bytes of each rank's device that a communicator of so many ranks takes, without limits on CTAs and before its rings grow.
pub fn communicator_bytes(ranks: u32) -> u64 {
    let collectives = match ranks as usize <= native::RANKS_MAX {
        true => native::Layout::of(&native::Geometry::recommended(GRID_MAX, ranks, 0, 1)).bytes,
        false => 0,
    };
    Layout::of(ranks, &Geometry::recommended(GRID_MAX, 0)).bytes + collectives
}

/// Whether graphs, and no communicator, use these resources of some device.
pub(in crate::peers) fn are_held_by_graphs() -> bool {
    TRANSPORTS.lock().values().any(|transports| transports.are_let_go() && !transports.are_unused())
}

/// Frees the resources that no communicator uses, when the process ends.
pub(in crate::peers) fn give_back() {
    let unused =
        |_: &Ordinal, transports: &mut DeviceTransports| transports.are_let_go() && transports.are_unused();
    let unused: Vec<_> = TRANSPORTS.lock().extract_if(.., unused).collect();
    drop(unused);
}

impl DeviceTransports {
    fn are_unused(&self) -> bool {
        self.sequencer.is_unused()
    }

    /// The kernels of native collectives for so many ranks, if there are any.
    fn kernels(&self, ranks: u32) -> Option<Arc<Kernels>> {
        let native = self.native.as_ref().filter(|_| ranks as usize <= native::RANKS_MAX)?;
        native.kernels(ranks).map_err(without_native).ok()
    }

    /// Whether no [`Share`] and no p2p transport holds them.
    fn are_let_go(&self) -> bool {
        Arc::strong_count(&self.p2p) == 1
    }
}

fn transports(device: Ordinal) -> Result<DeviceTransports, TransportError> {
    let mut all = TRANSPORTS.lock();
    if let Some(transports) = all.get(&device) {
        if transports.sequencer.home.is_there() {
            return Ok(transports.clone());
        }
        log::info!("device {device}: its context is another than before, all begins anew there");
        all.remove(&device);
    }
    let driver = gpu::driver()?;
    let sequencer = sequencer::DeviceResources::new(Home::of(driver, device)?, p2p::HOST_BYTES)?;
    let p2p = P2pDeviceResources::new(sequencer.clone())?;
    let native = match config().collectives == Collectives::Auto {
        true => NativeDeviceResources::new(sequencer.clone(), capabilities::others_wait())
            .map_err(without_native)
            .ok(),
        false => None,
    };
    let transports = DeviceTransports { p2p, native, sequencer };
    all.insert(device, transports.clone());
    Ok(transports)
}

/// Logs why this rank has no native collectives. Then no rank of its communicators has.
fn without_native(error: TransportError) {
    log::info!("no native collectives: {error}");
}
