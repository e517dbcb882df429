//! Compiles the kernels of `crates/kernels` with the machine's C++ compiler.

use std::path::PathBuf;

use windlass_kernels::collectives::Kernel;

fn main() {
    let kernels = "../../kernels";
    for folder in ["device", "host"] {
        println!("cargo::rerun-if-changed={kernels}/{folder}");
    }
    println!("cargo::rerun-if-changed=build.rs");
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .flag("-pthread")
        .flag("-ffp-contract=off")
        .flag_if_supported("-Wno-maybe-uninitialized");
    for object in ["p2p_object.cpp", "collective_object.cpp"] {
        build.file(format!("{kernels}/host/{object}"));
    }
    build.compile("windlass_host_kernels");

    // A Rust library exports only what Rust defines, so each kernel is called through a function of `src/lib.rs`.
    let exported = Kernel::all().map(|kernel| {
        let name = kernel.name();
        let launch = if kernel.runs_several() { "BatchLaunch" } else { "CollectiveLaunch" };
        format!("kernel!({name}, {name}_params, {name}_work, windlass_host_{name}, {launch});\n")
    });
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    std::fs::write(out.join("collectives.rs"), exported.collect::<String>()).expect("a list of exports");
    // The kernels' threads live as long as the process, so the library must not be unloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
