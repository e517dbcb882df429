//! What is counted of the blocks of `ncclMemAlloc`, by number, and the words for readers.

use std::collections::BTreeMap;

use super::named::Named;

/// A count. Those up to [`Pooled::HeldBytes`] are of what there is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Pooled {
    /// Blocks that were freed and are kept.
    Blocks,
    /// Their bytes.
    Bytes,
    /// Blocks that the application has.
    HeldBlocks,
    /// Their bytes.
    HeldBytes,
    /// The most bytes that were kept at once.
    BytesHighest,
    /// How often one was handed out again.
    Hits,
    /// How often NCCL made one.
    Misses,
    /// How many left because more was kept than may be.
    Evicted,
    /// How many left because memory was short, or the application said so.
    Trimmed,
    /// How many were not kept when they were freed: registered still, too large, or not to be used again.
    LetGo,
    /// How often what was kept was freed once more.
    DoubleFrees,
    /// How many somebody else unmapped.
    Forgotten,
}

/// How many there are.
pub const COUNTS: usize = Pooled::Forgotten as usize + 1;

impl Pooled {
    /// Their names in reports, in order.
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

    /// What is said of each only where it is.
    const RARE: [(&'static str, &'static str); 5] = [
        ("evicted", "evicted"),
        ("trimmed", "trimmed"),
        ("let_go", "not kept"),
        ("double_frees", "freed twice"),
        ("forgotten", "unmapped by others"),
    ];
}

/// One line for people, without its end; none if nothing happened.
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
