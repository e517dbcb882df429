//! The ways in which a call can run.

/// A way for a call to run. Ranks that take part in one call are always on one path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Path {
    /// The real NCCL runs the call with the very same arguments.
    Forward,
    /// The real NCCL runs the call over buffers that Windlass has registered with it.
    Registered,
    /// A kernel of Windlass runs sends, receives, all-to-alls, gathers and scatters, over rings in the ranks' memory.
    P2p,
    /// A kernel of Windlass runs collectives, one or several of a group, over rings in the ranks' memory.
    Native,
}

/// How many [`Path`]s there are.
pub const PATHS: usize = Path::ALL.len();

impl Path {
    /// Every path, in the order in which they are counted.
    pub const ALL: [Path; 4] = [Path::Forward, Path::Registered, Path::P2p, Path::Native];

    /// The path's name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Path::Forward => "forward",
            Path::Registered => "registered",
            Path::P2p => "p2p",
            Path::Native => "native",
        }
    }
}
