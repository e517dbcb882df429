//! The sources of the limits of a communicator's native collectives: as bits in the counters, and in words for readers.

use crate::config::{UNMEASURED, config, of_run};

/// The source of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Source {
    /// Nobody measured it: the limit is small.
    Unmeasured,
    /// A pessimistic model of what was measured on fewer ranks.
    Model,
    /// Measured by this project on such GPUs.
    BuiltIn,
    /// Measured on this machine.
    Cache,
    /// The file that `WINDLASS_TUNING` names.
    File,
}

impl Source {
    /// All sources.
    pub const ALL: [Source; 5] =
        [Source::Unmeasured, Source::Model, Source::BuiltIn, Source::Cache, Source::File];

    /// The source's name for readers.
    pub fn name(self) -> &'static str {
        match self {
            Source::Unmeasured => "unmeasured",
            Source::Model => "model",
            Source::BuiltIn => "built in",
            Source::Cache => "cache",
            Source::File => "file",
        }
    }

    /// How much a limit of this source is worth, after "up to".
    pub fn worth(self) -> &'static str {
        match self {
            Source::Unmeasured => {
                "16 KiB, because nobody measured GPUs of this capability and this number of multiprocessors"
            }
            Source::Model => "a model's limits, because nobody timed so many ranks",
            Source::BuiltIn => "built-in limits, timed on such GPUs",
            Source::Cache => "limits measured on this machine",
            Source::File => "limits of WINDLASS_TUNING",
        }
    }

    /// The source's bit.
    pub fn bit(self) -> u32 {
        1 << self as u32
    }
}

/// Beside the sources' bits: the limit of all-reduces, which are measured first, is a guess. So nobody has measured this machine.
pub const GUESSED: u32 = 1 << 31;

/// That limits are guesses, what measures them, and why that was not done before this process.
pub fn not_measured() -> String {
    let told = of_run(UNMEASURED);
    not_measured_because(match told.as_deref() {
        _ if config().cache.folder().is_none() => {
            "there is no folder for them (WINDLASS_CACHE=off, or no HOME)"
        }
        None => "Windlass was loaded without `windlass run`",
        Some("") => "what `windlass run` has measured does not hold for this communicator",
        Some(why) => why,
    })
}

/// The same, with this reason.
pub fn not_measured_because(why: &str) -> String {
    format!("limits not measured here (`windlass tune` measures them, on idle GPUs): {why}")
}

/// The names of the sources whose bits are set.
pub fn names(bits: u32) -> Vec<String> {
    Source::ALL
        .into_iter()
        .filter(|source| bits & source.bit() != 0)
        .map(|source| source.name().into())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bits are distinct, and read back as names.
    #[test]
    fn bits() {
        assert_eq!(names(Source::Model.bit() | Source::Cache.bit()), ["model", "cache"]);
        assert_eq!(names(u32::MAX).len(), Source::ALL.len());
        assert_eq!(names(0), Vec::<String>::new());
    }
}
