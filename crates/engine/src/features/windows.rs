//! Windows of NCCL's that outlive their deregistration, and how the ranks of a communicator agree to use one again.
//!
//! A window is named by the round that made it, alike on all ranks. In a round every rank says what it registers, and which
//! window of its own it could use for that; [`decide`] says the same on all of them: that window, a new one, or that the call is
//! refused. A rank's windows are in its [`WindowLedger`]. What is said goes over a few words that all ranks share ([`WindowSlot`]).
//!
//! Here nothing waits, and nothing of NCCL's is called.

pub(crate) mod decide;
mod hammering;
mod kept;
pub(crate) mod list;
pub(crate) mod said;
pub(crate) mod slot;

pub(crate) use decide::Rules;
pub(crate) use kept::{
    Course, Health, Making, WindowRequest, Windows, free_leaving, free_left, is_refused_alone, look,
};
pub(crate) use said::WORDS;
