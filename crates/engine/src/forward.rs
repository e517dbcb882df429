//! Calls the real NCCL: the path `forward`, where NCCL runs a call with the same arguments, and all other functions that Windlass calls.

#![allow(unsafe_code)]

pub mod init;

pub mod configuration;

pub mod device;

pub mod known;
pub mod of_call;

pub mod operators;

pub mod queries;

pub mod registration;

use nccl_sys::{ncclRedOp_t, ncclResult_t, real};
use std::ffi::c_int;

use windlass_base::call::{Call, Function};

/// Arguments of the application on their way to another thread: NCCL takes calls from any thread, one at a time.
#[derive(Debug)]
pub struct Carried<T>(T);

// SAFETY: pointers of the application's, which are only handed to NCCL, by one thread.
unsafe impl<T> Send for Carried<T> {}

impl<T> Carried<T> {
    /// Wraps a value.
    pub fn new(what: T) -> Carried<T> {
        Carried(what)
    }

    /// The value.
    pub fn get(&self) -> &T {
        &self.0
    }

    /// Unwraps the value.
    pub fn take(self) -> T {
        self.0
    }
}

/// Calls the real library. The ABI layer made `call` from a C caller's arguments; that caller is responsible for its pointers.
pub fn forward(call: &Call) -> ncclResult_t {
    let (shared, local) = (&call.shared, &call.local);
    let (count, datatype) = (shared.count, shared.datatype);
    let (send, receive, config) = (local.send, local.receive, local.config);
    let (communicator, stream) = (local.communicator, local.stream);
    // The ABI layer sets these for every function that has them.
    let operation = shared.operation.unwrap_or(ncclRedOp_t(0));
    let root: c_int = shared.root.unwrap_or(0);
    let peer: c_int = local.peer.unwrap_or(0);
    // SAFETY: these are the arguments with which the application called this very function, and the library is
    // open, since the ABI layer lets no call past before that.
    unsafe {
        match shared.function {
            Function::AllReduce => {
                real::ncclAllReduce(send, receive, count, datatype, operation, communicator, stream)
            }
            Function::Broadcast => {
                real::ncclBroadcast(send, receive, count, datatype, root, communicator, stream)
            }
            Function::Bcast => real::ncclBcast(receive, count, datatype, root, communicator, stream),
            Function::Reduce => {
                real::ncclReduce(send, receive, count, datatype, operation, root, communicator, stream)
            }
            Function::AllGather => real::ncclAllGather(send, receive, count, datatype, communicator, stream),
            Function::ReduceScatter => {
                real::ncclReduceScatter(send, receive, count, datatype, operation, communicator, stream)
            }
            Function::AlltoAll => real::ncclAlltoAll(send, receive, count, datatype, communicator, stream),
            Function::Gather => real::ncclGather(send, receive, count, datatype, root, communicator, stream),
            Function::Scatter => {
                real::ncclScatter(send, receive, count, datatype, root, communicator, stream)
            }
            Function::AllReduceConfig => real::ncclAllReduceConfig(
                send,
                receive,
                count,
                datatype,
                operation,
                communicator,
                stream,
                config,
            ),
            Function::BroadcastConfig => {
                real::ncclBroadcastConfig(send, receive, count, datatype, root, communicator, stream, config)
            }
            Function::ReduceConfig => real::ncclReduceConfig(
                send,
                receive,
                count,
                datatype,
                operation,
                root,
                communicator,
                stream,
                config,
            ),
            Function::AllGatherConfig => {
                real::ncclAllGatherConfig(send, receive, count, datatype, communicator, stream, config)
            }
            Function::ReduceScatterConfig => real::ncclReduceScatterConfig(
                send,
                receive,
                count,
                datatype,
                operation,
                communicator,
                stream,
                config,
            ),
            Function::AlltoAllConfig => {
                real::ncclAlltoAllConfig(send, receive, count, datatype, communicator, stream, config)
            }
            Function::GatherConfig => {
                real::ncclGatherConfig(send, receive, count, datatype, root, communicator, stream, config)
            }
            Function::ScatterConfig => {
                real::ncclScatterConfig(send, receive, count, datatype, root, communicator, stream, config)
            }
            Function::Send => real::ncclSend(send, count, datatype, peer, communicator, stream),
            Function::Recv => real::ncclRecv(receive, count, datatype, peer, communicator, stream),
        }
    }
}
