//! Child communicators, made by a split or shrink. What a rank says and does next is a [plan](windlass_bootstrap::children::plan):
//! [`ChildCall::begin`] comes before the real call and runs it up to there.
//!
//! The ranks of a parent with a peer group may have a round, in which they tell each other where they go. The ranks of a lazy child then meet
//! at their first rank, and NCCL is called only if others need it. Otherwise NCCL makes the child. Its ranks find each other at the
//! roster that they entered before ([`windlass_bootstrap::children::local_rendezvous`]). [`ChildCall::begun`] counts the call.
//! [`ChildCall::ask`] or `refuse` follows. Dropping a call without either says that this rank does not come.

mod call;
mod lineage;
mod tests;

pub use call::{ChildCall, ChildRequest, lineage_of, roster_of};
pub use lineage::Lineage;
pub(super) use lineage::Wait;
