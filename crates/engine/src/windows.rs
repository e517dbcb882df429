//! Windows of NCCL's that outlive their deregistration, and how the ranks of a communicator agree to use one again.
//!
//! A window is named by the round that made it, alike on all ranks. In a round every rank says what it registers, and which
//! window of its own it could use for that; [`decide`] says the same on all of them: that window, a new one, or that the call is
//! refused. A rank's windows are in its [`WindowLedger`]. What is said goes over a few words that all ranks share ([`WindowSlot`]).
//!
//! Here nothing waits, and nothing of NCCL's is called.

mod decide;
mod hammering;
mod list;
mod said;
mod slot;

pub(crate) use decide::{Decided, Decision, Rules, Unlike, decide};
pub(crate) use list::{Ended, Record, Standing, WindowLedger};
pub(crate) use said::{Said, WORDS};
pub(crate) use slot::{Round, Seen, WindowSlot};

/// Names a window on all ranks, from 1; 0 names none.
pub(crate) type Number = u64;
