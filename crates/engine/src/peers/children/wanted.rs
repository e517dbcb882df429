//! A child communicator as data: what the program asks for, and what NCCL made.

use crate::forward::configuration;
use crate::forward::init::Ctas;
use windlass_base::gpu::Ordinal;
use windlass_bootstrap::facts::Waiting;

/// The kind of child that is asked for.
#[derive(Clone, Debug)]
pub enum Wanted {
    /// The ranks with this color. With `None` this rank is in no child.
    Split(Option<i32>),
    /// All but these ranks, which may be in any order.
    Shrink(Vec<i32>),
}

/// Whether NCCL has built the parent here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Built here, and on all ranks as far as this one knows.
    Built,
    /// Not built.
    Lazy,
    /// Built here, but not on a rank that said so.
    Lost,
}

/// A rank of a communicator that NCCL has made.
#[derive(Clone, Copy, Debug)]
pub struct NewCommunicator {
    /// Its device.
    pub device: Ordinal,
    /// Its rank in the new communicator.
    pub rank: u32,
    /// How many ranks there are.
    pub ranks: u32,
}

/// What the configuration of a child communicator says.
#[derive(Clone, Debug)]
pub struct Configured {
    /// Whether the init waits, if the configuration says so.
    pub waiting: Option<Waiting>,
    /// What the configuration says of blocks. If none, the parent's holds.
    pub ctas: Option<Ctas>,
    /// The whole configuration.
    pub configuration: configuration::Kept,
    /// Whether NCCL lets the child use its parent's resources.
    pub shares: bool,
}
