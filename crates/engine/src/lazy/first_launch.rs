//! A launch waits for what runs on its device where the kernel's code is not there yet, or where its threads need more stack than
//! those of any kernel before: the device then makes room for all that fit on it. Kernels of ours may be running by then,
//! waiting for a message that is to come after that very launch: a hang that NCCL alone has not, as its own kernel of messages
//! ran first, which needs the most (seen on 2 H200 with 2.28.9: 1976 bytes a thread, 1736 to 1864 for collectives). So NCCL's
//! kernel of messages runs once on a device before any of ours can: a rank's message of one byte to itself. It takes a
//! communicator of NCCL's, so the first of a device is not lazy.
//!
//! Where NCCL allocates by cudaMalloc (NCCL_CUMEM_ENABLE=0, and 2.18), its first init in a process that sees two GPUs which reach each
//! other tries legacy IPC on memory that it frees at once, and that free waits for all that runs. Such a process has no lazy
//! communicators before ([`legacy`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use nccl_sys::{ncclComm_t, ncclInternalError, ncclResult_t, ncclSuccess};

use crate::forward::known;
use crate::peers::PeerGroup;
use windlass_base::config::{Switch, config};
use windlass_base::error::refuse;
use windlass_base::gpu::stream::Stream;
use windlass_base::gpu::{self, Context, Ordinal, context};

use super::legacy;
use super::on_device::on_device;

/// Whether that launch has been, by device and its context, with which NCCL's code goes. A device's is held meanwhile: who comes to the same one must not go on before, though NCCL's
/// launch may wait for what its other communicators run there. The map's own lock is held for a look.
static GUARDS: Mutex<Guards> = Mutex::new(BTreeMap::new());

type Guards = BTreeMap<(Ordinal, Context), Arc<Mutex<FirstLaunch>>>;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum FirstLaunch {
    #[default]
    Ahead,
    Done,
    /// NCCL could not. It is not asked again, and makes all communicators there itself.
    Refused,
}

fn of(device: Ordinal) -> Arc<Mutex<FirstLaunch>> {
    let of = (device, context::on(device));
    GUARDS.lock().unwrap_or_else(PoisonError::into_inner).entry(of).or_default().clone()
}

/// Whether a communicator on this device may be lazy. Never waits: while another thread's message runs, it may not.
#[must_use]
pub(crate) fn is_guarded(device: Ordinal) -> bool {
    let is_guarded = || of(device).try_lock().is_ok_and(|first_launch| *first_launch == FirstLaunch::Done);
    config().first_launch_guard == Switch::Off || is_guarded() && legacy::is_settled()
}

/// Before kernels of a new peer group can run on its device: its communicator, which NCCL has made. After all ranks have met, since what
/// runs on this device may wait for them.
pub(crate) fn guard(peer_group: &PeerGroup, communicator: ncclComm_t) {
    let Some(device) = peer_group.device() else { return };
    if config().first_launch_guard == Switch::Off {
        return;
    }
    legacy::note(peer_group.negotiated());
    let own = of(device);
    let mut first_launch = own.lock().unwrap_or_else(PoisonError::into_inner);
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

/// From this rank to itself.
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
