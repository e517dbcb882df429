//! Finds the substitutes of a registered call's buffers: aliases, or staging memory where a buffer cannot be registered.

use std::sync::atomic::Ordering;

use nccl_sys::{ncclInternalError, ncclResult_t, ncclUnhandledCudaError};
use once_cell::sync::OnceCell;

use crate::background::worker;
use crate::features::memory::allocation::{Allocations, Kind};
use crate::features::registration::aliases::Aliases;
use crate::features::registration::cache::{Key, Use, Why};
use crate::features::registration::substitutes::{Buffers, Substitutes};
use windlass_base::error::refuse;
use windlass_base::gpu::{Address, Driver};
use windlass_base::range::Range;
use windlass_base::stats::count;
use windlass_base::stats::resources::Registered;

use crate::features::registration::registering::Registering;
use crate::features::registration::registering::state::State;

/// How many allocations of the process are remembered.
const ALLOCATIONS_MAX: usize = 1024;

pub(crate) fn allocations(driver: &'static Driver) -> &'static Allocations {
    static ALLOCATIONS: OnceCell<Allocations> = OnceCell::new();
    ALLOCATIONS.get_or_init(|| Allocations::new(driver, ALLOCATIONS_MAX))
}

impl Registering {
    pub(crate) fn substitutes(
        &self,
        state: &mut State,
        buffers: &Buffers,
    ) -> Result<Substitutes, ncclResult_t> {
        let number = Use(state.uses.0 + 1);
        state.uses = number;
        if state.cache.waits_for().is_some() && state.is_over() {
            state.cache.over(Use(number.0 - 1));
        }
        if state.pending == 0 {
            state.staging.begin();
        }
        let receives = self.alias(state, buffers.receive, number);
        let sends = if buffers.is_in_place() { None } else { self.alias(state, buffers.send, number) };
        let State { home, real: Some(real), staging, .. } = state else { return Err(ncclInternalError) };
        let substitutes = buffers.substitutes(sends, receives, |bytes| {
            staging.take(home, *real, bytes).ok_or_else(|| {
                let why = format_args!("no memory for {bytes} bytes of a registered call's buffer");
                refuse(ncclUnhandledCudaError, why)
            })
        })?;
        if substitutes.copies() {
            count::registered(Registered::Staged, 1);
            self.take_back(state);
        }
        Ok(substitutes)
    }

    /// The address of a buffer's alias, which may be registered here. None if the buffer cannot be registered.
    fn alias(&self, state: &mut State, buffer: Range, number: Use) -> Option<Address> {
        let State { home, real: Some(real), cache, staging, .. } = state else { return None };
        let found = allocations(home.driver).look(buffer.base);
        if found.kind != (Kind::Vmm { exportable: true }) || found.device != self.device {
            count::registered(counted_as(found.kind), 1);
            return None;
        }
        let key = Key { range: found.range, id: found.id };
        let mut aliases = Aliases::new(home, *real, staging.handle_types, &self.is_left);
        match cache.want(&mut aliases, key, buffer, number) {
            Ok(alias) => {
                count::registered(Registered::Hits, 1);
                if !self.has_entries() {
                    self.has_entries.store(true, Ordering::Relaxed);
                    worker::wake();
                }
                Some(alias.address() + (buffer.base - found.range.base))
            }
            Err(why) => {
                count::registered(counted(why), 1);
                log::debug!("address {:#x} is staged: {why:?}", buffer.base);
                None
            }
        }
    }
}

fn counted(why: Why) -> Registered {
    match why {
        Why::Straddles => Registered::Elsewhere,
        Why::Full => Registered::Full,
        Why::Refused | Why::Failed => Registered::Refused,
    }
}

/// The counter of memory that cannot be registered.
pub(crate) fn counted_as(kind: Kind) -> Registered {
    match kind {
        Kind::Vmm { exportable: true } => Registered::Elsewhere,
        Kind::Vmm { exportable: false } | Kind::VmmParts { .. } => Registered::Segments,
        Kind::Cuda => Registered::CudaMalloc,
        Kind::Pool => Registered::Pool,
        Kind::Managed | Kind::Host => Registered::Host,
        Kind::Unknown => Registered::Unknown,
    }
}
