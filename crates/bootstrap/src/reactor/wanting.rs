//! Decides how long missing descriptors are waited for, and when ranks are refused because of them.
//!
//! At first the thread waits, since descriptors come back. After a time it refuses, since other ranks would wait for
//! ever. Ranks that wait to be accepted hear that by the end of their connections, which takes no descriptor. A rank
//! that can reach no host fails, and goes on trying to decline. Two descriptors are held in reserve for that
//! ([`descriptor::even_of_reserve`]).

use std::sync::Once;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::approach::Want;
use windlass_base::descriptor::{self, WANTED_FOR};

/// [`WANTED_FOR`] while connections of NCCL's are relayed to a root of this process: they give their descriptors back.
const OF_NCCL_WITHIN: Duration = Duration::from_secs(60);

/// Since when operations have failed for want of descriptors, if they do.
#[derive(Debug, Default)]
pub(super) struct Wanting(Option<Instant>);

impl Wanting {
    /// Notes that an operation failed with this error, while `relays` connections are relayed. Returns whether to try
    /// again.
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

    /// Whether an operation failed for want of descriptors, and they may still be missing.
    pub(super) fn is_wanting(&self) -> bool {
        self.0.is_some()
    }

    /// Ends the want if the reserve is full and there are descriptors to accept with.
    pub(super) fn look_at_reserve(&mut self, relays: usize) {
        // As many as an accepted connection needs: beside a relay one more, for the root.
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
