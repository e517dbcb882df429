//! What the communicators of one device share: launch resources that go from one communicator to the next, because freeing host memory may
//! wait for the device.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::TransportError;
use crate::sequencer::host::HostMemory;
use windlass_base::gpu::module::MemoryDomain;
use windlass_base::gpu::stream::{Event, Stream};
use windlass_base::gpu::{Driver, Failure, Home};
use windlass_base::stats::count;

/// Events for whoever has to know how far a stream came.
pub const MARKS: usize = 4;

/// One device's. Keep it as long as the process uses the device: dropping it frees, which may wait for work on the GPU, and
/// graphs that captured its communicators' kernels must be gone ([`DeviceResources::is_unused`]).
#[derive(Debug)]
pub struct DeviceResources {
    domain: MemoryDomain,
    /// For what is read of the device: reports, after an abort.
    pub(super) stream: Stream,
    beside_bytes: usize,
    capability: i32,
    shelf: Arc<Shelf>,
    home: Home,
}

/// What lies ready. A graph's destructor puts things here, so the lock is held for moments only, and never across a call
/// of the driver.
#[derive(Debug)]
struct Shelf {
    /// None once the device's are gone.
    ready: Mutex<Option<Vec<LaunchResources>>>,
    /// Launch resources in use.
    lent: AtomicUsize,
}

/// Launch resources in use of all devices.
static LENT: AtomicUsize = AtomicUsize::new(0);

/// What one communicator needs of the driver beside its regions.
#[derive(Debug)]
pub struct LaunchResources {
    /// What its kernels look at.
    pub host: HostMemory,
    /// After the communicator's last operation.
    pub(super) done: Event,
    /// What nodes of graphs record from when another one came after them. Nobody waits for it.
    pub(super) passed: Event,
    /// Between the streams of one turn.
    pub(super) joined: Event,
    /// For whoever has to know how far a stream came.
    pub marks: [Event; MARKS],
}

/// Launch resources in use by a communicator and by graphs that captured it. They come back without a driver call.
#[derive(Debug)]
pub struct Lent {
    resources: Option<LaunchResources>,
    shelf: Arc<Shelf>,
}

impl DeviceResources {
    /// For the device of `home`; launch resources have so much room for those who make kernels.
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

    /// The context that communicators of this device work in.
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// That of all kernels.
    pub fn domain(&self) -> MemoryDomain {
        self.domain
    }

    /// The device's compute capability, 90 for 9.0.
    pub fn capability(&self) -> i32 {
        self.capability
    }

    /// Whether the device is of 9.0 or newer: it has clusters, and kernels that begin early.
    pub fn is_since_hopper(&self) -> bool {
        self.capability >= 90
    }

    /// Whether no communicator, and no graph that captured one, is left: then it may be dropped.
    pub fn is_unused(&self) -> bool {
        self.shelf.lent.load(Ordering::Acquire) == 0
    }

    /// Whether one communicator is all that launches kernels on this device: there is no other one with launch resources, no graph that has captured
    /// one, and none that NCCL alone runs, on any device of this process.
    pub fn is_of_one(&self) -> bool {
        let (here, everywhere) = (self.shelf.lent.load(Ordering::Relaxed), LENT.load(Ordering::Relaxed));
        here == 1 && count::living() <= everywhere
    }

    /// Launch resources whose former work is done, or new ones. At init only, in the home's context.
    pub(super) fn lend(&self) -> Result<Lent, Failure> {
        let mut former = self.shelf.lock().replace(Vec::new()).unwrap_or_default();
        let mut found = None;
        for index in 0..former.len() {
            if former[index].is_idle()? {
                found = Some(former.swap_remove(index));
                break;
            }
        }
        if let Some(ready) = &mut *self.shelf.lock() {
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
            marks: [event()?, event()?, event()?, event()?],
        })
    }

    /// Marks are made before the operation that they belong to, so its end is theirs.
    pub(super) fn is_idle(&self) -> Result<bool, Failure> {
        self.done.is_done()
    }
}

impl Lent {
    /// The launch resources; there are some until this is dropped.
    pub fn resources(&self) -> Option<&LaunchResources> {
        self.resources.as_ref()
    }
}

impl Shelf {
    fn lock(&self) -> MutexGuard<'_, Option<Vec<LaunchResources>>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lent {
    /// Perhaps on a thread of the driver's. Launch resources that find those of the device gone are left to the process's end.
    fn drop(&mut self) {
        let Some(resources) = self.resources.take() else { return };
        let mut ready = self.shelf.lock();
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
        let ready = self.shelf.lock().take();
        if self.home.driver.is_in_forked_child() {
            return;
        }
        match self.home.enter() {
            Ok(_entered) => drop(ready),
            // They went with the context.
            Err(_) if !self.home.is_there() => std::mem::forget(ready),
            Err(failure) => {
                ::log::warn!("launch resources of device {} stay: {failure}", self.home.device);
                std::mem::forget(ready);
            }
        }
    }
}
