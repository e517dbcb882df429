//! What the communicators of one device share: the budget of blocks, and kits that go from one communicator to the next,
//! because freeing host memory may wait for the device.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::gpu::module::MemoryDomain;
use crate::gpu::stream::{Event, Stream};
use crate::gpu::{Driver, Failure, Home};
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
    ready: Mutex<Ready>,
    /// Half of the blocks that the device holds resident, for all live communicators together: kernels that wait for peers
    /// must not keep each other from running.
    blocks: u32,
    /// Grants whose communicators have run something.
    active: AtomicU32,
}

#[derive(Debug)]
struct Ready {
    /// None once the supply is gone.
    kits: Option<Vec<Kit>>,
    /// Kits in use.
    lent: usize,
    /// Blocks that no grant has reserved.
    left: u32,
}

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

/// A kit and blocks, in use by a communicator and by graphs that captured it. Comes back without a driver call.
#[derive(Debug)]
pub struct Lent {
    kit: Option<Kit>,
    pub(super) grant: Grant,
}

/// Blocks of the device's budget: some are this communicator's whatever comes, the others it shares evenly with those that
/// have run something too. They go back when dropped.
#[derive(Debug)]
pub struct Grant {
    least: u32,
    most: u32,
    active: AtomicBool,
    shelf: Arc<Shelf>,
}

impl Supply {
    /// For the device of `home`; kits have so much room for those who make kernels.
    pub fn new(home: Home, beside_bytes: usize) -> Result<Arc<Supply>, Refusal> {
        let facts = home.driver.device_facts(home.device)?;
        let entered = home.enter()?;
        let stream = Stream::new(home.driver)?;
        drop(entered);
        // Of every kernel that can be launched at all, a multiprocessor holds a block.
        let blocks = (facts.multiprocessors.max(1) as u32 / 2).max(1);
        let ready = Ready { kits: Some(Vec::new()), lent: 0, left: blocks };
        let shelf = Shelf { ready: Mutex::new(ready), blocks, active: AtomicU32::new(0) };
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

    /// Reserves `least` blocks of the device's budget; kernels may have up to `most` while few communicators use it. Refuses
    /// if fewer than `least` are not reserved.
    pub fn grant(&self, most: u32, least: u32) -> Result<Grant, Refusal> {
        let least = least.max(1);
        let mut ready = self.shelf.lock();
        let left = ready.left;
        if left < least {
            return Err(Refusal::NoBlocks { device: self.home.device, wanted: least, left });
        }
        ready.left -= least;
        let most = most.max(least);
        Ok(Grant { least, most, active: AtomicBool::new(false), shelf: self.shelf.clone() })
    }

    /// Whether no communicator, and no graph that captured one, is left: then it may be dropped.
    pub fn is_unused(&self) -> bool {
        self.shelf.lock().lent == 0
    }

    /// A kit whose former work is done, or a new one. At birth only, in the home's context.
    pub(super) fn lend(&self, grant: Grant) -> Result<Lent, Failure> {
        let mut former = self.shelf.lock().kits.replace(Vec::new()).unwrap_or_default();
        let mut found = None;
        for index in 0..former.len() {
            if former[index].is_idle()? {
                found = Some(former.swap_remove(index));
                break;
            }
        }
        if let Some(kits) = &mut self.shelf.lock().kits {
            kits.append(&mut former);
        }
        let kit = match found {
            Some(kit) => kit,
            None => Kit::new(self.home.driver, self.beside_bytes)?,
        };
        kit.host.reset();
        self.shelf.lock().lent += 1;
        Ok(Lent { kit: Some(kit), grant })
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

impl Grant {
    /// What it has in any case.
    pub fn least(&self) -> u32 {
        self.least
    }

    /// What the next kernel may have. Kernels that were launched, or captured, when fewer shared the budget may have more: of six communicators
    /// that begin one after the other 126 of 132 multiprocessors (NCCL alone takes up to 32 for each, whoever else runs).
    pub(super) fn share(&self) -> u32 {
        if !self.active.load(Ordering::Relaxed) && !self.active.swap(true, Ordering::Relaxed) {
            self.shelf.active.fetch_add(1, Ordering::Relaxed);
        }
        let active = self.shelf.active.load(Ordering::Relaxed);
        (self.shelf.blocks / active.max(1)).clamp(self.least, self.most)
    }
}

impl Shelf {
    fn lock(&self) -> MutexGuard<'_, Ready> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lent {
    /// Perhaps on a thread of the driver's. A kit that finds the supply gone is left to the process's end.
    fn drop(&mut self) {
        let Some(kit) = self.kit.take() else { return };
        let mut ready = self.grant.shelf.lock();
        ready.lent -= 1;
        match &mut ready.kits {
            Some(kits) => kits.push(kit),
            None => std::mem::forget(kit),
        }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.shelf.lock().left += self.least;
        self.shelf.active.fetch_sub(u32::from(self.active.load(Ordering::Relaxed)), Ordering::Relaxed);
    }
}

impl Drop for Supply {
    fn drop(&mut self) {
        let kits = self.shelf.lock().kits.take();
        if self.home.driver.is_in_forked_child() {
            return;
        }
        match self.home.enter() {
            Ok(_entered) => drop(kits),
            Err(failure) => {
                ::log::warn!("kits of device {} stay: {failure}", self.home.device);
                std::mem::forget(kits);
            }
        }
    }
}
