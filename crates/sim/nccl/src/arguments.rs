//! NCCL's checks of arguments, with NCCL's codes and messages.

use crate::communicator::{Communicator, Config};
use crate::operation::{Call, Kind};
use crate::reduce;
use crate::refusal::{Outcome, refuse};
use nccl_sys::*;
use std::sync::atomic::Ordering::SeqCst;

/// Checks the arguments of a collective, send or receive.
pub fn check(communicator: &Communicator, call: &Call) -> Outcome {
    let name = call.kind.name();
    if communicator.revoked.load(SeqCst) {
        return refuse(ncclInvalidUsage, format!("{name}: communicator was revoked"));
    }
    if communicator.leave.load(SeqCst) {
        return refuse(ncclInvalidUsage, format!("{name}: communicator was aborted by a shrink"));
    }
    communicator.ensure_ready()?;
    let (root, ranks) = (call.root, communicator.ranks);
    if root < 0 || root >= ranks as i32 {
        let text = format!("{name} : invalid root {root} (root should be in the 0..{ranks} range)");
        return refuse(ncclInvalidArgument, text);
    }
    let datatype = call.datatype;
    if datatype.0 < 0 || datatype.0 >= ncclNumTypes.0 {
        return refuse(ncclInvalidArgument, format!("{name} : invalid type {}", datatype.0));
    }
    let operator = call.operator;
    if operator.0 < 0 {
        return refuse(ncclInvalidArgument, format!("{name} : invalid reduction operation {}", operator.0));
    }
    if !crate::operators::is_known(communicator, operator) {
        let text = format!("{name} : reduction operation {} unknown to this communicator", operator.0);
        return refuse(ncclInvalidArgument, text);
    }
    if call.count.checked_mul(8 * ranks).is_none() {
        return refuse(ncclInvalidArgument, format!("{name} : count {} is too large", call.count));
    }
    if call.kind.reduces() && call.count > 0 && !reduce::is_reducible(datatype) {
        // NCCL reduces 8-bit floats from sm_90 on; the simulator refuses them as on older devices.
        return refuse(ncclInvalidArgument, "FP8 reduction support begins with sm90 capable devices.");
    }
    check_pointers(communicator, call)
}

/// Refuses null buffers. NCCL checks pointers only on request (NCCL_CHECK_POINTERS); a null one would fault later.
fn check_pointers(communicator: &Communicator, call: &Call) -> Outcome {
    let (send, receive) = call.buffers(communicator.rank, communicator.ranks);
    for (buffer, name) in [(send, "sendbuff"), (receive, "recvbuff")] {
        if buffer.is_some_and(|buffer| buffer.address == 0 && buffer.bytes > 0) {
            let name = if matches!(call.kind, Kind::Send | Kind::Recv) { "buff" } else { name };
            let text = format!("{} : {name} (nil) is not a valid pointer", call.kind.name());
            return refuse(ncclInvalidArgument, text);
        }
    }
    Ok(())
}

/// Reads a configuration as NCCL does: only as many bytes as the caller's `nccl.h` declared.
///
/// # Safety
/// `config` must be null or point to as many bytes as its first word says.
pub unsafe fn read_config(config: *const ncclConfig_t, inherited: Option<Config>) -> Outcome<Config> {
    let default = Config { blocking: true, split_share: false, shrink_share: false };
    if config.is_null() {
        return Ok(inherited.unwrap_or(default));
    }
    // SAFETY: an all-zero value is valid for these plain fields.
    let mut known: ncclConfig_t = unsafe { std::mem::zeroed() };
    known.blocking = NCCL_CONFIG_UNDEF_INT;
    known.splitShare = NCCL_CONFIG_UNDEF_INT;
    known.shrinkShare = NCCL_CONFIG_UNDEF_INT;
    known.cgaClusterSize = NCCL_CONFIG_UNDEF_INT;
    known.minCTAs = NCCL_CONFIG_UNDEF_INT;
    known.maxCTAs = NCCL_CONFIG_UNDEF_INT;
    // SAFETY: by contract the first word is readable.
    let size = unsafe { (*config).size }.min(size_of::<ncclConfig_t>());
    // SAFETY: by contract.
    unsafe { std::ptr::copy_nonoverlapping(config.cast::<u8>(), (&raw mut known).cast::<u8>(), size) };
    if known.magic != NCCL_API_MAGIC {
        return refuse(
            ncclInvalidArgument,
            "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER",
        );
    }
    let flag = |value: i32, name: &str, otherwise: bool| match value {
        NCCL_CONFIG_UNDEF_INT => Ok(otherwise),
        0 => Ok(false),
        1 => Ok(true),
        _ => refuse(ncclInvalidArgument, format!("Invalid config {name} attribute value {value}")),
    };
    let set = |value: i32| (value != NCCL_CONFIG_UNDEF_INT).then_some(value);
    if let Some(value) = set(known.cgaClusterSize).filter(|value| *value < 0) {
        return refuse(ncclInvalidArgument, format!("Invalid config cgaClusterSize attribute value {value}"));
    }
    let (least, most) = (set(known.minCTAs), set(known.maxCTAs));
    if least.is_some_and(|value| value <= 0)
        || most.is_some_and(|value| value <= 0)
        || least.zip(most).is_some_and(|(least, most)| least > most)
    {
        let text =
            format!("Invalid config min/max channels attribute value {}/{}", known.minCTAs, known.maxCTAs);
        return refuse(ncclInvalidArgument, text);
    }
    Ok(Config {
        blocking: flag(known.blocking, "blocking", default.blocking)?,
        split_share: flag(known.splitShare, "splitShare", default.split_share)?,
        shrink_share: flag(known.shrinkShare, "shrinkShare", default.shrink_share)?,
    })
}
