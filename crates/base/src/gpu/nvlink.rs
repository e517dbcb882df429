//! Finds out whether NVLink joins two GPUs: over PCIe a line of 128 bytes may arrive in parts. The driver tells it of GPUs that this process
//! sees, NVML of all others, if NVML is there.

use crate::gpu::device::Ordinal;
use crate::gpu::library::Driver;
use crate::gpu::nvml::Nvml;

impl Driver {
    /// Whether NVLink joins a device of this process to a GPU by UUID and PCI address (domain, bus, device). None if neither can tell.
    pub fn nvlink(&self, from: Ordinal, uuid: &[u8; 16], pci: (u32, u8, u8)) -> Option<bool> {
        match self.ordinal_of(uuid) {
            Some(to) => self.reach(from, to).ok().map(|reach| reach.access && reach.native_atomics),
            None => {
                let (domain, bus, device) = pci;
                Nvml::opened()?
                    .nvlink(&self.pci(from).ok()?, &format!("{domain:08x}:{bus:02x}:{device:02x}.0"))
            }
        }
    }

    /// Whether no NVLink joins a device to any other, as far as the driver or NVML can say.
    pub fn is_unlinked(&self, ordinal: Ordinal) -> bool {
        let others: Vec<Ordinal> =
            (0..self.device_count().unwrap_or(0)).filter(|other| *other != ordinal).collect();
        let is_apart = |other: &Ordinal| self.reach(ordinal, *other).is_ok_and(|reach| !reach.native_atomics);
        // The driver first, as opening NVML takes longer.
        others.iter().all(is_apart)
            && self.links_and_power(ordinal).0.map_or(!others.is_empty(), |links| links == 0)
    }

    /// How many NVLinks of a device are up, and its power limit in watts, each if NVML tells it.
    pub fn links_and_power(&self, ordinal: Ordinal) -> (Option<u32>, Option<u32>) {
        let found = || {
            let nvml = Nvml::opened()?;
            let device = nvml.device(&self.pci(ordinal).ok()?)?;
            Some((nvml.links(device), nvml.power_limit(device)))
        };
        found().unwrap_or_default()
    }

    fn ordinal_of(&self, uuid: &[u8; 16]) -> Option<Ordinal> {
        (0..self.device_count().ok()?).find(|ordinal| self.uuid(*ordinal).is_ok_and(|found| found == *uuid))
    }
}
