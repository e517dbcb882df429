//! The application's registered buffers: noted while there is nobody to register them with, then handed to NCCL.

use std::sync::{Mutex, PoisonError};

use nccl_sys::{ncclComm_t, ncclResult_t, ncclSuccess};

use crate::forward::registration;
use windlass_base::error::refuse;

use super::handle::Minted;

/// Those of one communicator that were made before NCCL's.
#[derive(Debug, Default)]
pub struct Registrations(Mutex<Vec<Registration>>);

#[derive(Debug)]
struct Registration {
    /// What the application holds: an address that is nobody else's.
    handle: Minted,
    address: usize,
    bytes: usize,
    /// NCCL's, once there is one.
    real: Option<usize>,
}

impl Registrations {
    /// Notes a buffer; what the application gets.
    pub fn add(&self, address: usize, bytes: usize) -> usize {
        let registration = Registration { handle: Minted::new(), address, bytes, real: None };
        let handle = registration.handle.address();
        self.lock().push(registration);
        handle
    }

    /// Forgets one; none if it is not ours.
    pub fn remove(&self, handle: usize, real: Option<ncclComm_t>) -> Option<ncclResult_t> {
        let mut all = self.lock();
        let index = all.iter().position(|one| one.handle.address() == handle)?;
        let one = all.swap_remove(index);
        drop(all);
        Some(match (one.real, real) {
            (Some(own), Some(real)) => registration::deregister(real, own),
            _ => ncclSuccess,
        })
    }

    /// Whether the application has any.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// NCCL has built its communicator. What it refuses stays noted, unregistered: it is faster with it, not other.
    pub(super) fn replay(&self, real: ncclComm_t) {
        for one in self.lock().iter_mut() {
            one.real = registration::register(real, one.address, one.bytes)
                .map_err(|code| {
                    refuse(code, format_args!("{} bytes at {:#x} are not registered", one.bytes, one.address))
                })
                .ok();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Registration>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
