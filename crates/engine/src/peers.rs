//! The peer group of a communicator: each rank lends a region of its device's memory and maps the other ranks' regions. Sends, receives and
//! native collectives run over these regions. Nothing here is used with `WINDLASS_PEER_GROUPS=off`.
//!
//! [`ask`] begins an init and waits for no other rank. [`complete`] waits for the other ranks, prepares, and gives each rank's [`InitOutcome`].
//! A communicator keeps its [`PeerGroup`]. Dropping the peer group closes this rank. Its region is freed once all other ranks have
//! closed or died: [`settle`] checks that, after the end of a communicator and on the background worker.
//!
//! This file lists what other modules may use. The modules below it use each other, and never this file.

mod attempts;
mod children;
mod chores;
mod group;
mod growing;
mod health;
mod ids;
mod registry;
mod requests;
mod scalars;
mod setup;
mod shutdown;
mod sleep;

pub use children::{ChildCall, ChildRequest, Lineage, lineage_of, roster_of};
#[cfg(any(test, feature = "fuzzing"))]
pub use chores::fuzz_request;
pub use group::PeerGroup;
pub use health::error_propagation::Went;
pub use setup::asked::Asked;
pub use setup::hosting::{host, is_on, spare_id};
pub use setup::init::{
    InitOutcome, all_here, ask, complete, complete_one, is_one_session, tell, would_be_lazy,
};
pub use setup::offers::common as common_offer;
pub use setup::request::{InitRequest, Laziness, waits};
pub use setup::transports::communicator_bytes;
pub use shutdown::closing::settle;
pub use shutdown::release_all::{StillRegistered, register_nothing};
pub use windlass_bootstrap::children::plan::{ChildPlan, LazyVote, Parent};
pub use windlass_bootstrap::facts::Waiting;
pub use windlass_transport::sequencer::{Afterwards, History};
