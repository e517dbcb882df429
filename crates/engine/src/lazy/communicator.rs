//! The record of a lazy communicator, and its small queries. Other files of this folder have the rest of its methods.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use nccl_sys::{
    ncclComm, ncclComm_t, ncclInternalError, ncclInvalidArgument, ncclInvalidUsage, ncclNumOps, ncclResult_t,
    ncclSuccess,
};

use crate::features::recycling::cached::Built;
use crate::forward::known::{self, End};
use crate::peers::{Parent, PeerGroup};
use windlass_base::call::Call;
use windlass_base::error::refuse;
use windlass_base::gpu::{Ordinal, StreamHandle};
use windlass_base::lock::Mutex;
use windlass_base::process;
use windlass_base::scoped::Counted;

use super::ends::Ends;
use super::handle::Minted;
use super::kept::Registrations;
use super::lost;
use super::operators::Operators;
use super::usage::{Unfit, Usage, free_bytes};

/// The stage of a lazy communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Lazy,
    /// A thread is in NCCL's init.
    Materializing,
    /// A thread still is, and another one aborts NCCL's communicator.
    Aborting,
    Materialized,
}

/// A lazy communicator.
#[derive(Debug)]
pub struct LazyCommunicator {
    pub(super) handle: Minted,
    /// Its peer group, from init to end.
    pub peer_group: Arc<PeerGroup>,
    /// This rank's device.
    pub device: Ordinal,
    /// Where NCCL's init writes its handle, before it waits for the other ranks.
    pub(super) written: AtomicPtr<ncclComm>,
    /// NCCL's handle once this one is materialized; null before.
    pub(super) real: AtomicPtr<ncclComm>,
    /// NCCL's communicator: taken from the cache at init, or built for this one. Held for a few stores; lock order: after `stage`.
    pub(super) built: Mutex<Option<Built>>,
    /// Whether a cached communicator materializes it, or has.
    pub is_reused: bool,
    pub(super) usage: Usage,
    /// How many attempts there were to have NCCL build it.
    pub(super) attempts: AtomicU64,
    pub(super) aborted: AtomicBool,
    /// How many calls are on their way into NCCL's communicator, or in it.
    pub(super) calls: AtomicUsize,
    pub(super) finalized: AtomicBool,
    pub(super) revoked: AtomicBool,
    /// Held for a few stores.
    pub(super) stage: Mutex<Stage>,
    pub(super) ends: Ends,
    /// User-defined reductions.
    pub operators: Operators,
    /// The application's registered buffers.
    pub registrations: Registrations,
}

impl LazyCommunicator {
    /// A new lazy communicator. `built`: the cached communicator that will materialize it, which then all ranks have.
    pub fn new(peer_group: Arc<PeerGroup>, device: Ordinal, built: Option<Built>) -> Arc<LazyCommunicator> {
        process::first_lazy();
        let lazy = Arc::new(LazyCommunicator {
            handle: Minted::new(),
            peer_group,
            device,
            written: AtomicPtr::new(null_mut()),
            real: AtomicPtr::new(null_mut()),
            is_reused: built.is_some(),
            built: Mutex::new(built),
            usage: Usage::default(),
            attempts: AtomicU64::new(0),
            aborted: AtomicBool::new(false),
            calls: AtomicUsize::new(0),
            finalized: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            stage: Mutex::new(Stage::Lazy),
            ends: Ends::default(),
            operators: Operators::default(),
            registrations: Registrations::default(),
        });
        lost::listen(&lazy);
        lazy
    }

    /// The application's handle.
    pub fn handle(&self) -> ncclComm_t {
        self.handle.address() as ncclComm_t
    }

    /// NCCL's own handle, once this one has been materialized.
    pub fn real(&self) -> Option<ncclComm_t> {
        let real = self.real.load(Ordering::Acquire);
        (!real.is_null()).then_some(real)
    }

    /// NCCL's result code for a call that it would refuse by the arguments alone. None if it takes the call.
    pub fn refusal(&self, call: &Call) -> Option<ncclResult_t> {
        refusal(call, self.peer_group.negotiated().members.len(), &self.operators)
    }

    /// Whether NCCL's communicator is built, for the init of children.
    pub fn standing(&self) -> Parent {
        // NCCL's communicator came from the last attempt.
        let attempt = self.attempts.load(Ordering::Relaxed).checked_sub(1);
        match self.real() {
            None => Parent::Lazy,
            Some(_) if attempt.is_some_and(|attempt| self.peer_group.attempts.has_lost(attempt)) => {
                Parent::Lost
            }
            Some(_) => Parent::Built,
        }
    }

    /// Finalizes, destroys or aborts it. Returns NCCL's result.
    pub fn end(&self, how: End) -> ncclResult_t {
        match (how, self.real()) {
            (End::Abort, _) => self.abort(),
            (End::Finalize, _) if self.finalized.swap(true, Ordering::AcqRel) => refuse(
                ncclInvalidArgument,
                format_args!("ncclCommFinalize: called before on this communicator"),
            ),
            (End::Finalize, None) => ncclSuccess,
            (End::Finalize, Some(real)) => self.finalize(real),
            (End::Destroy, _) => self.destroy(),
        }
    }

    /// Notes that NCCL's communicator must not be cached after this one.
    pub fn mark(&self, unfit: Unfit) {
        self.usage.mark(unfit);
    }

    /// Notes that a collective goes to NCCL on a stream; all ranks capture it, or none does.
    pub fn runs_on(&self, stream: StreamHandle) {
        self.usage.run_on(stream, Unfit::Everywhere);
    }

    /// Notes that a call which only this rank makes goes to NCCL on a stream.
    pub fn runs_alone_on(&self, stream: StreamHandle) {
        self.usage.run_on(stream, Unfit::Here);
    }

    /// Free bytes of the device, before the first call goes to NCCL, which allocates memory for connections; else none. NCCL makes
    /// connections for a call in a group only at the group's end.
    pub fn measure(&self) -> Option<u64> {
        let fresh = !self.is_reused && self.usage.is_fresh();
        if fresh { free_bytes(self.device).ok() } else { None }
    }

    /// After that call: notes by how much the free bytes have fallen.
    pub fn measured(&self, before: Option<u64>) {
        before.into_iter().for_each(|before| self.usage.measured(self.device, before));
    }

    /// Revokes it (`ncclCommRevoke`). Returns NCCL's result.
    pub fn revoke(&self, flags: c_int) -> ncclResult_t {
        let ended = self.finalized.load(Ordering::Acquire) || self.is_revoked();
        let result = match self.real() {
            _ if flags != 0 => {
                refuse(ncclInvalidArgument, format_args!("ncclCommRevoke: flags {flags}, expected 0"))
            }
            _ if ended => refuse(
                ncclInvalidArgument,
                format_args!("ncclCommRevoke: the communicator is ending, or revoked"),
            ),
            None => ncclSuccess,
            Some(real) => known::revoke(real, flags),
        };
        if result == ncclSuccess {
            self.revoked.store(true, Ordering::Release);
            // NCCL counts it as finalized, too.
            self.finalized.store(true, Ordering::Release);
        }
        result
    }

    /// Whether it was revoked.
    pub fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    /// Runs `call` with NCCL's communicator, which no abort ends before it is in NCCL: an abort waits a moment for it.
    pub fn with_nccl<T>(&self, call: impl FnOnce(ncclComm_t) -> T) -> Result<T, ncclResult_t> {
        let Some(real) = self.real() else {
            return Err(refuse(
                ncclInternalError,
                format_args!("a lazy communicator that was not materialized"),
            ));
        };
        // An abort writes the one and reads the other in turn: one of the two sees what the other has written.
        let _inside = Counted::by(&self.calls);
        // Another thread may have aborted it while it was materialized, or while the call was ordered.
        if self.aborted.load(Ordering::SeqCst) {
            return Err(refuse(ncclInvalidUsage, format_args!("the communicator was aborted")));
        }
        Ok(call(real))
    }

    /// The call with NCCL's own handle and operation.
    pub fn translated(&self, call: &Call, real: ncclComm_t) -> Result<Call, ncclResult_t> {
        let mut call = *call;
        call.local.communicator = real;
        if let Some(operation) = call.shared.operation {
            let made = self.operators.real(operation, real).ok_or_else(|| {
                let name = call.local.called.entry().description().name;
                let why = format_args!("{name}: reduction {} is unknown to this communicator", operation.0);
                refuse(ncclInvalidArgument, why)
            });
            call.shared.operation = Some(made?);
        }
        Ok(call)
    }
}

/// NCCL's code for a call that it refuses at once (2.28, `ArgsCheck`); none if it takes the call.
fn refusal(call: &Call, ranks: usize, operators: &Operators) -> Option<ncclResult_t> {
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
mod arguments_tests {
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
