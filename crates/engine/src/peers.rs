//! What the ranks of a communicator share once they have met: each lends a region of its device's memory and maps the
//! others', and the p2p transport over these. Not with `WINDLASS_PEER_GROUPS=off`.
//!
//! [`ask`] begins an init and waits for nobody; [`complete`] waits for the others, prepares and brings each rank's [`InitOutcome`]. A
//! [`PeerGroup`] is kept with its communicator. Dropping it closes this rank; the region goes back when all others have
//! closed or died, which [`settle`] looks for: after the end of a communicator, and on the background worker when
//! something was heard.
//!
//! This file says what others may use. The files below it name each other, and never this one.

mod aliases;
pub mod alive;
mod asked;
mod attempts;
pub mod cached;
pub mod checking;
mod children;
mod chores;
mod closing;
mod deregistration;
mod draining;
mod error_propagation;
mod features;
mod freeing;
mod group;
mod growing;
mod hang_detector;
mod hosting;
mod ids;
mod init;
mod life;
mod offer_pacing;
mod offers;
mod page_layout;
mod preparing;
mod process_exit;
mod recycling;
pub mod registering;
mod registry;
mod release_all;
mod release_socket;
mod request;
mod requests;
mod room;
mod shutdown;
mod side_thread;
mod staging;
mod substitutes;
mod transports;
mod tuned;
mod weak_list;
pub mod windows;
mod worker;

pub use asked::Asked;
pub use children::{
    ChildCall, ChildInit, Configured, Lineage, LocalWait, NewCommunicator, ParentOnNccl, Standing, Wanted,
};
#[cfg(any(test, feature = "fuzzing"))]
pub use chores::fuzz_request;
pub use closing::settle;
pub use deregistration::memory_is_freed;
pub use freeing::let_go;
pub use group::PeerGroup;
pub use hosting::{host, is_on, spare_id};
pub use init::{InitOutcome, all_here, ask, complete, device_now, is_one_session, tell, would_be_lazy};
pub use offers::common as common_offer;
pub use recycling::{free_leaving, look_after_pool, make_room, trim_pool};
pub use release_all::{StillRegistered, register_nothing};
pub use request::{InitRequest, Laziness};
pub use transports::communicator_bytes;
pub use windlass_bootstrap::colors::{Course, LazyVote, Others, Parent};
pub use windlass_bootstrap::facts::Waiting;
pub use windlass_transport::sequencer::Afterwards;
