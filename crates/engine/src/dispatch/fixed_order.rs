//! What happens where fixed order (`WINDLASS_ORDER`) is asked for but NCCL is to run a reduction that rounds: the call is counted,
//! and logged once for each communicator, or refused.

use nccl_sys::{ncclInvalidUsage, ncclResult_t};

use crate::communicator::{self, Communicator};
use crate::forward::known;
use crate::group;
use crate::plan::{Terms, is_in_fixed_order};
use windlass_base::call::{Call, Shared};
use windlass_base::config::{Order, config};
use windlass_base::error::refuse;
use windlass_base::process;
use windlass_base::stats::count;

/// Called before NCCL runs a call. An error means that NCCL must not run it, as the program wants fixed order or nothing.
#[inline]
pub(super) fn to_nccl(call: &Call, communicator: &Communicator) -> Result<(), ncclResult_t> {
    if communicator.order_is_asked_for() && call.shared.rounds() { lost(call, communicator) } else { Ok(()) }
}

/// At the first call of an unknown handle: where fixed order is asked for, the communicator gets its entry before the call runs.
#[cold]
pub(super) fn see(call: &Call) -> Option<&'static Communicator> {
    if !call.shared.rounds() || config().order == Order::Auto {
        return None;
    }
    let handle = call.local.communicator;
    let identity = known::identity(handle)?;
    process::first_communicator();
    let communicator = communicator::insert(handle, identity);
    communicator.count_as_child();
    Some(communicator)
}

/// Counts a native collective that runs in fixed order, where that is asked for.
#[inline]
pub(super) fn kept(call: &Shared, counters: usize, terms: &Terms) {
    if is_in_fixed_order(call, terms) && call.count > 0 {
        count::ordered(counters, true);
    }
}

/// Counts, logs or refuses a reduction that is not in fixed order. A reduction without elements or of a single rank has no order.
#[cold]
fn lost(call: &Call, communicator: &Communicator) -> Result<(), ncclResult_t> {
    // A communicator that an open group is to make does not know its ranks yet.
    let ranks = match communicator.ranks() {
        0 => known::identity(call.local.communicator).map_or(0, |identity| identity.ranks),
        ranks => ranks as i32,
    };
    if call.shared.count == 0 || ranks == 1 {
        return Ok(());
    }
    let counters = communicator.counters();
    count::ordered(counters, false);
    let (reason, serial) = (count::why_not_native(counters), count::serial(counters));
    if config().order == Order::Strict {
        // The call runs on no path, so only the function is counted.
        count::function(call.local.called.entry());
        let why = format_args!(
            "{:?}: WINDLASS_ORDER=strict, and communicator {serial} cannot reduce in fixed order: {reason}; \
             with WINDLASS_ORDER=fixed NCCL runs it",
            call.local.called.entry()
        );
        // As NCCL has it, a group with a call that was refused runs nothing.
        return Err(group::fail(refuse(ncclInvalidUsage, why)));
    }
    if communicator.says_order() {
        log::warn!("reductions of communicator {serial} ({ranks} ranks) are not in fixed order: {reason}");
    }
    Ok(())
}
