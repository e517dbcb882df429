//! What is counted of registrations, for the report.

use serde::Serialize;

use crate::registration::Why;

/// One cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// How often something was registered.
    pub registered: u64,
    /// How often a buffer was registered already.
    pub hits: u64,
    /// How often a buffer was to be staged.
    pub staged: Staged,
    /// Registrations that there are, retired and stuck ones too.
    pub entries: u64,
    /// The most there ever were.
    pub entries_highest: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The most there ever were.
    pub bytes_highest: u64,
    /// How often one left to make room.
    pub evicted: u64,
    /// How often one was retired: its memory was freed, or other memory seen in its place.
    pub retired: u64,
    /// Retired ones that wait for other ranks, or for graphs.
    pub waiting: u64,
    /// How often one was given back.
    pub deregistered: u64,
    /// How often that failed.
    pub stuck: u64,
    /// Allocations known not to be registrable.
    pub refused: u64,
    /// Registrations of the application's own that there are.
    pub applications: u64,
    /// How often a buffer lay in one of them.
    pub applications_hits: u64,
}

/// Why buffers were to be staged: see [`Why`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Staged {
    /// [`Why::Straddles`]
    pub straddles: u64,
    /// [`Why::Waits`]
    pub waits: u64,
    /// [`Why::Stuck`]
    pub stuck: u64,
    /// [`Why::Applications`]
    pub applications: u64,
    /// [`Why::Full`]
    pub full: u64,
    /// [`Why::Refused`]
    pub refused: u64,
    /// [`Why::Failed`]
    pub failed: u64,
}

impl Staged {
    pub(super) fn note(&mut self, why: Why) {
        let counter = match why {
            Why::Straddles => &mut self.straddles,
            Why::Waits => &mut self.waits,
            Why::Stuck => &mut self.stuck,
            Why::Applications => &mut self.applications,
            Why::Full => &mut self.full,
            Why::Refused => &mut self.refused,
            Why::Failed => &mut self.failed,
        };
        *counter += 1;
    }

    /// All of them.
    pub fn all(&self) -> u64 {
        let Staged { straddles, waits, stuck, applications, full, refused, failed } = *self;
        straddles + waits + stuck + applications + full + refused + failed
    }
}
