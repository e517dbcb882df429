//! The state of one communicator's registrations on this rank, and how far its registered calls are.

use crate::features::registration::agreed::Number;
use crate::features::registration::aliases::Alias;
use crate::features::registration::cache::{Cache, Limits, Use};
use crate::features::registration::offer_pacing::OfferPacing;
use crate::features::registration::staging::Staging;
use windlass_base::gpu::stream::{self, Event};
use windlass_base::gpu::{Failure, Home, StreamHandle};

/// The device memory that a communicator may hold as staging buffers. Calls that need more are not registered.
const STAGING_BYTES_MAX: u64 = 512 << 20;
/// NCCL walks through all registrations for every buffer of every call, so there are few.
const ENTRIES_MAX: usize = 64;
/// How many allocations that cannot be registered are remembered.
const REFUSED_MAX: usize = 64;

/// What is left after the end of a communicator's registrations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Nothing is registered with NCCL any more.
    Clean,
    /// Peers may be writing to registered memory, or NCCL keeps it. It stays for good, and NCCL must not free its communicator,
    /// because NCCL would look for the registrations in memory that it has just freed (2.28.9, commFree).
    Left,
}

/// The state, locked in [`super::Registering`].
#[derive(Debug)]
pub(crate) struct State {
    pub home: Home,
    /// NCCL's communicator, since the first candidate.
    pub real: Option<usize>,
    pub cache: Cache<Alias>,
    pub staging: Staging,
    pub pacing: OfferPacing,
    /// The size that this rank has offered, as log2 of bytes. 0 for none.
    pub offered: u8,
    /// The size for which there was no memory.
    pub size_refused: u8,
    /// The number of the next candidate.
    pub next: Number,
    /// The number of the last registered call.
    pub uses: Use,
    /// How many registered calls NCCL has not begun, because their groups are open.
    pub pending: u32,
    /// Marks the end of the last registered call and of its copies. NCCL runs these calls in order.
    last: Option<Event>,
    /// Whether the marked work ends with a copy, which NCCL does not order.
    last_copied: bool,
    /// Whether work runs that could not be marked.
    pub is_lost: bool,
    pub end: Option<End>,
}

/// How far the registered calls are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Over,
    Running,
    /// The driver answers nothing any more, or a call could not be marked.
    Lost,
}

impl State {
    pub(crate) fn new(home: Home) -> State {
        let limits = Limits { entries_max: ENTRIES_MAX, bytes_max: u64::MAX, refused_max: REFUSED_MAX };
        State {
            home,
            real: None,
            cache: Cache::new(limits),
            staging: Staging::new(STAGING_BYTES_MAX),
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

    /// Whether no kernel of this rank uses the registrations, even if groups hold calls. True if the context is gone.
    pub(crate) fn has_left(&self) -> bool {
        let Some(last) = &self.last else { return true };
        let is_done = || self.home.enter().is_ok_and(|_entered| last.is_done().unwrap_or(false));
        !self.home.is_there() || is_done()
    }

    /// Asks the driver how far the registered calls are.
    pub(crate) fn progress(&self) -> Progress {
        let done = self.last.as_ref().map_or(Ok(true), |last| {
            // Entering relaxes the thread's capture mode. Otherwise another thread's capture would forbid the query.
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

    /// Orders later work on a stream behind the last marked work, on whatever stream that was.
    pub(crate) fn wait(&self, stream: StreamHandle) -> Result<(), Failure> {
        self.last
            .as_ref()
            .map_or(Ok(()), |last| self.home.driver.wait(stream, last, stream::Ordering::Inside))
    }

    /// Marks the work on a stream, and the work that was marked before.
    pub(crate) fn mark(&mut self, stream: StreamHandle, copied: bool) -> Result<(), Failure> {
        let marked = self.try_to_mark(stream, copied);
        self.is_lost |= marked.is_err();
        marked
    }

    /// Marks the work on a stream and all that was marked before, where NCCL may not have run the call that orders the two.
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
