//! The buffers that the application registers (`ncclCommRegister`) with a lazy communicator: noted, and registered with NCCL once it is
//! materialized.

use nccl_sys::{ncclComm_t, ncclResult_t, ncclSuccess};

use crate::forward::registration;
use windlass_base::error::refuse;
use windlass_base::lock::Mutex;

use super::handle::Minted;

/// The registrations of one communicator from before it was materialized.
#[derive(Debug, Default)]
pub struct Registrations(Mutex<Vec<Registration>>);

#[derive(Debug)]
struct Registration {
    /// The application's handle: a unique address.
    handle: Minted,
    address: usize,
    bytes: usize,
    /// NCCL's handle, once there is one.
    real: Option<usize>,
}

impl Registrations {
    /// Notes a buffer of `bytes` bytes. Returns the application's handle.
    pub fn add(&self, address: usize, bytes: usize) -> usize {
        let registration = Registration { handle: Minted::new(), address, bytes, real: None };
        let handle = registration.handle.address();
        self.0.lock().push(registration);
        handle
    }

    /// Ends a registration, with NCCL too. None if the handle is not from [`add`](Registrations::add).
    pub fn remove(&self, handle: usize, real: Option<ncclComm_t>) -> Option<ncclResult_t> {
        let mut all = self.0.lock();
        let index = all.iter().position(|one| one.handle.address() == handle)?;
        let one = all.swap_remove(index);
        drop(all);
        Some(match (one.real, real) {
            (Some(own), Some(real)) => registration::deregister(real, own),
            _ => ncclSuccess,
        })
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// Registers all with NCCL, which has built its communicator. A buffer that NCCL refuses stays unregistered: that affects only speed.
    pub(super) fn replay(&self, real: ncclComm_t) {
        for one in self.0.lock().iter_mut() {
            one.real = registration::register(real, one.address, one.bytes)
                .map_err(|code| {
                    refuse(code, format_args!("{} bytes at {:#x} are not registered", one.bytes, one.address))
                })
                .ok();
        }
    }
}
