//! Fixed order (`WINDLASS_ORDER`) that cannot be had: reductions that round and that NCCL is to run are counted, said once for each
//! communicator, or refused.

use nccl_sys::{ncclInvalidUsage, ncclResult_t};

use crate::communicator::Communicator;
use crate::group::{self, Awaited};
use windlass_base::call::Call;
use windlass_base::config::{Order, config};
use windlass_base::error::refuse;
use windlass_base::stats::count;

/// NCCL is to run a call. An error: it must not, as the program wants fixed order or nothing.
#[inline]
pub(super) fn to_nccl(call: &Call, communicator: &Communicator) -> Result<(), ncclResult_t> {
    if communicator.order_is_asked_for() && call.shared.rounds() { lost(call, communicator) } else { Ok(()) }
}

/// What has no elements has no order, and nor has what one rank alone reduces.
#[cold]
fn lost(call: &Call, communicator: &Communicator) -> Result<(), ncclResult_t> {
    if call.shared.count == 0 || communicator.ranks() == 1 {
        return Ok(());
    }
    let reason = count::why_not_native(communicator.counters());
    if config().order == Order::Strict {
        let why = format_args!(
            "{:?}: WINDLASS_ORDER=strict, but its communicator cannot reduce in fixed order: {reason}",
            call.shared.function.entry()
        );
        let code = refuse(ncclInvalidUsage, why);
        // As NCCL has it, a group with a call that was refused runs nothing.
        if group::is_open() {
            group::wait_for(Awaited::Failed(code));
        }
        return Err(code);
    }
    count::not_in_fixed_order(communicator.counters());
    if communicator.says_order() {
        log::warn!(
            "reductions of communicator {:p} ({} ranks) are not in fixed order: {reason}",
            call.local.communicator,
            communicator.ranks()
        );
    }
    Ok(())
}
