//! Keeps what the communicators of one device share. Launch resources pass from an ended communicator to the next, because freeing host
//! memory may wait for the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::TransportError;
use crate::sequencer::host::HostMemory;
use windlass_base::gpu::module::MemoryDomain;
use windlass_base::gpu::stream::{Event, Ordering::Inside, Stream};
use windlass_base::gpu::{Driver, Failure, Home, StreamHandle};
use windlass_base::lock::Mutex;
use windlass_base::stats::count;

/// How many events launch resources have for callers that must know how far a stream has come.
pub const MARKS: usize = 4;

/// What the communicators of one device share. Keep it as long as the process uses the device: dropping it frees memory, which may wait for
/// work on the GPU. Graphs that captured its communicators' kernels must be gone before ([`DeviceResources::is_unused`]).
#[derive(Debug)]
pub struct DeviceResources {
    /// The memory domain in which all kernels are launched.
    pub domain: MemoryDomain,
    /// On this stream the host reads reports and counts from the device.
    pub(super) stream: Stream,
    beside_bytes: usize,
    /// The device's compute capability, 90 for 9.0.
    pub capability: i32,
    shelf: Arc<Shelf>,
    /// The context that communicators of this device work in.
    pub home: Home,
}

/// Launch resources that lie ready. A graph's destructor puts resources here, so the lock is held briefly and never across a driver call.
#[derive(Debug)]
struct Shelf {
    /// None once the [`DeviceResources`] are dropped.
    ready: Mutex<Option<Vec<LaunchResources>>>,
    /// How many launch resources are in use.
    lent: AtomicUsize,
}

/// How many launch resources are in use on all devices.
static LENT: AtomicUsize = AtomicUsize::new(0);

/// What one communicator needs of the driver beside its regions.
#[derive(Debug)]
pub struct LaunchResources {
    /// Host memory that the communicator's kernels read and write.
    pub host: HostMemory,
    /// Recorded after the communicator's last operation.
    pub(super) done: Event,
    /// What a graph's record node records instead of `done` once a later record node exists. Nobody waits for it.
    pub(super) passed: Event,
    /// Orders the streams of one turn against each other.
    pub(super) joined: Event,
    /// On which work of before a capture enters the order: outside the graph, whose shape then does not depend on it. The device's stream would
    /// not do, as the hang detector reads over that.
    pub(super) history: Stream,
    /// For callers that must know how far a stream has come.
    pub marks: [Event; MARKS],
}

/// Launch resources in use by a communicator and by graphs that captured it. They are returned without a driver call.
#[derive(Debug)]
pub struct Lent {
    resources: Option<LaunchResources>,
    shelf: Arc<Shelf>,
}

impl DeviceResources {
    /// For the device of `home`. Launch resources get `beside_bytes` bytes of host memory for those who make kernels.
    pub fn new(home: Home, beside_bytes: usize) -> Result<Arc<DeviceResources>, TransportError> {
        let facts = home.driver.device_facts(home.device)?;
        let entered = home.enter()?;
        let stream = Stream::new(home.driver)?;
        drop(entered);
        let shelf = Shelf { ready: Mutex::new(Some(Vec::new())), lent: AtomicUsize::new(0) };
        let domain = if facts.memory_domains > 1 { MemoryDomain::Remote } else { MemoryDomain::Default };
        let (capability, shelf) = (facts.capability, Arc::new(shelf));
        Ok(Arc::new(DeviceResources { domain, stream, beside_bytes, capability, shelf, home }))
    }

    /// Whether the device is of 9.0 or newer: it has clusters, and kernels that begin early.
    pub fn is_since_hopper(&self) -> bool {
        self.capability >= 90
    }

    /// Whether no communicator, and no graph that captured one, is left. Only then may this be dropped.
    pub fn is_unused(&self) -> bool {
        self.shelf.lent.load(Ordering::Acquire) == 0
    }

    /// Whether only one communicator launches kernels on this device. No other communicator, and no graph that captured another, has launch
    /// resources here. NCCL alone runs no communicator of this process, on any device.
    pub fn is_of_one(&self) -> bool {
        let (here, everywhere) = (self.shelf.lent.load(Ordering::Relaxed), LENT.load(Ordering::Relaxed));
        here == 1 && count::living() <= everywhere
    }

    /// Takes launch resources whose former work is done, or makes new ones. Call it at init only, in the home's context.
    pub(super) fn lend(&self) -> Result<Lent, Failure> {
        let mut former = self.shelf.ready.lock().replace(Vec::new()).unwrap_or_default();
        let mut found = None;
        for index in 0..former.len() {
            if former[index].is_idle()? {
                found = Some(former.swap_remove(index));
                break;
            }
        }
        if let Some(ready) = &mut *self.shelf.ready.lock() {
            ready.append(&mut former);
        }
        let resources = match found {
            Some(resources) => resources,
            None => LaunchResources::new(self.home.driver, self.beside_bytes)?,
        };
        resources.host.reset();
        self.shelf.lent.fetch_add(1, Ordering::Relaxed);
        LENT.fetch_add(1, Ordering::Relaxed);
        Ok(Lent { resources: Some(resources), shelf: self.shelf.clone() })
    }
}

impl LaunchResources {
    fn new(driver: &'static Driver, beside_bytes: usize) -> Result<LaunchResources, Failure> {
        let event = || Event::new(driver);
        Ok(LaunchResources {
            host: HostMemory::new(driver, beside_bytes)?,
            done: event()?,
            passed: event()?,
            joined: event()?,
            history: Stream::new(driver)?,
            marks: [event()?, event()?, event()?, event()?],
        })
    }

    /// Makes later work on a stream run after what other streams hold now.
    pub(super) fn join(
        &self,
        driver: &Driver,
        later: StreamHandle,
        earlier: &[StreamHandle],
    ) -> Result<(), Failure> {
        earlier.iter().try_for_each(|stream| {
            self.joined.record(*stream, Inside)?;
            driver.wait(later, &self.joined, Inside)
        })
    }

    /// The event `done` is enough: marks are recorded before the operation that they belong to.
    pub(super) fn is_idle(&self) -> Result<bool, Failure> {
        self.done.is_done()
    }
}

impl Lent {
    /// The launch resources, which are there until this is dropped.
    pub fn resources(&self) -> Option<&LaunchResources> {
        self.resources.as_ref()
    }
}

impl Drop for Lent {
    /// May run on a thread of the driver. If the [`DeviceResources`] are gone, the launch resources stay until the process ends.
    fn drop(&mut self) {
        let Some(resources) = self.resources.take() else { return };
        let mut ready = self.shelf.ready.lock();
        match &mut *ready {
            Some(ready) => ready.push(resources),
            None => std::mem::forget(resources),
        }
        drop(ready);
        LENT.fetch_sub(1, Ordering::Relaxed);
        self.shelf.lent.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for DeviceResources {
    fn drop(&mut self) {
        let ready = self.shelf.ready.lock().take();
        if let Err(failure) = self.home.give_back(ready) {
            ::log::warn!("launch resources of device {} stay: {failure}", self.home.device);
        }
    }
}
