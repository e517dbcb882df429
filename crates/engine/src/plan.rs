//! Which path a call takes. Pure, and a function of what all ranks share: local facts cannot even be passed in.

use crate::call::{Function, Shared};
use crate::path::Path;

/// What all ranks of a communicator know of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// NCCL does everything.
    Plain,
    /// Its ranks can write each other's memory.
    Fabric,
    /// The same, and they have agreed to have NCCL use registered buffers in this call.
    Registering,
}

/// Bytes of the larger buffer from which on NCCL is faster with registered ones (docs/registration.md).
pub const REGISTERED_BYTES_MIN: u64 = 8 << 20;

/// Whether ranks that may register agree on whether they do in this call, which is not captured: in graphs NCCL registers by
/// itself. With a configuration the call stays NCCL's.
#[inline]
pub fn is_candidate(call: &Shared, ranks: usize) -> bool {
    call.function == Function::AllGather && call.bytes(ranks) >= REGISTERED_BYTES_MIN
}

/// Chooses the path of a call.
#[inline]
pub fn plan(call: &Shared, standing: Standing) -> Path {
    match (call.function, standing) {
        // Collectives that NCCL makes of sends and receives too. With a configuration they stay NCCL's.
        (
            Function::Send | Function::Recv | Function::AlltoAll | Function::Gather | Function::Scatter,
            Standing::Fabric | Standing::Registering,
        ) => Path::Mailbox,
        (Function::AllGather, Standing::Registering) => Path::Registered,
        _ => Path::Forward,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_sys::ncclFloat32;

    /// Sends and receives of any size, and what is made of them, stay within a fabric; all else is NCCL's.
    #[test]
    fn sends_and_receives_stay_in_the_fabric() {
        for function in Function::ALL {
            use Function::{AlltoAll, Gather, Recv, Scatter, Send};
            let point_to_point = matches!(function, Send | Recv | AlltoAll | Gather | Scatter);
            for count in [0, 1, usize::MAX] {
                let call = Shared { function, count, datatype: ncclFloat32, operation: None, root: None };
                let expected = if point_to_point { Path::Mailbox } else { Path::Forward };
                assert_eq!(plan(&call, Standing::Fabric), expected);
                assert_eq!(plan(&call, Standing::Plain), Path::Forward);
            }
        }
    }

    /// What ranks agree on is what may then be registered, and nothing else.
    #[test]
    fn large_all_gathers_are_candidates() {
        for function in Function::ALL {
            for bytes in [0, REGISTERED_BYTES_MIN - 4, REGISTERED_BYTES_MIN, 1 << 40] {
                let count = bytes as usize / 16;
                let call = Shared { function, count, datatype: ncclFloat32, operation: None, root: None };
                let expected = function == Function::AllGather && bytes >= REGISTERED_BYTES_MIN;
                assert_eq!(is_candidate(&call, 4), expected, "{function:?} of {bytes} bytes");
                let registers = plan(&call, Standing::Registering) == Path::Registered;
                assert_eq!(registers, function == Function::AllGather);
                assert_ne!(plan(&call, Standing::Fabric), Path::Registered);
            }
        }
    }
}
