//! Gives the command the commit that it tells.

use std::path::Path;

#[path = "../base/commit.rs"]
mod commit;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=../base/commit.rs");
    commit::tell(Path::new("../.."));
}
