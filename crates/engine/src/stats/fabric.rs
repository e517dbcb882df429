//! Whether a communicator has a fabric, as a number in the counters and as text for readers.

/// No fabric was asked for.
pub const NOT_ASKED: u32 = 0;
/// It has one.
pub const YES: u32 = 1;
/// The reasons why it has none begin above this number.
pub const PLAIN: u32 = 100;

/// NCCL made it at its birth.
pub const MADE: u32 = 0;
/// A promise that NCCL has not built.
pub const PROMISED: u32 = 1;
/// A promise that was honoured.
pub const BUILT: u32 = 2;
/// A promise for which NCCL's of an earlier one was taken.
pub const REUSED: u32 = 3;

/// What of NCCL stands behind a communicator: empty where NCCL made it.
pub fn nccl(number: u32) -> &'static str {
    ["", "promised", "built", "reused"].get(number as usize).copied().unwrap_or("")
}

/// What the numbers above [`PLAIN`] mean, from 1.
const REASONS: [&str; 22] = [
    "windlass is switched off",
    "one rank has no peers",
    "more ranks than one host can hold",
    "the caller does not wait",
    "NCCL_COMM_ID is set",
    "more than one id",
    "NCCL's own options forbid peer access",
    "the id has no calling card",
    "ranks run other versions of windlass",
    "the meeting cannot be reached",
    "this rank cannot say where it is",
    "a rank has no windlass or went to NCCL",
    "ranks are on different hosts",
    "ranks are in different network namespaces",
    "ranks share a device",
    "ranks have different options",
    "a device or driver lacks what is needed",
    "a rank could not prepare",
    "made from a communicator without a fabric, grown, or not seen at its birth",
    "made in a group with others, which other ranks may make one after the other",
    "NCCL's own options tie the launches of ranks together",
    "made from a communicator without a fabric, and not all its ranks are on one host with windlass",
];

/// The text of a number: empty, `yes` or the reason.
pub fn text(number: u32) -> &'static str {
    match number {
        NOT_ASKED => "",
        YES => "yes",
        _ => (number as usize)
            .checked_sub(PLAIN as usize + 1)
            .and_then(|index| REASONS.get(index))
            .copied()
            .unwrap_or("a reason that this reader does not know"),
    }
}
