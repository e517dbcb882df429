//! Groups: the calls and tasks that a thread holds until its outermost group ends.

use crate::communicator::Communicator;
use crate::driver::driver;
use crate::operation::{self, Queued};
use crate::profiler;
use crate::refusal::{Outcome, refuse};
use nccl_sys::*;
use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

/// How long after the answer the work of nonblocking communicators begins.
const LAUNCHES_AFTER: Duration = Duration::from_millis(1);

/// Work that may block on peers: inits, splits, windows, ends.
pub struct Task {
    /// The communicator whose state gets the result.
    pub communicator: Arc<Communicator>,
    /// Tasks of one communicator run one after another, others beside each other.
    pub work: Box<dyn FnOnce() -> Outcome + Send>,
    pub blocking: Blocking,
}

/// Whether the end of the group waits for a task.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Blocking {
    /// As the communicator was configured.
    AsConfigured,
    /// Always: the handle, through which the result could be asked, is gone afterwards.
    Always,
}

#[derive(Default)]
struct Group {
    depth: u32,
    error: Option<ncclResult_t>,
    tasks: Vec<Task>,
    calls: Vec<Queued>,
}

thread_local! {
    /// Never dropped: exit handlers of an ending thread may still end communicators.
    static GROUP: ManuallyDrop<RefCell<Group>> = ManuallyDrop::default();
}

fn with_group<T>(body: impl FnOnce(&mut Group) -> T) -> T {
    GROUP.with(|group| body(&mut group.borrow_mut()))
}

/// Groups that users have opened and not ended, in all threads.
pub static OPEN: AtomicI64 = AtomicI64::new(0);

pub fn start() {
    with_group(|group| group.depth += 1);
}

pub fn depth() -> u32 {
    with_group(|group| group.depth)
}

/// Whether this thread has a group open.
pub fn is_open() -> bool {
    with_group(|group| group.depth > 0)
}

/// `ncclGroupStart`.
pub fn start_by_user() {
    start();
    OPEN.fetch_add(1, SeqCst);
}

/// `ncclGroupEnd`.
pub fn end_by_user() -> Outcome {
    if with_group(|group| group.depth) > 0 {
        OPEN.fetch_sub(1, SeqCst);
    }
    end()
}

/// Keeps an error for the end of this thread's open group, if there is one.
pub fn note<T>(outcome: Outcome<T>) -> Outcome<T> {
    if let Err(code) = outcome
        && code != ncclInProgress
    {
        with_group(|group| {
            if group.depth > 0 {
                group.error = Some(code);
            }
        });
    }
    outcome
}

/// Holds a call for the group's end. As NCCL, refuses one whose stream is not in the capture of the communicator's other calls.
pub fn hold(call: Queued) -> Outcome {
    let is_other = |held: &&Queued| Arc::ptr_eq(&held.communicator, &call.communicator);
    let other = with_group(|group| group.calls.iter().find(is_other).map(|held| held.call.stream));
    if let Some(other) = other.filter(|other| *other != call.call.stream) {
        let capture = |stream| Ok(driver()?.captured(stream)?.map(|captured| captured.capture));
        if capture(other)? != capture(call.call.stream)? {
            return refuse(
                ncclInvalidUsage,
                "Streams given to a communicator within a NCCL group must either be all uncaptured or all captured by the same graph.",
            );
        }
    }
    with_group(|group| group.calls.push(call));
    Ok(())
}

/// Runs a task when the outermost group ends; at once if none is open.
pub fn run(task: Task) -> Outcome {
    start();
    with_group(|group| group.tasks.push(task));
    end()
}

/// Runs the last work of a communicator when the outermost group ends, and waits for it even if the communicator is nonblocking.
pub fn run_last(communicator: Arc<Communicator>, work: impl FnOnce() -> Outcome + Send + 'static) -> Outcome {
    let held = with_group(|group| group.depth > 0);
    if !held {
        return work();
    }
    run(Task { communicator, work: Box::new(work), blocking: Blocking::Always })
}

/// Leaves a group; the end of the outermost one runs its tasks, then its calls.
pub fn end() -> Outcome {
    let Some(group) = leave()? else { return Ok(()) };
    profiler::ends();
    let result = run_group(group);
    profiler::ended();
    result
}

fn run_group(group: Group) -> Outcome {
    let Group { error, tasks, calls, .. } = group;
    if let Some(code) = error {
        return Err(code);
    }
    let configured = tasks.iter().map(|task| (&task.communicator, task.blocking));
    let configured = configured.chain(calls.iter().map(|call| (&call.communicator, Blocking::AsConfigured)));
    // As in NCCL, a task that ends a communicator makes the whole group blocking.
    let mut kinds: Vec<bool> = configured
        .clone()
        .filter(|(_, how)| *how == Blocking::AsConfigured)
        .map(|(own, _)| own.config.blocking)
        .collect();
    let ends = configured.clone().any(|(_, how)| how == Blocking::Always);
    kinds.dedup();
    if kinds.len() > 1 {
        let text = "Blocking and nonblocking communicators are not allowed in the same group.";
        return refuse(ncclInvalidArgument, text);
    }
    let blocking = ends || kinds.first().copied().unwrap_or(true);
    if blocking || tasks.is_empty() && calls.is_empty() {
        return run_tasks(tasks).and_then(|()| operation::launch_all(calls));
    }
    run_behind(tasks, calls);
    Err(ncclInProgress)
}

/// `ncclGroupSimulateEnd`: ends the group, runs its tasks but not its calls, and gives the number of calls.
pub fn end_simulated() -> Outcome<usize> {
    if with_group(|group| group.depth) > 0 {
        OPEN.fetch_sub(1, SeqCst);
    }
    match leave()? {
        Some(Group { error: Some(code), .. }) => Err(code),
        Some(Group { tasks, calls, .. }) => run_tasks(tasks).map(|()| calls.len()),
        None => Ok(0),
    }
}

/// Leaves one level; gives the group if it was the outermost.
fn leave() -> Outcome<Option<Group>> {
    with_group(|group| {
        if group.depth == 0 {
            return refuse(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
        }
        group.depth -= 1;
        Ok((group.depth == 0).then(|| std::mem::take(group)))
    })
}

/// Runs tasks and waits for them, those of several communicators on a thread each. Gives the first error.
fn run_tasks(tasks: Vec<Task>) -> Outcome {
    let mut queues: Vec<Vec<Task>> = Vec::new();
    for task in tasks {
        match queues.iter_mut().find(|queue| Arc::ptr_eq(&queue[0].communicator, &task.communicator)) {
            Some(queue) => queue.push(task),
            None => queues.push(vec![task]),
        }
    }
    if queues.len() <= 1 {
        return queues.pop().map_or(Ok(()), run_queue);
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = queues.into_iter().map(|queue| scope.spawn(|| run_queue(queue))).collect();
        let results: Vec<Outcome> =
            threads.into_iter().map(|thread| thread.join().unwrap_or(Err(ncclInternalError))).collect();
        results.into_iter().collect()
    })
}

/// Runs the tasks of one communicator on its device.
fn run_queue(queue: Vec<Task>) -> Outcome {
    let run = |Task { communicator, work, .. }| in_context_of(&communicator, work);
    queue.into_iter().map(run).fold(Ok(()), Outcome::and)
}

/// Runs `body` with the communicator's device, and restores the thread's.
pub fn in_context_of(communicator: &Communicator, body: impl FnOnce() -> Outcome) -> Outcome {
    driver()?.within(communicator.context, communicator.device, body)
}

/// Runs tasks and calls of nonblocking communicators on a background thread, and sets their states. Does not wait.
fn run_behind(tasks: Vec<Task>, calls: Vec<Queued>) {
    let mut communicators: Vec<Arc<Communicator>> = Vec::new();
    for communicator in
        tasks.iter().map(|task| &task.communicator).chain(calls.iter().map(|call| &call.communicator))
    {
        communicator.set_state(ncclInProgress);
        communicators.push(communicator.clone());
    }
    std::thread::spawn(move || {
        // Late, so that work that does not wait for a launch overtakes it.
        std::thread::sleep(LAUNCHES_AFTER);
        let work = || run_tasks(tasks).and_then(|()| operation::launch_all(calls));
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        let code = result.unwrap_or(Err(ncclInternalError)).err().unwrap_or(ncclSuccess);
        communicators.iter().for_each(|communicator| communicator.set_state(code));
    });
}
