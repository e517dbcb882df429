//! Decides the kind of an allocation from what the driver says of an address. Pure.

use windlass_base::gpu::Address;
use windlass_base::gpu::device::Ordinal;
use windlass_base::gpu::pointer::Attributes;
use windlass_base::range::Range;

/// The kind of memory, as far as registration depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One handle, mapped over all addresses that were reserved for it.
    Vmm {
        /// Whether peers may open it by file descriptor. Memory that a peer exported to this process cannot be exported again.
        exportable: bool,
    },
    /// One of several handles mapped in a reservation, as in PyTorch's expandable segments. Others may be mapped beside it
    /// later without any change of id, so nothing tells when. The allocation is this one mapping. A buffer that
    /// extends into the next mapping lies in no allocation.
    VmmParts {
        /// As above, of this handle.
        exportable: bool,
    },
    /// `cudaMalloc`.
    Cuda,
    /// `cudaMallocAsync`, of any pool.
    Pool,
    /// `cudaMallocManaged`.
    Managed,
    /// Host memory that the driver allocated or registered.
    Host,
    /// Everything else: memory unknown to the driver, of a graph, or of a peer by legacy IPC.
    Unknown,
}

/// An allocation, which is registered as a whole or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The whole range. 0 bytes where the driver knows nothing of the address.
    pub range: Range,
    /// `CU_POINTER_ATTRIBUTE_BUFFER_ID`, never reused in this process. 0 where the driver knows nothing.
    pub id: u64,
    /// Its kind.
    pub kind: Kind,
    /// Its device. -1 where the driver knows nothing.
    pub device: Ordinal,
}

impl Allocation {
    /// The answer where nothing is known of an address.
    pub(crate) fn unknown(at: Address) -> Allocation {
        Allocation { range: Range { base: at, bytes: 0 }, id: 0, kind: Kind::Unknown, device: -1 }
    }

    /// The allocation at address `at`, from the driver's attributes. `is_mapped_by_handle` is called last, since it costs the driver most.
    ///
    /// The allocation is the intersection of range and mapping. For mapped memory the range is the whole reservation. For the driver's
    /// own memory the mapping is the block of 2 MiB or more that allocations are cut from (seen on an H200, CUDA 13.0).
    pub(crate) fn of(
        said: &Attributes,
        at: Address,
        is_mapped_by_handle: impl FnOnce() -> bool,
    ) -> Allocation {
        let whole = Range { base: said.range.base, bytes: said.range.bytes };
        let mapping = Range { base: said.mapping.base, bytes: said.mapping.bytes };
        let base = whole.base.max(mapping.base);
        let range = Range { base, bytes: whole.end().min(mapping.end()).saturating_sub(base) };
        if !(range.base..range.end()).contains(&at) {
            // The attributes contradict each other.
            return Allocation::unknown(at);
        }
        let exportable = said.has_descriptor();
        let kind = if said.is_managed {
            Kind::Managed
        } else if said.is_host {
            Kind::Host
        } else if said.is_of_pool {
            Kind::Pool
        } else if said.has_legacy_ipc {
            Kind::Cuda
        } else if !is_mapped_by_handle() {
            Kind::Unknown
        } else if mapping.contains(whole) {
            Kind::Vmm { exportable }
        } else {
            Kind::VmmParts { exportable }
        };
        Allocation { range, id: said.id, kind, device: said.device }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_base::gpu::pointer::Extent;

    const MIB: u64 = 1 << 20;
    const BASE: u64 = 0x7f00_0000_0000;

    /// What an H200 says of a `cudaMalloc` of 8 MiB.
    fn said() -> Attributes {
        let all = Extent { base: BASE, bytes: 8 * MIB };
        Attributes {
            id: 7,
            range: all,
            mapping: all,
            device: 3,
            is_host: false,
            is_managed: false,
            is_of_pool: false,
            has_legacy_ipc: true,
            handles: 0,
        }
    }

    /// Each kind from the measured answers (docs/measurements/2026-11-22-lazy-communicators/buffer_ids.txt).
    #[test]
    fn kinds_as_measured() {
        let mapped = Attributes { has_legacy_ipc: false, ..said() };
        let host = Attributes { is_host: true, ..mapped };
        let managed = Attributes { is_managed: true, ..mapped };
        let pool = Attributes { is_of_pool: true, handles: 1, ..mapped };
        let exportable = Attributes { handles: 1, ..mapped };
        let fabric_alone = Attributes { handles: 8, ..mapped };
        let part = Extent { base: BASE + 2 * MIB, bytes: 2 * MIB };
        let cases = [
            (said(), false, Kind::Cuda),
            (host, false, Kind::Host),
            (managed, false, Kind::Managed),
            (pool, false, Kind::Pool),
            (exportable, true, Kind::Vmm { exportable: true }),
            (mapped, true, Kind::Vmm { exportable: false }),
            (fabric_alone, true, Kind::Vmm { exportable: false }),
            (Attributes { mapping: part, ..exportable }, true, Kind::VmmParts { exportable: true }),
            (Attributes { mapping: part, ..mapped }, true, Kind::VmmParts { exportable: false }),
            // Memory that a graph allocates, or that a peer gave by legacy IPC.
            (mapped, false, Kind::Unknown),
        ];
        for (said, by_handle, kind) in cases {
            let found = Allocation::of(&said, BASE + 3 * MIB, || by_handle);
            assert_eq!((found.kind, found.id, found.device), (kind, 7, 3), "{said:?}");
        }
    }

    /// An allocation is the intersection of range and mapping, whichever is wider. Contradictory attributes give no allocation.
    #[test]
    fn what_range_and_mapping_share() {
        let of = |range: (u64, u64), mapping: (u64, u64), at: u64| {
            let extent = |(base, bytes)| Extent { base, bytes };
            let said = Attributes { range: extent(range), mapping: extent(mapping), ..said() };
            let found = Allocation::of(&said, at, || false);
            (found.range.base, found.range.bytes)
        };
        assert_eq!(of((BASE + 4096, 4096), (BASE, 2 * MIB), BASE + 8191), (BASE + 4096, 4096));
        assert_eq!(of((BASE, 8 * MIB), (BASE + 2 * MIB, 2 * MIB), BASE + 2 * MIB), (BASE + 2 * MIB, 2 * MIB));
        assert_eq!(of((BASE, 3 * MIB), (BASE, 4 * MIB), BASE), (BASE, 3 * MIB));
        assert_eq!(of((BASE, MIB), (BASE + MIB, MIB), BASE), (BASE, 0), "they share nothing");
        assert_eq!(of((BASE, MIB), (BASE, MIB), BASE + MIB), (BASE + MIB, 0), "it does not lie there");
        assert_eq!(of((u64::MAX, 8), (0, u64::MAX), 5), (5, 0));
    }
}
