//! Limits of the bootstrap of a process: all that can grow has one.

/// Descriptors that a rank of NCCL opens first.
pub(crate) const OF_A_RANK_OF_NCCL: usize = 2;

/// Limits of the bootstrap of a process.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Ids whose sessions are open at once.
    pub sessions_max: usize,
    /// Calls that make communicators from others, and whose ranks have not all come to our process listener. One more
    /// makes the host forget the oldest for which no rank waits. A rank whose program gives a call up would be expected
    /// while it lives.
    pub calls_max: usize,
    /// Spare ids that are kept. A dropped one costs NCCL as much as a kept one, so there is room for many.
    pub spare_ids_max: usize,
    /// Connections relayed at once to one root of NCCL, which serves one at a time; further ones wait. Each takes two
    /// descriptors where NCCL alone takes one, and NCCL's root ends if none is left for it.
    pub relays_max: usize,
    /// Connections relayed at once to all roots of this process.
    pub relays_of_all_max: usize,
    /// Connections of one session without a greeting yet. A further one closes the oldest.
    pub newcomers_max: usize,
    /// Ranks' connections of one session, also those of ranks that come again.
    pub present_max: usize,
    /// Connections accepted before other sockets get a turn. That many may be accepted beyond the relays' limit.
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
