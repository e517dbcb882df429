//! What the mailboxes of one device share: the loaded kernel, the budget of blocks, and kits that go from one
//! communicator to the next, because freeing host memory and unloading code may wait for the device.

use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use windlass_kernels::arrange::{BulkSend, RECOMMENDED_STAGES};
use windlass_kernels::images::{Image, MAIL_KERNEL, MAIL_THREADS_MAX, images_for};

use crate::gpu::module::{Function, MemoryDomain, Module};
use crate::gpu::stream::{Event, Stream};
use crate::gpu::{Driver, Failure, Home};
use crate::mailbox::calls::{self, Calls, HostMemory};
use crate::mailbox::lists::{self, Room};
use crate::mailbox::refusal::Refusal;

/// Captures that are in progress at once and use one communicator; the next one forgets the first.
pub(super) const CAPTURES: usize = 4;
/// Lists of eager groups on their way to the device at once; the next one waits.
pub(super) const EAGER_LISTS: usize = 4;

/// One device's. Keep it as long as the process uses the device: dropping it frees and unloads, which may wait for work
/// on the GPU, and graphs that captured its kernel must be gone ([`Supply::is_unused`]).
#[derive(Debug)]
pub struct Supply {
    module: Option<Module>,
    pub(super) function: Function,
    pub(super) domain: MemoryDomain,
    pub(super) bulk: BulkSend,
    pub(super) shared_bytes_max: u32,
    /// For reports, after an abort.
    pub(super) stream: Stream,
    pub(super) calls: Calls,
    shelf: Arc<Shelf>,
    home: Home,
}

/// What lies ready. A graph's destructor puts things here, so the lock is held for moments only, and never across a call
/// of the driver.
#[derive(Debug)]
struct Shelf(Mutex<Ready>);

#[derive(Debug)]
struct Ready {
    /// None once the supply is gone.
    kits: Option<Vec<Kit>>,
    /// Kits in use.
    lent: usize,
    budget: Budget,
}

/// Half of the blocks that the device holds resident, for all live communicators together: kernels that wait for peers
/// must not keep each other from running.
#[derive(Debug)]
struct Budget {
    all: u32,
    /// Not reserved by any grant.
    left: u32,
    /// Grants whose communicators have run something.
    active: u32,
}

/// What one communicator needs of the driver beside its slices.
#[derive(Debug)]
pub(super) struct Kit {
    pub host: HostMemory,
    /// After the communicator's last operation.
    pub done: Event,
    /// After the last operation inside each capture.
    pub captured: [Event; CAPTURES],
    /// After the copy of each eager list.
    pub copied: [Event; EAGER_LISTS],
    /// Between the streams of one group.
    pub joined: Event,
    pub room: Room,
}

/// A kit and blocks, in use by a mailbox and by graphs that captured it. Comes back without a driver call.
#[derive(Debug)]
pub(super) struct Lent {
    kit: Option<Kit>,
    pub grant: Grant,
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

/// Blocks that can keep the state of the lanes of all pairs in their shared memory.
fn least_blocks(ranks: u32, bulk: BulkSend) -> u32 {
    match bulk {
        // Movers that store chunks themselves have a job for each lane, and these devices have 163 KiB.
        BulkSend::OrdinaryStores if ranks > 4 => 8,
        _ => ranks.div_ceil(2).clamp(2, 8),
    }
}

impl Supply {
    /// The blocks that a communicator of so many ranks must have.
    pub fn least_blocks(&self, ranks: u32) -> u32 {
        least_blocks(ranks, self.bulk)
    }

    /// Loads the kernel for the device of `home`, whole.
    pub fn new(home: Home, calls: Calls) -> Result<Arc<Supply>, Refusal> {
        let facts = home.driver.device_facts(home.device)?;
        Supply::with_images(home, calls, images_for((facts.capability / 10).max(0) as u32))
    }

    /// The same with images of the caller's, best first: what tests use.
    pub fn with_images(home: Home, calls: Calls, images: &[Image]) -> Result<Arc<Supply>, Refusal> {
        let facts = home.driver.device_facts(home.device)?;
        let entered = home.enter()?;
        let shared_bytes_max = calls::shared_bytes_max(&home)?;
        let (image, module, function) = load(home.driver, images, shared_bytes_max)?
            .ok_or(Refusal::NoImage { device: home.device, capability: facts.capability })?;
        // The largest block: blocks of other shapes are smaller.
        let per_multiprocessor =
            home.driver.blocks_per_multiprocessor(function, MAIL_THREADS_MAX, shared_bytes_max)?;
        let resident = per_multiprocessor.max(1) as u32 * facts.multiprocessors.max(1) as u32;
        let stream = Stream::new(home.driver)?;
        drop(entered);
        ::log::debug!(
            "device {}: mailbox kernel {}, {resident} blocks resident, {shared_bytes_max} bytes shared",
            home.device,
            image.name
        );
        let all = (resident / 2).max(1);
        let budget = Budget { all, left: all, active: 0 };
        let ready = Ready { kits: Some(Vec::new()), lent: 0, budget };
        let domain = if facts.memory_domains > 1 { MemoryDomain::Remote } else { MemoryDomain::Default };
        let bulk = match image.has_bulk_copies {
            true => BulkSend::Copies { stages: RECOMMENDED_STAGES },
            false => BulkSend::OrdinaryStores,
        };
        let shelf = Arc::new(Shelf(Mutex::new(ready)));
        Ok(Arc::new(Supply {
            module: Some(module),
            function,
            domain,
            bulk,
            shared_bytes_max,
            stream,
            calls,
            shelf,
            home,
        }))
    }

    /// The context that mailboxes of this device work in.
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// Reserves `least` blocks of the device's budget; kernels may have up to `most` while few communicators use it. Refuses
    /// if fewer than `least` are not reserved.
    pub fn grant(&self, most: u32, least: u32) -> Result<Grant, Refusal> {
        let least = least.max(1);
        let mut ready = self.shelf.lock();
        let left = ready.budget.left;
        if left < least {
            return Err(Refusal::NoBlocks { device: self.home.device, wanted: least, left });
        }
        ready.budget.left -= least;
        let most = most.max(least);
        Ok(Grant { least, most, active: AtomicBool::new(false), shelf: self.shelf.clone() })
    }

    /// Whether no mailbox, and no graph that captured one, is left: then it may be dropped.
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
            None => Kit::new(self.home.driver, self.calls)?,
        };
        kit.host.reset();
        kit.room.clear();
        self.shelf.lock().lent += 1;
        Ok(Lent { kit: Some(kit), grant })
    }
}

/// The first image that loads. A device may refuse one that a newer driver made for another.
fn load<'a>(
    driver: &'static Driver,
    images: &'a [Image],
    shared_bytes_max: u32,
) -> Result<Option<(&'a Image, Module, Function)>, Failure> {
    let mut last = None;
    for image in images {
        let name = CString::new(MAIL_KERNEL).unwrap_or_default();
        let loaded = calls::load(driver, image.bytes)
            .and_then(|module| module.function(&name, shared_bytes_max).map(|function| (module, function)));
        match loaded {
            Ok((module, function)) => return Ok(Some((image, module, function))),
            Err(failure) => {
                ::log::debug!("mailbox kernel {}: {failure}", image.name);
                last = Some(failure);
            }
        }
    }
    last.map_or(Ok(None), Err)
}

impl Kit {
    fn new(driver: &'static Driver, calls: Calls) -> Result<Kit, Failure> {
        let event = || Event::new(driver);
        Ok(Kit {
            host: HostMemory::new(driver, calls, lists::BYTES)?,
            done: event()?,
            captured: [event()?, event()?, event()?, event()?],
            copied: [event()?, event()?, event()?, event()?],
            joined: event()?,
            room: Room::default(),
        })
    }

    /// Lists are copied before the kernel of their operation, so its end is theirs.
    fn is_idle(&self) -> Result<bool, Failure> {
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

    /// What the next kernel may have. Kernels that were launched when fewer shared the budget may have more; they end.
    pub(super) fn share(&self) -> u32 {
        let mut ready = self.shelf.lock();
        if !self.active.swap(true, Ordering::Relaxed) {
            ready.budget.active += 1;
        }
        (ready.budget.all / ready.budget.active.max(1)).clamp(self.least, self.most)
    }
}

impl Shelf {
    fn lock(&self) -> MutexGuard<'_, Ready> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
        let mut ready = self.shelf.lock();
        ready.budget.left += self.least;
        ready.budget.active -= u32::from(self.active.load(Ordering::Relaxed));
    }
}

impl Drop for Supply {
    fn drop(&mut self) {
        let kits = self.shelf.lock().kits.take();
        if self.home.driver.is_in_forked_child() {
            return;
        }
        match self.home.enter() {
            Ok(_entered) => drop((kits, self.module.take())),
            Err(failure) => {
                ::log::warn!("mailbox kits of device {} stay: {failure}", self.home.device);
                std::mem::forget((kits, self.module.take()));
            }
        }
    }
}
