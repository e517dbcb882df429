//! The engine of a stream: a queue and the OS thread that works it off.

use crate::sync::{lock, wait};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex};

type Operation = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub struct Lane {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Operation>,
    submitted: u64,
    completed: u64,
    /// The thread starts with the first operation: many streams never get one.
    started: bool,
    closed: bool,
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
    }
}

impl Lane {
    pub fn submit(self: &Arc<Self>, operation: impl FnOnce() + Send + 'static) -> Marker {
        let mut queue = lock(&self.queue);
        queue.waiting.push_back(Box::new(operation));
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

    /// Everything submitted so far, or nothing if all of it is done.
    pub fn pending(self: &Arc<Self>) -> Option<Marker> {
        let queue = lock(&self.queue);
        (queue.completed < queue.submitted).then(|| Marker { lane: self.clone(), position: queue.submitted })
    }

    /// Lets the thread go once the queue is empty.
    pub fn close(&self) {
        lock(&self.queue).closed = true;
        self.changed.notify_all();
    }

    fn run(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(operation) = queue.waiting.pop_front() {
                drop(queue);
                if catch_unwind(AssertUnwindSafe(operation)).is_err() {
                    // A panic of ours must not leave everyone who waits for this stream hanging.
                    crate::report::line(format_args!("an operation panicked on its stream"));
                }
                queue = lock(&self.queue);
                queue.completed += 1;
                self.changed.notify_all();
            } else if queue.closed {
                return;
            } else {
                queue = wait(&self.changed, queue);
            }
        }
    }
}
