//! Pseudo-random numbers that are the same in each run: a hash of the device, the work, and how often the device has done such
//! work before. So they do not depend on which stream's thread comes first.

use super::Work;
use crate::device::Ordinal;
use crate::sync::lock;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Mutex;

#[derive(Default)]
pub struct Noise {
    done: Mutex<BTreeMap<(Ordinal, Work), u64>>,
}

impl Noise {
    /// The next number for such work on this device, from -1 to below 1.
    pub fn draw(&self, device: Ordinal, work: &Work) -> f64 {
        let mut done = lock(&self.done);
        let times = done.entry((device, *work)).or_default();
        *times += 1;
        nth(device, work, *times)
    }
}

fn nth(device: Ordinal, work: &Work, times: u64) -> f64 {
    // The hasher has the same keys in every process.
    let mut hasher = DefaultHasher::new();
    (device, work, times).hash(&mut hasher);
    // 53 bits are what a double holds.
    (hasher.finish() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
}

#[cfg(test)]
mod tests {
    use super::super::RawWork;
    use super::*;

    fn work(bytes: u64) -> Work {
        let (side, operation) = (c"nccl".as_ptr(), c"all_reduce".as_ptr());
        RawWork { side, operation, bytes, ranks: 2, reserved: 0 }.read().unwrap()
    }

    /// Numbers are the same in each run, different on each device, within their limits, and around zero.
    #[test]
    fn drawn() {
        let (one, other) = (Noise::default(), Noise::default());
        let of = |noise: &Noise, device| (0..1000).map(|_| noise.draw(device, &work(8))).collect::<Vec<_>>();
        let (here, there) = (of(&one, 0), of(&one, 1));
        assert_eq!(of(&other, 0), here);
        assert_ne!(here, there);
        assert!(here.iter().all(|drawn| (-1.0..1.0).contains(drawn)));
        assert!((here.iter().sum::<f64>() / 1000.0).abs() < 0.1);
        assert!(here.iter().any(|drawn| *drawn > 0.9) && here.iter().any(|drawn| *drawn < -0.9));
    }

    /// Other work in between does not change the numbers.
    #[test]
    fn by_work() {
        let (alone, beside) = (Noise::default(), Noise::default());
        beside.draw(0, &work(9));
        assert_eq!(alone.draw(0, &work(8)), beside.draw(0, &work(8)));
    }
}
