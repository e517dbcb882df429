//! What becomes of ranks when this process has no descriptor left.
//!
//! For a while that is a matter of waiting: descriptors come back. Then it is a refusal: others would wait for ever. Whoever waits to be
//! let in is told by the end of his connection, which takes no descriptor. A rank that can reach nobody fails, and goes on trying to
//! say so; for that two descriptors are held in reserve ([`descriptor::even_of_reserve`]).

use std::sync::Once;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::{Endpoint, Reactor};
use crate::agreement::Event;
use crate::children;
use crate::connection;
use crate::counts::Counts;
use crate::negotiated::Token;
use crate::outcome::Failure;
use windlass_base::descriptor::{self, Ours, WANTED_FOR};

/// The same while ranks of NCCL's are on their way to a root of this process, whatever is wanted: they give theirs back.
const OF_NCCL_WITHIN: Duration = Duration::from_secs(60);

/// Whether something that could not be done is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    Later,
    Refused,
}

impl Reactor {
    /// Something could not be done for this error.
    pub(super) fn lacks(&mut self, what: &str, error: Errno) -> Want {
        log::debug!("bootstrap cannot {what}: {error}, trying again soon");
        Counts::up(&self.shared.counts.starved);
        let since = *self.wanting.get_or_insert_with(Instant::now);
        let within = if self.relays > 0 { OF_NCCL_WITHIN } else { WANTED_FOR };
        if !descriptor::is_want(error) || since.elapsed() < within {
            return Want::Later;
        }
        say_once(error, since.elapsed());
        Want::Refused
    }

    /// Whether there is enough again.
    pub(super) fn look_at_reserve(&mut self) {
        // As many as a connection is let in with: beside a relay one more, for the root.
        let needed = if self.relays > 0 { 2 } else { 1 };
        if descriptor::fill_reserve() && descriptor::are_free(needed) {
            self.wanting = None;
        }
    }

    /// Nobody can be let in to this session. Those who are there hear that it cannot be, the others that nobody is.
    pub(super) fn refuse_session(&mut self, token: Token) {
        self.happen(token, Event::Absent(Failure::Short));
        self.retire(token);
    }

    /// Nobody can be let in to the process listener. Those who wait there lose their host; it opens again for others.
    pub(super) fn refuse_visitors(&mut self, listener: u64) {
        if let Some(Endpoint::ProcessListener(_)) = self.endpoints.get(&listener) {
            self.endpoints.remove(&listener);
            self.open_process_listener_again();
        }
    }

    pub(super) fn open_process_listener_again(&mut self) {
        let is_open =
            self.endpoints.values().any(|endpoint| matches!(endpoint, Endpoint::ProcessListener(_)));
        if is_open || self.process_listener == children::NOBODY {
            return;
        }
        let address = children::address(self.process_listener);
        let listener = address.and_then(|address| connection::listen_locally(&address));
        if let Err(error) = listener.and_then(|listener| self.listen_at_process_listener(listener)) {
            self.lacks("open its process listener again", error);
        }
    }

    pub(super) fn listen_at_process_listener(&mut self, listener: Ours) -> rustix::io::Result<()> {
        let mut watched = self.poll.watch(listener);
        watched.want(EventFlags::IN)?;
        self.endpoints.insert(watched.key(), Endpoint::ProcessListener(watched));
        Ok(())
    }
}

fn say_once(error: Errno, waited: Duration) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        let limit = getrlimit(Resource::Nofile).current;
        let limit = limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string());
        log::error!(
            "no file descriptor could be opened for {} s ({error}; RLIMIT_NOFILE {limit}): communicators that need this process fail",
            waited.as_secs()
        );
    });
}
