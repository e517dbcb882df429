//! Gives the library the name that programs load, and the commit that it tells.

use std::path::Path;

#[path = "crates/base/commit.rs"]
mod commit;

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=crates/base/commit.rs");
    commit::tell(Path::new("."));
}
