//! Makes and ends registrations: maps the same memory a second time, and has NCCL register that alias. So no address of the
//! program ever gets into NCCL's table.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nccl_sys::{ncclComm_t, ncclSuccess};

use crate::features::registration::cache;
use crate::features::registration::cache::{Key, Registrar};
use crate::forward::registration;
use windlass_base::descriptor;
use windlass_base::gpu::memory::{Mapping, Physical, Reservation};
use windlass_base::gpu::{Address, Failure, Home};
use windlass_base::stats::count;
use windlass_base::stats::resources::Registered;

/// Descriptors that must be free. NCCL opens some for a moment when a call first uses a registration, to tell the peers of it. If it cannot, it
/// runs that call unregistered on this rank alone, without an error (2.28.9, ncclIpcLocalRegisterBuffer).
const DESCRIPTORS: usize = 8;
/// Aliases begin at multiples of the largest page.
const ALIGNMENT: u64 = 2 << 20;

/// The program's memory at an address of Windlass, registered with NCCL. Dropping it only unmaps it, so NCCL must have deregistered it,
/// or ended the communicator.
#[derive(Debug)]
pub(crate) struct Alias {
    mapping: Mapping,
    registration: usize,
}

impl Alias {
    /// First address.
    pub(crate) fn address(&self) -> Address {
        self.mapping.address
    }

    fn new(mapping: Mapping, registration: usize) -> Alias {
        count::registered_now(Registered::Entries, 1);
        count::registered_now(Registered::Bytes, mapping.physical.bytes as i64);
        Alias { mapping, registration }
    }
}

impl Drop for Alias {
    fn drop(&mut self) {
        count::registered_now(Registered::Entries, -1);
        count::registered_now(Registered::Bytes, -(self.mapping.physical.bytes as i64));
    }
}

/// Makes and ends the aliases of one communicator.
#[derive(Debug)]
pub(crate) struct Aliases<'a> {
    home: &'a Home,
    real: usize,
    /// The handle types by which the memory must be exportable, as the driver's mask.
    handle_types: u64,
    /// Whether an abort has left everything as it is. NCCL's communicator must not be used then.
    is_left: &'a AtomicBool,
}

impl<'a> Aliases<'a> {
    pub(crate) fn new(
        home: &'a Home,
        real: usize,
        handle_types: u64,
        is_left: &'a AtomicBool,
    ) -> Aliases<'a> {
        Aliases { home, real, handle_types, is_left }
    }

    fn map(&self, key: Key) -> Result<Mapping, Failure> {
        let driver = self.home.driver;
        let _entered = self.home.enter()?;
        let physical = Physical::behind(driver, key.range.base, key.range.bytes)?;
        let reservation = Arc::new(Reservation::new(driver, key.range.bytes, ALIGNMENT)?);
        Mapping::new(&reservation, 0, physical, self.home.device)
    }
}

/// Whether enough descriptors are free for NCCL to register memory now.
pub(crate) fn has_descriptors() -> bool {
    let are_free = descriptor::are_free(DESCRIPTORS);
    if !are_free {
        log::info!("fewer than {DESCRIPTORS} descriptors could be opened: nothing more is registered");
    }
    are_free
}

impl Registrar for Aliases<'_> {
    type Alias = Alias;

    fn register(&mut self, key: Key) -> Result<Alias, cache::Failure> {
        let driver = self.home.driver;
        if driver.handle_types(key.range.base) & self.handle_types != self.handle_types {
            return Err(cache::Failure::Never);
        }
        if !has_descriptors() {
            return Err(cache::Failure::NotNow);
        }
        let mapped = self.map(key);
        // The mapping now keeps its memory, but may have mapped newer memory than was asked for.
        if driver.buffer_id(key.range.base) != Some(key.id) {
            return Err(cache::Failure::NotNow);
        }
        let mapping = mapped.map_err(|failure| {
            log::info!("memory at {:#x} gets no alias: {failure}", key.range.base);
            cache::Failure::NotNow
        })?;
        if self.is_left.load(Ordering::Acquire) {
            return Err(cache::Failure::NotNow);
        }
        let (real, bytes) = (self.real as ncclComm_t, key.range.bytes as usize);
        match registration::register(real, mapping.address as usize, bytes) {
            // Here NCCL returns success without registering.
            Ok(0) => Err(cache::Failure::Never),
            Ok(registration) => {
                count::registered(Registered::Registered, 1);
                Ok(Alias::new(mapping, registration))
            }
            Err(code) => {
                log::info!("NCCL registers no {bytes} bytes: {code:?}");
                Err(cache::Failure::NotNow)
            }
        }
    }

    fn deregister(&mut self, alias: Alias) -> Result<(), Alias> {
        if self.is_left.load(Ordering::Acquire) {
            return Err(alias);
        }
        let Ok(entered) = self.home.enter() else { return Err(alias) };
        let code = registration::deregister(self.real as ncclComm_t, alias.registration);
        if code != ncclSuccess {
            count::registered(Registered::Stuck, 1);
            log::warn!("NCCL keeps a registration of {:#x}: {code:?}", alias.mapping.address);
            return Err(alias);
        }
        count::registered(Registered::Deregistered, 1);
        drop(alias);
        drop(entered);
        Ok(())
    }
}
