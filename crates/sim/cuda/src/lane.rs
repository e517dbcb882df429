//! The engine of a stream: a queue and the OS thread that works it off.

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
    /// With the modelled time at which each was submitted: it begins no earlier.
    waiting: VecDeque<(u64, Operation)>,
    submitted: u64,
    completed: u64,
    /// The modelled time at which the last completed one ended.
    reached_ns: u64,
    /// The thread starts with the first operation: many streams never get one.
    started: bool,
    closed: bool,
}

/// `WINDLASS_SIM_QUEUE`: how much a stream holds before whoever submits more waits.
fn ahead_max() -> usize {
    static MAX: OnceLock<usize> = OnceLock::new();
    *MAX.get_or_init(|| number_from_environment("WINDLASS_SIM_QUEUE").map_or(usize::MAX, |max| max.max(1)))
}

/// A point in a lane: everything submitted before it.
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

    /// Everything submitted so far, whether it is done or not; none if there was nothing.
    pub fn marker(self: &Arc<Self>) -> Option<Marker> {
        let position = lock(&self.queue).submitted;
        (position > 0).then(|| Marker { lane: self.clone(), position })
    }

    /// Lets the thread go once the queue is empty.
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
                    // A panic of ours must not leave everyone who waits for this stream hanging.
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
