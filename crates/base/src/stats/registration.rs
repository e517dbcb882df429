//! The counts of registrations, by number, and their words for readers.

use std::collections::BTreeMap;

use super::named::Named;

/// A count. Those up to [`Registered::StagingBytes`] are of what exists now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Registered {
    /// Allocations that are registered.
    Entries,
    /// Bytes of registered allocations.
    Bytes,
    /// Bytes of staging buffers.
    StagingBytes,
    /// How often an allocation was registered.
    Registered,
    /// How often a buffer was found already registered.
    Hits,
    /// Calls that used a staging buffer.
    Staged,
    /// How often a registration was ended.
    Deregistered,
    /// How often the end of a registration failed.
    Stuck,
    /// Buffers of `cudaMalloc`, which cannot be registered.
    CudaMalloc,
    /// Buffers of several handles (expandable segments), or of one that cannot be exported.
    Segments,
    /// Buffers of a memory pool (`cudaMallocAsync`).
    Pool,
    /// Buffers in managed or host memory.
    Host,
    /// Buffers that the driver does not know.
    Unknown,
    /// Buffers over several allocations, or of another device.
    Elsewhere,
    /// Buffers for which the table had no room.
    Full,
    /// Buffers that NCCL or the driver refused.
    Refused,
    /// Bytes still registered at ends that could not wait: peers' processes keep them for good.
    LeftBytes,
}

/// The number of counts.
pub const COUNTS: usize = Registered::LeftBytes as usize + 1;

impl Registered {
    /// The names of the counts in reports, in order.
    pub const NAMES: [&'static str; COUNTS] = [
        "entries",
        "bytes",
        "staging_bytes",
        "registered",
        "hits",
        "staged",
        "deregistered",
        "stuck",
        "cuda_malloc",
        "segments",
        "pool",
        "host",
        "unknown",
        "elsewhere",
        "full",
        "refused",
        "left_bytes",
    ];

    /// Counts of buffers that could not be registered, with their words.
    const REASONS: [(&'static str, &'static str); 8] = [
        ("cuda_malloc", "cudaMalloc"),
        ("segments", "expandable segments"),
        ("pool", "memory pools"),
        ("host", "managed or host memory"),
        ("unknown", "unknown to the driver"),
        ("elsewhere", "more than one allocation, or another device"),
        ("full", "the table was full"),
        ("refused", "refused by NCCL or the driver"),
    ];
}

/// One line for people, without a line end; none if nothing was counted.
pub fn text(counts: &BTreeMap<String, u64>, size: impl Fn(u64) -> String) -> Option<String> {
    let named = Named::of(counts)?;
    let of = |name: &str| named.count(name);
    let mut line = format!(
        "registration: registered {} (now {}, {}), hits {}, staged {} (memory {})",
        of("registered"),
        of("entries"),
        size(of("bytes")),
        of("hits"),
        of("staged"),
        size(of("staging_bytes")),
    );
    let refused = named.there(&Registered::REASONS);
    if !refused.is_empty() {
        line += &format!(", refused: {}", refused.join(", "));
    }
    if of("stuck") > 0 {
        line += &format!(", never given back: {}", of("stuck"));
    }
    if of("left_bytes") > 0 {
        line += &format!(", left to peers by aborts: {}", size(of("left_bytes")));
    }
    Some(line)
}

#[cfg(test)]
mod tests {
    use super::super::named::tests::counts;
    use super::*;

    #[test]
    fn one_line() {
        let line = |list: &[(&str, u64)]| text(&counts(list), |bytes| format!("{bytes} B"));
        assert_eq!(line(&[]), None);
        assert_eq!(
            line(&[("registered", 12), ("hits", 48_113), ("segments", 3), ("entries", 2), ("bytes", 5)])
                .unwrap(),
            "registration: registered 12 (now 2, 5 B), hits 48113, staged 0 (memory 0 B), refused: expandable segments 3"
        );
        let left = line(&[("left_bytes", 7), ("stuck", 1)]).unwrap();
        assert!(left.ends_with(", never given back: 1, left to peers by aborts: 7 B"), "{left}");
        for (name, _) in Registered::REASONS {
            assert!(Registered::NAMES.contains(&name));
        }
    }
}
