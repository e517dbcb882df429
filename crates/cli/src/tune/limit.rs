//! From times to a limit. Pure.

use crate::bench::{Cell, CellDone};

/// Windlass may take so much longer than NCCL: differences below it are no reason to change sides.
const SLOWER_MOST: f64 = 1.01;

/// Which of the two was faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Windlass, or there is no difference.
    Fast,
    /// NCCL.
    Nccl,
    /// The times vary too much to tell.
    Unclear,
    /// Windlass left it to NCCL.
    NotOurs,
}

/// What a measurement says. Unclear is where the noise, by how far the medians lie above the shortest times, could turn it round.
pub fn finding(done: &CellDone) -> Finding {
    if done.path != "native" {
        return Finding::NotOurs;
    }
    let above = done.windlass.median / done.plain.median / SLOWER_MOST - 1.0;
    match above {
        above if !above.is_finite() => Finding::Unclear,
        above if above.abs() < noise(done) => Finding::Unclear,
        above if above <= 0.0 => Finding::Fast,
        _ => Finding::Nccl,
    }
}

/// By which part a measurement's times vary: the worse side's.
pub fn noise(done: &CellDone) -> f64 {
    let of = |median: f64, min: f64| (median - min) / median;
    let noise = of(done.plain.median, done.plain.min).max(of(done.windlass.median, done.windlass.min));
    // Below this every measurement varies.
    (noise - 0.01).max(0.0)
}

/// The largest size, in bytes, up to which Windlass was never the slower one, in any mode; none where it is at the smallest.
pub fn native_bytes_max(measured: &[CellDone]) -> Option<u64> {
    let mut sizes: Vec<u64> = measured.iter().map(|done| done.bytes).collect();
    sizes.sort();
    sizes.dedup();
    let is_fast = |bytes: &u64| {
        measured.iter().filter(|done| done.bytes == *bytes).all(|done| finding(done) == Finding::Fast)
    };
    sizes.into_iter().take_while(is_fast).last()
}

/// Which measurements are to be made again: those that are unclear, where that matters.
pub fn again(measured: &[CellDone]) -> Vec<Cell> {
    let is_lost = |done: &&CellDone| matches!(finding(done), Finding::Nccl | Finding::NotOurs);
    let lost_at = measured.iter().filter(is_lost).map(|done| done.bytes).min().unwrap_or(u64::MAX);
    let matters = |done: &&CellDone| finding(done) == Finding::Unclear && done.bytes < lost_at;
    measured.iter().filter(matters).map(|done| done.cell).collect()
}

/// Takes a measurement made again in the place of the first, if it varies less.
pub fn replace(measured: &mut [CellDone], again: CellDone) {
    if let Some(first) = measured.iter_mut().find(|done| done.cell == again.cell)
        && noise(&again) <= noise(first)
    {
        *first = CellDone { position: first.position, ..again };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Mode;
    use crate::bench::operation::Operation;
    use crate::bench::statistics::Spread;
    use crate::element::element;
    use nccl_sys::types::ncclFloat32;

    fn done(bytes: u64, mode: Mode, (plain, windlass): (f64, f64), noise: f64) -> CellDone {
        let spread = |median: f64| Spread { median, min: median * (1.0 - noise), max: median * 2.0 };
        CellDone {
            position: 0,
            cell: Cell { operation: Operation::AllReduce, bytes, mode, element: element(ncclFloat32) },
            bytes,
            calls: 10,
            plain: spread(plain),
            windlass: spread(windlass),
            plain_host_ns: None,
            windlass_host_ns: None,
            plain_busy_part: None,
            windlass_busy_part: None,
            again: 0,
            path: "native".into(),
        }
    }

    /// A percent is no difference; noise counts only where it could turn the answer.
    #[test]
    fn findings() {
        let of = |times, noise| finding(&done(1, Mode::Eager, times, noise));
        assert_eq!(of((10.0, 5.0), 0.0), Finding::Fast);
        assert_eq!(of((10.0, 10.1), 0.0), Finding::Fast);
        assert_eq!(of((10.0, 10.3), 0.0), Finding::Nccl);
        assert_eq!(of((10.0, 5.0), 0.3), Finding::Fast);
        assert_eq!(of((10.0, 9.0), 0.3), Finding::Unclear);
        assert_eq!(of((10.0, 11.0), 0.3), Finding::Unclear);
        assert_eq!(of((10.0, 20.0), 0.3), Finding::Nccl);
        assert_eq!(of((0.0, 0.0), 0.0), Finding::Unclear);
        let forwarded = CellDone { path: "forward".into(), ..done(1, Mode::Eager, (10.0, 1.0), 0.0) };
        assert_eq!(finding(&forwarded), Finding::NotOurs);
    }

    /// The limit is where any mode first loses, or cannot be told; what is faster again beyond it does not count.
    #[test]
    fn limits() {
        let at = |bytes, eager, graph| {
            [done(bytes, Mode::Eager, (10.0, eager), 0.0), done(bytes, Mode::Graph, (10.0, graph), 0.0)]
        };
        let all = |points: &[(u64, f64, f64)]| {
            points.iter().flat_map(|(bytes, eager, graph)| at(*bytes, *eager, *graph)).collect::<Vec<_>>()
        };
        assert_eq!(native_bytes_max(&all(&[(4, 5.0, 5.0), (1, 5.0, 5.0), (2, 5.0, 5.0)])), Some(4));
        assert_eq!(native_bytes_max(&all(&[(1, 5.0, 5.0), (2, 5.0, 11.0), (4, 5.0, 5.0)])), Some(1));
        assert_eq!(native_bytes_max(&all(&[(1, 11.0, 5.0), (2, 5.0, 5.0)])), None);
        assert_eq!(native_bytes_max(&[]), None);
        let unclear = done(2, Mode::Eager, (10.0, 9.9), 0.2);
        assert_eq!(native_bytes_max(&[done(1, Mode::Eager, (10.0, 5.0), 0.0), unclear]), Some(1));
    }

    /// Only what could move the limit is measured again, and the steadier one is kept.
    #[test]
    fn again_where_it_matters() {
        let mut measured = vec![
            done(1, Mode::Eager, (10.0, 9.0), 0.3),
            done(2, Mode::Graph, (10.0, 20.0), 0.0),
            done(4, Mode::Eager, (10.0, 9.0), 0.3),
        ];
        assert_eq!(again(&measured), [measured[0].cell]);
        replace(&mut measured, done(1, Mode::Eager, (10.0, 12.0), 0.5));
        assert_eq!(measured[0].windlass.median, 9.0);
        replace(&mut measured, done(1, Mode::Eager, (10.0, 8.0), 0.0));
        assert_eq!(measured[0].windlass.median, 8.0);
        assert_eq!(again(&measured), []);
        assert_eq!(native_bytes_max(&measured), Some(1));
    }
}
