//! How deep this thread is in groups, what its open group still has to tell when it ends, and which calls within peer groups it
//! holds till then.
//!
//! NCCL counts per thread, and its count is the one that matters: a group that NCCL refused to open does not shift
//! ours, nor does closing what is not open, and what fails or throws at its end is closed. PyTorch closes all its open
//! groups to make a communicator and opens as many again; nothing is carried across that.

use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::sync::Arc;

use nccl_sys::{ncclComm_t, ncclResult_t};

use crate::features::registration::registering::Candidate;
use crate::forward::init::Handle;
use crate::forward::of_call::OfCall;
use crate::lazy::{LazyCommunicator, Operator};
use crate::peers::{ChildInit, Configured, InitRequest, PeerGroup};
use windlass_base::call::Call;
use windlass_base::gate::Passed;
use windlass_base::gpu::StreamHandle;
use windlass_transport::p2p::Operation;

/// This thread's open group. Few groups await anything: the lists, which have destructors to look after, are let be then.
#[derive(Clone, Copy, Default)]
struct Group {
    depth: u32,
    awaited: u32,
}

thread_local! {
    static GROUP: Cell<Group> = const { Cell::new(Group { depth: 0, awaited: 0 }) };
    /// Never dropped itself: exit drops what its thread has in such storage before it runs any exit handler, and handlers run groups, too.
    static ENDED: ManuallyDrop<RefCell<Ended>> = const {
        ManuallyDrop::new(RefCell::new(Ended {
            awaited: Vec::new(),
            held: Vec::new(),
            lazy_work: Vec::new(),
            candidates: Vec::new(),
            inside: Vec::new(),
            followed: Vec::new(),
            given: Given { communicators: Vec::new(), is_refused: false },
        }))
    };
    static LEFT: Left = const { Left };
}

/// What lets go of an open group with its thread.
struct Left;

impl Drop for Left {
    fn drop(&mut self) {
        drop(with_ended(std::mem::take));
    }
}

fn with_ended<T>(body: impl FnOnce(&mut Ended) -> T) -> T {
    ENDED.with(|ended| body(&mut ended.borrow_mut()))
}

/// What a group leaves at its end.
#[derive(Debug, Default)]
pub struct Ended {
    /// What waited for it.
    pub awaited: Vec<Awaited>,
    /// What it runs within peer groups, in call order, unless that was [taken](take_held).
    pub held: Vec<Held>,
    /// What NCCL is to run of lazy communicators that are not materialized, in call order.
    pub lazy_work: Vec<LazyWork>,
    /// Calls that NCCL runs at its end, and which all ranks have decided on.
    pub candidates: Vec<Waiting>,
    /// Its communicators of NCCL's, in which no thread of ours may be until then.
    pub inside: Vec<Passed<'static>>,
    /// What NCCL runs of it, and ours come after: of each communicator one call, as NCCL joins the streams of a communicator's group.
    pub followed: Vec<Followed>,
    /// What NCCL got of it, of those that have a peer group.
    pub given: Given,
}

/// A call that NCCL runs when its group ends, and that what comes of ours is to wait for.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Followed {
    pub communicator: ncclComm_t,
    pub peer_group: Arc<PeerGroup>,
    pub stream: StreamHandle,
}

/// What NCCL has of a group, where the order of ours asks for that.
#[derive(Debug, Default)]
pub struct Given {
    /// Whose calls, each once.
    pub communicators: Vec<ncclComm_t>,
    /// It has refused one, and will run none.
    pub is_refused: bool,
}

impl Ended {
    /// Most groups leave nothing.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.awaited.is_empty()
            && self.held.is_empty()
            && self.lazy_work.is_empty()
            && self.candidates.is_empty()
            && self.inside.is_empty()
            && self.followed.is_empty()
    }
}

/// What runs within a peer group and waits for the end of its group. Its arguments were looked at.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Held {
    pub communicator: ncclComm_t,
    pub peer_group: Arc<PeerGroup>,
    pub what: Ours,
    pub stream: StreamHandle,
    /// How many communicators NCCL had calls of by then, as far as that is noted.
    pub given: usize,
}

/// What runs within a peer group.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum Ours {
    Message(Operation),
    /// Or NCCL runs it after all: that is known when the group ends.
    Collective(Call),
}

/// A call that NCCL has taken, and runs when its group ends.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Waiting {
    pub peer_group: Arc<PeerGroup>,
    pub candidate: Candidate,
    pub stream: StreamHandle,
}

/// What a lazy communicator waits for NCCL with.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct LazyWork {
    pub lazy: Arc<LazyCommunicator>,
    pub work: Work,
}

/// What NCCL is to run. Its arguments were looked at.
pub enum Work {
    /// A collective, with its reduction if that is the application's own, and its own configuration: both may go meanwhile.
    Call(Call, Option<Arc<Operator>>, Option<OfCall>),
    /// Anything else, which gets NCCL's handle.
    Other(Box<dyn FnOnce(ncclComm_t) -> ncclResult_t>),
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Work::Call(call, ..) => call.fmt(f),
            Work::Other(_) => f.write_str("Other"),
        }
    }
}

/// What waits for the end of a group.
#[derive(Debug)]
pub enum Awaited {
    /// A handle that NCCL writes then.
    Handle(Handle),
    /// One of a communicator whose ranks do not meet.
    Grouped(Handle),
    /// A communicator whose ranks are to meet, and where NCCL wrote its handle.
    Requested(Handle, ncclComm_t, Box<InitRequest>),
    /// One that NCCL makes then, whatever its session came to.
    Made(Handle, ncclComm_t),
    /// A communicator made from another, whose handle NCCL writes then.
    Child(Handle, Configured, Box<ChildInit>),
    /// An init that failed before NCCL came to it, or that NCCL refused: the answer of the group.
    Failed(ncclResult_t),
}

/// Whether this thread has an open group.
pub(crate) fn is_open() -> bool {
    GROUP.get().depth > 0
}

/// NCCL opened a group.
pub(crate) fn opened() {
    GROUP.with(|group| group.set(Group { depth: group.get().depth + 1, ..group.get() }));
}

/// Whether closing a group now leaves nothing to do.
#[inline]
pub(crate) fn leaves_nothing() -> bool {
    GROUP.get().awaited == 0
}

/// NCCL is asked to close a group that leaves nothing.
#[inline]
pub(crate) fn close_empty() {
    let depth = GROUP.get().depth;
    GROUP.set(Group { depth: depth.saturating_sub(1), awaited: 0 });
}

/// A group is about to be closed. At the outermost one, gives what it holds to run within peer groups; NCCL still takes calls.
pub(crate) fn take_held() -> Vec<Held> {
    if GROUP.get().depth != 1 {
        return Vec::new();
    }
    with_ended(|ended| std::mem::take(&mut ended.held))
}

/// NCCL is asked to close a group. At the outermost one, gives what it leaves.
pub(crate) fn closed() -> Ended {
    let awaited = GROUP.with(|group| {
        let Group { depth, awaited } = group.get();
        let left = if depth > 1 { Group { depth: depth - 1, awaited } } else { Group::default() };
        group.set(left);
        if depth > 1 { 0 } else { awaited }
    });
    if awaited == 0 {
        return Ended::default();
    }
    with_ended(std::mem::take)
}

/// This waits for the end of the open group.
pub(crate) fn wait_for(what: Awaited) {
    with_ended(|ended| ended.awaited.push(what));
    one_more();
}

/// This runs at the end of the open group.
pub(crate) fn hold(what: Held) {
    with_ended(|ended| ended.held.push(what));
    one_more();
}

/// NCCL got a call of this communicator in the open group, and took it or not.
pub(crate) fn give(communicator: ncclComm_t, is_taken: bool) {
    with_ended(|Ended { given, .. }| {
        given.is_refused |= !is_taken;
        if !given.communicators.contains(&communicator) {
            given.communicators.push(communicator);
        }
    });
    one_more();
}

/// How many communicators NCCL has calls of in the open group, as far as that is noted.
pub(crate) fn given() -> usize {
    with_ended(|ended| ended.given.communicators.len())
}

/// This goes to NCCL at the end of the open group.
pub(crate) fn hold_lazy_work(what: LazyWork) {
    with_ended(|ended| ended.lazy_work.push(what));
    one_more();
}

/// NCCL runs this call at the end of the open group.
pub(crate) fn hold_candidate(what: Waiting) {
    with_ended(|ended| ended.candidates.push(what));
    one_more();
}

/// To be held while NCCL runs anything of a communicator, which `pass` enters: no thread of ours is in it then. What an open group has
/// begun goes on till its end.
#[inline]
pub(crate) fn enter(pass: impl Fn() -> Option<Passed<'static>>) -> Option<Passed<'static>> {
    let passed = pass()?;
    if is_open() {
        stay_inside(pass()?);
    }
    Some(passed)
}

/// NCCL has more to run of this communicator when the open group ends.
fn stay_inside(passed: Passed<'static>) {
    let is_new = with_ended(|Ended { inside, .. }| {
        let is_new = !inside.iter().rev().any(|known| known.is_of_same_gate(&passed));
        if is_new {
            inside.push(passed);
        }
        is_new
    });
    if is_new {
        one_more();
    }
}

/// What NCCL runs of this when the open group ends is waited for by what comes of ours.
pub(crate) fn follow(what: Followed) {
    let is_new = with_ended(|Ended { followed, .. }| {
        let is_new = !followed.iter().any(|known| known.communicator == what.communicator);
        if is_new {
            followed.push(what);
        }
        is_new
    });
    if is_new {
        one_more();
    }
}

/// The room of a list that has been run is used again.
pub(crate) fn put_back(mut room: Vec<Held>) {
    room.clear();
    with_ended(|Ended { held, .. }| {
        if held.capacity() < room.capacity() && held.is_empty() {
            *held = room;
        }
    });
}

/// As above.
pub(crate) fn put_back_followed(mut room: Vec<Followed>) {
    room.clear();
    with_ended(|Ended { followed, .. }| {
        if followed.capacity() < room.capacity() && followed.is_empty() {
            *followed = room;
        }
    });
}

fn one_more() {
    // A thread that is exiting has no such storage any more, and leaves what it holds to the process's end.
    let _ = LEFT.try_with(|_| ());
    GROUP.with(|group| group.set(Group { awaited: group.get().awaited + 1, ..group.get() }));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Handles come at the outermost end only, once, and closing too often does not count below zero.
    #[test]
    fn nested() {
        let none = |ended: Ended| ended.is_empty();
        opened();
        opened();
        wait_for(Awaited::Handle(Handle(std::ptr::dangling_mut())));
        assert!(is_open());
        assert!(none(closed()));
        assert!(matches!(closed().awaited[..], [Awaited::Handle(_)]));
        assert!(!is_open());
        assert!(none(closed()));
        opened();
        assert!(is_open());
        assert!(none(closed()));
    }

    /// A thread that exits runs its exit handlers after what it had in thread-local storage was dropped, and these run groups.
    #[test]
    fn after_the_end_of_thread_local_storage() {
        struct Late(std::cell::OnceCell<std::sync::mpsc::Sender<bool>>);
        impl Drop for Late {
            fn drop(&mut self) {
                opened();
                wait_for(Awaited::Handle(Handle(std::ptr::dangling_mut())));
                let held = matches!(closed().awaited[..], [Awaited::Handle(_)]);
                self.0.get().unwrap().send(held && LEFT.try_with(|_| ()).is_err()).unwrap();
            }
        }
        thread_local! {
            static LATE: Late = const { Late(std::cell::OnceCell::new()) };
        }
        let (tell, told) = std::sync::mpsc::channel();
        let exits = move || {
            // Used first, so dropped last.
            LATE.with(|late| late.0.set(tell).unwrap());
            opened();
            wait_for(Awaited::Handle(Handle(std::ptr::dangling_mut())));
            closed();
        };
        std::thread::spawn(exits).join().unwrap();
        assert!(told.recv().unwrap());
    }

    /// Groups are the thread's own.
    #[test]
    fn per_thread() {
        opened();
        assert!(!std::thread::spawn(is_open).join().unwrap());
        closed();
    }
}
