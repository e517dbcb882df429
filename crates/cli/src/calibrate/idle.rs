//! Tells whether GPUs are idle, so that a measurement neither disturbs another process nor is disturbed. Pure.

use crate::asking::{Device, Load};

/// Memory of the driver and of tools that watch GPUs may be in use on an idle GPU.
const MEMORY_MAX: u64 = 2 << 30;
/// Utilization up to this may be left over from work that has just ended.
const PERCENT_MAX: u32 = 10;

/// The result for all GPUs.
#[derive(Debug, PartialEq, Eq)]
pub enum Judgement {
    Idle,
    /// Which GPU is in use, and by what.
    InUse(String),
    /// The driver does not tell.
    Unknown,
}

/// Judges all devices that the command sees. Simulated devices that NVML does not know are idle.
pub fn judge(devices: &[Device], simulated: bool) -> Judgement {
    let in_use = devices.iter().enumerate().find_map(|(number, device)| {
        let load = device.load.filter(is_in_use)?;
        Some(format!(
            "GPU {number} is in use ({} processes, {:.1} GiB, {} % busy)",
            load.processes,
            load.memory_bytes as f64 / f64::from(1 << 30),
            load.percent
        ))
    });
    match in_use {
        Some(words) => Judgement::InUse(words),
        None if !simulated && devices.iter().any(|device| device.load.is_none()) => Judgement::Unknown,
        None => Judgement::Idle,
    }
}

/// Names the first device that has processes.
pub fn processes(loads: &[Option<Load>]) -> Option<String> {
    loads.iter().enumerate().find_map(|(number, load)| {
        let load = load.filter(|load| load.processes > 0)?;
        Some(format!("GPU {number} had {} processes", load.processes))
    })
}

fn is_in_use(load: &Load) -> bool {
    load.processes > 0 || load.memory_bytes > MEMORY_MAX || load.percent > PERCENT_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All GPUs must be idle; the first that is not is named.
    #[test]
    fn judgements() {
        let device = |load| Device { load, ..Device::default() };
        let idle = Load { processes: 0, memory_bytes: 600 << 20, percent: 0 };
        let of = |loads: [Option<Load>; 2]| judge(&loads.map(device), false);
        assert_eq!(of([Some(idle); 2]), Judgement::Idle);
        let busy = Load { processes: 1, memory_bytes: 3 << 30, percent: 40 };
        let words = "GPU 1 is in use (1 processes, 3.0 GiB, 40 % busy)";
        assert_eq!(of([Some(idle), Some(busy)]), Judgement::InUse(words.into()));
        for load in [
            Load { processes: 1, ..idle },
            Load { memory_bytes: 3 << 30, ..idle },
            Load { percent: 50, ..idle },
        ] {
            assert!(matches!(of([Some(load), Some(idle)]), Judgement::InUse(_)));
        }
        assert_eq!(of([Some(idle), None]), Judgement::Unknown);
        assert!(matches!(of([Some(busy), None]), Judgement::InUse(_)));
        assert_eq!(judge(&[device(None)], true), Judgement::Idle);
        assert_eq!(processes(&[None, Some(busy)]), Some("GPU 1 had 1 processes".into()));
        assert_eq!(processes(&[Some(Load { percent: 90, ..idle })]), None);
    }
}
