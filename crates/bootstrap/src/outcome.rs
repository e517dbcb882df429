//! The outcomes of a session, and their reasons.

use nccl_sys::{
    ncclInternalError, ncclInvalidArgument, ncclInvalidUsage, ncclRemoteError, ncclResult_t, ncclSystemError,
};

use crate::negotiated::bytes::{Reader, Writer};

/// The most bytes of a rank's own words for its refusal.
pub const WORDS_BYTES_MAX: usize = 200;

/// What a session decided, the same for all ranks that hear it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionOutcome {
    /// All ranks confirmed.
    PeerGroup,
    /// There is no peer group: NCCL runs every call.
    OnNccl(FallbackReason),
    /// There will be no communicator.
    Failed(Failure),
}

/// Declares each case with its wire code and its text. `number` fields are `u32` ranks or counts, `words` fields are
/// text.
macro_rules! coded {
    ($(#[$meta:meta])* $type:ident { $($code:literal $name:ident $(($($field:ident: $kind:ident),*))? = $about:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum $type {
            $(#[doc = $about] $name $({ $(#[doc = "As the sentence says."] $field: coded!(@type $kind)),* })?,)*
        }

        impl $type {
            /// Its code in messages and counters.
            pub fn number(&self) -> u16 {
                match self {
                    $($type::$name $({ $($field: _),* })? => $code,)*
                }
            }

            fn put(&self, writer: &mut Writer) {
                match self {
                    $($type::$name $({ $($field),* })? => {
                        writer.u16($code);
                        $($(coded!(@put writer, $field, $kind);)*)?
                    })*
                }
            }

            fn take(reader: &mut Reader<'_>) -> Option<$type> {
                Some(match reader.u16()? {
                    $($code => $type::$name $({ $($field: coded!(@take reader, $kind)),* })?,)*
                    _ => return None,
                })
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self {
                    $($type::$name $({ $($field),* })? => {
                        f.write_str($about)?;
                        $($(coded!(@write f, $field, $kind);)*)?
                        Ok(())
                    })*
                }
            }
        }
    };
    (@write $f:ident, $field:ident, number) => { write!($f, ", {} {}", stringify!($field), $field)? };
    (@write $f:ident, $field:ident, words) => { write!($f, ": {}", $field)? };
    (@type number) => { u32 };
    (@type words) => { String };
    (@put $writer:ident, $field:ident, number) => { $writer.u32(*$field) };
    (@put $writer:ident, $field:ident, words) => { $writer.counted($field.as_bytes(), WORDS_BYTES_MAX) };
    (@take $reader:ident, number) => { $reader.u32()? };
    (@take $reader:ident, words) => { String::from_utf8_lossy($reader.counted(WORDS_BYTES_MAX)?).into_owned() };
}

coded! {
    /// Why a communicator has no peer group.
    FallbackReason {
        1 SwitchedOff = "WINDLASS=off is set",
        2 OneRank = "it has one rank",
        3 ManyRanks = "it has more than 16 ranks",
        4 NonBlocking = "its init does not wait for the other ranks",
        5 CommId = "NCCL_COMM_ID is set",
        6 ManyIds = "its init has several ids",
        7 PeerAccess = "NCCL_P2P_DISABLE or NCCL_P2P_LEVEL forbids peer access",
        8 NoIdTag = "its id was made without Windlass",
        9 OtherVersion = "ranks run unlike versions of Windlass",
        10 Unreachable(words: words) = "this rank could not reach the others",
        11 NoIdentity(words: words) = "this rank could not say where it runs",
        12 NonWindlass = "a rank runs without Windlass or went to NCCL",
        13 OtherHost(rank: number, other: number) = "ranks are on different hosts",
        14 OtherNetwork(rank: number, other: number) = "ranks are in different network namespaces",
        15 SameDevice(rank: number, other: number) = "ranks share a GPU",
        16 OtherOptions(rank: number, other: number) = "ranks run unlike builds of Windlass",
        17 Incapable(rank: number) = "a GPU or driver cannot share virtual memory",
        18 Refused(rank: number, words: words) = "a rank could not prepare",
        19 Child = "it was grown, or made from a communicator on NCCL",
        20 Grouped = "it was made in one group with others",
        21 ImplicitOrder = "NCCL_LAUNCH_ORDER_IMPLICIT or launchOrderImplicit is set",
        22 Apart = "a rank of it is on another host, has no Windlass or declined",
        23 LaunchBarrier(rank: number, other: number) = "NCCL_LAUNCH_MODE=GROUP is set, and ranks share a process",
        24 UnseenValues = "NCCL may take variables from a plugin",
        25 OtherOrder(rank: number, other: number) = "ranks have unlike values of WINDLASS_ORDER",
        26 OtherNccl(rank: number, other: number) = "ranks have unlike releases of NCCL",
        27 OldNccl = "its NCCL is older than 2.26",
    }
}

coded! {
    /// Why there is no communicator.
    Failure {
        1 Lost(rank: number) = "a rank left before the outcome was known",
        2 HostLost = "the process that hosts the session left before the outcome was known",
        3 Aborted = "this rank was aborted",
        4 Mismatch(rank: number, ranks: number, expected: number) = "ranks disagree on their number",
        5 Duplicate(rank: number) = "a rank reported twice",
        6 Disorder(rank: number) = "a rank spoke out of turn",
        7 Unreadable = "the host of the session sent what cannot be read",
        8 Absent(rank: number) = "a rank of the communicator it is made from died, or its own call failed",
        9 Short = "a rank's process has no file descriptor left",
    }
}

impl FallbackReason {
    /// The rank whose reason it is, where the reason is one rank's, and what it says for itself. None for the rank is this rank.
    pub fn of_one_rank(&self) -> Option<(Option<u32>, &str)> {
        match self {
            FallbackReason::NoIdentity { words } | FallbackReason::Unreachable { words } => {
                Some((None, words))
            }
            FallbackReason::Refused { rank, words } => Some((Some(*rank), words)),
            FallbackReason::Incapable { rank } => Some((Some(*rank), "")),
            _ => None,
        }
    }
}

impl Failure {
    /// The result that NCCL returns in a like case.
    pub fn code(&self) -> ncclResult_t {
        match self {
            Failure::Lost { .. } | Failure::HostLost | Failure::Absent { .. } => ncclRemoteError,
            Failure::Short => ncclSystemError,
            Failure::Mismatch { .. } => ncclInvalidArgument,
            Failure::Duplicate { .. } => ncclInvalidUsage,
            // NCCL's own waits return this when they are aborted.
            Failure::Aborted | Failure::Disorder { .. } | Failure::Unreadable => ncclInternalError,
        }
    }
}

impl SessionOutcome {
    pub(super) fn put(&self, writer: &mut Writer) {
        match self {
            SessionOutcome::PeerGroup => drop(writer.u8(0)),
            SessionOutcome::OnNccl(reason) => reason.put(writer.u8(1)),
            SessionOutcome::Failed(failure) => failure.put(writer.u8(2)),
        }
    }

    pub(super) fn take(reader: &mut Reader<'_>) -> Option<SessionOutcome> {
        Some(match reader.u8()? {
            0 => SessionOutcome::PeerGroup,
            1 => SessionOutcome::OnNccl(FallbackReason::take(reader)?),
            2 => SessionOutcome::Failed(Failure::take(reader)?),
            _ => return None,
        })
    }
}

/// Cuts words to [`WORDS_BYTES_MAX`] bytes, between characters.
pub(super) fn bounded(words: &str) -> String {
    words[..words.floor_char_boundary(WORDS_BYTES_MAX)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The codes that callers see, as NCCL's bootstrap gives them; and words are cut between characters.
    #[test]
    fn codes_and_words() {
        assert_eq!(Failure::Lost { rank: 1 }.code(), ncclRemoteError);
        assert_eq!(Failure::HostLost.code(), ncclRemoteError);
        assert_eq!(Failure::Aborted.code(), ncclInternalError);
        assert_eq!(bounded(&"é".repeat(150)), "é".repeat(100));
        assert_eq!(bounded("x"), "x");
        assert_eq!(
            FallbackReason::OtherHost { rank: 1, other: 0 }.to_string(),
            "ranks are on different hosts, rank 1, other 0"
        );
        assert_eq!(
            FallbackReason::Refused { rank: 1, words: "no room".into() }.to_string(),
            "a rank could not prepare, rank 1: no room"
        );
    }
}
