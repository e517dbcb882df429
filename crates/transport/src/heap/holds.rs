//! Counts the graphs that hold a communicator: a graph that captured our kernels may run them long after the communicator was destroyed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use windlass_base::gpu::stream::Capture;
use windlass_base::gpu::{Driver, Failure, graph::Released};

/// How many graphs can still run kernels of one communicator. While there are any, its regions and its mappings of peers' regions stay, and
/// it does not tell its peers that it has closed.
#[derive(Debug, Default)]
pub struct Holds {
    graphs: AtomicUsize,
    /// Id of the capture that was counted last, so that each is counted once. Capture ids are never used again.
    last_capture: AtomicU64,
}

impl Holds {
    /// No graph holds the communicator.
    pub fn new() -> Arc<Holds> {
        Arc::default()
    }

    /// Makes the graph of a capture, and everything made of it, hold the communicator. Cheap if the same capture came last. One thread at a time,
    /// as NCCL demands for a communicator.
    pub fn hold(self: &Arc<Self>, driver: &Driver, capture: Capture) -> Result<(), Failure> {
        if self.last_capture.load(Ordering::Relaxed) == capture.id {
            return Ok(());
        }
        self.count_one();
        driver.retain_in_graph(capture.graph, self.clone())?;
        self.last_capture.store(capture.id, Ordering::Relaxed);
        Ok(())
    }

    /// Whether no graph is left.
    pub fn are_none(&self) -> bool {
        self.graphs.load(Ordering::Acquire) == 0
    }

    pub(super) fn count_one(&self) {
        self.graphs.fetch_add(1, Ordering::Relaxed);
    }
}

impl Released for Holds {
    /// Only counts, because this runs in a destructor of the driver. The background worker sees it when it settles.
    fn released(&self) {
        self.graphs.fetch_sub(1, Ordering::Release);
    }
}
