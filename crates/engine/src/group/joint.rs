//! The streams of one communicator's calls in a group. As in NCCL, all these calls are one operation, whoever runs each: it waits for
//! earlier work of every stream, and every stream waits for it. Other communicators' streams are never joined, also not those of another
//! rank in the same thread: a stream that waits for another communicator may wait for ever.

use std::sync::Arc;

use nccl_sys::{ncclComm_t, ncclInvalidUsage, ncclResult_t};

use crate::peers::PeerGroup;
use windlass_base::error::refuse;
use windlass_base::gpu::{self, StreamHandle};

/// Who runs a call of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runs {
    Nccl,
    /// Windlass, or NCCL after all: the group's end decides.
    Held,
}

/// One communicator's streams in a group, each once, in call order.
#[derive(Debug)]
pub(crate) struct Joint {
    pub communicator: ncclComm_t,
    pub peer_group: Arc<PeerGroup>,
    pub first: StreamHandle,
    more: Vec<StreamHandle>,
    /// Those of calls that NCCL runs. NCCL joins these itself.
    pub nccls: Vec<StreamHandle>,
}

/// The joints of an open group.
#[derive(Debug, Default)]
pub(crate) struct Joints(Vec<Joint>);

impl Joints {
    pub(super) const NONE: Joints = Joints(Vec::new());

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the stream of a call; whether NCCL has a call of the communicator there already. NCCL refuses a call whose stream is not in the
    /// capture of the communicator's other calls, eager ones among captured ones too, and so does this.
    pub(super) fn add(
        &mut self,
        handle: ncclComm_t,
        stream: StreamHandle,
        runs: Runs,
        peer_group: impl FnOnce(ncclComm_t) -> Option<Arc<PeerGroup>>,
    ) -> Result<bool, ncclResult_t> {
        let known = self.0.iter().position(|joint| joint.communicator == handle);
        let Some(known) = known else {
            // Another thread has ended the communicator: whoever runs the call refuses it.
            let Some(peer_group) = peer_group(handle) else { return Ok(false) };
            let nccls = if runs == Runs::Nccl { vec![stream] } else { Vec::new() };
            self.0.push(Joint { communicator: handle, peer_group, first: stream, more: Vec::new(), nccls });
            return Ok(false);
        };
        let joint = &mut self.0[known];
        if !joint.all().any(|known| known == stream) {
            check_captures(joint.first, stream)?;
            joint.more.push(stream);
        }
        let is_nccls = joint.nccls.contains(&stream);
        if runs == Runs::Nccl && !is_nccls {
            joint.nccls.push(stream);
        }
        Ok(is_nccls)
    }

    /// The joint of a peer group.
    pub(crate) fn of(&self, peer_group: &Arc<PeerGroup>) -> Option<&Joint> {
        self.0.iter().find(|joint| Arc::ptr_eq(&joint.peer_group, peer_group))
    }

    /// All joints.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Joint> {
        self.0.iter()
    }

    /// Forgets all, and keeps the memory.
    pub(super) fn emptied(mut self) -> Joints {
        self.0.clear();
        self
    }

    pub(super) fn capacity(&self) -> usize {
        self.0.capacity()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

impl Joint {
    /// All streams, each once, in call order.
    pub(crate) fn all(&self) -> impl Iterator<Item = StreamHandle> {
        std::iter::once(self.first).chain(self.more.iter().copied())
    }

    /// Whether another joint is of another rank of the same communicator.
    pub(crate) fn is_of_same(&self, other: &Joint) -> bool {
        self.peer_group.negotiated().comm == other.peer_group.negotiated().comm
    }

    /// The streams that NCCL does not know, and one of NCCL's, which is to wait for them before NCCL runs its part. None if NCCL has no part, or
    /// knows all.
    pub(crate) fn before_nccl(&self) -> Option<(StreamHandle, Vec<StreamHandle>)> {
        let nccls = *self.nccls.first()?;
        let unknown: Vec<_> = self.all().filter(|stream| !self.nccls.contains(stream)).collect();
        (!unknown.is_empty()).then_some((nccls, unknown))
    }

    /// Where Windlass's part runs, which comes after NCCL's part.
    pub(crate) fn lane(&self, of_calls: &[StreamHandle]) -> PartLane {
        let of_both = of_calls.iter().find(|stream| self.nccls.contains(stream));
        let Some(stream) = of_both.or(of_calls.first()).copied() else {
            return PartLane { stream: self.first, before: Vec::new(), after: Vec::new() };
        };
        let after: Vec<_> = self.all().filter(|other| *other != stream).collect();
        // NCCL's part has waited for all streams. Of a lazy communicator NCCL may have two parts, which it does not join.
        let nccls = || self.nccls.iter().copied().filter(|other| *other != stream);
        let before = if self.nccls.is_empty() { after.clone() } else { nccls().collect() };
        PartLane { stream, before, after }
    }
}

/// The stream on which Windlass runs its part of a communicator's group.
#[derive(Debug)]
pub(crate) struct PartLane {
    pub stream: StreamHandle,
    /// The streams that it waits for.
    pub before: Vec<StreamHandle>,
    /// The streams that wait for it.
    pub after: Vec<StreamHandle>,
}

fn check_captures(one: StreamHandle, other: StreamHandle) -> Result<(), ncclResult_t> {
    let Some(driver) = gpu::opened() else { return Ok(()) };
    // Where the driver gives an error, the launch on this stream gets it, too.
    let (Ok(first), Ok(second)) = (driver.capture_of(one), driver.capture_of(other)) else { return Ok(()) };
    if first.map(|capture| capture.id) == second.map(|capture| capture.id) {
        return Ok(());
    }
    let why = "streams of one communicator's calls in a group must be all eager, or all in the same capture";
    Err(refuse(ncclInvalidUsage, format_args!("{why}")))
}
