//! Keeps this thread's open group: its depth, the calls that it holds, and what else waits for its outermost end. Thread-local: no locks.
//!
//! The depth follows NCCL's count of the thread. A group that NCCL refused to open does not count, closing without an open group
//! does not go below zero, and a group whose end fails or throws is closed. PyTorch closes all its open groups to make a communicator
//! and opens as many again; nothing is carried across that.

mod joint;

use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::sync::Arc;

use nccl_sys::{ncclComm_t, ncclResult_t};

use crate::features::registration::registering::Candidate;
use crate::forward::device;
use crate::forward::init::Handle;
use crate::forward::of_call::OfCall;
use crate::lazy::{LazyCommunicator, Operator};
use crate::peers::{Afterwards, ChildCall, InitRequest, PeerGroup};
use windlass_base::call::Call;
use windlass_base::gate::Passed;
use windlass_base::gpu::{Ordinal, StreamHandle};
use windlass_bootstrap::outcome::FallbackReason;
use windlass_transport::p2p::Operation;

pub(crate) use joint::{Joint, Joints, PartLane, Runs};

/// This thread's open group: its depth, and the number of entries in [`ENDED`], those of passed gates apart. Most groups have no others, and
/// their end is short.
#[derive(Clone, Copy, Default)]
struct Group {
    depth: u32,
    awaited: u32,
    inside: u32,
}

thread_local! {
    static GROUP: Cell<Group> = const { Cell::new(Group { depth: 0, awaited: 0, inside: 0 }) };
    /// The streams of calls that NCCL has got, while no communicator has a second one: most groups have no more, and need no [`Joints`].
    static FORWARDED: Forwarded =
        const { Forwarded { pairs: [const { Cell::new((0, 0)) }; FORWARDED_MAX], count: Cell::new(0) } };
    /// The device that NCCL alone would have set last on this thread, as far as noted.
    static SET: Cell<Option<Ordinal>> = const { Cell::new(None) };
    /// Never dropped: `exit` drops its thread's thread-local values before it runs exit handlers, and handlers run groups, too.
    static ENDED: ManuallyDrop<RefCell<Ended>> = const {
        ManuallyDrop::new(RefCell::new(Ended {
            awaited: Vec::new(),
            held: Vec::new(),
            lazy_work: Vec::new(),
            candidates: Vec::new(),
            inside: Vec::new(),
            followed: Vec::new(),
            joints: Joints::NONE,
            sleeps: Vec::new(),
        }))
    };
    static LEFT: Left = const { Left };
}

/// Drops what an open group holds when its thread ends.
struct Left;

impl Drop for Left {
    fn drop(&mut self) {
        drop(with_ended(std::mem::take));
    }
}

fn with_ended<T>(body: impl FnOnce(&mut Ended) -> T) -> T {
    ENDED.with(|ended| body(&mut ended.borrow_mut()))
}

/// What a group has collected for its end.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    /// Inits and failures that wait for the end.
    pub awaited: Vec<Awaited>,
    /// Held calls, in call order, unless they were [taken](take_held).
    pub held: Vec<Held>,
    /// Work for NCCL on lazy communicators that are not materialized, in call order.
    pub lazy_work: Vec<LazyWork>,
    /// Registration candidates that NCCL runs at the end.
    pub candidates: Vec<Waiting>,
    /// Passes of the gates: no thread of Windlass may be in NCCL with these communicators until the end.
    pub inside: Vec<Passed<'static>>,
    /// Calls that NCCL runs and later kernels of Windlass wait for: one call of each communicator suffices, as NCCL joins all streams of a
    /// communicator in a group.
    pub followed: Vec<Followed>,
    /// The streams of communicators of which Windlass may run a part, or with several streams.
    pub(crate) joints: Joints,
    /// Suspends and resumes, in call order.
    pub(crate) sleeps: Vec<SleepWork>,
}

/// A suspend or resume of a communicator with a peer group.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub(crate) struct SleepWork {
    pub communicator: ncclComm_t,
    pub resumes: bool,
    /// Whether NCCL has its part of the call yet.
    pub nccl_has: bool,
}

/// A call that NCCL runs when its group ends, and that later kernels of Windlass must wait for.
#[derive(Debug)]
#[allow(missing_docs)]
pub(crate) struct Followed {
    pub communicator: ncclComm_t,
    pub peer_group: Arc<PeerGroup>,
    pub stream: StreamHandle,
    pub afterwards: Afterwards,
}

impl Ended {
    /// Whether the group has collected nothing, as most groups.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.awaited.is_empty()
            && self.held.is_empty()
            && self.lazy_work.is_empty()
            && self.candidates.is_empty()
            && self.inside.is_empty()
            && self.followed.is_empty()
            && self.joints.is_empty()
            && self.sleeps.is_empty()
    }
}

/// A held call, or one message of it. Its arguments were checked.
#[derive(Debug)]
#[allow(missing_docs)]
pub(crate) struct Held {
    pub communicator: ncclComm_t,
    pub peer_group: Arc<PeerGroup>,
    pub what: Ours,
    pub stream: StreamHandle,
}

/// What a kernel of Windlass may run.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub(crate) enum Ours {
    Message(Operation),
    /// NCCL may run it after all: decided when the group ends.
    Collective(Call),
}

/// A registration candidate that NCCL has taken, and runs when its group ends.
#[derive(Debug)]
#[allow(missing_docs)]
pub(crate) struct Waiting {
    pub peer_group: Arc<PeerGroup>,
    pub candidate: Candidate,
    pub stream: StreamHandle,
}

/// Work for NCCL on a lazy communicator that is not materialized.
#[derive(Debug)]
#[allow(missing_docs)]
pub(crate) struct LazyWork {
    pub lazy: Arc<LazyCommunicator>,
    pub work: Work,
}

/// What NCCL is to run. Its arguments were checked.
pub(crate) enum Work {
    /// A collective, with its operation if the application made that, and a copy of its configuration: the application may free both.
    Call(Call, Option<Arc<Operator>>, Option<OfCall>),
    /// Any other work, which gets NCCL's handle.
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
pub(crate) enum Awaited {
    /// A communicator on NCCL for this reason, whose handle NCCL writes at the end.
    Handle(Handle, FallbackReason),
    /// A communicator whose ranks are to meet, and the handle that NCCL wrote.
    Requested(Handle, ncclComm_t, Box<InitRequest>),
    /// A communicator that NCCL makes at the end, whatever the outcome of its session.
    Made(Handle, ncclComm_t),
    /// A child communicator, whose handle NCCL writes at the end.
    Child(Handle, Box<ChildCall>),
    /// A call or init that failed: the group returns this code.
    Failed(ncclResult_t),
}

/// The device that NCCL alone would have set last on this thread. None if it may have set none.
pub(crate) fn device_set() -> Option<Ordinal> {
    SET.get()
}

/// Notes that NCCL alone would have set this device on this thread.
#[inline]
pub(crate) fn set_device(device: Ordinal) {
    SET.set(Some(device));
}

/// The same for a call after which NCCL sets the device that the thread had. Without a context that is the one that was set before.
pub(crate) fn restore_device() {
    device::if_current().into_iter().for_each(set_device);
}

/// Whether this thread has an open group.
pub(crate) fn is_open() -> bool {
    GROUP.get().depth > 0
}

/// Called after NCCL has opened a group.
pub(crate) fn opened() {
    GROUP.with(|group| group.set(Group { depth: group.get().depth + 1, ..group.get() }));
}

/// Whether closing a group now leaves nothing to do but leaving gates.
#[inline]
pub(crate) fn leaves_nothing() -> bool {
    GROUP.get().awaited == 0
}

/// Called when NCCL closes a group that leaves nothing. Returns the passes of gates, to be [given back](put_back_inside) once NCCL has run
/// the group.
#[inline]
pub(crate) fn close_empty() -> Vec<Passed<'static>> {
    let Group { depth, inside, .. } = GROUP.get();
    if depth > 1 {
        GROUP.set(Group { depth: depth - 1, awaited: 0, inside });
        return Vec::new();
    }
    GROUP.set(Group::default());
    FORWARDED.with(Forwarded::forget);
    if inside == 0 { Vec::new() } else { with_ended(|ended| std::mem::take(&mut ended.inside)) }
}

/// Leaves the gates of a group that has ended, and keeps the list's memory.
pub(crate) fn put_back_inside(mut room: Vec<Passed<'static>>) {
    room.clear();
    if room.capacity() > 0 {
        with_ended(|ended| {
            if ended.inside.capacity() == 0 {
                ended.inside = room;
            }
        });
    }
}

/// Takes the held calls before the outermost group is closed, while NCCL still takes calls. Empty for an inner group.
pub(crate) fn take_held() -> Vec<Held> {
    if GROUP.get().depth != 1 {
        return Vec::new();
    }
    with_ended(|ended| std::mem::take(&mut ended.held))
}

/// Called when NCCL closes a group. Takes all that the outermost group has collected; empty for an inner group.
pub(crate) fn closed() -> Ended {
    let awaited = GROUP.with(|group| {
        let Group { depth, awaited, inside } = group.get();
        let left = if depth > 1 { Group { depth: depth - 1, awaited, inside } } else { Group::default() };
        group.set(left);
        if depth > 1 { 0 } else { awaited + inside }
    });
    if !is_open() {
        FORWARDED.with(Forwarded::forget);
    }
    if awaited == 0 {
        return Ended::default();
    }
    with_ended(std::mem::take)
}

/// Notes the stream of a call in the open group; whether NCCL has a call of the communicator there already. `peer_group` finds that of a communicator. `ncclInvalidUsage` where NCCL would refuse the
/// call because of its stream; the group then fails, too.
#[inline]
pub(crate) fn join(
    communicator: ncclComm_t,
    stream: StreamHandle,
    runs: Runs,
    peer_group: impl Fn(ncclComm_t) -> Option<Arc<PeerGroup>>,
) -> Result<bool, ncclResult_t> {
    let noted = match runs {
        Runs::Nccl => FORWARDED.with(|forwarded| forwarded.note(communicator as usize, stream.0)),
        Runs::Held => None,
    };
    match noted {
        Some(is_known) => Ok(is_known),
        None => join_several(communicator, stream, runs, peer_group),
    }
}

#[inline(never)]
fn join_several(
    communicator: ncclComm_t,
    stream: StreamHandle,
    runs: Runs,
    peer_group: impl Fn(ncclComm_t) -> Option<Arc<PeerGroup>>,
) -> Result<bool, ncclResult_t> {
    let (joined, are_new) = with_ended(|Ended { joints, .. }| {
        let before = joints.len();
        let mut add = |communicator, stream, runs| joints.add(communicator, stream, runs, &peer_group);
        let mut forwarded = FORWARDED.with(Forwarded::take);
        let all = forwarded.try_for_each(|(communicator, stream)| {
            add(communicator as ncclComm_t, StreamHandle(stream), Runs::Nccl).map(drop)
        });
        let joined = all.and_then(|()| add(communicator, stream, runs));
        (joined, joints.len() - before)
    });
    (0..are_new).for_each(|_| one_more());
    joined.inspect_err(|code| wait_for(Awaited::Failed(*code)))
}

/// The streams of calls that NCCL has got in the open group: as many pairs of a communicator and its stream as one thread has GPUs.
struct Forwarded {
    pairs: [Cell<(usize, usize)>; FORWARDED_MAX],
    /// How many there are; [`SPILT`] once the group has [`Joints`], which have them all.
    count: Cell<usize>,
}

const FORWARDED_MAX: usize = 8;
const SPILT: usize = FORWARDED_MAX + 1;

impl Forwarded {
    /// Notes a stream; whether it was noted before. None where the communicator has another one, or there is no room.
    fn note(&self, communicator: usize, stream: usize) -> Option<bool> {
        let count = self.count.get();
        if count == SPILT {
            return None;
        }
        match self.pairs[..count].iter().map(Cell::get).find(|(known, _)| *known == communicator) {
            Some((_, known)) => (known == stream).then_some(true),
            None if count < FORWARDED_MAX => {
                self.pairs[count].set((communicator, stream));
                self.count.set(count + 1);
                Some(false)
            }
            None => None,
        }
    }

    /// Takes all pairs; from now on the group has [`Joints`].
    fn take(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let count = self.count.replace(SPILT) % SPILT;
        let pairs = self.pairs.each_ref().map(Cell::get);
        pairs.into_iter().take(count)
    }

    fn forget(&self) {
        self.count.set(0);
    }
}

/// Gives back the memory of a group's joints.
pub(crate) fn put_back_joints(room: Joints) {
    let room = room.emptied();
    with_ended(|Ended { joints, .. }| {
        if joints.is_empty() && joints.capacity() < room.capacity() {
            *joints = room;
        }
    });
}

/// Adds an init or failure to the open group.
pub(crate) fn wait_for(what: Awaited) {
    keep(|ended| ended.awaited.push(what))
}

/// Has the open group fail, if there is one: NCCL runs nothing of it. Returns the code.
pub(crate) fn fail(code: ncclResult_t) -> ncclResult_t {
    if is_open() {
        wait_for(Awaited::Failed(code));
    }
    code
}

/// Adds a held call to the open group.
pub(crate) fn hold(what: Held) {
    keep(|ended| ended.held.push(what))
}

/// Adds work on a lazy communicator, which goes to NCCL at the end of the open group.
pub(crate) fn hold_lazy_work(what: LazyWork) {
    keep(|ended| ended.lazy_work.push(what))
}

/// Whether the open group has a suspend or resume of a communicator.
pub(crate) fn holds_sleep(communicator: ncclComm_t) -> bool {
    with_ended(|ended| ended.sleeps.iter().any(|work| work.communicator == communicator))
}

/// Adds a suspend or resume, which runs at the end of the open group.
pub(crate) fn hold_sleep(what: SleepWork) {
    keep(|ended| ended.sleeps.push(what))
}

/// Whether the open group holds work on this lazy communicator.
pub(crate) fn holds_lazy_work(lazy: &Arc<LazyCommunicator>) -> bool {
    !leaves_nothing()
        && with_ended(|Ended { lazy_work, .. }| lazy_work.iter().any(|held| Arc::ptr_eq(&held.lazy, lazy)))
}

/// Adds a registration candidate, which NCCL runs at the end of the open group.
pub(crate) fn hold_candidate(what: Waiting) {
    keep(|ended| ended.candidates.push(what))
}

/// Passes a communicator's gate: while the result lives, no thread of Windlass is in NCCL with the communicator. An open group keeps
/// another pass until its end.
#[inline]
pub(crate) fn enter(pass: impl Fn() -> Option<Passed<'static>>) -> Option<Passed<'static>> {
    let passed = pass()?;
    if is_open() {
        stay_inside(pass()?);
    }
    Some(passed)
}

/// Keeps a pass until the open group ends, one for each gate.
fn stay_inside(passed: Passed<'static>) {
    let is_new = with_ended(|Ended { inside, .. }| {
        let is_new = !inside.iter().rev().any(|known| known.is_of_same_gate(&passed));
        if is_new {
            inside.push(passed);
        }
        is_new
    });
    if is_new {
        let _ = LEFT.try_with(|_| ());
        GROUP.with(|group| group.set(Group { inside: group.get().inside + 1, ..group.get() }));
    }
}

/// Notes a call of NCCL's, so that later kernels of Windlass wait for it once the open group has ended.
pub(crate) fn follow(what: Followed) {
    let is_new = with_ended(|Ended { followed, .. }| {
        let is_new = !followed.iter().any(|known| Arc::ptr_eq(&known.peer_group, &what.peer_group));
        if is_new {
            followed.push(what);
        }
        is_new
    });
    if is_new {
        one_more();
    }
}

/// Gives back the list of held calls.
pub(crate) fn put_back(room: Vec<Held>) {
    reuse(room, |ended| &mut ended.held)
}

/// Gives back the list of followed calls.
pub(crate) fn put_back_followed(room: Vec<Followed>) {
    reuse(room, |ended| &mut ended.followed)
}

/// Empties a list of a group that has ended, before anything else, and reuses its memory.
#[inline]
fn reuse<T>(mut room: Vec<T>, list: impl FnOnce(&mut Ended) -> &mut Vec<T>) {
    room.clear();
    with_ended(|ended| {
        let list = list(ended);
        if list.capacity() < room.capacity() && list.is_empty() {
            *list = room;
        }
    });
}

/// Adds what waits for the end of the open group.
#[inline]
fn keep(add: impl FnOnce(&mut Ended)) {
    with_ended(add);
    one_more();
}

fn one_more() {
    // In a thread that is exiting, `LEFT` is already dropped; what the thread holds stays until the process ends.
    let _ = LEFT.try_with(|_| ());
    GROUP.with(|group| group.set(Group { awaited: group.get().awaited + 1, ..group.get() }));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Handles come once, at the outermost end only, and closing too often does not count below zero.
    #[test]
    fn nested() {
        let none = |ended: Ended| ended.is_empty();
        opened();
        opened();
        wait_for(Awaited::Handle(Handle(std::ptr::dangling_mut()), FallbackReason::Child));
        assert!(is_open());
        assert!(none(closed()));
        assert!(matches!(closed().awaited[..], [Awaited::Handle(..)]));
        assert!(!is_open());
        assert!(none(closed()));
        opened();
        assert!(is_open());
        assert!(none(closed()));
    }

    /// A thread that exits runs exit handlers after its thread-local values were dropped, and the handlers run groups.
    #[test]
    fn after_the_end_of_thread_local_storage() {
        struct Late(std::cell::OnceCell<std::sync::mpsc::Sender<bool>>);
        impl Drop for Late {
            fn drop(&mut self) {
                opened();
                wait_for(Awaited::Handle(Handle(std::ptr::dangling_mut()), FallbackReason::Child));
                let held = matches!(closed().awaited[..], [Awaited::Handle(..)]);
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
            wait_for(Awaited::Handle(Handle(std::ptr::dangling_mut()), FallbackReason::Child));
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
