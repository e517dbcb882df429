//! The order of a communicator's operations on a GPU, as a plain value: which operation waits for what. An operation is a turn of Windlass, or a
//! call that NCCL runs.
//!
//! # What is given
//! - NCCL runs its own operations of a communicator one after the other, on whatever streams.
//! - The communicator's event is recorded right behind each turn, and behind NCCL's calls that are followed. Nothing is recorded later, when the
//!   stream may hold work of other communicators.
//! - Streams are told apart by *id*: a new stream may have the handle of a destroyed one whose work still runs.
//!
//! # What follows
//! - A turn waits for the event if its stream has another id than the last recorded one.
//! - NCCL's first call after a turn does so, too. NCCL's later calls come behind that one.
//! - A turn after NCCL's calls comes behind NCCL: on the stream of NCCL's last call, or after a message of NCCL's on its own stream.
//! - Nobody sees launches of a graph. So after the first capture every operation waits for the event, and NCCL's calls are followed.

use windlass_base::gpu::StreamHandle;
use windlass_base::gpu::stream::Place;

/// How graphs that captured a communicator's operations run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Graphs {
    /// Beside other graphs and eager operations, so all are ordered against each other.
    #[default]
    Mixed,
    /// Never while another operation of the communicator is in flight: the program guarantees it (NCCL_GRAPH_MIXING_SUPPORT=0). A program that
    /// breaks its word has two operations in flight at once, in NCCL, too.
    ///
    /// A capture then holds kernels alone, as NCCL's does, so that it may be the body of a conditional node, which may hold no event nodes.
    /// Operations of one capture are still in order.
    Apart,
}

/// What the caller of [`Sequencer::before_nccl`](super::Sequencer::before_nccl) must do once NCCL has taken the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Afterwards {
    /// Nothing.
    Nothing,
    /// Call [`Sequencer::after_nccl`](super::Sequencer::after_nccl): a graph may run on any stream and compares none, so it waits for the event.
    Follow,
    /// The same; the call is part of a capture.
    FollowInCapture,
    /// Call [`Sequencer::nccl_ran`](super::Sequencer::nccl_ran) once NCCL has launched the group of the call. Then later calls need not wait.
    Confirm,
}

/// What a turn needs to come behind NCCL's eager work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum History {
    /// Nothing: it does so anyway, or the program vouches for it ([`Graphs::Apart`]).
    Behind,
    /// A message of NCCL's on the turn's stream, right before it.
    MessageHere,
    /// The turn is captured: a message of NCCL's beside the capture, which is followed. The graph must not depend on what ran before.
    MessageBeside,
}

/// `cudaStreamPerThread`: one handle, but another stream in each thread.
const PER_THREAD: StreamHandle = StreamHandle(2);

/// The order of the operations so far. The sequencer's lock is held.
#[derive(Clone, Debug, Default)]
pub(super) struct Order {
    /// Id of the stream behind whose operation the event was recorded last. 0: behind none, or on a stream that nobody asks for, as graphs share
    /// the order.
    pub(super) recorded: Option<u64>,
    /// Captures have taken operations, so graphs may record the event.
    pub(super) is_shared: bool,
    /// NCCL's eager work behind which the event is not recorded: the stream of its last call.
    nccls: Option<Last>,
    /// Operations were recorded since NCCL's last call that comes behind all of them.
    is_ahead_of_nccl: bool,
}

/// The stream of NCCL's last call.
#[derive(Clone, Copy, Debug)]
struct Last {
    handle: StreamHandle,
    /// Its id at the first of several calls in a row. None if it is not known which stream that was.
    id: Option<u64>,
}

impl Last {
    fn is_on(&self, handle: StreamHandle) -> bool {
        self.handle == handle && self.id.is_some()
    }
}

impl Order {
    /// What a turn needs to come behind NCCL's eager work. `place` asks where the turn goes.
    pub(super) fn history<E>(
        &self,
        graphs: Graphs,
        place: impl FnOnce() -> Result<Place, E>,
    ) -> Result<History, E> {
        let Some(last) = self.nccls else { return Ok(History::Behind) };
        Ok(match place()? {
            Place::Eager(id) if last.id == Some(id) => History::Behind,
            Place::Eager(_) => History::MessageHere,
            Place::Captured(_) if graphs == Graphs::Apart => History::Behind,
            Place::Captured(_) => History::MessageBeside,
        })
    }

    /// Whether an eager operation on a stream of this id has to wait for the event.
    pub(super) fn waits(&self, id: u64) -> bool {
        self.is_shared || self.recorded.is_some_and(|recorded| recorded != id)
    }

    /// Notes that the event was recorded behind an eager turn, or behind NCCL's call that is followed, on a stream of this id.
    pub(super) fn record(&mut self, id: u64, by: Runner) {
        self.recorded = Some(id);
        self.nccls = None;
        self.is_ahead_of_nccl |= by == Runner::Windlass;
    }

    /// Notes that the event was recorded behind no operation.
    pub(super) fn record_nothing(&mut self) {
        self.recorded = self.recorded.or(Some(0));
    }

    /// Notes that a capture took an operation.
    pub(super) fn record_in_capture(&mut self, graphs: Graphs) {
        self.is_shared |= graphs == Graphs::Mixed;
    }

    /// Notes that NCCL gets an eager call, and tells whether it has to wait for the event. `id` asks for the stream's id. `is_certain`: the call
    /// runs unless it is [refused](Order::refuse); NCCL may never launch what a group holds.
    pub(super) fn forward<E>(
        &mut self,
        handle: StreamHandle,
        is_certain: bool,
        id: impl Fn() -> Result<u64, E>,
    ) -> Result<(bool, Afterwards), E> {
        if self.is_shared {
            self.nccls = Some(Last { handle, id: None });
            return Ok((true, Afterwards::Follow));
        }
        let is_known = handle != PER_THREAD && self.nccls.is_some_and(|last| last.is_on(handle));
        let asked = if is_known && !self.is_ahead_of_nccl { None } else { Some(id()?) };
        if !is_known {
            // If NCCL does not launch this call, its last one was on the stream of before.
            let id = asked.filter(|_| is_certain || self.nccls.is_none());
            self.nccls = Some(Last { handle, id });
        }
        let waits = self.is_ahead_of_nccl && asked.is_some_and(|id| self.waits(id));
        let confirms = self.is_ahead_of_nccl && !is_certain;
        self.is_ahead_of_nccl &= !is_certain;
        Ok((waits, if confirms { Afterwards::Confirm } else { Afterwards::Nothing }))
    }

    /// Notes that NCCL has launched a call after [`Afterwards::Confirm`], and no turn came since.
    pub(super) fn confirm(&mut self) {
        self.is_ahead_of_nccl = false;
    }

    /// Notes that nobody knows what NCCL has run, nor behind what: it refused a call, its group failed, or the driver did.
    pub(super) fn doubt(&mut self) {
        self.is_ahead_of_nccl = true;
        self.nccls = Some(Last { handle: PER_THREAD, id: None });
    }
}

/// Who runs an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Runner {
    Windlass,
    Nccl,
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAMS: usize = 2;
    /// Operations before something has ended, as bits.
    type Before = u32;

    /// A small GPU that runs what the order lets it run: for each place what has surely ended before anything that is issued there now.
    #[derive(Clone, Debug, Default)]
    struct World {
        order: Order,
        ids: [u64; STREAMS],
        streams: [Before; STREAMS],
        /// The other thread's second stream.
        other: (u64, Before),
        /// The communicator's own stream.
        history: Before,
        event: Before,
        /// Before NCCL's next operation.
        nccl: Before,
        all: Before,
        graphs: Vec<Held>,
        next_id: u64,
        steps: Vec<Step>,
    }

    /// Who has operations in a graph.
    #[derive(Clone, Copy, Debug)]
    enum Held {
        Windlass,
        Nccl,
    }

    /// What becomes of a call that NCCL gets.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Fate {
        Runs,
        Refused,
        /// Its group runs, or fails before NCCL has launched it.
        Grouped,
        Dropped,
        /// The driver has failed to order it, and NCCL runs it all the same. Graphs do not learn of it.
        Unordered,
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Turn(usize),
        Forward(usize, Fate),
        /// NCCL's call on one stream and a turn on another one in one group.
        Group(usize, usize),
        Capture(Held),
        Launch(usize),
        /// The stream is destroyed, and the next one has its handle.
        Anew(usize),
        /// Another thread goes on, whose per-thread stream is another one.
        OtherThread,
    }

    const STEPS: [Step; 19] = [
        Step::Turn(0),
        Step::Turn(1),
        Step::Forward(0, Fate::Runs),
        Step::Forward(1, Fate::Runs),
        Step::Forward(0, Fate::Refused),
        Step::Forward(1, Fate::Refused),
        Step::Forward(0, Fate::Dropped),
        Step::Forward(1, Fate::Dropped),
        Step::Forward(0, Fate::Grouped),
        Step::Forward(1, Fate::Grouped),
        Step::Forward(0, Fate::Unordered),
        Step::Group(0, 0),
        Step::Group(0, 1),
        Step::Capture(Held::Windlass),
        Step::Capture(Held::Nccl),
        Step::Launch(0),
        Step::Launch(1),
        Step::Anew(0),
        Step::OtherThread,
    ];

    impl World {
        fn new() -> World {
            World { ids: [1, 2], other: (3, 0), next_id: 4, ..World::default() }
        }

        fn place(&self, stream: usize) -> Place {
            Place::Eager(self.ids[stream])
        }

        /// One operation that begins after `before`, which must be all.
        fn run(&mut self, before: Before) -> Before {
            assert_eq!(before & self.all, self.all, "too early in the last of {:?}", self.steps);
            let bit = self.all + 1;
            self.all |= bit;
            before | bit
        }

        /// NCCL's message on the communicator's own stream.
        fn message(&mut self) {
            let id = || Ok::<_, ()>(1000);
            let (waits, _) = self.order.forward(StreamHandle(50), true, id).unwrap();
            if waits {
                self.history |= self.event;
            }
            self.history |= self.nccl;
            (self.nccl, self.event) = (self.history, self.history);
            self.order.record(1000, Runner::Nccl);
        }

        fn turn(&mut self, stream: usize, is_behind_nccl: bool) {
            let place = self.place(stream);
            let history = if is_behind_nccl { Ok(History::Behind) } else { self.history(place) };
            if history == Ok(History::MessageHere) {
                self.streams[stream] |= self.nccl;
                self.nccl = self.streams[stream];
            }
            if self.order.waits(self.ids[stream]) {
                self.streams[stream] |= self.event;
            }
            self.streams[stream] = self.run(self.streams[stream]);
            self.event = self.streams[stream];
            self.order.record(self.ids[stream], Runner::Windlass);
        }

        fn history(&self, place: Place) -> Result<History, ()> {
            self.order.history(Graphs::Mixed, || Ok(place))
        }

        fn forward(&mut self, stream: usize, fate: Fate) {
            if fate == Fate::Unordered {
                if self.order.is_shared {
                    return;
                }
                self.order.doubt();
                self.all |= self.all + 1;
                self.streams[stream] |= self.nccl | self.all & !(self.all >> 1);
                self.nccl = self.streams[stream];
                return;
            }
            let (id, is_certain) = (self.ids[stream], matches!(fate, Fate::Runs | Fate::Refused));
            let handle = [StreamHandle(100), PER_THREAD][stream];
            let (waits, afterwards) = self.order.forward(handle, is_certain, || Ok::<_, ()>(id)).unwrap();
            if waits {
                self.streams[stream] |= self.event;
            }
            let runs = matches!(fate, Fate::Runs | Fate::Grouped);
            if runs {
                let after = self.run(self.streams[stream] | self.nccl);
                (self.streams[stream], self.nccl) = (after, after);
            }
            match afterwards {
                _ if fate == Fate::Refused => {}
                Afterwards::Nothing => {}
                Afterwards::Confirm if runs => self.order.confirm(),
                Afterwards::Confirm => {}
                Afterwards::Follow | Afterwards::FollowInCapture => {
                    self.event = self.streams[stream];
                    self.order.record(0, Runner::Nccl);
                }
            }
            if !runs && (is_certain || afterwards != Afterwards::Nothing) {
                self.order.doubt();
            }
        }

        fn capture(&mut self, held: Held) {
            let capture = windlass_base::gpu::stream::Capture { id: self.next_id, graph: 1 };
            self.next_id += 1;
            if matches!(held, Held::Windlass)
                && self.history(Place::Captured(capture)) == Ok(History::MessageBeside)
            {
                self.message();
            }
            if self.order.recorded.is_none() {
                self.event = self.history;
                self.order.record_nothing();
            }
            self.order.record_in_capture(Graphs::Mixed);
            self.graphs.push(held);
        }

        fn launch(&mut self, stream: usize) {
            for held in self.graphs.clone() {
                let nccls = if matches!(held, Held::Nccl) { self.nccl } else { 0 };
                let after = self.run(self.streams[stream] | self.event | nccls);
                (self.streams[stream], self.event) = (after, after);
                if matches!(held, Held::Nccl) {
                    self.nccl = after;
                }
            }
        }

        fn step(&mut self, step: Step) {
            self.steps.push(step);
            match step {
                Step::Turn(stream) => self.turn(stream, false),
                Step::Forward(stream, fate) => self.forward(stream, fate),
                Step::Group(nccls, ours) => {
                    self.streams[nccls] |= self.streams[ours];
                    self.forward(nccls, Fate::Grouped);
                    self.streams[ours] |= self.streams[nccls];
                    self.turn(ours, true);
                    self.streams[nccls] |= self.streams[ours];
                }
                Step::Capture(held) => self.capture(held),
                Step::Launch(stream) => self.launch(stream),
                Step::OtherThread => {
                    std::mem::swap(&mut self.ids[1], &mut self.other.0);
                    std::mem::swap(&mut self.streams[1], &mut self.other.1);
                }
                Step::Anew(stream) => {
                    (self.ids[stream], self.streams[stream]) = (self.next_id, 0);
                    self.next_id += 1;
                }
            }
        }

        fn explore(&self, depth: usize) {
            for step in STEPS.iter().filter(|_| depth > 0) {
                let mut next = self.clone();
                next.step(*step);
                next.explore(depth - 1);
            }
        }
    }

    /// Every operation runs after all before it: in all sequences of five of these steps, and by hand of six.
    #[test]
    fn no_operation_runs_too_early() {
        World::new().explore(5);
    }
}
