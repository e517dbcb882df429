//! The command as users run it, on the simulator and with small libraries made here.

mod bench;
mod calibrate;
mod closing;
mod compare;
mod demo;
mod doctor;
mod hang;
mod interruption;
mod messages;
mod run;
mod stats;
mod tune;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The command, without variables that this machine may set.
fn windlass(arguments: &[&str]) -> Command {
    for library in ["libwindlass.so", "libsim_cuda.so", "libsim_kernels.so", "libsim_nccl.so"] {
        let file = built(library);
        assert!(
            file.exists(),
            "{} is missing: run `cargo build` (with --release if these tests have it) in the workspace first",
            file.display()
        );
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_windlass"));
    command.args(arguments);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("WINDLASS") || name.starts_with("NCCL_") || name.ends_with("NCCL_SO_PATH") {
            command.env_remove(&*name);
        }
    }
    command.env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH");
    // No limits that this machine's user has measured, and none of the tests' for that user.
    command.env("WINDLASS_CACHE", "off");
    command
}

/// A file that `cargo build` puts beside the command.
fn built(name: &str) -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_windlass")).with_file_name(name)
}

fn simulated_nccl() -> String {
    built("libsim_nccl.so").display().to_string()
}

/// The result of a command: exit code, standard output, standard error.
fn outcome(mut command: Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().expect("the command starts");
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    (status.code(), text(&stdout), text(&stderr))
}

/// Compiles a C text with the machine's compiler.
fn compile(source: &str, output: &Path, arguments: &[&str]) {
    let file = output.with_extension("c");
    std::fs::write(&file, source).unwrap();
    let mut command = Command::new("cc");
    command.arg(&file).arg("-o").arg(output).args(arguments);
    let (code, _, complaint) = outcome(command);
    assert_eq!(code, Some(0), "cc: {complaint}");
}

/// A library with the version of an NCCL, with more functions if asked for.
fn make_nccl(folder: &Path, version: i32, more: &str) -> PathBuf {
    let source = format!("int ncclGetVersion(int *version) {{ *version = {version}; return 0; }}\n{more}\n");
    let library = folder.join("libnccl.so.2");
    compile(&source, &library, &["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"]);
    library
}
