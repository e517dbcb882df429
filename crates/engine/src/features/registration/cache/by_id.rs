//! A hash table by the driver's ids. Nobody chooses ids to collide, so one multiplication spreads them well enough.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map from the id of an allocation.
pub(crate) type ById<T> = HashMap<u64, T, BuildHasherDefault<Spread>>;

/// 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spread(u64);

impl Hasher for Spread {
    #[inline]
    fn write_u64(&mut self, id: u64) {
        // The table takes the lowest bits and the highest seven. Of ids that are multiples of a power of two the lowest bits of
        // the product are all zero; the upper half of it tells them apart.
        let product = u128::from(id) * u128::from(GOLDEN);
        self.0 = product as u64 ^ (product >> 64) as u64;
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(GOLDEN);
        }
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ids in sequence, far apart, or at multiples of powers of two collide seldom: of 64 ids in 128 places, at most four share one.
    #[test]
    fn ids_are_spread() {
        for step in [1_u64, 2, 3, 7, 1 << 8, 1 << 12, 1 << 20, 1 << 32, 1 << 40, (1 << 32) + 1] {
            for start in [0_u64, 1, 1000, 1 << 33] {
                let mut places = [0; 128];
                for index in 0..64 {
                    let mut hash = Spread::default();
                    hash.write_u64(start.wrapping_add(step.wrapping_mul(index)));
                    places[hash.finish() as usize % 128] += 1;
                }
                assert!(places.iter().all(|count| *count < 5), "from {start} by {step}: {places:?}");
            }
        }
    }
}
