//! What a rank does next in a suspend or resume, by what the ranks agreed on. Pure; `exploring` walks through all orders.
//!
//! Nothing is given back before all ranks have said that their work is done: a refusal until then changes nothing. From then on a suspend only
//! goes forward. A resume that any rank refuses leaves all ranks asleep, and may be tried again.

use super::ballot::Objection;

/// A step of a suspend or resume. At its end all ranks vote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum SleepStep {
    /// This rank's work ends, and it looks what forbids to sleep.
    Quiet,
    /// It unmaps its peers' memory, and gives its own back.
    LetGo,
    /// It makes its memory again, at the same addresses, and fills it with zeros.
    Make,
    /// It maps the memory of its peers again, and tests it.
    Map,
}

/// What comes after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SleepPlan {
    Go(SleepStep),
    /// The call is over. Whether the communicator sleeps, and why the call failed: which rank refused.
    End {
        sleeps: bool,
        result: Result<(), (u32, Objection)>,
    },
}

impl SleepStep {
    /// The first step of a suspend or resume.
    pub(super) fn first(resumes: bool) -> SleepStep {
        if resumes { SleepStep::Make } else { SleepStep::Quiet }
    }

    /// The number of the step in the communicator's `call`th suspend or resume.
    pub(super) fn number(self, call: u32) -> u32 {
        2 * call + u32::from(matches!(self, SleepStep::LetGo | SleepStep::Map))
    }

    /// Whether a rank stops waiting for the others after some time. Nothing has been given back then.
    pub(super) fn has_deadline(self) -> bool {
        self == SleepStep::Quiet
    }

    /// What comes next. A resume that was refused is undone by letting go once more, alone, before its end.
    pub(super) fn then(self, agreed: Result<(), (u32, Objection)>) -> SleepPlan {
        match (self, agreed) {
            (SleepStep::Quiet, Ok(())) => SleepPlan::Go(SleepStep::LetGo),
            (SleepStep::Make, Ok(())) => SleepPlan::Go(SleepStep::Map),
            (SleepStep::Quiet | SleepStep::Map, result) => {
                SleepPlan::End { sleeps: self == SleepStep::Map && result.is_err(), result }
            }
            (SleepStep::LetGo | SleepStep::Make, result) => SleepPlan::End { sleeps: true, result },
        }
    }
}
