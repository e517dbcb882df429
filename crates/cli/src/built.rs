//! Of what this command was built: what `windlass --version` tells.

use std::sync::LazyLock;
use windlass_kernels::images::DIGEST;

/// The commit that was checked out, or `unknown`.
pub const COMMIT: &str = env!("WINDLASS_COMMIT");

/// The command's version.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The version, and a line each for the commit and the kernels.
pub fn long_version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        format!("{VERSION}\ncommit  {COMMIT}\nkernels {DIGEST} (SHA-256 of the compiled kernels)")
    });
    &TEXT
}

/// The same on one line, as `windlassGetBuild` has it of a library.
pub fn line() -> String {
    format!("windlass {VERSION} commit {COMMIT} kernels {DIGEST}")
}
