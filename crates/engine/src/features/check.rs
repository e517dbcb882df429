//! Compares what the ranks of a communicator call: `WINDLASS_CHECK=1`.
//!
//! Each rank writes one entry per call into its own ring in the shared page (`CheckSlot`), and goes on. Rank 0 reads the
//! entries and [compares](compare) them. The place of a buffer is told as a window and an offset (`Places`); windows have the same
//! numbers on all ranks.
//!
//! No call waits here. An entry that is overwritten before it is read is not compared.

pub(crate) mod compare;
pub(crate) mod entry;
mod kept;
pub(crate) mod places;
pub(crate) mod slot;
pub(crate) mod text;

pub(crate) use kept::{Checking, say_who_does_not, say_why_not};
pub(crate) use slot::words_of;
