//! Measures by NVML the GPU memory that a command takes: of its processes, and of whole devices.

use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use windlass_base::gpu::nvml::{Handle, Nvml};

/// A device's growth below this does not count as the command's.
const GROWTH_MIN: u64 = 16 << 20;

/// The devices that are read repeatedly while a command runs.
pub struct Meter {
    nvml: &'static Nvml,
    devices: Vec<Handle>,
}

/// The highest values of one run, by device, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Peaks {
    /// The memory of all processes of the command.
    pub processes: BTreeMap<usize, u64>,
    /// The growth of the whole device since before the run.
    pub devices: BTreeMap<usize, u64>,
}

/// Whether memory is that of processes or of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    Processes,
    Devices,
}

/// The values of a run so far.
#[derive(Debug, Default)]
pub struct Watch {
    before: BTreeMap<usize, u64>,
    pub peaks: Peaks,
}

impl Meter {
    /// None if there is no NVML or no GPU.
    pub fn open() -> Option<Meter> {
        let nvml = Nvml::opened()?;
        let devices = nvml.devices();
        (!devices.is_empty()).then_some(Meter { nvml, devices })
    }

    /// Notes the memory in use before a run begins.
    pub fn watch(&self) -> Watch {
        Watch { before: self.used(), peaks: Peaks::default() }
    }

    /// Reads the memory now.
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

/// The memory of the family's processes; none if there is none of them, or the driver does not tell it.
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
}

/// The source that all runs have: processes if the driver named them in each run, else devices. In containers the driver often names
/// no process.
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

    /// Only the family's processes count; if the driver does not tell one's memory, there is no sum.
    #[test]
    fn sums() {
        let family = BTreeSet::from([1, 2]);
        assert_eq!(sum(&[(1, Some(5)), (2, Some(6)), (9, Some(100))], &family), Some(11));
        assert_eq!(sum(&[(9, Some(100))], &family), None);
        assert_eq!(sum(&[(1, Some(5)), (2, None)], &family), None);
    }

    /// The highest value of each device counts, and growth only above the minimum.
    #[test]
    fn peaks() {
        let mut watch =
            Watch { before: BTreeMap::from([(0, 100 << 20), (1, 100 << 20)]), ..Watch::default() };
        for mib in [150, 400, 300] {
            let used = BTreeMap::from([(0, mib << 20), (1, 110 << 20), (2, 900 << 20)]);
            watch.note(BTreeMap::from([(0, (mib - 110) << 20)]), used);
        }
        let peaks = watch.peaks;
        assert_eq!(peaks.processes, BTreeMap::from([(0, 290 << 20)]));
        assert_eq!(peaks.devices, BTreeMap::from([(0, 300 << 20)]));
    }

    /// All runs use the same source.
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
