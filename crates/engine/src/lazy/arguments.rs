//! Checks a call's arguments as NCCL does (2.28, `ArgsCheck`), for communicators that NCCL has not built.

use nccl_sys::{ncclInvalidArgument, ncclNumOps, ncclResult_t};

use windlass_base::call::Call;
use windlass_base::error::refuse;

use super::operators::Operators;

/// NCCL's code for a call that it refuses at once; none if it takes the call.
pub(super) fn refusal(call: &Call, ranks: usize, operators: &Operators) -> Option<ncclResult_t> {
    let (shared, local) = (&call.shared, &call.local);
    let refused = |why: std::fmt::Arguments<'_>| Some(refuse(ncclInvalidArgument, why));
    let name = local.called.entry().description().name;
    if let Some(root) = shared.root.or(local.peer)
        && usize::try_from(root).map_or(true, |root| root >= ranks)
    {
        return refused(format_args!("{name}: rank {root}, expected 0 to {}", ranks - 1));
    }
    if shared.datatype.size_bytes().is_none() {
        return refused(format_args!("{name}: data type {}, expected one of NCCL's", shared.datatype.0));
    }
    let operation = shared.operation?;
    if operation.0 < 0 {
        return refused(format_args!("{name}: reduction {}, expected none below 0", operation.0));
    }
    if operation.0 < ncclNumOps.0 {
        return None;
    }
    match operators.datatype(operation) {
        None => refused(format_args!("{name}: reduction {} is unknown to this communicator", operation.0)),
        // NCCL drops a call without elements before it compares types.
        Some(datatype) if datatype != shared.datatype && shared.count > 0 => refused(format_args!(
            "{name}: data type {}, expected {} as its reduction was made with",
            shared.datatype.0, datatype.0
        )),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_sys::{ncclDataType_t, ncclFloat32, ncclInt8, ncclRedOp_t, ncclScalarHostImmediate, ncclSum};
    use std::ptr::{null, null_mut};
    use windlass_base::call::{Function, Local, Shared};

    fn call(
        function: Function,
        datatype: ncclDataType_t,
        operation: Option<ncclRedOp_t>,
        root: Option<i32>,
    ) -> Call {
        let shared = Shared { function, count: 3, datatype, operation, root };
        let communicator = null_mut();
        let local = Local {
            called: function,
            send: null(),
            receive: null_mut(),
            peer: None,
            config: null(),
            communicator,
            stream: null_mut(),
            scalar: None,
        };
        Call { shared, local }
    }

    /// Roots, types and operators that do not exist are refused; all else is taken.
    #[test]
    fn refusals() {
        let operators = Operators::default();
        let mut scalar = 2.0_f32.to_le_bytes();
        let own = operators.create(scalar.as_mut_ptr().cast(), ncclFloat32, ncclScalarHostImmediate).unwrap();
        let refused = |call: Call| refusal(&call, 2, &operators);
        let reduce = |datatype, operation| call(Function::AllReduce, datatype, Some(operation), None);
        let gone = ncclRedOp_t(own.0 + 1);
        for right in [
            reduce(ncclFloat32, ncclSum),
            reduce(ncclFloat32, own),
            call(Function::Broadcast, ncclInt8, None, Some(1)),
        ] {
            assert_eq!(refused(right), None, "{right:?}");
        }
        for wrong in [
            reduce(ncclDataType_t(12), ncclSum),
            reduce(ncclDataType_t(-1), ncclSum),
            reduce(ncclFloat32, ncclRedOp_t(-1)),
            reduce(ncclFloat32, gone),
            reduce(ncclInt8, own),
            call(Function::Broadcast, ncclInt8, None, Some(2)),
            call(Function::Broadcast, ncclInt8, None, Some(-1)),
        ] {
            assert_eq!(refused(wrong), Some(ncclInvalidArgument), "{wrong:?}");
        }
        let mut send = call(Function::Send, ncclInt8, None, None);
        send.local.peer = Some(2);
        assert_eq!(refused(send), Some(ncclInvalidArgument));
        send.local.peer = Some(0);
        assert_eq!(refused(send), None);
    }
}
