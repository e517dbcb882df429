//! What the ranks of a communicator call, told to each other and compared: `WINDLASS_CHECK=1`.
//!
//! Each rank writes what it calls, one [entry](Entry) a call, into a ring of its own in memory that all share
//! ([`CheckSlot`]), and goes on. Some thread reads what is there and [compares](compare) it. Where buffers lie is said by windows
//! ([`Places`]), which are numbered alike on all ranks.
//!
//! Here nothing waits, and what comes too late is not compared.

pub(crate) mod compare;
pub(crate) mod entry;
mod kept;
pub(crate) mod places;
pub(crate) mod slot;
pub(crate) mod text;

pub(crate) use kept::{Checking, say_who_does_not, say_why_not};
pub(crate) use slot::words_of;
