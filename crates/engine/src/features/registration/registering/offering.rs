//! Decides up to which size this rank offers to register, from its calls' buffers and its memory.

use std::sync::atomic::Ordering;

use crate::features::memory::allocation::Kind;
use crate::features::registration::aliases::{self, Aliases};
use crate::features::registration::staging;
use crate::features::registration::substitutes::Buffers;
use windlass_base::range::Range;
use windlass_base::stats::count;

use crate::features::registration::registering::finding::{allocations, counted_as};
use crate::features::registration::registering::{EVERYTHING, Registering, State};

impl Registering {
    /// Learns from a call that is not registered, and may raise this rank's offer.
    pub(crate) fn learn(&self, state: &mut State, buffers: &Buffers, size: u8) {
        if self.vetoes.load(Ordering::Relaxed) > 0 || size > self.size_max || size >= state.size_refused {
            return;
        }
        if state.pacing.has_offered() {
            if size > state.offered && self.prepare(state, size) {
                self.offer(state, size);
            }
            return;
        }
        if !state.pacing.looks() {
            return;
        }
        let fine = self.is_registrable(state, buffers.receive) && self.is_registrable(state, buffers.send);
        if !state.pacing.saw(fine) {
            return;
        }
        if self.prepare(state, size) && self.has_types(state, buffers) {
            state.pacing.offers();
            self.offer(state, size);
        } else {
            state.pacing.takes_back();
        }
    }

    fn offer(&self, state: &mut State, size: u8) {
        state.offered = size;
        self.agreed.offer(size);
        log::debug!("rank offers to register up to 2^{size} bytes");
    }

    pub(crate) fn take_back(&self, state: &mut State) {
        if state.pacing.has_offered() {
            state.pacing.takes_back();
            self.offer(state, 0);
        }
    }

    /// Whether a buffer lies in one allocation of this device that can be mapped again and exported.
    fn is_registrable(&self, state: &State, buffer: Range) -> bool {
        let found = allocations(state.home.driver).look(buffer.base);
        let fine = found.kind == Kind::Vmm { exportable: true }
            && found.device == self.device
            && found.range.contains(buffer);
        if !fine {
            count::registered(counted_as(found.kind), 1);
        }
        fine
    }

    /// Acquires what one call of that size needs, before this rank offers it: staging memory and free descriptors.
    fn prepare(&self, state: &mut State, size: u8) -> bool {
        let bytes = staging::needed(size, self.ranks);
        if !aliases::has_descriptors() {
            return false;
        }
        if state.staging.has_room_for(bytes) {
            return true;
        }
        let is_over = state.is_over();
        let State { home, real: Some(real), staging, .. } = state else { return false };
        if !is_over {
            return false;
        }
        let is_prepared = staging.prepare(home, *real, bytes);
        if !is_prepared {
            state.size_refused = size;
        }
        is_prepared
    }

    /// Whether the memory can be exported by the handle types that NCCL uses for its own.
    fn has_types(&self, state: &State, buffers: &Buffers) -> bool {
        let driver = state.home.driver;
        let wanted = state.staging.handle_types;
        [buffers.send, buffers.receive]
            .iter()
            .all(|buffer| driver.handle_types(buffer.base) & wanted == wanted)
    }

    /// Takes the offer back, because the program registers buffers itself or its resources are shared. Deregisters what no rank may
    /// still need, since the worker may not do that.
    pub(crate) fn withdraw(&self, state: &mut State) {
        if !state.pacing.has_offered() && state.cache.is_empty() {
            return;
        }
        self.take_back(state);
        let may_go = self.agreed.owes() == 0 && state.is_over();
        let State { home, real: Some(real), cache, staging, .. } = state else { return };
        let (driver, mut aliases) =
            (home.driver, Aliases::new(home, *real, staging.handle_types, &self.is_left));
        match may_go {
            true => cache.freed(&mut aliases, EVERYTHING),
            false => cache.look(&mut aliases, |base| driver.buffer_id(base)),
        };
    }
}
