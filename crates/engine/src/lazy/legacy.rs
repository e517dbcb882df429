//! Knows whether NCCL has already tried legacy IPC in this process, or never will. Before that no communicator may be lazy.
//!
//! NCCL's `p2pCanConnect` tries once in a process, for the first two ranks of a communicator whose GPUs this process both sees. Then
//! it frees the memory of the test (read in 2.18.6, 2.21.5, 2.28.9 and 2.30.7). A free waits for the kernels of its device. One of
//! them may be a receive of Windlass that waits for the very call for which a lazy communicator is being built.

use std::sync::atomic::{AtomicBool, Ordering};

use once_cell::sync::OnceCell;

use windlass_base::config::nccl::{self, Effect};
use windlass_base::gpu;
use windlass_bootstrap::negotiated::NegotiatedConfig;

static TRIED: AtomicBool = AtomicBool::new(false);

/// Whether NCCL has tried, or never will, as in a process that sees a single GPU.
pub(super) fn is_settled() -> bool {
    TRIED.load(Ordering::Acquire) || !would_try() || seen().len() == 1
}

/// Whether this process sees two of these GPUs.
fn sees_two(members: impl Iterator<Item = [u8; 16]>, seen: &[[u8; 16]]) -> bool {
    members.filter(|member| seen.contains(member)).count() > 1
}

/// Called after NCCL has made this communicator.
pub(super) fn note(negotiated: &NegotiatedConfig) {
    if TRIED.load(Ordering::Relaxed) {
        return;
    }
    if sees_two(negotiated.members.iter().map(|member| member.device.uuid), seen()) {
        TRIED.store(true, Ordering::Release);
    }
}

fn would_try() -> bool {
    nccl::at_allocation().has(Effect::NoCuMem) || nccl::lacks_cu_mem()
}

/// UUIDs of the GPUs that this process sees; empty where the driver does not say.
fn seen() -> &'static [[u8; 16]] {
    static SEEN: OnceCell<Vec<[u8; 16]>> = OnceCell::new();
    SEEN.get_or_init(|| {
        let Ok(driver) = gpu::driver() else { return Vec::new() };
        let count = driver.device_count().unwrap_or_default();
        (0..count).filter_map(|device| Some(driver.device_facts(device).ok()?.uuid)).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NCCL tries if this process sees two GPUs of a communicator; not if only another process sees the other GPU.
    #[test]
    fn who_tries() {
        let [own, other, hidden] = [1, 2, 3].map(|number| [number; 16]);
        assert!(sees_two([own, other].into_iter(), &[own, other]));
        assert!(!sees_two([own, hidden].into_iter(), &[own, other]));
        assert!(sees_two([other, hidden, own].into_iter(), &[own, other]));
    }
}
