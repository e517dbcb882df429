//! Arithmetic on elements, with NCCL's semantics: integers wrap, averages of integers divide towards zero, 16-bit
//! floats round after every step, minima and maxima prefer numbers to NaN.

use half::{bf16, f16};
use nccl_sys::*;

/// The reduction of the ranks' inputs, after each rank has scaled its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fold {
    Sum,
    Product,
    Minimum,
    Maximum,
    /// Sum, then divide by the number of ranks.
    SumThenDivide,
}

pub trait Element: Copy {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn greatest(self, other: Self) -> Self;
    fn divide(self, ranks: usize) -> Self;
    /// 1/ranks, for types whose averages scale before they sum.
    fn reciprocal(ranks: usize) -> Option<Self>;
}

macro_rules! integers {
    ($($type:ty)*) => { $(impl Element for $type {
        fn add(self, other: Self) -> Self { self.wrapping_add(other) }
        fn multiply(self, other: Self) -> Self { self.wrapping_mul(other) }
        fn least(self, other: Self) -> Self { self.min(other) }
        fn greatest(self, other: Self) -> Self { self.max(other) }
        fn divide(self, ranks: usize) -> Self { self / ranks as $type }
        fn reciprocal(_: usize) -> Option<Self> { None }
    })* };
}

macro_rules! floats {
    ($($type:ty)*) => { $(impl Element for $type {
        fn add(self, other: Self) -> Self { self + other }
        fn multiply(self, other: Self) -> Self { self * other }
        fn least(self, other: Self) -> Self { self.min(other) }
        fn greatest(self, other: Self) -> Self { self.max(other) }
        fn divide(self, _: usize) -> Self { self }
        fn reciprocal(ranks: usize) -> Option<Self> { Some((1.0 / ranks as f64) as $type) }
    })* };
}

/// A sum or product of two 16-bit floats in f32, rounded once, is the correctly rounded one.
macro_rules! half_floats {
    ($($type:ty)*) => { $(impl Element for $type {
        fn add(self, other: Self) -> Self { Self::from_f32(self.to_f32() + other.to_f32()) }
        fn multiply(self, other: Self) -> Self { Self::from_f32(self.to_f32() * other.to_f32()) }
        fn least(self, other: Self) -> Self { Self::from_f32(self.to_f32().min(other.to_f32())) }
        fn greatest(self, other: Self) -> Self { Self::from_f32(self.to_f32().max(other.to_f32())) }
        fn divide(self, _: usize) -> Self { self }
        fn reciprocal(ranks: usize) -> Option<Self> { Some(Self::from_f32((1.0 / ranks as f64) as f32)) }
    })* };
}

integers!(i8 u8 i32 u32 i64 u64);
floats!(f32 f64);
half_floats!(f16 bf16);

/// Runs `$body` with `$type` bound to the Rust type of an NCCL data type; 8-bit floats have none.
macro_rules! with_type {
    ($datatype:expr, $type:ident => $body:expr) => {
        match $datatype {
            ncclInt8 => {
                type $type = i8;
                Some($body)
            }
            ncclUint8 => {
                type $type = u8;
                Some($body)
            }
            ncclInt32 => {
                type $type = i32;
                Some($body)
            }
            ncclUint32 => {
                type $type = u32;
                Some($body)
            }
            ncclInt64 => {
                type $type = i64;
                Some($body)
            }
            ncclUint64 => {
                type $type = u64;
                Some($body)
            }
            ncclFloat16 => {
                type $type = f16;
                Some($body)
            }
            ncclFloat32 => {
                type $type = f32;
                Some($body)
            }
            ncclFloat64 => {
                type $type = f64;
                Some($body)
            }
            ncclBfloat16 => {
                type $type = bf16;
                Some($body)
            }
            _ => None,
        }
    };
}

/// Whether the simulator can reduce elements of this type.
pub fn is_reducible(datatype: ncclDataType_t) -> bool {
    with_type!(datatype, T => size_of::<T>()).is_some()
}

/// The bytes of 1/ranks, for types whose averages scale first.
pub fn reciprocal_bytes(datatype: ncclDataType_t, ranks: usize) -> Option<[u8; 8]> {
    with_type!(datatype, T => T::reciprocal(ranks).map(|value| {
        let mut bytes = [0u8; 8];
        // SAFETY: no element is larger than 8 bytes.
        unsafe { bytes.as_mut_ptr().cast::<T>().write_unaligned(value) };
        bytes
    }))
    .flatten()
}

/// Multiplies `count` elements at `data` by the scalar in `scalar`.
///
/// # Safety
/// `data` must hold `count` aligned elements that nobody else uses.
pub unsafe fn scale(datatype: ncclDataType_t, data: *mut u8, count: usize, scalar: [u8; 8]) {
    with_type!(datatype, T => {
        // SAFETY: no element is larger than 8 bytes.
        let scalar = unsafe { scalar.as_ptr().cast::<T>().read_unaligned() };
        // SAFETY: by contract.
        let data = unsafe { std::slice::from_raw_parts_mut(data.cast::<T>(), count) };
        data.iter_mut().for_each(|value| *value = value.multiply(scalar));
    });
}

/// Folds `count` elements of all sources, in their order, into `target`, which may be one of them.
///
/// # Safety
/// All pointers must hold `count` aligned elements; nobody writes to the sources, or uses the target.
pub unsafe fn fold(
    datatype: ncclDataType_t,
    how: Fold,
    target: *mut u8,
    sources: &[*const u8],
    count: usize,
) {
    with_type!(datatype, T => {
        let target = target.cast::<T>();
        let combine = match how {
            Fold::Sum | Fold::SumThenDivide => T::add,
            Fold::Product => T::multiply,
            Fold::Minimum => T::least,
            Fold::Maximum => T::greatest,
        };
        for index in 0..count {
            // SAFETY: by contract; each element is read from all sources before it is written.
            unsafe {
                let mut value = *sources[0].cast::<T>().add(index);
                for source in &sources[1..] {
                    value = combine(value, *source.cast::<T>().add(index));
                }
                if how == Fold::SumThenDivide {
                    value = value.divide(sources.len());
                }
                *target.add(index) = value;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums wrap in the type, averages of integers divide towards zero.
    #[test]
    fn integers_wrap_then_divide_towards_zero() {
        let (first, second) = ([100i8, -5], [100i8, -2]);
        let sources = [first.as_ptr().cast(), second.as_ptr().cast()];
        let mut out = [0i8; 2];
        // SAFETY: two elements each.
        unsafe { fold(ncclInt8, Fold::SumThenDivide, out.as_mut_ptr().cast(), &sources, 2) };
        assert_eq!(out, [-28, -3]);
    }
}
