//! NVTX ranges around calls, when `WINDLASS_NVTX` asks: a profiler shows which path a call took.
//!
//! Built only with the feature `nvtx`, since NVIDIA's crate needs libclang to build; without it asking gives a warning.

#[cfg(feature = "nvtx")]
mod ranges {
    use once_cell::sync::OnceCell;

    static DOMAIN: OnceCell<nvtx::Domain> = OnceCell::new();

    /// A range that ends when this is dropped.
    pub struct Range(#[allow(dead_code)] nvtx::domain::LocalRange<'static>);

    pub fn start() {
        DOMAIN.get_or_init(|| nvtx::Domain::new("windlass"));
    }

    /// Begins a range, if ranges were asked for.
    #[inline]
    pub fn range(name: &'static str) -> Option<Range> {
        DOMAIN.get().map(|domain| Range(domain.local_range(name)))
    }
}

#[cfg(not(feature = "nvtx"))]
mod ranges {
    /// Nothing.
    pub struct Range;

    pub fn start() {
        log::warn!("WINDLASS_NVTX is on, but this build has no NVTX: build with the feature nvtx");
    }

    /// No range.
    #[inline]
    pub fn range(_name: &'static str) -> Option<Range> {
        None
    }
}

pub use ranges::{Range, range};

use crate::config::{Config, Switch};

/// Starts annotating if the options ask.
pub fn start(config: &Config) {
    if config.nvtx == Switch::On {
        ranges::start();
    }
}
