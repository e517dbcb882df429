//! Whether NCCL has a plugin that supplies variables. From 2.28.7 on NCCL loads `libnccl-env.so` where it finds one, also where
//! NCCL_ENV_PLUGIN is not set (read in the sources of 2.28.7 to 2.30.7).

#![allow(unsafe_code)]

use std::ffi::CStr;

const SINCE: i32 = 22807;
const DEFAULT: &CStr = c"libnccl-env.so";

/// Whether a release of NCCL loads the plugin of the default name. `named` is the value of NCCL_ENV_PLUGIN: if it is set, its
/// row in the list of variables decides.
pub(super) fn is_found(named: Option<&str>, version: i32) -> bool {
    if version < SINCE || named.is_some_and(|named| !named.is_empty()) {
        return false;
    }
    // SAFETY: NCCL loads this very library a moment later, with whatever its constructors do.
    let handle = unsafe { libc::dlopen(DEFAULT.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return false;
    }
    log::info!(
        "{} is found: NCCL may take variables from it, so peer groups are off",
        DEFAULT.to_string_lossy()
    );
    // The plugin stays open: it may have started threads, and NCCL uses it from now on.
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A release that knows no plugins looks for none, and a named plugin is not looked for here.
    #[test]
    fn who_looks() {
        assert!(!is_found(None, 22803));
        assert!(!is_found(Some("none"), 23007));
        assert!(!is_found(Some("mine"), 23007));
    }
}
