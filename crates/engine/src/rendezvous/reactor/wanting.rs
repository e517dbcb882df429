//! What becomes of ranks when this process has no descriptor left.
//!
//! For a while that is a matter of waiting: descriptors come back. Then it is a refusal, which all others hear: they would
//! wait for ever. What it takes to hear and to tell them is held in reserve ([`descriptor::even_of_reserve`]), one connection at a time.

use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::Reactor;
use crate::contract::Token;
use crate::descriptor;
use crate::rendezvous::agreement::{Event, Seat};
use crate::rendezvous::counts::Counts;
use crate::rendezvous::derived::Invitation;
use crate::rendezvous::message::FromRank;
use crate::rendezvous::verdict::{Failure, Reason, Verdict};

/// How long descriptors are waited for.
const WITHIN: Duration = Duration::from_secs(3);
/// Of no connection.
const NOBODYS_KEY: u64 = 0;

/// Whether something that could not be done is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    Later,
    Refused,
}

impl Reactor {
    /// Something could not be done for this error.
    pub(super) fn lacks(&mut self, what: &str, error: Errno) -> Want {
        Counts::up(&self.shared.counts.starved);
        let since = *self.wanting.get_or_insert_with(Instant::now);
        if !descriptor::is_want(error) || since.elapsed() < WITHIN {
            log::debug!("rendezvous cannot {what}: {error}, trying again soon");
            return Want::Later;
        }
        Want::Refused
    }

    /// Whether descriptors have been wanting for too long.
    pub(super) fn is_short(&self) -> bool {
        self.wanting.is_some_and(|since| since.elapsed() >= WITHIN)
    }

    pub(super) fn look_at_reserve(&mut self) {
        let was_short = self.is_short();
        if descriptor::fill_reserve() && descriptor::are_free(1) {
            self.wanting = None;
        } else if was_short {
            static SAID: std::sync::Once = std::sync::Once::new();
            SAID.call_once(|| {
                let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
                let limit = limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string());
                log::error!(
                    "no file descriptor is left for {} s (limit RLIMIT_NOFILE {limit}): communicators that need this process fail",
                    WITHIN.as_secs()
                );
            });
        }
    }

    /// All ranks of this meeting hear that it cannot be.
    pub(super) fn refuse_meeting(&mut self, token: Token) {
        self.happen(token, Event::Absent(Failure::Short));
    }

    /// Somebody has come to the lobby by a descriptor of the reserve.
    pub(super) fn refuse_invited(&mut self, invitation: &Invitation) {
        let Invitation { call, child, .. } = *invitation;
        self.end_round(child, Failure::Short);
        if call == child {
            return self.happen(child, Event::Absent(Failure::Short));
        }
        // Ranks of a roster have what NCCL gave them.
        let words = Failure::Short.to_string();
        let said = FromRank::Decline(Verdict::Plain(Reason::Unreachable { words }));
        self.happen(child, Event::Said(Seat(NOBODYS_KEY), said));
    }
}
