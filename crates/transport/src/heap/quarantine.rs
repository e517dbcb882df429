//! Decides when a region may be lent again: after every member of its communicator has closed, no graph can run its kernels any more, and our
//! own zeroing of it is done. Pure: fed by events.
//!
//! A dead process ends its waits, too, but nobody knows when its kernels do: they keep the memory, which is never lent again, only
//! unmapped here. Nothing else ends a wait: a member that is only slow keeps its regions, and the counters show it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::heap::holds::Holds;
use crate::heap::space::Placement;

/// Names a lease, uniquely in this process. Events may come late; those of leases that are gone mean nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// Names a process, uniquely among the peers of this host.
pub type Process = u64;

/// Another rank to which a region was announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Member {
    /// Its rank in the communicator.
    pub rank: u32,
    /// The process of that rank.
    pub process: Process,
}

/// What happens to leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The memory holds zeros.
    Zeroed(LeaseId),
    /// This rank has closed the region.
    ClosedHere(LeaseId),
    /// Another rank has closed the region: it has unmapped it, or will not touch it again.
    Closed(LeaseId, u32),
    /// A process has ended or executed another program, with all its ranks. Its kernels may run on: its sockets close before the driver stops
    /// them, and children that were forked from it keep its CUDA context.
    Died(Process),
}

#[derive(Debug)]
struct Lease {
    placement: Placement,
    holds: Arc<Holds>,
    here: Here,
    content: Content,
    /// Members that may still touch it.
    open: BTreeSet<Member>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Here {
    Open,
    Closed,
}

/// What a lent region holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// It is being filled with zeros.
    BeingZeroed,
    /// What the lender asked for: zeros, or anything.
    Ready,
}

/// All leases of a symmetric heap.
#[derive(Debug, Default)]
pub struct Quarantine {
    leases: BTreeMap<LeaseId, Lease>,
}

impl Quarantine {
    /// Enters a lease. If the region is to hold zeros, its zeroing has been issued.
    pub fn lend(&mut self, id: LeaseId, placement: Placement, holds: Arc<Holds>, content: Content) {
        let lease = Lease { placement, holds, here: Here::Open, content, open: BTreeSet::new() };
        self.leases.insert(id, lease);
    }

    /// Notes that these members may touch a region, before it is announced to them. False if there is no such lease, if this rank has closed it,
    /// or if its content is not ready.
    #[must_use]
    pub fn announce(&mut self, id: LeaseId, members: &[Member]) -> bool {
        match self.leases.get_mut(&id) {
            Some(lease) if lease.content == Content::Ready && lease.here == Here::Open => {
                lease.open.extend(members);
                true
            }
            _ => false,
        }
    }

    /// Notes an event. Events of leases that are gone, and repeated ones, change nothing.
    pub fn note(&mut self, event: Event) {
        match event {
            Event::Zeroed(id) => self.change(id, |lease| lease.content = Content::Ready),
            Event::ClosedHere(id) => self.change(id, |lease| lease.here = Here::Closed),
            Event::Closed(id, rank) => {
                self.change(id, |lease| lease.open.retain(|member| member.rank != rank))
            }
            Event::Died(process) => {
                for lease in self.leases.values_mut() {
                    lease.open.retain(|member| member.process != process);
                }
            }
        }
    }

    fn change(&mut self, id: LeaseId, change: impl FnOnce(&mut Lease)) {
        if let Some(lease) = self.leases.get_mut(&id) {
            change(lease);
        }
    }

    /// The memory of a lease is another, and its zeroing is about to be issued.
    pub fn unready(&mut self, id: LeaseId) {
        self.change(id, |lease| lease.content = Content::BeingZeroed);
    }

    /// Removes a lease. False if it is gone.
    pub fn end(&mut self, id: LeaseId) -> bool {
        self.leases.remove(&id).is_some()
    }

    /// Removes the leases that are over, and returns them.
    pub fn take_over(&mut self) -> Vec<Placement> {
        let over = self.leases.extract_if(.., |_, lease| lease.is_over());
        over.map(|(_, lease)| lease.placement).collect()
    }

    /// Whether the memory holds zeros; a lease that is gone does.
    pub fn is_zeroed(&self, id: LeaseId) -> bool {
        self.leases.get(&id).is_none_or(|lease| lease.content == Content::Ready)
    }

    /// How many leases there are.
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Whether there are no leases.
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Bytes of regions that this rank has closed and that wait for others.
    pub fn waiting_bytes(&self) -> u64 {
        let waiting = self.leases.values().filter(|lease| lease.here == Here::Closed);
        waiting.map(|lease| lease.placement.bytes).sum()
    }
}

impl Lease {
    fn is_over(&self) -> bool {
        self.here == Here::Closed
            && self.content == Content::Ready
            && self.open.is_empty()
            && self.holds.are_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACEMENT: Placement = Placement { chunk: 1, offset: 0, bytes: 1 << 20 };

    fn members(ranks: u32) -> Vec<Member> {
        (1..=ranks).map(|rank| Member { rank, process: 100 + u64::from(rank) / 2 }).collect()
    }

    /// Every order of events ends the lease at the last of them, not before.
    #[test]
    fn over_at_the_last_event_in_any_order() {
        let id = LeaseId(1);
        let events = [
            Event::ClosedHere(id),
            Event::Closed(id, 1),
            Event::Died(101),
            Event::Closed(id, 3),
            Event::Died(102),
        ];
        // Ranks 2 and 3 live in process 101, rank 4 in 102.
        let mut orders = vec![Vec::new()];
        for _ in 0..events.len() {
            orders = orders
                .into_iter()
                .flat_map(|order: Vec<usize>| {
                    (0..events.len())
                        .filter(|next| !order.contains(next))
                        .map(|next| [order.as_slice(), &[next]].concat())
                        .collect::<Vec<_>>()
                })
                .collect();
        }
        assert_eq!(orders.len(), 120);
        for order in orders {
            let mut quarantine = Quarantine::default();
            quarantine.lend(id, PLACEMENT, Holds::new(), Content::BeingZeroed);
            quarantine.note(Event::Zeroed(id));
            assert!(quarantine.announce(id, &members(4)));
            let mut done = BTreeSet::new();
            for event in &order {
                assert!(quarantine.take_over().is_empty(), "{order:?}");
                quarantine.note(events[*event]);
                quarantine.note(events[*event]);
                done.insert(*event);
                // Rank 3 closes by itself or dies with its process.
                if [0, 1, 2, 4].iter().all(|needed| done.contains(needed)) {
                    break;
                }
            }
            assert_eq!(quarantine.take_over(), [PLACEMENT], "{order:?}");
            assert!(quarantine.is_empty());
        }
    }

    /// Not announced before it holds zeros, nor after it closed; not over while it is being zeroed.
    #[test]
    fn zeros_first() {
        let mut quarantine = Quarantine::default();
        let id = LeaseId(3);
        quarantine.lend(id, PLACEMENT, Holds::new(), Content::BeingZeroed);
        assert!(!quarantine.announce(id, &members(1)));
        quarantine.note(Event::ClosedHere(id));
        assert!(quarantine.take_over().is_empty());
        assert_eq!(quarantine.waiting_bytes(), PLACEMENT.bytes);
        quarantine.note(Event::Zeroed(id));
        assert!(!quarantine.announce(id, &members(1)));
        assert_eq!(quarantine.take_over().len(), 1);
        assert!(!quarantine.announce(id, &members(1)) && quarantine.is_zeroed(id));
    }

    /// A graph that holds the communicator holds its regions.
    #[test]
    fn graphs_hold() {
        use windlass_base::gpu::graph::Released;
        let mut quarantine = Quarantine::default();
        let holds = Holds::new();
        let id = LeaseId(4);
        quarantine.lend(id, PLACEMENT, holds.clone(), Content::BeingZeroed);
        quarantine.note(Event::Zeroed(id));
        quarantine.note(Event::ClosedHere(id));
        holds.count_one();
        assert!(quarantine.take_over().is_empty());
        holds.released();
        assert_eq!(quarantine.take_over().len(), 1);
    }
}
