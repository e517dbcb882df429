//! Keeps the memory of ended peer groups whose kernels have not left yet. An abort does not wait for kernels, which may stand in a
//! stream behind other work. Peers' memory stays mapped, and this rank's lent, until they have left.

use windlass_base::gpu::Ordinal;
use windlass_base::lock::Mutex;
use windlass_transport::heap::{PeerRegion, Region};

use crate::features::registration::deregistration;
use crate::peers::growing::Grown;
use crate::peers::setup::transports::Transports;
use crate::peers::shutdown::closing::Closing;

/// The memory of other ranks that this rank uses, and its own that they use.
#[derive(Debug)]
pub(in crate::peers) struct Mapped {
    pub transports: Transports,
    /// By rank, none at this rank's place.
    pub peers: Vec<Option<PeerRegion>>,
    pub region: Region,
    pub closing: Closing,
}

/// The memory of a peer group that ends.
#[derive(Debug)]
pub(in crate::peers) struct Draining {
    pub mapped: Mapped,
    pub grown: Grown,
}

/// Locked across event queries, and while a peer group is closed. The locks of symmetric heaps and of `closing` come after it.
static DRAINING: Mutex<Vec<Draining>> = Mutex::new(Vec::new());

impl Draining {
    /// Closes this rank, now or when its kernels have left.
    pub(in crate::peers) fn begin(self) {
        if self.is_over() {
            self.close();
        } else {
            self.mapped.transports.sequencer.abort();
            DRAINING.lock().push(self);
        }
    }

    /// A driver that answers nothing any more runs nothing either.
    fn is_over(&self) -> bool {
        self.mapped.transports.sequencer.is_idle().unwrap_or(true)
    }

    /// Closes in this order: the other ranks hear last that this rank has closed.
    fn close(self) {
        let Draining { mapped: Mapped { transports, peers, region, mut closing }, grown } = self;
        drop((transports, peers));
        closing.also(grown.end());
        drop(region);
        closing.begin();
    }
}

/// Closes the peer groups whose kernels have left. Callable on any thread, between calls. When it returns, another thread's are closed, too.
pub(in crate::peers) fn close_over() {
    DRAINING.lock().extract_if(.., |one| one.is_over()).for_each(Draining::close);
}

/// Whether peer groups on this device are draining that will end.
pub(in crate::peers) fn is_any_on(device: Ordinal) -> bool {
    let is_on = |one: &Draining| one.mapped.region.device() == device;
    // Work that was issued in part may never end.
    let will_end = |one: &Draining| !one.mapped.transports.sequencer.is_doubtful();
    DRAINING.lock().iter().any(|one| is_on(one) && will_end(one))
}

/// Closes all peer groups whose kernels have left. Returns whether more are draining, or registrations remain.
pub(in crate::peers) fn look() -> bool {
    close_over();
    let remains = deregistration::look_at_remains();
    !DRAINING.lock().is_empty() || remains
}

/// Forgets what drains when the process ends: the driver stops it.
pub(in crate::peers) fn forget() {
    std::mem::forget(std::mem::take(&mut *DRAINING.lock()));
    deregistration::forget();
}
