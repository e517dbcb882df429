//! NCCL loads its kernels on a device when it makes its first communicator there, and loading waits for what runs on that device.
//! Where that communicator is a promise's, our kernels may be running by then, waiting for a message that is to come after the
//! very call that honours it: a hang that NCCL alone has not (seen on 2 H200 with 2.28.9). So before the first promise of a
//! device NCCL makes a communicator of one rank there, which ends at once.

use std::collections::BTreeSet;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use nccl_sys::{ncclResult_t, ncclSuccess};

use crate::config::{Switch, config};
use crate::error::refuse;
use crate::forward::birth;
use crate::forward::configuration::Kept;
use crate::forward::known::{self, End};
use crate::gpu::Ordinal;

use super::on_device;

/// Devices on which NCCL has made a communicator. Held for a look.
static WARM: Mutex<BTreeSet<Ordinal>> = Mutex::new(BTreeSet::new());

/// NCCL has made a communicator on this device.
pub fn note(device: Ordinal) {
    if device >= 0 {
        WARM.lock().unwrap_or_else(PoisonError::into_inner).insert(device);
    }
}

/// Has NCCL load its kernels on this device, if it has not. False: it cannot, so that there had better be no promise.
#[must_use]
pub fn warm(device: Ordinal) -> bool {
    let is_warm = WARM.lock().unwrap_or_else(PoisonError::into_inner).contains(&device);
    if is_warm || config().warm == Switch::Off {
        return true;
    }
    let result = on_device(device, one_rank);
    if result != ncclSuccess {
        refuse(
            result,
            format_args!("NCCL makes no communicator of one rank on device {device}: no promise there"),
        );
        return false;
    }
    note(device);
    true
}

fn one_rank() -> ncclResult_t {
    let place = AtomicPtr::new(null_mut());
    let made = match birth::make_id() {
        Ok(id) => birth::build(&place, 1, &id, 0, &Kept::Nothing),
        Err(code) => code,
    };
    let written = place.load(Ordering::Acquire);
    match made == ncclSuccess {
        true => known::end(End::Destroy, written),
        false => made,
    }
}
