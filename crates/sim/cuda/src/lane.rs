//! A stream's queue of operations, and the OS thread `sim-stream` that runs them in order.

use crate::clock;
use crate::simulator::number_from_environment;
use crate::sync::{lock, wait};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, OnceLock};

type Operation = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub struct Lane {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    /// Each operation with the modelled time of its submission, before which it cannot begin.
    waiting: VecDeque<(u64, Operation)>,
    submitted: u64,
    completed: u64,
    /// The modelled time at which the last completed operation ended.
    reached_ns: u64,
    /// Whether the thread runs. The first operation starts it: many streams never get one.
    started: bool,
    closed: bool,
}

/// `WINDLASS_SIM_QUEUE`: how many operations a stream queues before [`Lane::submit`] waits.
fn ahead_max() -> usize {
    static MAX: OnceLock<usize> = OnceLock::new();
    *MAX.get_or_init(|| number_from_environment("WINDLASS_SIM_QUEUE").map_or(usize::MAX, |max| max.max(1)))
}

/// A point in a lane, reached when everything submitted before it is done.
pub struct Marker {
    lane: Arc<Lane>,
    position: u64,
}

impl Marker {
    pub fn wait(&self) {
        let mut queue = lock(&self.lane.queue);
        while queue.completed < self.position {
            queue = wait(&self.lane.changed, queue);
        }
        clock::not_before(queue.reached_ns);
    }

    pub fn is_reached(&self) -> bool {
        lock(&self.lane.queue).completed >= self.position
    }
}

impl Lane {
    pub fn submit(self: &Arc<Self>, operation: impl FnOnce() + Send + 'static) -> Marker {
        let mut queue = lock(&self.queue);
        while queue.waiting.len() >= ahead_max() {
            queue = wait(&self.changed, queue);
        }
        queue.waiting.push_back((clock::now(), Box::new(operation)));
        queue.submitted += 1;
        if !queue.started {
            queue.started = true;
            let lane = self.clone();
            std::thread::Builder::new()
                .name("sim-stream".into())
                .spawn(move || lane.run())
                .expect("a stream needs a thread");
        }
        self.changed.notify_all();
        Marker { lane: self.clone(), position: queue.submitted }
    }

    /// The point after everything submitted so far; `None` if nothing ever was.
    pub fn marker(self: &Arc<Self>) -> Option<Marker> {
        let position = lock(&self.queue).submitted;
        (position > 0).then(|| Marker { lane: self.clone(), position })
    }

    /// Ends the thread once the queue is empty; does not wait for that.
    pub fn close(&self) {
        lock(&self.queue).closed = true;
        self.changed.notify_all();
    }

    fn run(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some((submitted_ns, operation)) = queue.waiting.pop_front() {
                drop(queue);
                clock::not_before(submitted_ns);
                if catch_unwind(AssertUnwindSafe(operation)).is_err() {
                    // The operation counts as completed, so that nobody who waits for this stream hangs.
                    crate::report::line(format_args!("an operation panicked on its stream"));
                }
                queue = lock(&self.queue);
                queue.completed += 1;
                queue.reached_ns = clock::now();
                self.changed.notify_all();
            } else if queue.closed {
                return;
            } else {
                queue = wait(&self.changed, queue);
            }
        }
    }
}
