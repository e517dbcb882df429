//! Where the ranks of a new communicator find each other.

use crate::peers::setup::hosting::bootstrap;
use windlass_bootstrap::children::Invitation;
use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::{Bootstrap, LocalEntry, local_rendezvous};

use super::lineage::Lineage;

/// Where the ranks of the new communicator find each other: always at one of themselves, so that none of them needs a rank
/// of the parent that is not in it, and that may be done and gone.
#[derive(Debug)]
pub(super) enum SessionPlace {
    /// This rank is in none, or it has said all there that it has to.
    Nowhere,
    /// At the roster of this communicator, which this rank entered before NCCL was asked; or why it could not.
    AtRoster(Result<LocalEntry, String>),
    /// At the process of the first rank, which waits for this one's message: all know who is in it, as they have heard each other.
    AtMember(Invitation),
}

/// Enters the roster of the communicator of this name on this host, if there is one. Waits for the thread of a process that is in the
/// same call, for a while: who has not entered by then has no peer group, nor have the others.
pub(super) fn enter(lineage: &Lineage, child: Option<Token>) -> SessionPlace {
    let Some(child) = child else { return SessionPlace::Nowhere };
    let enter = |bootstrap: &Bootstrap| {
        bootstrap.enter_local(local_rendezvous::name(child), lineage.rank, &|| lineage.has_ended())
    };
    let entered = bootstrap().and_then(enter);
    SessionPlace::AtRoster(entered.map_err(|error| error.to_string()))
}
