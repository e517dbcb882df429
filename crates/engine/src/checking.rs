//! What the ranks of a communicator call, told to each other and compared: `WINDLASS_CHECK=1`.
//!
//! Each rank writes what it calls, one [entry](Entry) a call, into a ring of its own in memory that all share
//! ([`CheckSlot`]), and goes on. Some thread reads what is there and [compares](compare) it. Where buffers lie is said by windows
//! ([`Places`]), which are numbered alike on all ranks.
//!
//! Here nothing waits, and what comes too late is not compared.

mod compare;
mod entry;
mod places;
mod slot;
mod text;

pub(crate) use compare::{Aspect, Divergence, Rules, compare};
pub(crate) use entry::{Called, Entry, Place, Window};
pub(crate) use places::Places;
pub(crate) use slot::{CheckSlot, Found, words_of};
pub(crate) use text::{absent, divergence};
