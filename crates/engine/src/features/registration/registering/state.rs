//! What a rank has of a communicator that registers, and how far its registered calls are.

use crate::features::registration::agreed::Number;
use crate::features::registration::aliases::Alias;
use crate::features::registration::cache::{Cache, Limits, Use};
use crate::features::registration::offer_pacing::OfferPacing;
use crate::features::registration::staging::Staging;
use windlass_base::config::config;
use windlass_base::gpu::stream::{self, Event};
use windlass_base::gpu::{Failure, Home, StreamHandle};

/// NCCL walks through all registrations for every buffer of every call.
const ENTRIES_MAX: usize = 64;
/// Allocations that cannot be registered, remembered.
const REFUSED_MAX: usize = 64;

/// What an end leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// NCCL has nothing of ours any more.
    Clean,
    /// Peers may be writing to what is registered, or NCCL keeps it: it stays for good, and NCCL must not free its communicator,
    /// since it looks for what is registered where it has just freed it (2.28.9, commFree).
    Left,
}

/// What this rank has of it.
#[derive(Debug)]
pub(crate) struct State {
    pub home: Home,
    /// NCCL's communicator, once it was asked for something.
    pub real: Option<usize>,
    pub cache: Cache<Alias>,
    pub staging: Staging,
    pub pacing: OfferPacing,
    /// Up to which size this rank has offered, as a power of two; 0 for nothing.
    pub offered: u8,
    /// There was no memory to offer that size.
    pub size_refused: u8,
    /// The number of the next candidate.
    pub next: Number,
    /// Calls that are registered.
    pub uses: Use,
    /// How many of them NCCL has not begun: those of open groups.
    pub pending: u32,
    /// Marks the end of the last that it has, and of what was copied; NCCL runs them in turn.
    last: Option<Event>,
    /// Whether that one copied, which NCCL knows nothing of.
    last_copied: bool,
    /// Something runs that could not be marked.
    pub is_lost: bool,
    pub end: Option<End>,
}

/// How far the calls that were registered are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Over,
    Running,
    /// The driver answers nothing any more, or did not when a call was to be marked.
    Lost,
}

impl State {
    pub(crate) fn new(home: Home) -> State {
        let limits = Limits { entries_max: ENTRIES_MAX, bytes_max: u64::MAX, refused_max: REFUSED_MAX };
        State {
            home,
            real: None,
            cache: Cache::new(limits),
            staging: Staging::new(config().staging_bytes_max),
            pacing: OfferPacing::new(),
            offered: 0,
            size_refused: u8::MAX,
            next: 1,
            uses: Use::default(),
            pending: 0,
            last: None,
            last_copied: false,
            is_lost: false,
            end: None,
        }
    }

    /// Whether no kernel of this rank uses anything, whatever groups still hold. In a context that is gone nothing runs.
    pub(crate) fn has_left(&self) -> bool {
        let Some(last) = &self.last else { return true };
        let is_done = || self.home.enter().is_ok_and(|_entered| last.is_done().unwrap_or(false));
        !self.home.is_there() || is_done()
    }

    /// Asks the driver.
    pub(crate) fn progress(&self) -> Progress {
        let done = self.last.as_ref().map_or(Ok(true), |last| {
            // Relaxed: another thread's capture forbids the question else.
            let _entered = self.home.enter()?;
            last.is_done()
        });
        match done {
            Err(_) => Progress::Lost,
            Ok(_) if self.is_lost => Progress::Lost,
            Ok(true) if self.pending == 0 => Progress::Over,
            Ok(_) => Progress::Running,
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.progress() == Progress::Over
    }

    /// What comes next on a stream comes after what was copied last, whatever stream that was on.
    pub(crate) fn wait(&self, stream: StreamHandle) -> Result<(), Failure> {
        self.last
            .as_ref()
            .map_or(Ok(()), |last| self.home.driver.wait(stream, last, stream::Ordering::Inside))
    }

    /// Marks what a stream holds, and what was marked before.
    pub(crate) fn mark(&mut self, stream: StreamHandle, copied: bool) -> Result<(), Failure> {
        let marked = self.try_to_mark(stream, copied);
        self.is_lost |= marked.is_err();
        marked
    }

    /// Marks what a stream holds and all that was marked before, where NCCL may not have run the call that orders the two.
    pub(crate) fn mark_behind(&mut self, stream: StreamHandle) -> Result<(), Failure> {
        let marked = self.wait(stream).and_then(|()| self.try_to_mark(stream, true));
        self.is_lost |= marked.is_err();
        marked
    }

    fn try_to_mark(&mut self, stream: StreamHandle, copied: bool) -> Result<(), Failure> {
        if self.last_copied {
            self.wait(stream)?;
        }
        let last = match self.last.take() {
            Some(last) => last,
            None => Event::new(self.home.driver)?,
        };
        self.last_copied = copied;
        self.last.insert(last).record(stream, stream::Ordering::Inside)
    }
}
