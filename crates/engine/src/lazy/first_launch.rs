//! Runs NCCL's send/receive kernel once on each device before any kernel of Windlass can run there: a rank sends itself one byte.
//! That takes a communicator of NCCL's, so the first communicator of a device is not lazy.
//!
//! A launch waits for all kernels on its device if its code is not loaded yet, or if its threads need more stack than those of any
//! kernel before. A kernel of Windlass may then be waiting for a message that comes after that launch: a hang. NCCL alone does not
//! hang, as its send/receive kernel, which needs the most stack, ran first (2 H200, 2.28.9: 1976 bytes a thread, 1736 to 1864 for
//! collectives).
//!
//! Where NCCL allocates by cudaMalloc (NCCL_CUMEM_ENABLE=0, and 2.18) and a process sees two GPUs which reach each other, NCCL's first
//! init there tries legacy IPC and frees the tested memory. That free waits for all kernels. Such a process has no lazy communicators
//! before that init ([`legacy`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use nccl_sys::{ncclComm_t, ncclInternalError, ncclResult_t, ncclSuccess};

use crate::forward::known;
use crate::peers::PeerGroup;
use windlass_base::config::{Switch, config};
use windlass_base::error::refuse;
use windlass_base::gpu::stream::Stream;
use windlass_base::gpu::{self, Context, Ordinal, context};
use windlass_base::lock::Mutex;

use super::legacy;
use super::on_device::on_device;

/// Whether NCCL's kernel has run, by device and context (NCCL's code is unloaded with the context). A device's lock is held during the
/// launch, so that other threads wait for it, though NCCL's launch may wait for kernels on the device. The map's lock is held for a lookup.
static GUARDS: Mutex<Guards> = Mutex::new(BTreeMap::new());

type Guards = BTreeMap<(Ordinal, Context), Arc<Mutex<FirstLaunch>>>;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum FirstLaunch {
    #[default]
    Ahead,
    Done,
    /// NCCL failed. It is not asked again, and no communicator of the device is lazy.
    Refused,
}

fn of(device: Ordinal) -> Arc<Mutex<FirstLaunch>> {
    let of = (device, context::on(device));
    GUARDS.lock().entry(of).or_default().clone()
}

/// Whether a communicator on this device may be lazy. Never waits: false while another thread's message runs.
#[must_use]
pub(crate) fn is_guarded(device: Ordinal) -> bool {
    let is_guarded = || of(device).try_lock().is_some_and(|first_launch| *first_launch == FirstLaunch::Done);
    // Where no NVLink joins the device to others, no kernel of Windlass waits on it.
    let is_unlinked = || gpu::driver().is_ok_and(|driver| driver.is_unlinked(device));
    config().first_launch_guard == Switch::Off || is_guarded() && legacy::is_settled() || is_unlinked()
}

/// Runs the message on a new peer group's device, before its kernels can run there. `communicator` is NCCL's. Called after all ranks have
/// met, since kernels on this device may wait for them. Waits for the message.
pub(crate) fn guard(peer_group: &PeerGroup, communicator: ncclComm_t) {
    let Some(device) = peer_group.device() else { return };
    if config().first_launch_guard == Switch::Off {
        return;
    }
    legacy::note(peer_group.negotiated());
    let own = of(device);
    let mut first_launch = own.lock();
    if *first_launch != FirstLaunch::Ahead {
        return;
    }
    let result = on_device(device, || message(peer_group, communicator));
    *first_launch = if result == ncclSuccess { FirstLaunch::Done } else { FirstLaunch::Refused };
    if result != ncclSuccess {
        ::log::warn!(
            "NCCL ran no message on device {device}, result {result:?}: its first calls may wait for our messages"
        );
    }
}

/// Sends one byte from this rank to itself through NCCL, and waits for it.
fn message(peer_group: &PeerGroup, communicator: ncclComm_t) -> ncclResult_t {
    let Some([from, to]) = peer_group.scratch() else {
        return refuse(ncclInternalError, format_args!("a peer group without memory on this rank"));
    };
    let stream = match gpu::driver().and_then(Stream::new) {
        Ok(stream) => stream,
        Err(failure) => return refuse(failure.result(), format_args!("{failure}")),
    };
    let result = known::order(communicator, peer_group.rank(), from, to, stream.handle);
    match stream.wait() {
        Ok(()) => result,
        Err(failure) => refuse(failure.result(), format_args!("{failure}")),
    }
}
