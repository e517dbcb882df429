//! What the communicators of one device share: kits that go from one communicator to the next, because freeing host memory may
//! wait for the device.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::gpu::module::MemoryDomain;
use crate::gpu::stream::{Event, Stream};
use crate::gpu::{Driver, Failure, Home};
use crate::stats::count;
use crate::turns::host::HostMemory;
use crate::turns::refusal::Refusal;

/// Events of a kit for whoever has to know how far a stream came.
pub const MARKS: usize = 4;

/// One device's. Keep it as long as the process uses the device: dropping it frees, which may wait for work on the GPU, and
/// graphs that captured its communicators' kernels must be gone ([`Supply::is_unused`]).
#[derive(Debug)]
pub struct Supply {
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
    /// None once the supply is gone.
    ready: Mutex<Option<Vec<Kit>>>,
    /// Kits in use.
    lent: AtomicUsize,
}

/// Kits in use of all devices.
static LENT: AtomicUsize = AtomicUsize::new(0);

/// What one communicator needs of the driver beside its slices.
#[derive(Debug)]
pub struct Kit {
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

/// A kit in use by a communicator and by graphs that captured it. Comes back without a driver call.
#[derive(Debug)]
pub struct Lent {
    kit: Option<Kit>,
    shelf: Arc<Shelf>,
}

impl Supply {
    /// For the device of `home`; kits have so much room for those who make kernels.
    pub fn new(home: Home, beside_bytes: usize) -> Result<Arc<Supply>, Refusal> {
        let facts = home.driver.device_facts(home.device)?;
        let entered = home.enter()?;
        let stream = Stream::new(home.driver)?;
        drop(entered);
        let shelf = Shelf { ready: Mutex::new(Some(Vec::new())), lent: AtomicUsize::new(0) };
        let domain = if facts.memory_domains > 1 { MemoryDomain::Remote } else { MemoryDomain::Default };
        let (capability, shelf) = (facts.capability, Arc::new(shelf));
        Ok(Arc::new(Supply { domain, stream, beside_bytes, capability, shelf, home }))
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

    /// Whether one communicator is all that launches kernels on this device: there is no other one with a kit, no graph that has captured
    /// one, and none that NCCL alone runs, on any device of this process.
    pub fn is_of_one(&self) -> bool {
        let (here, everywhere) = (self.shelf.lent.load(Ordering::Relaxed), LENT.load(Ordering::Relaxed));
        here == 1 && count::living() <= everywhere
    }

    /// A kit whose former work is done, or a new one. At init only, in the home's context.
    pub(super) fn lend(&self) -> Result<Lent, Failure> {
        let mut former = self.shelf.lock().replace(Vec::new()).unwrap_or_default();
        let mut found = None;
        for index in 0..former.len() {
            if former[index].is_idle()? {
                found = Some(former.swap_remove(index));
                break;
            }
        }
        if let Some(kits) = &mut *self.shelf.lock() {
            kits.append(&mut former);
        }
        let kit = match found {
            Some(kit) => kit,
            None => Kit::new(self.home.driver, self.beside_bytes)?,
        };
        kit.host.reset();
        self.shelf.lent.fetch_add(1, Ordering::Relaxed);
        LENT.fetch_add(1, Ordering::Relaxed);
        Ok(Lent { kit: Some(kit), shelf: self.shelf.clone() })
    }
}

impl Kit {
    fn new(driver: &'static Driver, beside_bytes: usize) -> Result<Kit, Failure> {
        let event = || Event::new(driver);
        Ok(Kit {
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
    /// The kit; there is one until this is dropped.
    pub fn kit(&self) -> Option<&Kit> {
        self.kit.as_ref()
    }
}

impl Shelf {
    fn lock(&self) -> MutexGuard<'_, Option<Vec<Kit>>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lent {
    /// Perhaps on a thread of the driver's. A kit that finds the supply gone is left to the process's end.
    fn drop(&mut self) {
        let Some(kit) = self.kit.take() else { return };
        let mut ready = self.shelf.lock();
        match &mut *ready {
            Some(kits) => kits.push(kit),
            None => std::mem::forget(kit),
        }
        drop(ready);
        LENT.fetch_sub(1, Ordering::Relaxed);
        self.shelf.lent.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for Supply {
    fn drop(&mut self) {
        let kits = self.shelf.lock().take();
        if self.home.driver.is_in_forked_child() {
            return;
        }
        match self.home.enter() {
            Ok(_entered) => drop(kits),
            // They went with the context.
            Err(_) if !self.home.is_there() => std::mem::forget(kits),
            Err(failure) => {
                ::log::warn!("kits of device {} stay: {failure}", self.home.device);
                std::mem::forget(kits);
            }
        }
    }
}
