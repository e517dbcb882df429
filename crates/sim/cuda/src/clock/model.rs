//! The cost of work, parsed from the text of `WINDLASS_SIM_CLOCK`. Pure functions.

use crate::device::Ordinal;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};

/// Who does the work: each side has rates of its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Side {
    Nccl,
    Windlass,
    /// NCCL over registered buffers. Where it has no rate, that of `Nccl` holds.
    Registered,
}

/// The operations that may have a rate of their own.
pub const OPERATIONS: [&str; 11] = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "uneven_all_gather",
    "uneven_reduce_scatter",
    "alltoall",
    "gather",
    "scatter",
    "send_recv",
];

/// What a kernel does, as its launcher or its `_work` function says.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Work {
    side: Side,
    /// `None` for an operation that is not in [`OPERATIONS`].
    operation: Option<&'static str>,
    /// 0 if not known.
    ranks: u32,
    /// Bytes of this rank's larger buffer.
    bytes: u64,
}

/// `SimWork` of the crate's documentation.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawWork {
    pub side: *const c_char,
    pub operation: *const c_char,
    pub bytes: u64,
    pub ranks: u32,
    pub reserved: u32,
}

impl RawWork {
    pub const NONE: RawWork =
        RawWork { side: std::ptr::null(), operation: std::ptr::null(), bytes: 0, ranks: 0, reserved: 0 };

    /// `None` if the side is missing or unknown.
    pub fn read(&self) -> Option<Work> {
        let text = |name: *const c_char| {
            // SAFETY: null, or a terminated text of whoever launches.
            (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_str().unwrap_or_default())
        };
        Some(Work {
            side: Side::named(text(self.side)?)?,
            operation: text(self.operation).and_then(operation_named),
            ranks: self.ranks,
            bytes: self.bytes,
        })
    }
}

/// A latency and a bandwidth.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Rate {
    latency_ns: f64,
    bytes_per_ns: f64,
}

/// Which work a rate is for; `None` is any.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Key {
    side: Side,
    operation: Option<&'static str>,
    ranks: Option<u32>,
}

/// The parsed variable.
#[derive(PartialEq, Debug)]
pub struct Model {
    rates: BTreeMap<Key, Rate>,
    /// The part by which costs vary both ways.
    pub noise: f64,
    load: f64,
    slow: BTreeMap<Ordinal, f64>,
}

impl Side {
    fn named(name: &str) -> Option<Side> {
        match name {
            "nccl" => Some(Side::Nccl),
            "windlass" => Some(Side::Windlass),
            "registered" => Some(Side::Registered),
            _ => None,
        }
    }
}

fn operation_named(name: &str) -> Option<&'static str> {
    OPERATIONS.into_iter().find(|known| *known == name)
}

impl Model {
    /// # Errors
    /// A text that names the wrong part, and what was expected.
    pub fn parse(text: &str) -> Result<Model, String> {
        let mut model = Model { rates: BTreeMap::new(), noise: 0.0, load: 1.0, slow: BTreeMap::new() };
        let mut seen: Vec<&str> = Vec::new();
        for part in text.split(',').map(str::trim) {
            let (name, value) =
                part.split_once('=').ok_or_else(|| format!("'{part}' has no '=': expected NAME=VALUE"))?;
            if name != "slow" && seen.contains(&name) {
                return Err(format!("'{name}' stands twice"));
            }
            seen.push(name);
            model.take(name, value).map_err(|expected| format!("'{part}': expected {expected}"))?;
        }
        for (side, name) in [(Side::Nccl, "nccl"), (Side::Windlass, "windlass")] {
            if !model.rates.contains_key(&Key { side, operation: None, ranks: None }) {
                return Err(format!("expected {name}={RATE} among its parts"));
            }
        }
        Ok(model)
    }

    /// # Errors
    /// A text that says what was expected.
    fn take(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "noise" => {
                let noise = number(value).filter(|noise| (0.0..1.0).contains(noise));
                self.noise = noise.ok_or("a part from 0 to below 1, as noise=0.05")?;
            }
            "load" => {
                self.load = number(value).and_then(above_zero).ok_or("a factor above 0, as load=1.5")?
            }
            "slow" => {
                let slow = value.split_once(':').and_then(|(device, factor)| {
                    Some((device.parse::<Ordinal>().ok().filter(|device| *device >= 0)?, number(factor)?))
                });
                let slow = slow.filter(|(_, factor)| *factor > 0.0);
                let (device, factor) = slow.ok_or("DEVICE:FACTOR, a factor above 0, as slow=1:2.5")?;
                if self.slow.insert(device, factor).is_some() {
                    return Err("each device once".into());
                }
            }
            _ => {
                self.rates.insert(Key::parse(name)?, Rate::parse(value).ok_or(RATE_FOR_PEOPLE)?);
            }
        }
        Ok(())
    }

    /// The cost of `work` on a device in nanoseconds, without noise.
    pub fn cost_ns(&self, device: Ordinal, work: &Work) -> f64 {
        let Some(rate) = self.rate(work) else { return 0.0 };
        let slow = self.slow.get(&device).copied().unwrap_or(1.0);
        (rate.latency_ns + work.bytes as f64 / rate.bytes_per_ns) * self.load * slow
    }

    /// The most specific rate for some work: a rate of its operation comes before one of its number of ranks.
    fn rate(&self, work: &Work) -> Option<Rate> {
        let (operation, ranks) = (work.operation, Some(work.ranks));
        let of = |side: Side| {
            [(operation, ranks), (operation, None), (None, ranks), (None, None)]
                .into_iter()
                .find_map(|(operation, ranks)| self.rates.get(&Key { side, operation, ranks }).copied())
        };
        match work.side {
            Side::Registered => of(Side::Registered).or_else(|| of(Side::Nccl)),
            side => of(side),
        }
    }
}

const RATE: &str = "LATENCY_US:GB_PER_S";
const RATE_FOR_PEOPLE: &str =
    "LATENCY_US:GB_PER_S, a latency of at least 0 and a bandwidth above 0, as nccl=12:200";

impl Rate {
    fn parse(text: &str) -> Option<Rate> {
        let (latency, bandwidth) = text.split_once(':')?;
        let latency_us = number(latency).filter(|latency| *latency >= 0.0)?;
        // 10^9 bytes a second are a byte a nanosecond.
        let bytes_per_ns = number(bandwidth).and_then(above_zero)?;
        Some(Rate { latency_ns: latency_us * 1e3, bytes_per_ns })
    }
}

impl Key {
    /// `SIDE[.OPERATION][@RANKS]`.
    fn parse(text: &str) -> Result<Key, String> {
        let expected = || {
            let operations = OPERATIONS.join(", ");
            format!(
                "nccl, windlass or registered, perhaps with .OPERATION and @RANKS, or noise, load, slow; operations are {operations}"
            )
        };
        let (name, ranks) = match text.split_once('@') {
            Some((name, ranks)) => (name, Some(ranks.parse().ok().ok_or_else(expected)?)),
            None => (text, None),
        };
        let (side, operation) = match name.split_once('.') {
            Some((side, operation)) => (side, Some(operation_named(operation).ok_or_else(expected)?)),
            None => (name, None),
        };
        Ok(Key { side: Side::named(side).ok_or_else(expected)?, operation, ranks })
    }
}

fn number(text: &str) -> Option<f64> {
    text.parse().ok().filter(|number: &f64| number.is_finite())
}

fn above_zero(number: f64) -> Option<f64> {
    (number > 0.0).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(side: Side, operation: &'static str, ranks: u32, bytes: u64) -> Work {
        Work { side, operation: Some(operation), ranks, bytes }
    }

    /// The cost is the latency and the time of the bytes; load and slow devices multiply both.
    #[test]
    fn costs() {
        let model = Model::parse("nccl=10:100,windlass=2.5:20, load=2,slow=1:3,slow=3:0.5").unwrap();
        let nccl = work(Side::Nccl, "all_reduce", 2, 1000);
        assert_eq!(model.cost_ns(0, &nccl), 2.0 * 10_010.0);
        assert_eq!(model.cost_ns(1, &nccl), 6.0 * 10_010.0);
        assert_eq!(model.cost_ns(3, &nccl), 10_010.0);
        assert_eq!(model.cost_ns(0, &work(Side::Windlass, "reduce", 2, 1000)), 2.0 * 2550.0);
    }

    /// A rate of an operation comes before one of a number of ranks; registered buffers without a rate cost as NCCL's others.
    #[test]
    fn nearest() {
        let text = "nccl=1:1,windlass=2:1,windlass@8=3:1,windlass.all_reduce=4:1,windlass.all_reduce@8=5:1,\
                    nccl.broadcast=6:1,registered.all_gather=7:1";
        let model = Model::parse(text).unwrap();
        let us = |side, operation, ranks| model.cost_ns(0, &work(side, operation, ranks, 0)) / 1e3;
        assert_eq!(us(Side::Windlass, "reduce", 2), 2.0);
        assert_eq!(us(Side::Windlass, "reduce", 8), 3.0);
        assert_eq!(us(Side::Windlass, "all_reduce", 4), 4.0);
        assert_eq!(us(Side::Windlass, "all_reduce", 8), 5.0);
        assert_eq!(us(Side::Registered, "broadcast", 2), 6.0);
        assert_eq!(us(Side::Registered, "all_gather", 2), 7.0);
        assert_eq!(us(Side::Registered, "all_reduce", 2), 1.0);
    }

    /// An error names the part that cannot be read, and what was expected.
    #[test]
    fn refused() {
        for (text, reason) in [
            ("", "'' has no '='"),
            ("nccl=1:1", "expected windlass=LATENCY_US:GB_PER_S among its parts"),
            ("windlass=1:1,nccl@2=1:1", "expected nccl="),
            ("nccl=1:1,windlass=1", "'windlass=1': expected LATENCY_US:GB_PER_S"),
            ("nccl=1:0,windlass=1:1", "'nccl=1:0': expected LATENCY_US"),
            ("nccl=-1:1", "'nccl=-1:1': expected LATENCY_US"),
            ("nccl=1:inf", "'nccl=1:inf': expected LATENCY_US"),
            ("nccl=1:1,nccl=1:1", "'nccl' stands twice"),
            ("ncll=1:1", "'ncll=1:1': expected nccl, windlass or registered"),
            ("nccl.allreduce=1:1", "operations are all_reduce"),
            ("nccl@two=1:1", "'nccl@two=1:1': expected"),
            ("noise=1", "'noise=1': expected a part from 0 to below 1"),
            ("load=0", "'load=0': expected a factor above 0"),
            ("slow=2", "'slow=2': expected DEVICE:FACTOR"),
            ("slow=-1:2", "'slow=-1:2': expected DEVICE:FACTOR"),
            ("slow=1:2,slow=1:3", "'slow=1:3': expected each device once"),
            ("nccl=1:1,windlass=1:1,", "'' has no '='"),
        ] {
            let told = Model::parse(text).unwrap_err();
            assert!(told.contains(reason), "{text}: {told}");
        }
    }

    /// Names are looked up; an unknown side gives no work.
    #[test]
    fn raw() {
        let raw = RawWork {
            side: c"nccl".as_ptr(),
            operation: c"send_recv".as_ptr(),
            bytes: 7,
            ranks: 2,
            reserved: 0,
        };
        assert_eq!(raw.read(), Some(work(Side::Nccl, "send_recv", 2, 7)));
        let unnamed = RawWork { operation: c"other".as_ptr(), ..raw };
        assert_eq!(unnamed.read(), Some(Work { operation: None, ..work(Side::Nccl, "send_recv", 2, 7) }));
        assert_eq!(RawWork { side: c"other".as_ptr(), ..raw }.read(), None);
        assert_eq!(RawWork::NONE.read(), None);
    }
}
