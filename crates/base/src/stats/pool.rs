//! The counts of blocks of `ncclMemAlloc`, by number, and their words for readers.

use std::collections::BTreeMap;

use super::named::Named;

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

/// The number of counts.
pub const COUNTS: usize = Pooled::Forgotten as usize + 1;

impl Pooled {
    /// The names of the counts in reports, in order.
    pub const NAMES: [&'static str; COUNTS] = [
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
pub fn text(counts: &BTreeMap<String, u64>, size: impl Fn(u64) -> String) -> Option<String> {
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

#[cfg(test)]
mod tests {
    use super::super::named::tests::counts;
    use super::*;

    #[test]
    fn one_line() {
        let line = |list: &[(&str, u64)]| text(&counts(list), |bytes| format!("{bytes} B"));
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
}
