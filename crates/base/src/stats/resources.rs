//! The counts of registrations, of blocks of `ncclMemAlloc` and of kept windows, by number, and their words for readers.

use std::collections::BTreeMap;

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

impl Registered {
    /// The names of the counts in reports, in order.
    pub const NAMES: [&'static str; 17] = [
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
pub fn registrations(counts: &BTreeMap<String, u64>, size: impl Fn(u64) -> String) -> Option<String> {
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

/// A count. Those up to [`Pooled::HeldBytes`] are of blocks that exist now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Pooled {
    /// Freed blocks that are kept.
    Blocks,
    /// Bytes of kept blocks.
    Bytes,
    /// Blocks that the program has.
    HeldBlocks,
    /// Bytes of blocks that the program has.
    HeldBytes,
    /// The most bytes of kept blocks at one time.
    BytesHighest,
    /// How often a kept block was handed out again.
    Hits,
    /// How often NCCL made a block.
    Misses,
    /// Kept blocks that were freed because more was kept than allowed.
    Evicted,
    /// Kept blocks that were freed because memory was short, or because the program asked.
    Trimmed,
    /// Blocks that were not kept when the program freed them: still registered, too large, or not reusable.
    LetGo,
    /// How often the program freed a kept block once more.
    DoubleFrees,
    /// Blocks that others have unmapped.
    Forgotten,
}

impl Pooled {
    /// The names of the counts in reports, in order.
    pub const NAMES: [&'static str; 12] = [
        "blocks",
        "bytes",
        "held_blocks",
        "held_bytes",
        "bytes_highest",
        "hits",
        "misses",
        "evicted",
        "trimmed",
        "let_go",
        "double_frees",
        "forgotten",
    ];

    /// Counts that the line has only where they are not 0, with their words.
    const RARE: [(&'static str, &'static str); 5] = [
        ("evicted", "evicted"),
        ("trimmed", "trimmed"),
        ("let_go", "not kept"),
        ("double_frees", "freed twice"),
        ("forgotten", "unmapped by others"),
    ];
}

/// One line for people, without a line end; none if nothing was counted.
pub fn pool(counts: &BTreeMap<String, u64>, size: impl Fn(u64) -> String) -> Option<String> {
    let named = Named::of(counts)?;
    let of = |name: &str| named.count(name);
    let usual = format!(
        "pool: hits {}, misses {}, keeps {} blocks, {} (at most {}), held {}, {}",
        of("hits"),
        of("misses"),
        of("blocks"),
        size(of("bytes")),
        size(of("bytes_highest")),
        of("held_blocks"),
        size(of("held_bytes")),
    );
    Some([vec![usual], named.there(&Pooled::RARE)].concat().join(", "))
}

/// A count of windows, or of registrations in communicators whose ranks keep windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Kept {
    /// Registrations that a kept window served.
    Hits,
    /// Registrations for which NCCL made a window.
    Made,
    /// Registrations that were refused.
    Refused,
    /// How often a window was kept when it was deregistered.
    Cached,
    /// Kept windows that were dropped because a call used their memory.
    Dropped,
}

impl Kept {
    /// The names of the counts in reports, in order.
    pub const NAMES: [&'static str; 5] = ["hits", "made", "refused", "cached", "dropped"];

    /// Counts that the line has only where they are not 0, with their words.
    const RARE: [(&'static str, &'static str); 2] =
        [("refused", "refused"), ("dropped", "dropped for calls over them")];
}

/// One line for people, without a line end; none if nothing was counted.
pub fn windows(counts: &BTreeMap<String, u64>) -> Option<String> {
    let named = Named::of(counts)?;
    let [hits, made, cached] = ["hits", "made", "cached"].map(|name| named.count(name));
    let usual = format!("windows: hits {hits}, made {made}, cached {cached}");
    Some([vec![usual], named.there(&Kept::RARE)].concat().join(", "))
}

/// Counts for one line of a report.
#[derive(Clone, Copy, Debug)]
struct Named<'a>(&'a BTreeMap<String, u64>);

impl<'a> Named<'a> {
    /// None if nothing was counted.
    fn of(counts: &'a BTreeMap<String, u64>) -> Option<Named<'a>> {
        (!counts.is_empty()).then_some(Named(counts))
    }

    /// A count; 0 if the name is missing.
    fn count(self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// For each name that was counted, its words with the count. `list` has names and words.
    fn there(self, list: &[(&str, &str)]) -> Vec<String> {
        let there = list.iter().filter(|(name, _)| self.count(name) > 0);
        there.map(|(name, words)| format!("{words} {}", self.count(name))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts as a reader gets them.
    fn counts(list: &[(&str, u64)]) -> BTreeMap<String, u64> {
        list.iter().map(|(name, count)| (name.to_string(), *count)).collect()
    }

    #[test]
    fn names() {
        let some = counts(&[("hits", 2), ("misses", 1)]);
        let named = Named::of(&some).unwrap();
        assert_eq!((named.count("hits"), named.count("none")), (2, 0));
        assert_eq!(
            named.there(&[("misses", "missed"), ("none", "none"), ("hits", "hit")]),
            ["missed 1", "hit 2"]
        );
        assert!(Named::of(&counts(&[])).is_none());
    }

    #[test]
    fn registration_line() {
        let line = |list: &[(&str, u64)]| registrations(&counts(list), |bytes| format!("{bytes} B"));
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

    #[test]
    fn pool_line() {
        let line = |list: &[(&str, u64)]| pool(&counts(list), |bytes| format!("{bytes} B"));
        assert_eq!(line(&[]), None);
        assert_eq!(
            line(&[
                ("hits", 7),
                ("misses", 2),
                ("blocks", 1),
                ("bytes", 5),
                ("bytes_highest", 9),
                ("let_go", 3)
            ])
            .unwrap(),
            "pool: hits 7, misses 2, keeps 1 blocks, 5 B (at most 9 B), held 0, 0 B, not kept 3"
        );
        for (name, _) in Pooled::RARE {
            assert!(Pooled::NAMES.contains(&name));
        }
    }

    #[test]
    fn windows_line() {
        assert_eq!(windows(&counts(&[])), None);
        let line = windows(&counts(&[("hits", 7), ("made", 2), ("cached", 9), ("dropped", 1)])).unwrap();
        assert_eq!(line, "windows: hits 7, made 2, cached 9, dropped for calls over them 1");
        assert!(Kept::RARE.iter().all(|(name, _)| Kept::NAMES.contains(name)));
    }
}
