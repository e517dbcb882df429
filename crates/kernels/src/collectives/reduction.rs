//! Decides which types and operations are reduced by which kernels, and what the kernels are told of them.

use super::Refused;
use super::kernel::Reducer;
use crate::collective::{COLLECTIVE_SCALAR_AT, CollectiveLaunch};

/// How a collective reduces its elements, in NCCL's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reduction {
    /// `ncclDataType_t`: 0 (int8) to 11 (float8e5m2).
    pub datatype: i32,
    /// `ncclRedOp_t`: 0 (sum) to 4 (average). Or 5, a number of ours: each rank multiplies its elements by its own [`Scalar`] before the sum, as
    /// the operations of `ncclRedOpCreatePreMulSum` do.
    pub operation: i32,
}

/// The factor by which this rank multiplies its elements, of their type. Peers may have another value, and give it in the other form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scalar {
    /// Its bits, the low ones of the word: as many as an element has.
    Bits(u64),
    /// Its address, aligned for its type; any address that the device reads. The kernel reads it when it runs, so it must not change before the
    /// kernel has ended.
    At(u64),
}

// ncclDataType_t and ncclRedOp_t, as far as they matter here.
pub(super) const FLOAT16: i32 = 6;
pub(super) const FLOAT32: i32 = 7;
pub(super) const FLOAT64: i32 = 8;
pub(super) const BFLOAT16: i32 = 9;
pub(super) const SUM: i32 = 0;
pub(super) const AVERAGE: i32 = 4;
/// The operation of a [`Reduction`] that has a [`Scalar`].
pub const SCALED_SUM: i32 = 5;
pub(super) const FLOAT8_E4M3: i32 = 10;
pub(super) const FLOAT8_E5M2: i32 = 11;
pub(super) const ELEMENT_BYTES: [u32; 12] = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1];

impl Reduction {
    /// Bytes of an element. Fails if we do not reduce this type by this operation, with this scalar or none. Integers have no averages: a kernel
    /// that divided took up to 6.3 of NCCL's time (docs/measurements/2026-11-26-other-types). Of few bytes it was faster.
    pub(super) fn element_bytes(self, scalar: Option<Scalar>) -> Result<u32, Refused> {
        let of_type = usize::try_from(self.datatype).ok().and_then(|datatype| ELEMENT_BYTES.get(datatype));
        let is_of_integers = self.operation == AVERAGE && self.datatype < FLOAT16;
        let of_type = of_type.filter(|_| (SUM..=SCALED_SUM).contains(&self.operation) && !is_of_integers);
        match of_type {
            None => Err(Refused::Reduction(self)),
            Some(_) if scalar.is_some() != (self.operation == SCALED_SUM) => {
                Err(Refused::Scalar { reduction: self, scalar })
            }
            Some(element_bytes) => Ok(*element_bytes),
        }
    }

    pub(super) fn reducer(self) -> Reducer {
        match (self.operation, self.datatype) {
            (SCALED_SUM, _) | (_, FLOAT8_E4M3 | FLOAT8_E5M2) => Reducer::Ordered,
            (SUM | AVERAGE, FLOAT32) => Reducer::SumF32,
            (SUM | AVERAGE, FLOAT16) => Reducer::SumF16,
            (SUM | AVERAGE, BFLOAT16) => Reducer::SumBf16,
            _ => Reducer::Any,
        }
    }

    /// Writes the reduction into the launch. Both numbers are in range.
    pub(super) fn tell(self, scalar: Option<Scalar>, launch: &mut CollectiveLaunch) {
        launch.reduction = self.datatype as u32 | (self.operation as u32) << 8;
        launch.scale = match scalar {
            None => self.scale(launch.ranks),
            Some(Scalar::Bits(bits)) => bits,
            Some(Scalar::At(address)) => {
                launch.flags |= COLLECTIVE_SCALAR_AT;
                address
            }
        };
    }

    /// The factor by which elements are multiplied before they are summed, as in NCCL.
    fn scale(self, ranks: u32) -> u64 {
        let factor = match self.operation {
            SUM => 1.0,
            AVERAGE => 1.0 / f64::from(ranks),
            _ => return 0,
        };
        match self.datatype {
            FLOAT64 => factor.to_bits(),
            FLOAT16 | FLOAT32 | BFLOAT16 | FLOAT8_E4M3 | FLOAT8_E5M2 => u64::from((factor as f32).to_bits()),
            _ => 0,
        }
    }
}
