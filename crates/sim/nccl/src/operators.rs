//! Reduction operators: NCCL's own, and those of `ncclRedOpCreatePreMulSum`.

use crate::communicator::Communicator;
use crate::reduce::{self, Fold};
use crate::refusal::{Outcome, lock, refuse};
use nccl_sys::*;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Scalar {
    None,
    Immediate([u8; 8]),
    /// The address of the scalar, which is read when the operation runs.
    InMemory(usize),
}

/// A user's operator: each rank multiplies its input by the scalar, then all are summed.
#[derive(Clone, Copy, Debug)]
struct UserOperator {
    datatype: ncclDataType_t,
    scalar: Scalar,
}

#[derive(Default)]
pub struct Operators {
    slots: Vec<Option<UserOperator>>,
}

impl Operators {
    pub fn live(&self) -> usize {
        self.slots.iter().flatten().count()
    }
}

/// How one rank reduces in one call.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    pub fold: Fold,
    scalar: Scalar,
    /// Compared between ranks: NCCL's number of the operator, or [`USER_CLASS`] for all user operators.
    pub class: i32,
}

impl Recipe {
    /// The factor of this rank's input, read now.
    pub fn factor(&self, datatype: ncclDataType_t) -> Option<[u8; 8]> {
        match self.scalar {
            Scalar::None => None,
            Scalar::Immediate(bytes) => Some(bytes),
            Scalar::InMemory(address) => {
                let mut bytes = [0u8; 8];
                let size = datatype.size_bytes().unwrap_or(0);
                // SAFETY: the user guaranteed that the scalar is readable while the operation runs.
                unsafe { std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), size) };
                Some(bytes)
            }
        }
    }
}

const USER_CLASS: i32 = ncclNumOps.0;

/// How `operator` reduces elements of `datatype`. Fails if a user's operator was made for another type.
pub fn recipe(
    communicator: &Communicator,
    operator: ncclRedOp_t,
    datatype: ncclDataType_t,
) -> Outcome<Recipe> {
    let plain = |fold| Ok(Recipe { fold, scalar: Scalar::None, class: operator.0 });
    match operator {
        ncclSum => plain(Fold::Sum),
        ncclProd => plain(Fold::Product),
        ncclMin => plain(Fold::Minimum),
        ncclMax => plain(Fold::Maximum),
        ncclAvg => match reduce::reciprocal_bytes(datatype, communicator.ranks) {
            Some(bytes) => {
                Ok(Recipe { fold: Fold::Sum, scalar: Scalar::Immediate(bytes), class: operator.0 })
            }
            None => plain(Fold::SumThenDivide),
        },
        _ => {
            let user = lock(&communicator.operators).slots[(operator.0 - ncclNumOps.0) as usize];
            let user = user.expect("checked by `arguments`");
            if user.datatype != datatype {
                return refuse(
                    ncclInvalidArgument,
                    "Data type supplied to user-created ncclRedOp_t does not match type given to reduction operation",
                );
            }
            Ok(Recipe { fold: Fold::Sum, scalar: user.scalar, class: USER_CLASS })
        }
    }
}

/// Whether the operator is one of NCCL's or a live one of this communicator.
pub fn is_known(communicator: &Communicator, operator: ncclRedOp_t) -> bool {
    let slot = operator.0 - ncclNumOps.0;
    slot < 0 || lock(&communicator.operators).slots.get(slot as usize).is_some_and(Option::is_some)
}

pub fn create(
    communicator: &Communicator,
    scalar: *mut libc::c_void,
    datatype: ncclDataType_t,
    residence: ncclScalarResidence_t,
) -> Outcome<ncclRedOp_t> {
    communicator.ensure_ready()?;
    let Some(size) = datatype.size_bytes() else { return refuse(ncclInternalError, "unknown data type") };
    let scalar = if residence == ncclScalarHostImmediate {
        let mut bytes = [0u8; 8];
        // SAFETY: the caller passes a readable scalar of this type.
        unsafe { std::ptr::copy_nonoverlapping(scalar.cast::<u8>(), bytes.as_mut_ptr(), size) };
        Scalar::Immediate(bytes)
    } else {
        Scalar::InMemory(scalar as usize)
    };
    let slots = &mut lock(&communicator.operators).slots;
    let slot = slots.iter().position(Option::is_none).unwrap_or_else(|| {
        slots.push(None);
        slots.len() - 1
    });
    slots[slot] = Some(UserOperator { datatype, scalar });
    Ok(ncclRedOp_t(ncclNumOps.0 + slot as i32))
}

pub fn destroy(communicator: &Communicator, operator: ncclRedOp_t) -> Outcome {
    let slots = &mut lock(&communicator.operators).slots;
    match slots.get_mut((operator.0 - ncclNumOps.0) as usize) {
        Some(slot @ Some(_)) => {
            *slot = None;
            Ok(())
        }
        _ => refuse(ncclInvalidArgument, "ncclRedOpDestroy : operator unknown to this communicator."),
    }
}
