//! NVTX ranges around calls, when `WINDLASS_NVTX` asks: a profiler shows which path a call took.
//!
//! The ranges are built only with the feature `nvtx`, since NVIDIA's crate needs libclang. Without the feature, the
//! option gives a warning.

#[cfg(feature = "nvtx")]
mod ranges {
    use std::ffi::CString;

    use nvtx::domain::{LocalRange, RegisteredString};
    use once_cell::sync::OnceCell;

    use crate::call::{FUNCTIONS, Function};

    static DOMAIN: OnceCell<nvtx::Domain> = OnceCell::new();
    static NAMES: OnceCell<[RegisteredString<'static>; FUNCTIONS]> = OnceCell::new();

    /// An NVTX range; it ends when the value is dropped.
    pub type Range = LocalRange<'static>;

    pub fn start() {
        let domain = DOMAIN.get_or_init(|| nvtx::Domain::new(c"windlass"));
        let name = |function: Function| CString::new(function.entry().description().name).unwrap_or_default();
        NAMES.get_or_init(|| Function::ALL.map(|function| domain.register_string(name(function))));
    }

    /// Begins a range, if `start` has switched ranges on.
    #[inline]
    pub fn range(function: Function) -> Option<Range> {
        let name = NAMES.get()?[function as usize];
        Some(DOMAIN.get()?.local_range(name))
    }
}

#[cfg(not(feature = "nvtx"))]
mod ranges {
    use crate::call::Function;

    pub(super) fn start() {
        log::warn!("WINDLASS_NVTX is on, but this build has no NVTX: build with the feature nvtx");
    }

    /// Never made: this build has no ranges.
    pub type Range = ();

    /// Always none.
    #[inline]
    pub fn range(_function: Function) -> Option<Range> {
        None
    }
}

pub use ranges::{Range, range};

use crate::config::{Startup, Switch};

/// Switches ranges on if `WINDLASS_NVTX` asks for them.
pub fn start(config: &Startup) {
    if config.nvtx == Switch::On {
        ranges::start();
    }
}
