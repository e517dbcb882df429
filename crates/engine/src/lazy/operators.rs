//! Operations that the program makes on a lazy communicator (`ncclRedOpCreatePreMulSum`). The program sees numbers of Windlass; NCCL's own
//! operation is made when a call needs it.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nccl_sys::{
    ncclComm_t, ncclDataType_t, ncclInternalError, ncclInvalidArgument, ncclNumOps, ncclRedOp_t,
    ncclResult_t, ncclScalarResidence_t, ncclSuccess,
};

use crate::forward::operators;
use windlass_base::call::Scalar;
use windlass_base::error::refuse;
use windlass_base::lock::Mutex;

/// Numbers that no operator of NCCL's is likely to have.
const FIRST: i32 = 0x0057_0000;

/// The operators of one communicator.
#[derive(Debug, Default)]
pub struct Operators(Mutex<Vec<Option<Arc<Operator>>>>);

/// An operator. It lives as long as held calls need it, even if the application has destroyed it.
#[derive(Debug)]
pub struct Operator {
    scalar: Scalar,
    datatype: ncclDataType_t,
    /// NCCL's number, once a call has needed it. Held during NCCL's create, which does not wait for other ranks.
    real: Mutex<Option<ncclRedOp_t>>,
    /// Whether the application has destroyed it.
    ended: AtomicBool,
}

impl Operators {
    /// Makes an operator that multiplies by a scalar, which is read now if it lies on the host.
    pub fn create(
        &self,
        scalar: *mut c_void,
        datatype: ncclDataType_t,
        residence: ncclScalarResidence_t,
    ) -> Result<ncclRedOp_t, ncclResult_t> {
        let Some(scalar) = operators::scalar(scalar, datatype, residence) else {
            let why = format_args!("data type {}, expected one of NCCL's", datatype.0);
            return Err(refuse(ncclInternalError, why));
        };
        let operator =
            Arc::new(Operator { scalar, datatype, real: Mutex::new(None), ended: AtomicBool::new(false) });
        let mut all = self.0.lock();
        let index = all.iter().position(Option::is_none).unwrap_or_else(|| {
            all.push(None);
            all.len() - 1
        });
        all[index] = Some(operator);
        Ok(ncclRedOp_t(FIRST + index as i32))
    }

    /// Destroys an operator, with NCCL's own if that was made. Held calls keep the operator itself.
    pub fn destroy(&self, operation: ncclRedOp_t, real: Option<ncclComm_t>) -> ncclResult_t {
        let refused = |why: &str| {
            refuse(ncclInvalidArgument, format_args!("ncclRedOpDestroy: reduction {}: {why}", operation.0))
        };
        if (0..ncclNumOps.0).contains(&operation.0) {
            return refused("NCCL's own, expected one that was made");
        }
        if operation.0 < 0 {
            return refused("expected none below 0");
        }
        let taken = index(operation).and_then(|index| self.0.lock().get_mut(index)?.take());
        let Some(operator) = taken else { return refused("unknown to this communicator") };
        operator.ended.store(true, Ordering::Release);
        real.map_or(ncclSuccess, |real| operator.let_go(real))
    }

    /// The type that an operator was made with; none if there is no such operator.
    pub fn datatype(&self, operation: ncclRedOp_t) -> Option<ncclDataType_t> {
        Some(self.get(operation)?.datatype)
    }

    /// The scalar of an operator, if that is for this type.
    pub fn scalar(&self, operation: ncclRedOp_t, datatype: ncclDataType_t) -> Option<Scalar> {
        self.get(operation).filter(|operator| operator.datatype == datatype).map(|operator| operator.scalar)
    }

    /// The operator with this number; none if the number is NCCL's own, or unknown.
    pub fn get(&self, operation: ncclRedOp_t) -> Option<Arc<Operator>> {
        self.0.lock().get(index(operation)?)?.clone()
    }

    /// NCCL's number for an operator; none if it is unknown, or NCCL fails to make it.
    pub fn real(&self, operation: ncclRedOp_t, real: ncclComm_t) -> Option<ncclRedOp_t> {
        if (0..ncclNumOps.0).contains(&operation.0) {
            return Some(operation);
        }
        self.get(operation)?.real(real)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.lock().iter().all(Option::is_none)
    }
}

fn index(operation: ncclRedOp_t) -> Option<usize> {
    usize::try_from(operation.0.checked_sub(FIRST)?).ok()
}

impl Operator {
    /// NCCL's number for this operator, which NCCL makes now if it has not yet.
    pub fn real(&self, real: ncclComm_t) -> Option<ncclRedOp_t> {
        let mut made = self.real.lock();
        if made.is_none() {
            *made = operators::create(&self.scalar, self.datatype, real)
                .map_err(|code| refuse(code, format_args!("NCCL makes no reduction")))
                .ok();
        }
        *made
    }

    /// Destroys NCCL's operator if the application has destroyed this one. Called after a held call went to NCCL, which keeps what it
    /// needs of the operator.
    pub fn let_go(&self, real: ncclComm_t) -> ncclResult_t {
        if !self.ended.load(Ordering::Acquire) {
            return ncclSuccess;
        }
        let made = self.real.lock().take();
        made.map_or(ncclSuccess, |made| operators::destroy(made, real))
    }
}
