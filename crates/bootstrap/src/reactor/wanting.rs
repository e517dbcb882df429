//! What becomes of ranks when this process has no descriptor left.
//!
//! For a while that is a matter of waiting: descriptors come back. Then it is a refusal: others would wait for ever. Whoever waits to be
//! let in is told by the end of his connection, which takes no descriptor. A rank that can reach nobody fails, and goes on trying to
//! say so; for that two descriptors are held in reserve ([`descriptor::even_of_reserve`]).

use std::sync::Once;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::approach::Want;
use windlass_base::descriptor::{self, WANTED_FOR};

/// The same while ranks of NCCL's are on their way to a root of this process, whatever is wanted: they give theirs back.
const OF_NCCL_WITHIN: Duration = Duration::from_secs(60);

/// Since when something could not be done for want of descriptors, if that is so.
#[derive(Debug, Default)]
pub(super) struct Wanting(Option<Instant>);

impl Wanting {
    /// Something could not be done for this error, while so many connections are relayed.
    pub(super) fn lacks(&mut self, what: &str, error: Errno, relays: usize) -> Want {
        log::debug!("bootstrap cannot {what}: {error}, trying again soon");
        let since = *self.0.get_or_insert_with(Instant::now);
        let within = if relays > 0 { OF_NCCL_WITHIN } else { WANTED_FOR };
        if !descriptor::is_want(error) || since.elapsed() < within {
            return Want::Later;
        }
        say_once(error, since.elapsed());
        Want::Refused
    }

    /// Whether something could not be done, and there may not be enough yet.
    pub(super) fn is_wanting(&self) -> bool {
        self.0.is_some()
    }

    /// Whether there is enough again.
    pub(super) fn look_at_reserve(&mut self, relays: usize) {
        // As many as a connection is let in with: beside a relay one more, for the root.
        let needed = if relays > 0 { 2 } else { 1 };
        if descriptor::fill_reserve() && descriptor::are_free(needed) {
            self.0 = None;
        }
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
