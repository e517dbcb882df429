//! What a rank had of a peer group whose kernels have not left yet: an abort does not wait for them, and they may stand in a
//! stream behind other work. Peers' memory stays mapped and ours lent until they have.

use std::sync::{Mutex, MutexGuard, PoisonError};

use windlass_base::gpu::Ordinal;
use windlass_transport::heap::{PeerRegion, Region};

use crate::features::registration::deregistration;
use crate::peers::growing::Grown;
use crate::peers::setup::transports::Transports;
use crate::peers::shutdown::closing::Closing;

/// What of other ranks' memory a rank uses, and what of its own they may.
#[derive(Debug)]
pub(in crate::peers) struct Mapped {
    pub transports: Transports,
    /// By rank, none at this rank's place.
    pub peers: Vec<Option<PeerRegion>>,
    pub region: Region,
    pub closing: Closing,
}

/// The same, of one that ends.
#[derive(Debug)]
pub(in crate::peers) struct Draining {
    pub mapped: Mapped,
    pub grown: Grown,
}

/// Held across queries of events, and while one is closed: the locks of symmetric heaps and of what is closed come after it.
static DRAINING: Mutex<Vec<Draining>> = Mutex::new(Vec::new());

impl Draining {
    /// Closes this rank, now or when its kernels have left.
    pub(in crate::peers) fn begin(self) {
        if self.is_over() {
            self.close();
        } else {
            self.mapped.transports.sequencer.abort();
            draining().push(self);
        }
    }

    /// A driver that answers nothing any more runs nothing either.
    fn is_over(&self) -> bool {
        self.mapped.transports.sequencer.is_idle().unwrap_or(true)
    }

    /// In this order: the others hear last that this rank has closed.
    fn close(self) {
        let Draining { mapped: Mapped { transports, peers, region, mut closing }, grown } = self;
        drop((transports, peers));
        closing.also(grown.end());
        drop(region);
        closing.begin();
    }
}

/// Closes those whose kernels have left. Any thread, between calls: one that comes meanwhile finds them closed.
pub(in crate::peers) fn close_over() {
    draining().extract_if(.., |one| one.is_over()).for_each(Draining::close);
}

/// Whether there are others on this device that will be over.
pub(in crate::peers) fn is_any_on(device: Ordinal) -> bool {
    let is_on = |one: &Draining| one.mapped.region.device() == device;
    // Of what was issued in part nobody knows when it ends.
    let will_end = |one: &Draining| !one.mapped.transports.sequencer.is_doubtful();
    draining().iter().any(|one| is_on(one) && will_end(one))
}

/// Closes all that is over; whether there is more.
pub(in crate::peers) fn look() -> bool {
    close_over();
    let remains = deregistration::look_at_remains();
    !draining().is_empty() || remains
}

/// The process ends: what still runs is the driver's to stop.
pub(in crate::peers) fn forget() {
    std::mem::forget(std::mem::take(&mut *draining()));
    deregistration::forget();
}

fn draining() -> MutexGuard<'static, Vec<Draining>> {
    DRAINING.lock().unwrap_or_else(PoisonError::into_inner)
}
