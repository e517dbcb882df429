//! The GPU memory that a command takes, as NVML tells it: of its processes, and of whole devices.

use crate::nvml::{Handle, Nvml};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Less growth of a device is not taken for the command's.
const GROWTH_MIN: u64 = 16 << 20;

/// What is asked, again and again, while a command runs.
pub struct Meter {
    nvml: Nvml,
    devices: Vec<Handle>,
}

/// The most that was seen in one run, by device; in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Peaks {
    /// Of the command's processes together.
    pub processes: BTreeMap<usize, u64>,
    /// Of the whole device, over what was taken before the run.
    pub devices: BTreeMap<usize, u64>,
}

/// Whose memory is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    Processes,
    Devices,
}

/// A run being watched.
#[derive(Debug, Default)]
pub struct Watch {
    before: BTreeMap<usize, u64>,
    peaks: Peaks,
}

impl Meter {
    /// None where there is no NVML, or no GPU.
    pub fn open() -> Option<Meter> {
        let nvml = Nvml::open()?;
        let devices = nvml.devices();
        (!devices.is_empty()).then_some(Meter { nvml, devices })
    }

    /// Before a run begins.
    pub fn watch(&self) -> Watch {
        Watch { before: self.used(), peaks: Peaks::default() }
    }

    /// Looks once.
    pub fn look(&self, watch: &mut Watch, family: &BTreeSet<u32>) {
        let processes = self.devices.iter().map(|device| self.nvml.processes(*device)).enumerate();
        let of_family = processes.filter_map(|(device, processes)| Some((device, sum(&processes, family)?)));
        watch.note(of_family.collect(), self.used());
    }

    fn used(&self) -> BTreeMap<usize, u64> {
        let used = self.devices.iter().map(|device| self.nvml.memory_used(*device)).enumerate();
        used.filter_map(|(device, bytes)| Some((device, bytes?))).collect()
    }
}

/// What processes of the family have together; none where there is none of them, or the driver does not tell.
fn sum(processes: &[(u32, Option<u64>)], family: &BTreeSet<u32>) -> Option<u64> {
    let bytes = processes.iter().filter(|(process, _)| family.contains(process)).map(|(_, bytes)| *bytes);
    bytes.fold(None, |sum, bytes| Some(sum.unwrap_or(0) + bytes?))
}

impl Watch {
    fn note(&mut self, processes: BTreeMap<usize, u64>, used: BTreeMap<usize, u64>) {
        let raise = |peaks: &mut BTreeMap<usize, u64>, device, bytes: u64| {
            let peak = peaks.entry(device).or_default();
            *peak = bytes.max(*peak);
        };
        for (device, bytes) in processes {
            raise(&mut self.peaks.processes, device, bytes);
        }
        for (device, bytes) in used {
            let growth = bytes.saturating_sub(self.before.get(&device).copied().unwrap_or(bytes));
            if growth >= GROWTH_MIN {
                raise(&mut self.peaks.devices, device, growth);
            }
        }
    }

    pub fn end(self) -> Peaks {
        self.peaks
    }
}

/// What can be told of all runs alike: of processes where the driver names them in each run, else of devices. Containers often see no
/// process's number.
pub fn source(runs: &[&Peaks]) -> Option<Source> {
    if runs.is_empty() {
        None
    } else if runs.iter().all(|run| !run.processes.is_empty()) {
        Some(Source::Processes)
    } else {
        runs.iter().any(|run| !run.devices.is_empty()).then_some(Source::Devices)
    }
}

impl Peaks {
    pub fn of(&self, source: Source) -> &BTreeMap<usize, u64> {
        match source {
            Source::Processes => &self.processes,
            Source::Devices => &self.devices,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only the family's processes count; one of which the driver tells nothing takes the sum away.
    #[test]
    fn sums() {
        let family = BTreeSet::from([1, 2]);
        assert_eq!(sum(&[(1, Some(5)), (2, Some(6)), (9, Some(100))], &family), Some(11));
        assert_eq!(sum(&[(9, Some(100))], &family), None);
        assert_eq!(sum(&[(1, Some(5)), (2, None)], &family), None);
    }

    /// The highest of each device, and growth only where there is enough of it.
    #[test]
    fn peaks() {
        let mut watch =
            Watch { before: BTreeMap::from([(0, 100 << 20), (1, 100 << 20)]), ..Watch::default() };
        for mib in [150, 400, 300] {
            let used = BTreeMap::from([(0, mib << 20), (1, 110 << 20), (2, 900 << 20)]);
            watch.note(BTreeMap::from([(0, (mib - 110) << 20)]), used);
        }
        let peaks = watch.end();
        assert_eq!(peaks.processes, BTreeMap::from([(0, 290 << 20)]));
        assert_eq!(peaks.devices, BTreeMap::from([(0, 300 << 20)]));
    }

    /// All runs are told from the same source.
    #[test]
    fn sources() {
        let of = |processes: &[usize], devices: &[usize]| Peaks {
            processes: processes.iter().map(|device| (*device, 1)).collect(),
            devices: devices.iter().map(|device| (*device, 2)).collect(),
        };
        let (both, devices, none) = (of(&[0], &[0]), of(&[], &[0]), of(&[], &[]));
        assert_eq!(source(&[&both, &both]), Some(Source::Processes));
        assert_eq!(source(&[&both, &devices]), Some(Source::Devices));
        assert_eq!(source(&[&none]), None);
        assert_eq!(source(&[]), None);
        assert_eq!(both.of(Source::Devices)[&0], 2);
    }
}
