//! What the ranks of a communicator share once they have met: each lends a region of its device's memory and maps the
//! others', and the p2p transport over these. Not with `WINDLASS_PEER_GROUPS=off`.
//!
//! [`ask`] begins an init and waits for nobody; [`complete`] waits for the others, prepares and brings each rank's [`InitOutcome`]. A
//! [`PeerGroup`] is kept with its communicator. Dropping it closes this rank; the region goes back when all others have
//! closed or died, which [`settle`] looks for: after the end of a communicator, and on the background worker when
//! something was heard.
//!
//! This file says what others may use. The files below it name each other, and never this one.

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

pub use children::{
    ChildCall, ChildInit, Configured, Lineage, LocalWait, NewCommunicator, ParentOnNccl, Standing, Wanted,
};
#[cfg(any(test, feature = "fuzzing"))]
pub use chores::fuzz_request;
pub use group::PeerGroup;
pub use setup::asked::Asked;
pub use setup::hosting::{host, is_on, spare_id};
pub use setup::init::{
    InitOutcome, all_here, ask, complete, device_now, is_one_session, tell, would_be_lazy,
};
pub use setup::offers::common as common_offer;
pub use setup::request::{InitRequest, Laziness};
pub use setup::transports::communicator_bytes;
pub use shutdown::closing::settle;
pub use shutdown::release_all::{StillRegistered, register_nothing};
pub use windlass_bootstrap::colors::{Course, LazyVote, Others, Parent};
pub use windlass_bootstrap::facts::Waiting;
pub use windlass_transport::sequencer::Afterwards;
