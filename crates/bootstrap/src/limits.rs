//! What bounds the bootstrap of a process: whatever can grow has a limit.

/// Descriptors that a rank of NCCL's opens first.
pub(crate) const OF_A_RANK_OF_NCCL: usize = 2;

/// What bounds the bootstrap of a process.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Ids whose sessions are open at once.
    pub sessions_max: usize,
    /// Calls that make communicators from others, whose ranks have not all been at our process listener; of more, the oldest one is
    /// forgotten for which nobody waits. A rank whose program gives a call up would be waited for as long as it lives.
    pub calls_max: usize,
    /// Ids kept that nobody uses. One that is dropped costs NCCL as much as one that is kept: room for many.
    pub spare_ids_max: usize,
    /// Connections that are relayed at once to one of NCCL's roots, which serves one at a time; more wait. Each takes two
    /// descriptors where NCCL alone takes one, and NCCL's root ends where none is left for it.
    pub relays_max: usize,
    /// The same to all roots of this process.
    pub relays_of_all_max: usize,
    /// Connections of one session that have not said who they are; more push the oldest out.
    pub newcomers_max: usize,
    /// Ranks' connections of one session, with those that come again.
    pub present_max: usize,
    /// Connections taken before others get a turn. So many may be taken that are one too many to be relayed.
    pub accepts_per_turn: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            sessions_max: 1024,
            calls_max: 1024,
            spare_ids_max: 1024,
            relays_max: 16,
            relays_of_all_max: 64,
            newcomers_max: 128,
            present_max: 64,
            accepts_per_turn: 8,
        }
    }
}
