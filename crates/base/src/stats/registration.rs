//! What is counted of registrations, by number, and the words for readers.

use std::collections::BTreeMap;

use super::named::Named;

/// A count. Those up to [`Registered::Bytes`] are of what there is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Registered {
    /// Allocations that are registered.
    Entries,
    /// Their bytes.
    Bytes,
    /// Bytes of staging memory.
    StagingBytes,
    /// How often an allocation was registered.
    Registered,
    /// How often a buffer was found registered.
    Hits,
    /// Calls that were staged.
    Staged,
    /// How often a registration was given back.
    Deregistered,
    /// How often that failed.
    Stuck,
    /// Buffers that could not be registered: `cudaMalloc`'s.
    CudaMalloc,
    /// Of several handles, as expandable segments are, or of one that cannot be exported.
    Segments,
    /// Of a pool, as `cudaMallocAsync` gives.
    Pool,
    /// Managed, or on the host.
    Host,
    /// What the driver says nothing of.
    Unknown,
    /// Of several allocations, or another device's.
    Elsewhere,
    /// For want of room in the table.
    Full,
    /// NCCL or the driver refused.
    Refused,
    /// Bytes that were left registered at ends that could not wait: peers' processes keep them for good.
    LeftBytes,
}

/// How many there are.
pub const COUNTS: usize = Registered::LeftBytes as usize + 1;

impl Registered {
    /// Their names in reports, in order.
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

    /// What is said of each that is not registrable.
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

/// One line for people, without its end; none if nothing happened.
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
