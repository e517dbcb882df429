//! The ways in which a call can run.

/// A way for a call to run. Ranks that take part in one call are always on one path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Path {
    /// The real NCCL runs it, as it came.
    Forward,
    /// The real NCCL runs it, with buffers that are registered with it.
    Registered,
    /// Sends and receives: a kernel of ours runs them, over rings in the ranks' memory.
    P2p,
    /// Collectives: a kernel of ours runs each, over rings in the ranks' memory.
    Native,
}

/// How many [`Path`]s there are.
pub const PATHS: usize = Path::ALL.len();

impl Path {
    /// Every path, in the order in which they are counted.
    pub const ALL: [Path; 4] = [Path::Forward, Path::Registered, Path::P2p, Path::Native];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Path::Forward => "forward",
            Path::Registered => "registered",
            Path::P2p => "p2p",
            Path::Native => "native",
        }
    }
}
