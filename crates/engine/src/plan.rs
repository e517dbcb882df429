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
}

/// Chooses the path of a call.
#[inline]
pub fn plan(call: &Shared, standing: Standing) -> Path {
    match (call.function, standing) {
        // Collectives that NCCL makes of sends and receives too. With a configuration they stay NCCL's.
        (
            Function::Send | Function::Recv | Function::AlltoAll | Function::Gather | Function::Scatter,
            Standing::Fabric,
        ) => Path::Mailbox,
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
}
