//! Compiles the kernels of `crates/kernels` with the machine's C++ compiler.
fn main() {
    let kernels = "../../kernels";
    for folder in ["device", "host"] {
        println!("cargo::rerun-if-changed={kernels}/{folder}");
    }
    println!("cargo::rerun-if-changed=build.rs");
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").opt_level(2).flag("-pthread").flag_if_supported("-Wno-maybe-uninitialized");
    // Rust's list of exports hides what is compiled here: it goes out by another name, through `src/lib.rs`.
    build.define("ncclWindlassMail", "windlass_host_mail");
    build.define("ncclWindlassMail_params", "windlass_host_mail_params");
    build.define("HOST_DELAY_RARITY", "4096");
    build.file(format!("{kernels}/host/mail_object.cpp")).compile("windlass_host_kernels");
    // Its threads stay as long as the process.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
