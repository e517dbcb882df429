//! The scalars of the program's own reductions (`ncclRedOpCreatePreMulSum`), of communicators whose operations NCCL makes. In fixed order
//! native collectives run them, too. A lazy communicator keeps its own (`lazy/operators.rs`).

use std::collections::BTreeMap;

use nccl_sys::{ncclDataType_t, ncclRedOp_t};

use windlass_base::call::Scalar;
use windlass_base::lock::Mutex;

/// The scalars by NCCL's number of the operation.
#[derive(Debug, Default)]
pub struct Scalars(Mutex<BTreeMap<i32, (ncclDataType_t, Scalar)>>);

impl Scalars {
    /// Notes an operation that NCCL has made.
    pub fn made(&self, operation: ncclRedOp_t, datatype: ncclDataType_t, scalar: Scalar) {
        self.0.lock().insert(operation.0, (datatype, scalar));
    }

    /// Forgets an operation that the program has destroyed. Calls made before keep what they have read.
    pub fn ended(&self, operation: ncclRedOp_t) {
        self.0.lock().remove(&operation.0);
    }

    /// The scalar of an operation, if the operation is for this type.
    pub fn of(&self, operation: ncclRedOp_t, datatype: ncclDataType_t) -> Option<Scalar> {
        let (own, scalar) = *self.0.lock().get(&operation.0)?;
        (own == datatype).then_some(scalar)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_sys::{ncclFloat16, ncclFloat32};

    /// An operation is known from when it is made to when it ends, for its own type alone.
    #[test]
    fn lives() {
        let (scalars, one) = (Scalars::default(), ncclRedOp_t(77));
        assert_eq!(scalars.of(one, ncclFloat32), None);
        scalars.made(one, ncclFloat32, Scalar::OnDevice(8));
        assert_eq!(scalars.of(one, ncclFloat32), Some(Scalar::OnDevice(8)));
        assert_eq!(scalars.of(one, ncclFloat16), None);
        scalars.ended(one);
        assert_eq!(scalars.of(one, ncclFloat32), None);
    }
}
