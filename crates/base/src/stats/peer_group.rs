//! Whether a communicator has a peer group, as a number in the counters and as text for readers.

/// No peer group was asked for.
pub const NOT_ASKED: u32 = 0;
/// The communicator has a peer group.
pub const YES: u32 = 1;
/// The numbers above this one are reasons why the communicator has no peer group.
pub const ON_NCCL: u32 = 100;

/// NCCL built its communicator at the init.
pub const MADE: u32 = 0;
/// A lazy communicator that NCCL has not built.
pub const UNBUILT: u32 = 1;
/// A lazy communicator that was materialized.
pub const BUILT: u32 = 2;
/// A lazy communicator that took NCCL's part of an ended one.
pub const REUSED: u32 = 3;

/// The state of NCCL's part of a communicator: empty where NCCL built it at the init.
pub fn nccl(number: u32) -> &'static str {
    ["", "unbuilt", "built", "reused"].get(number as usize).copied().unwrap_or("")
}

/// The reasons of the numbers above [`ON_NCCL`], from 1 on, with what would change each; empty if nothing is known.
const REASONS: [(&str, &str); 27] = [
    ("WINDLASS=off is set", "unset it"),
    ("it has one rank", ""),
    ("it has more than 16 ranks", "smaller communicators split from it can have peer groups"),
    (
        "its init does not wait for the other ranks",
        "make it by an id and outside groups, or with blocking = 1",
    ),
    ("NCCL_COMM_ID is set", "unset it"),
    ("its init has several ids", "make it outside groups"),
    ("NCCL_P2P_DISABLE or NCCL_P2P_LEVEL forbids peer access", "unset both"),
    (
        "its id was made without Windlass",
        "make it outside groups, or preload Windlass into the process that makes ids",
    ),
    ("ranks run unlike versions of Windlass", "install one version"),
    ("this rank could not reach the others", ""),
    ("this rank could not say where it runs", ""),
    (
        "a rank runs without Windlass or went to NCCL",
        "preload Windlass into all ranks, with the same variables",
    ),
    ("ranks are on different hosts", "communicators split from it within a host can have peer groups"),
    (
        "ranks are in different network namespaces",
        "give the containers of a host one network (--network=host)",
    ),
    ("ranks share a GPU", "give each rank its own"),
    ("ranks run unlike builds of Windlass", "install one build"),
    ("a GPU or driver cannot share virtual memory", "`windlass doctor` names it"),
    ("a rank could not prepare", ""),
    ("it was grown, or made from a communicator on NCCL", ""),
    ("it was made in one group with others", "make them one after the other"),
    ("NCCL_LAUNCH_ORDER_IMPLICIT or launchOrderImplicit is set", "unset it"),
    (
        "a rank of it is on another host, has no Windlass or declined",
        "preload Windlass into all ranks, and make it outside groups",
    ),
    ("NCCL_LAUNCH_MODE=GROUP is set, and ranks share a process", "unset it, or run a process for each rank"),
    ("NCCL may take variables from a plugin", "NCCL_ENV_PLUGIN=none ends that"),
    ("ranks have unlike values of WINDLASS_ORDER", "set the same on all ranks"),
    ("ranks have unlike releases of NCCL", "install one release"),
    ("its NCCL is older than 2.26", "use NCCL 2.26.2 or later"),
];

/// The version code of the first release of NCCL with peer groups. Since 2.26 a group runs its communicators in an order that all ranks see
/// alike, by hashes of their ids. Earlier releases ran them in the order of each rank's first calls, which kernels beside NCCL's cannot keep.
pub const NCCL_SINCE: i32 = 22602;

/// The reasons that a user has chosen, or cannot change: switched off, one rank, more than 16 ranks, NCCL_COMM_ID, no peer access by NCCL's
/// variables, several hosts, the parent.
const EXPECTED: [u32; 8] = [1, 2, 3, 5, 7, 13, 19, 22];

/// Whether a text is that of a reason which its user need not be told.
pub fn is_expected(text: &str) -> bool {
    EXPECTED.iter().any(|number| self::text(ON_NCCL + number) == text)
}

fn reason(number: u32) -> Option<&'static (&'static str, &'static str)> {
    REASONS.get((number as usize).checked_sub(ON_NCCL as usize + 1)?)
}

/// The text of a number: empty, `yes` or the reason.
pub fn text(number: u32) -> &'static str {
    match number {
        NOT_ASKED => "",
        YES => "yes",
        _ => reason(number).map_or("a reason that this reader does not know", |(text, _)| text),
    }
}

/// What would change a reason; empty if nothing is known.
pub fn change(number: u32) -> &'static str {
    reason(number).map_or("", |(_, change)| change)
}
