//! Kept windows: windows that stay in NCCL after their deregistration, and the round in which a communicator's ranks agree to use one again.
//!
//! The number of the round that made a window names it on all ranks. In a round every rank says what it registers, and which of its
//! windows would fit. [`decide`] then has one result on all ranks: that window, a new one, or a
//! refusal. A `WindowLedger` lists a rank's windows. Ranks speak through a few words of the shared page (`WindowSlot`).
//!
//! Only [`kept`] waits for other ranks and calls NCCL. The other files do neither.

pub(crate) mod decide;
mod hammering;
mod kept;
pub(crate) mod list;
pub(crate) mod said;
pub(crate) mod slot;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use decide::Rules;
pub(crate) use kept::{Course, Health, Making, WindowRequest, Windows, free_leaving, free_left, look};
pub(crate) use said::WORDS;
