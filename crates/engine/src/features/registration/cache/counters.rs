//! What is counted of registrations, for the report.

use serde::Serialize;

use crate::features::registration::cache::Why;

/// One cache. What was registered and neither deregistered nor stuck is there, until the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// How often an allocation was registered.
    pub registered: u64,
    /// How often it was registered already.
    pub hits: u64,
    /// [`Why::Refused`]
    pub refused: u64,
    /// [`Why::Failed`]
    pub failed: u64,
    /// [`Why::Full`]
    pub full: u64,
    /// [`Why::Straddles`]
    pub straddles: u64,
    /// How many left because their memory was seen to have gone.
    pub changed: u64,
    /// How many left because their memory was said to go.
    pub freed: u64,
    /// How many left to make room.
    pub evicted: u64,
    /// How many were given back, for whichever reason.
    pub deregistered: u64,
    /// How many could not be given back.
    pub stuck: u64,
    /// How many there are, stuck ones too.
    pub entries: u64,
    /// The most there ever were.
    pub entries_highest: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The most there ever were.
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
