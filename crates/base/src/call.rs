//! A collective, send or receive as plain data.
//!
//! It has two parts. [`Shared`] is equal on every rank that takes part (for a send and its receive: on both
//! sides), and only it may decide how the call runs. [`Local`] is this rank's own.

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

/// What every rank passes alike.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// Which function.
    pub function: Function,
    /// Elements, as the function counts them.
    pub count: usize,
    /// Type of an element.
    pub datatype: ncclDataType_t,
    /// The operation of a reduction.
    pub operation: Option<ncclRedOp_t>,
    /// The root of a rooted collective.
    pub root: Option<c_int>,
}

/// What is this rank's own. Pointers are device addresses and are never read here.
#[derive(Clone, Copy, Debug)]
pub struct Local {
    /// Where this rank's data lie; null for a receive.
    pub send: *const c_void,
    /// Where results go; null for a send.
    pub receive: *mut c_void,
    /// The other side of a send or receive.
    pub peer: Option<c_int>,
    /// The configuration of a call by a `…Config` function; may be null.
    pub config: *const ncclCollConfig_t,
    /// The communicator's handle.
    pub communicator: ncclComm_t,
    /// The stream in whose order the call runs.
    pub stream: cudaStream_t,
    /// What this rank's values are multiplied by, of a reduction that was made for that. Known once the call is looked at.
    pub scalar: Option<Scalar>,
}

/// The factor of a reduction by `ncclRedOpCreatePreMulSum`, of the type of the elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scalar {
    /// Its bytes.
    Here([u8; 8]),
    /// Where it lies on the device when calls run.
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
}

impl Shared {
    /// Whether it is a reduction whose result depends on the order in which values are combined: one that rounds.
    pub fn rounds(&self) -> bool {
        let Some(operation) = self.operation else { return false };
        let is_float = [ncclFloat32, ncclBfloat16, ncclFloat16, ncclFloat64, ncclFloat8e4m3, ncclFloat8e5m2]
            .contains(&self.datatype);
        // Below 0 there is none, which is NCCL's to say.
        is_float && operation.0 >= 0 && operation != ncclMax && operation != ncclMin
    }

    /// Whether the program made its operation: which number that has is each rank's own affair.
    pub fn has_own_operation(&self) -> bool {
        self.operation.is_some_and(|operation| operation.0 >= ncclNumOps.0)
    }

    /// Whether its reduction has kernels for one call alone, none for several: of floats of 8 bits, or by an operation that the program made.
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

    /// Its entry point.
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
mod tests {
    use super::*;
    use nccl_sys::ncclFloat32;

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

    /// What rounds: sums, products and averages of floats, and what the program made.
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

    /// What only moves has kernels for several, of whatever type.
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

    /// The plain function of each has its name.
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
