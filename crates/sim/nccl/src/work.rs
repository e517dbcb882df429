//! Describes an operation for the modelled clock of the simulated driver. Pure.

use crate::operation::{Call, Kind};
use std::ffi::{CStr, c_char};

/// `SimWork` of the simulated driver.
#[repr(C)]
pub struct SimWork {
    side: *const c_char,
    operation: *const c_char,
    bytes: u64,
    ranks: u32,
    reserved: u32,
}

/// The content of a [`SimWork`].
#[derive(Debug, PartialEq, Eq)]
pub struct Work {
    side: &'static CStr,
    operation: &'static CStr,
    /// Bytes of this rank's larger buffer, as `windlass bench` counts them; in a group the sum over its calls.
    bytes: u64,
    ranks: usize,
}

impl From<Work> for SimWork {
    fn from(work: Work) -> SimWork {
        SimWork {
            side: work.side.as_ptr(),
            operation: work.operation.as_ptr(),
            bytes: work.bytes,
            ranks: work.ranks as u32,
            reserved: 0,
        }
    }
}

/// The work of all calls of one group on one communicator. `registered`: all of them run over registered buffers.
pub fn of(calls: &[Call], ranks: usize, registered: bool) -> Work {
    let side = if registered { c"registered" } else { c"nccl" };
    let sum = |wanted: fn(Kind) -> bool| {
        calls.iter().filter(|call| wanted(call.kind)).map(|call| bytes(call, ranks)).sum::<u64>()
    };
    let messages = sum(|kind| kind == Kind::Send).max(sum(|kind| kind == Kind::Recv));
    let bytes = sum(|kind| !kind.is_message()) + messages;
    Work { side, operation: name(calls), bytes, ranks }
}

/// Bytes of a call's larger buffer.
fn bytes(call: &Call, ranks: usize) -> u64 {
    let parts = match call.kind {
        Kind::AllGather | Kind::ReduceScatter | Kind::AlltoAll | Kind::Gather | Kind::Scatter => ranks,
        _ => 1,
    };
    (call.bytes() * parts) as u64
}

/// The name of the first collective. Several broadcasts or reduces with different roots are one uneven collective.
fn name(calls: &[Call]) -> &'static CStr {
    let Some(first) = calls.iter().find(|call| !call.kind.is_message()) else { return c"send_recv" };
    match first.kind {
        Kind::Broadcast if are_uneven(calls) => c"uneven_all_gather",
        Kind::Reduce if are_uneven(calls) => c"uneven_reduce_scatter",
        Kind::AllReduce => c"all_reduce",
        Kind::Broadcast => c"broadcast",
        Kind::Reduce => c"reduce",
        Kind::AllGather => c"all_gather",
        Kind::ReduceScatter => c"reduce_scatter",
        Kind::AlltoAll => c"alltoall",
        Kind::Gather => c"gather",
        Kind::Scatter => c"scatter",
        Kind::Send | Kind::Recv => c"send_recv",
    }
}

fn are_uneven(calls: &[Call]) -> bool {
    let mut roots: Vec<i32> = calls.iter().map(|call| call.root).collect();
    roots.sort_unstable();
    roots.dedup();
    calls.len() > 1 && roots.len() == calls.len() && calls.iter().all(|call| call.kind == calls[0].kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_sys::{ncclFloat32, ncclSum};

    fn call(kind: Kind, count: usize, root: i32) -> Call {
        let (datatype, operator) = (ncclFloat32, ncclSum);
        Call { kind, send: 0, receive: 0, count, datatype, operator, root, stream: 0 }
    }

    fn told(calls: &[Call]) -> (&'static CStr, u64) {
        let work = of(calls, 4, false);
        (work.operation, work.bytes)
    }

    /// Bytes are those of the larger buffer.
    #[test]
    fn alone() {
        assert_eq!(told(&[call(Kind::AllReduce, 10, 0)]), (c"all_reduce", 40));
        assert_eq!(told(&[call(Kind::AllGather, 10, 0)]), (c"all_gather", 160));
        assert_eq!(told(&[call(Kind::ReduceScatter, 10, 0)]), (c"reduce_scatter", 160));
        assert_eq!(told(&[call(Kind::Scatter, 10, 1)]), (c"scatter", 160));
        assert_eq!(told(&[call(Kind::Broadcast, 10, 1)]), (c"broadcast", 40));
    }

    /// A group is one operation. Of sends or receives the larger sum counts; rooted collectives with different roots are uneven.
    #[test]
    fn groups() {
        let sends = [call(Kind::Send, 10, 1), call(Kind::Recv, 4, 2), call(Kind::Recv, 5, 1)];
        assert_eq!(told(&sends), (c"send_recv", 40));
        let rooted =
            |kind, roots: &[i32]| told(&roots.iter().map(|root| call(kind, 1, *root)).collect::<Vec<_>>());
        assert_eq!(rooted(Kind::Broadcast, &[0, 1, 3]), (c"uneven_all_gather", 12));
        assert_eq!(rooted(Kind::Broadcast, &[0, 1, 1]), (c"broadcast", 12));
        assert_eq!(rooted(Kind::Reduce, &[1, 0]), (c"uneven_reduce_scatter", 8));
        assert_eq!(told(&[call(Kind::AllReduce, 1, 0), call(Kind::AllGather, 1, 0)]), (c"all_reduce", 20));
        assert_eq!(of(&[call(Kind::AllReduce, 1, 0)], 2, true).side, c"registered");
    }
}
