//! Which types and operations are reduced, by which kernels, and what those are told.

use super::Refused;
use super::kernel::Reducer;

/// What a collective that reduces makes of its elements, in NCCL's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reduction {
    /// `ncclDataType_t`: 0 (int8) to 9 (bfloat16).
    pub datatype: i32,
    /// `ncclRedOp_t`: 0 (sum) to 4 (average).
    pub operation: i32,
}

// ncclDataType_t and ncclRedOp_t, as far as they matter here.
pub(super) const FLOAT16: i32 = 6;
pub(super) const FLOAT32: i32 = 7;
pub(super) const FLOAT64: i32 = 8;
pub(super) const BFLOAT16: i32 = 9;
pub(super) const SUM: i32 = 0;
pub(super) const AVERAGE: i32 = 4;
pub(super) const ELEMENT_BYTES: [u32; 10] = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2];

impl Reduction {
    /// Bytes of an element of the type, if we reduce it so.
    pub(super) fn element_bytes(self) -> Result<u32, Refused> {
        let of_type = usize::try_from(self.datatype).ok().and_then(|datatype| ELEMENT_BYTES.get(datatype));
        of_type.filter(|_| (SUM..=AVERAGE).contains(&self.operation)).copied().ok_or(Refused::Reduction(self))
    }

    pub(super) fn reducer(self) -> Reducer {
        match (self.operation, self.datatype) {
            (SUM | AVERAGE, FLOAT32) => Reducer::SumF32,
            (SUM | AVERAGE, FLOAT16) => Reducer::SumF16,
            (SUM | AVERAGE, BFLOAT16) => Reducer::SumBf16,
            _ => Reducer::Any,
        }
    }

    pub(super) fn word(self) -> u32 {
        // Both were found in range.
        self.datatype as u32 | (self.operation as u32) << 8
    }

    /// What elements are multiplied by, as NCCL does: before they are summed. Of integers the ranks, to divide by.
    pub(super) fn scale(self, ranks: u32) -> u64 {
        let factor = match self.operation {
            SUM => 1.0,
            AVERAGE => 1.0 / f64::from(ranks),
            _ => return 0,
        };
        match self.datatype {
            FLOAT64 => factor.to_bits(),
            FLOAT16 | FLOAT32 | BFLOAT16 => u64::from((factor as f32).to_bits()),
            _ if self.operation == AVERAGE => u64::from(ranks),
            _ => 0,
        }
    }
}
