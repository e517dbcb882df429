//! What the application asks for, and what NCCL made of it.

use crate::forward::configuration;
use crate::forward::init::Ctas;
use windlass_base::gpu::Ordinal;
use windlass_bootstrap::facts::Waiting;

/// What is asked for.
#[derive(Clone, Debug)]
pub enum Wanted {
    /// The ranks with this color; none takes part and is in none.
    Split(Option<i32>),
    /// All but these ranks, in any order.
    Shrink(Vec<i32>),
}

/// Whether NCCL has built the parent here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// As on all ranks, as far as is known.
    Built,
    /// It has not.
    Lazy,
    /// It has, but not on a rank that said so.
    Lost,
}

/// A rank of a communicator that NCCL has made.
#[derive(Clone, Copy, Debug)]
pub struct NewCommunicator {
    /// Its device.
    pub device: Ordinal,
    /// Its rank there.
    pub rank: u32,
    /// How many ranks there are.
    pub ranks: u32,
}

/// What a configuration says of a communicator made from another.
#[derive(Clone, Debug)]
pub struct Configured {
    /// Whether the caller waits, where the configuration says.
    pub waiting: Option<Waiting>,
    /// What the configuration says of blocks; the parent's holds where there is none.
    pub ctas: Option<Ctas>,
    /// All of it.
    pub configuration: configuration::Kept,
    /// Whether NCCL lets it use its parent's resources.
    pub shares: bool,
}
