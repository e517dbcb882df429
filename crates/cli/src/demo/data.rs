//! Values that ranks send: small integers, exact in every type under every operation.

use nccl_sys::types::{ncclAvg, ncclProd};

use crate::element::{Element, Reduction};

/// The value at `index` of the send buffer of `rank`, in round `round` of a step that uses the buffer again.
pub fn value(reduction: Reduction, round: usize, rank: usize, index: usize) -> f64 {
    match reduction.code {
        // Eight factors of at most 2 stay within 256, which bfloat16 still counts exactly and int8 wraps: so at
        // most six ranks have a factor of 2.
        ncclProd => [1.0, 2.0, 1.0][(index + 2 * rank + round) % 3],
        // Averages are checked within the rounding of one division.
        ncclAvg => ((index * 3 + rank * 5 + round) % 13) as f64,
        _ => ((index * 7 + rank * 11 + round * 3) % 16) as f64,
    }
}

/// The first values of a rank's send buffer.
pub fn values(reduction: Reduction, round: usize, rank: usize, count: usize) -> Vec<f64> {
    (0..count).map(|index| value(reduction, round, rank, index)).collect()
}

/// How far a result may be from the exact one, as a share of it. Averages alone are rounded: NCCL multiplies every
/// rank's value by a rounded 1/ranks and rounds each partial sum.
pub fn tolerance(element: Element, reduction: Reduction, ranks: usize) -> f64 {
    if reduction.code == ncclAvg { element.epsilon() * (ranks + 1) as f64 } else { 0.0 }
}

/// The first wrong element: index, found, expected.
pub fn first_difference(found: &[f64], expected: &[f64], tolerance: f64) -> Option<(usize, f64, f64)> {
    let pairs = found.iter().zip(expected).enumerate();
    pairs
        .map(|(index, (found, expected))| (index, *found, *expected))
        .find(|(_, found, expected)| (found - expected).abs() > tolerance * expected.abs() || found.is_nan())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::{ELEMENTS, REDUCTIONS, SUM};

    /// Over eight ranks, every operation's result survives every type, so that a wrong result cannot hide.
    #[test]
    fn results_are_exact() {
        for reduction in REDUCTIONS.iter().filter(|reduction| reduction.code != ncclAvg) {
            for element in ELEMENTS {
                let expected: Vec<f64> = (0..64)
                    .map(|index| reduction.of(*element, (0..8).map(|rank| value(*reduction, 0, rank, index))))
                    .collect();
                assert_eq!(element.decode(&element.encode(&expected)), expected, "{reduction} {element}");
            }
        }
    }

    /// Neighbouring ranks and rounds differ, so that data of the wrong rank or round is seen.
    #[test]
    fn values_differ() {
        for reduction in REDUCTIONS {
            let of =
                |round, rank| (0..12).map(|index| value(*reduction, round, rank, index)).collect::<Vec<_>>();
            assert_ne!(of(0, 0), of(0, 1), "{reduction}");
            assert_ne!(of(0, 0), of(1, 0), "{reduction}");
        }
    }

    /// Differences are found with their place; averages may be off by roundings.
    #[test]
    fn differences() {
        assert_eq!(first_difference(&[1.0, 2.0], &[1.0, 3.0], 0.0), Some((1, 2.0, 3.0)));
        let (float, avg) = ("float".parse().unwrap(), "avg".parse().unwrap());
        let rounded = [f64::from(1.0_f32 / 3.0)];
        assert!(first_difference(&rounded, &[1.0 / 3.0], 0.0).is_some());
        assert_eq!(first_difference(&rounded, &[1.0 / 3.0], tolerance(float, avg, 3)), None);
        assert!(first_difference(&[0.34], &[1.0 / 3.0], tolerance(float, avg, 3)).is_some());
        assert!(first_difference(&[f64::NAN], &[1.0 / 3.0], tolerance(float, avg, 3)).is_some());
        assert_eq!(tolerance(float, SUM, 3), 0.0);
    }
}
