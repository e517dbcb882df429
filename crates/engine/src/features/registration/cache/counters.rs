//! Counters of registrations, for the report.

use serde::Serialize;

use crate::features::registration::cache::Why;

/// The counters of one cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// How often an allocation was newly registered.
    pub registered: u64,
    /// How often an allocation was found registered.
    pub hits: u64,
    /// [`Why::Refused`]
    pub refused: u64,
    /// [`Why::Failed`]
    pub failed: u64,
    /// [`Why::Full`]
    pub full: u64,
    /// [`Why::Straddles`]
    pub straddles: u64,
    /// How many entries left because their memory was found gone.
    pub changed: u64,
    /// How many entries left because their memory was reported freed.
    pub freed: u64,
    /// How many entries left to make room.
    pub evicted: u64,
    /// How many were deregistered, for any reason.
    pub deregistered: u64,
    /// How many could not be deregistered.
    pub stuck: u64,
    /// How many there are, stuck ones included.
    pub entries: u64,
    /// The largest value of `entries` so far.
    pub entries_highest: u64,
    /// Bytes of these entries.
    pub bytes: u64,
    /// The largest value of `bytes` so far.
    pub bytes_highest: u64,
}

impl Counters {
    pub(crate) fn note(&mut self, why: Why) {
        let counter = match why {
            Why::Straddles => &mut self.straddles,
            Why::Refused => &mut self.refused,
            Why::Full => &mut self.full,
            Why::Failed => &mut self.failed,
        };
        *counter += 1;
    }
}
