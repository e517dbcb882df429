//! A collective, send or receive as plain data.
//!
//! A call has two parts. [`Shared`] is equal on every rank that takes part (for a send and its receive: on both
//! sides), and only it may decide how the call runs. [`Local`] belongs to this rank alone.

use nccl_sys::{
    Entry, cudaStream_t, ncclBfloat16, ncclCollConfig_t, ncclComm_t, ncclDataType_t, ncclFloat8e4m3,
    ncclFloat8e5m2, ncclFloat16, ncclFloat32, ncclFloat64, ncclMax, ncclMin, ncclNumOps, ncclRedOp_t,
};
use std::ffi::{c_int, c_void};

/// The functions that move data, in the order in which they are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
#[allow(missing_docs)]
pub enum Function {
    AllReduce,
    Broadcast,
    Bcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AlltoAll,
    Gather,
    Scatter,
    AllReduceConfig,
    BroadcastConfig,
    ReduceConfig,
    AllGatherConfig,
    ReduceScatterConfig,
    AlltoAllConfig,
    GatherConfig,
    ScatterConfig,
    Send,
    Recv,
}

/// How many [`Function`]s there are.
pub const FUNCTIONS: usize = Function::Recv as usize + 1;

/// The arguments that every rank passes alike.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// Which function.
    pub function: Function,
    /// The count of elements that the program passes.
    pub count: usize,
    /// Type of an element.
    pub datatype: ncclDataType_t,
    /// The operation of a reduction.
    pub operation: Option<ncclRedOp_t>,
    /// The root of a rooted collective.
    pub root: Option<c_int>,
}

/// The arguments that belong to this rank alone. Pointers are device addresses and are never read here.
#[derive(Clone, Copy, Debug)]
pub struct Local {
    /// The function that the program called, by whose name the call is counted. Without a configuration a `…Config` function is the
    /// plain one for all else.
    pub called: Function,
    /// Where this rank's data lie; null for a receive.
    pub send: *const c_void,
    /// Where results go; null for a send.
    pub receive: *mut c_void,
    /// The other rank of a send or receive.
    pub peer: Option<c_int>,
    /// The configuration of a call by a `…Config` function; otherwise null.
    pub config: *const ncclCollConfig_t,
    /// The communicator's handle.
    pub communicator: ncclComm_t,
    /// The stream in whose order the call runs.
    pub stream: cudaStream_t,
    /// The factor of this rank's values, for an operation of `ncclRedOpCreatePreMulSum`. Empty until the engine has looked
    /// the operation up.
    pub scalar: Option<Scalar>,
}

/// The factor of a reduction by `ncclRedOpCreatePreMulSum`, of the type of the elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scalar {
    /// The value's bytes.
    Here([u8; 8]),
    /// The device address of the value, which is read when the kernel runs.
    OnDevice(usize),
}

/// A call.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// What every rank passes alike.
    pub shared: Shared,
    /// What is this rank's own.
    pub local: Local,
}

impl Shared {
    /// Bytes of the larger buffer of the call over `ranks` ranks, the size by which nccl-tests names a call; 0 if
    /// the type is unknown.
    #[inline]
    pub fn bytes(&self, ranks: usize) -> u64 {
        let blocks = if BY_RANK[self.function as usize] { ranks } else { 1 };
        let element = self.datatype.size_bytes().unwrap_or(0);
        (self.count as u64).saturating_mul((element * blocks) as u64)
    }

    /// Whether the call reduces with rounding, so that the result depends on the order in which values are combined.
    pub fn rounds(&self) -> bool {
        let Some(operation) = self.operation else { return false };
        let is_float = [ncclFloat32, ncclBfloat16, ncclFloat16, ncclFloat64, ncclFloat8e4m3, ncclFloat8e5m2]
            .contains(&self.datatype);
        // No operation has a number below 0: NCCL refuses the call.
        is_float && operation.0 >= 0 && operation != ncclMax && operation != ncclMin
    }

    /// Whether the program made the operation. Each rank may have another number for the same operation.
    pub fn has_own_operation(&self) -> bool {
        self.operation.is_some_and(|operation| operation.0 >= ncclNumOps.0)
    }

    /// Whether kernels run this reduction only alone, never with other calls: floats of 8 bits, and operations that the program made.
    pub fn reduces_alone(&self) -> bool {
        let is_of_8_bits = [ncclFloat8e4m3, ncclFloat8e5m2].contains(&self.datatype);
        self.operation.is_some() && is_of_8_bits || self.has_own_operation()
    }
}

/// Functions whose larger buffer holds `count` elements of every rank.
const BY_RANK: [bool; FUNCTIONS] = {
    use Function::*;
    let mut by_rank = [false; FUNCTIONS];
    let listed = [
        AllGather,
        ReduceScatter,
        AlltoAll,
        Gather,
        Scatter,
        AllGatherConfig,
        ReduceScatterConfig,
        AlltoAllConfig,
        GatherConfig,
        ScatterConfig,
    ];
    let mut index = 0;
    while index < listed.len() {
        by_rank[listed[index] as usize] = true;
        index += 1;
    }
    by_rank
};

impl Function {
    /// Every function, in order.
    pub const ALL: [Function; FUNCTIONS] = [
        Function::AllReduce,
        Function::Broadcast,
        Function::Bcast,
        Function::Reduce,
        Function::AllGather,
        Function::ReduceScatter,
        Function::AlltoAll,
        Function::Gather,
        Function::Scatter,
        Function::AllReduceConfig,
        Function::BroadcastConfig,
        Function::ReduceConfig,
        Function::AllGatherConfig,
        Function::ReduceScatterConfig,
        Function::AlltoAllConfig,
        Function::GatherConfig,
        Function::ScatterConfig,
        Function::Send,
        Function::Recv,
    ];

    /// The function that does the same without a configuration.
    pub fn plain(self) -> Function {
        use Function::*;
        match self {
            AllReduceConfig => AllReduce,
            BroadcastConfig => Broadcast,
            ReduceConfig => Reduce,
            AllGatherConfig => AllGather,
            ReduceScatterConfig => ReduceScatter,
            AlltoAllConfig => AlltoAll,
            GatherConfig => Gather,
            ScatterConfig => Scatter,
            plain => plain,
        }
    }

    /// The function's entry point.
    pub fn entry(self) -> Entry {
        match self {
            Function::AllReduce => Entry::ncclAllReduce,
            Function::Broadcast => Entry::ncclBroadcast,
            Function::Bcast => Entry::ncclBcast,
            Function::Reduce => Entry::ncclReduce,
            Function::AllGather => Entry::ncclAllGather,
            Function::ReduceScatter => Entry::ncclReduceScatter,
            Function::AlltoAll => Entry::ncclAlltoAll,
            Function::Gather => Entry::ncclGather,
            Function::Scatter => Entry::ncclScatter,
            Function::AllReduceConfig => Entry::ncclAllReduceConfig,
            Function::BroadcastConfig => Entry::ncclBroadcastConfig,
            Function::ReduceConfig => Entry::ncclReduceConfig,
            Function::AllGatherConfig => Entry::ncclAllGatherConfig,
            Function::ReduceScatterConfig => Entry::ncclReduceScatterConfig,
            Function::AlltoAllConfig => Entry::ncclAlltoAllConfig,
            Function::GatherConfig => Entry::ncclGatherConfig,
            Function::ScatterConfig => Entry::ncclScatterConfig,
            Function::Send => Entry::ncclSend,
            Function::Recv => Entry::ncclRecv,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use nccl_sys::{ncclFloat32, ncclInt8};

    /// A call of a function over so many bytes, with this peer or root.
    pub(crate) fn call(function: Function, bytes: usize, other: c_int) -> Call {
        let is_message = function as usize >= Function::Send as usize;
        let (operation, root) = (None, (!is_message).then_some(other));
        let shared = Shared { function, count: bytes, datatype: ncclInt8, operation, root };
        let (send, receive) = (std::ptr::null(), std::ptr::null_mut());
        let local = Local {
            called: function,
            send,
            receive,
            peer: is_message.then_some(other),
            config: std::ptr::null(),
            communicator: std::ptr::null_mut(),
            stream: std::ptr::null_mut(),
            scalar: None,
        };
        Call { shared, local }
    }

    /// A send to rank 0.
    pub(crate) fn send(bytes: usize) -> Call {
        call(Function::Send, bytes, 0)
    }

    /// Bytes are those of the larger buffer, and do not overflow.
    #[test]
    fn bytes_of_the_larger_buffer() {
        let shared =
            |function, count| Shared { function, count, datatype: ncclFloat32, operation: None, root: None };
        assert_eq!(shared(Function::AllReduce, 10).bytes(4), 40);
        assert_eq!(shared(Function::AllGather, 10).bytes(4), 160);
        assert_eq!(shared(Function::ScatterConfig, 10).bytes(4), 160);
        assert_eq!(shared(Function::Send, 10).bytes(4), 40);
        assert_eq!(shared(Function::AllGather, usize::MAX).bytes(8), u64::MAX);
        assert_eq!(Shared { datatype: ncclDataType_t(77), ..shared(Function::Send, 10) }.bytes(4), 0);
    }

    /// Sums, products and averages of floats round, and so does every operation that the program made.
    #[test]
    fn who_rounds() {
        use nccl_sys::{ncclAvg, ncclInt32, ncclProd, ncclSum};
        let rounds = |datatype, operation| {
            let shared = Shared { function: Function::Reduce, count: 1, datatype, operation, root: Some(0) };
            shared.rounds()
        };
        for datatype in [ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2]
        {
            for operation in [ncclSum, ncclProd, ncclAvg, ncclRedOp_t(5), ncclRedOp_t(i32::MAX)] {
                assert!(rounds(datatype, Some(operation)));
            }
            assert!(
                !rounds(datatype, Some(ncclMax))
                    && !rounds(datatype, Some(ncclMin))
                    && !rounds(datatype, None)
            );
        }
        assert!(!rounds(ncclFloat32, Some(ncclRedOp_t(-1))));
        assert!(!rounds(ncclInt32, Some(ncclSum)) && !rounds(ncclDataType_t(12), Some(ncclSum)));
    }

    /// Calls that only move data can run together, whatever their type.
    #[test]
    fn who_reduces_alone() {
        use nccl_sys::{ncclInt32, ncclSum};
        let alone = |datatype, operation| {
            let function = Function::AllReduce;
            Shared { function, count: 1, datatype, operation, root: None }.reduces_alone()
        };
        for datatype in [ncclFloat8e4m3, ncclFloat8e5m2] {
            assert!(
                alone(datatype, Some(ncclSum)) && alone(datatype, Some(ncclMax)) && !alone(datatype, None)
            );
        }
        assert!(!alone(ncclFloat32, Some(ncclSum)) && !alone(ncclInt32, None));
        assert!(alone(ncclFloat32, Some(ncclRedOp_t(5))) && alone(ncclInt32, Some(ncclRedOp_t(i32::MAX))));
    }

    /// The plain function of each function has the same name without `Config`.
    #[test]
    fn plain_functions() {
        for function in Function::ALL {
            let (name, plain) = (format!("{function:?}"), format!("{:?}", function.plain()));
            assert_eq!(name.trim_end_matches("Config"), plain);
        }
    }

    /// The list of all functions is in counting order, and each is counted under its own entry point.
    #[test]
    fn order() {
        for (index, function) in Function::ALL.into_iter().enumerate() {
            assert_eq!(function as usize, index);
            assert_eq!(function.entry().description().name, format!("nccl{function:?}"));
        }
    }
}
