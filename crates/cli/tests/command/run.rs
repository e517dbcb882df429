//! Holds that `windlass run` makes Windlass take effect, or refuses with the reason.

use crate::compare::example;
use crate::{built, compile, make_nccl, outcome, simulated_nccl, windlass};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

const REFUSED: Option<i32> = Some(125);

fn refused(arguments: &[&str], reason: &str) {
    let mut command = windlass(&["run"]);
    command.args(arguments);
    let (code, printed, told) = outcome(command);
    assert_eq!(code, REFUSED, "{arguments:?}: {printed}{told}");
    assert!(told.contains(reason), "{arguments:?}: {told}");
    assert!(told.ends_with("windlass: not run, because Windlass would not take effect\n"), "{told}");
}

fn executable(path: &Path, content: &[u8]) -> String {
    std::fs::write(path, content).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// An ELF header with nothing after it: it names no loader.
fn elf_header(class: u8, machine: u16) -> Vec<u8> {
    let length = if class == 1 { 52 } else { 64 };
    let mut header = vec![0_u8; length];
    header[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', class, 1, 1]);
    header[16] = 2;
    header[18..20].copy_from_slice(&machine.to_le_bytes());
    header[20] = 1;
    let size_at = if class == 1 { 40 } else { 52 };
    header[size_at] = length as u8;
    header
}

/// Two variables are set, the command's exit code is returned, and nothing is printed before.
#[test]
fn runs() {
    let nccl = simulated_nccl();
    let script = "echo $LD_PRELOAD; echo $WINDLASS_NCCL; exit 7";
    let (code, printed, told) =
        outcome(windlass(&["run", "--quiet", "--nccl", &nccl, "--", "sh", "-c", script]));
    assert_eq!(code, Some(7), "{told}");
    assert_eq!(printed, format!("{}\n{nccl}\n", built("libwindlass.so").display()));
    assert_eq!(told, "");
}

/// Existing preloads stay, after Windlass. `--check` only prints what would be set.
#[test]
fn keeps_preloads() {
    let mut command = windlass(&["run", "--check", "--nccl", &simulated_nccl(), "--", "sh"]);
    command.env("LD_PRELOAD", "libm.so.6");
    let (code, printed, _) = outcome(command);
    assert_eq!(code, Some(0));
    assert!(
        printed.contains(&format!("LD_PRELOAD={}:libm.so.6\n", built("libwindlass.so").display())),
        "{printed}"
    );
}

/// A program that needs libnccl.so.2 in its RPATH, built without Windlass, finds it there, runs over Windlass, and is counted.
#[test]
fn takes_effect() {
    let folder = tempfile::tempdir().unwrap();
    const ID: &str = "typedef struct { char internal[128]; } ncclUniqueId;";
    // The library also has what Windlass calls for a new communicator.
    let init = "int ncclCommInitRank(void **comm, int ranks, ncclUniqueId id, int rank) { *comm = comm; return 0; }\n\
                #define ANSWER(name, value) int name(void *comm, int *answer) { *answer = value; return 0; }\n\
                ANSWER(ncclCommGetAsyncError, 0) ANSWER(ncclCommCount, 1)\n\
                ANSWER(ncclCommUserRank, 0) ANSWER(ncclCommCuDevice, 0)";
    let real = make_nccl(folder.path(), 21234, &format!("{ID}\n{init}"));
    let program = folder.path().join("program");
    // Windlass reports once there is a communicator.
    let source = format!(
        "#include <stdio.h>\n{ID}\nint ncclGetVersion(int *), ncclCommInitRank(void **, int, ncclUniqueId, int);\n\
         int main(void) {{ int version = 0; void *comm = 0; ncclUniqueId id = {{{{0}}}};\n\
         ncclGetVersion(&version); ncclCommInitRank(&comm, 1, id, 0); printf(\"%d\\n\", version); }}"
    );
    let library = real.display().to_string();
    compile(&source, &program, &[&library, "-Wl,-rpath,$ORIGIN"]);
    let report = folder.path().join("report.json");
    let mut command = windlass(&["run", "--"]);
    command.arg(&program).env("WINDLASS_REPORT", format!("json:{}", report.display()));
    // An option of 0.2 is told of once, by the command.
    command.env("WINDLASS_FABRIC", "off");
    let (code, printed, told) = outcome(command);
    let lines = "windlass: warning: WINDLASS_FABRIC is no longer read: use WINDLASS_PEER_GROUPS instead\n\
        windlass: 1 process, 1 communicator, no call in Windlass's kernels (on NCCL: it has one rank)\n";
    assert_eq!((code, printed.as_str(), told.as_str()), (Some(0), "21234\n", lines));
    // Without the command the process says so itself.
    let mut alone = Command::new(&program);
    alone.env("LD_PRELOAD", built("libwindlass.so")).env("WINDLASS_FABRIC", "off");
    let (_, _, told) = outcome(alone);
    assert_eq!(told.matches("WINDLASS_FABRIC is no longer read").count(), 1, "{told}");
    let report: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(report).unwrap()).unwrap();
    assert_eq!(report["functions"]["ncclGetVersion"], 1, "{report}");
    assert_eq!(report["functions"]["ncclCommInitRank"], 1, "{report}");
    assert_eq!(report["nccl_path"].as_str(), Some(&*library), "{report}");
}

/// Python is asked where its packages keep NCCL, without running the program.
#[test]
fn asks_python() {
    let folder = tempfile::tempdir().unwrap();
    let real = make_nccl(folder.path(), 21234, "");
    let python = executable(
        &folder.path().join("python3.12"),
        format!("#!/bin/sh\n[ \"$1\" = -c ] || exit 9\necho '[\"{}\"]'\n", folder.path().display())
            .as_bytes(),
    );
    let (code, printed, told) = outcome(windlass(&["run", "--check", "--", &python, "train.py"]));
    assert_eq!(code, Some(0), "{told}");
    assert!(printed.contains(&format!("WINDLASS_NCCL={}\n", real.display())), "{printed}");
}

/// Programs that cannot be preloaded are refused.
#[test]
fn refuses_programs() {
    let folder = tempfile::tempdir().unwrap();
    let nccl = simulated_nccl();
    let native = if cfg!(target_arch = "x86_64") { 62 } else { 183 };
    let file = |name: &str, content: &[u8]| executable(&folder.path().join(name), content);
    let command = |program: &str, reason: &str| refused(&["--nccl", &nccl, "--", program], reason);
    command(&file("static", &elf_header(2, native)), "is statically linked");
    command(&file("small", &elf_header(1, 3)), "is a 32-bit program");
    command(&file("foreign", &elf_header(2, 243)), "is a program for riscv");
    command(&file("noise", b"hel\0lo"), "is no ELF file");
    command(&file("docker", &elf_header(2, native)), "docker runs its command elsewhere");
}

/// A command that is not there, or is no program, ends as in a shell, and so does the comparison of one.
#[test]
fn finds_no_command() {
    let folder = tempfile::tempdir().unwrap();
    let plain = folder.path().join("plain");
    std::fs::write(&plain, "echo").unwrap();
    let plain = plain.display().to_string();
    for (name, code, reason) in [
        ("no-such-command", 127, "no-such-command: command not found in PATH"),
        ("/no/such", 127, "no such file: /no/such"),
        ("/tmp", 126, "/tmp is a folder, expected a program"),
        (&plain, 126, &*format!("{plain} is not executable (chmod +x {plain})")),
    ] {
        for command in ["run", "compare"] {
            let (found, printed, told) = outcome(windlass(&[command, "--", name]));
            assert_eq!(
                (found, &*printed, &*told),
                (Some(code), "", &*format!("windlass: {reason}\nwindlass: nothing was started\n"))
            );
        }
    }
}

/// A script without a first line that names a shell runs as shells run it.
#[test]
fn runs_plain_scripts() {
    let folder = tempfile::tempdir().unwrap();
    let script = executable(&folder.path().join("script"), b"echo $1 of $WINDLASS_NCCL\n");
    let (code, printed, told) =
        outcome(windlass(&["run", "--no-calibrate", "--nccl", &simulated_nccl(), &script, "one"]));
    assert_eq!((code, printed), (Some(0), format!("one of {}\n", simulated_nccl())), "{told}");
}

/// `--sim` brings NCCL and GPUs, in a folder that stays.
#[test]
fn on_the_simulator() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let script = "echo $LD_LIBRARY_PATH; ls $LD_LIBRARY_PATH";
        let mut command = windlass(&["run", "--sim", "--", "sh", "-c", script]);
        command.env("WINDLASS_CACHE", folder.path());
        let (code, printed, told) = outcome(command);
        let laid_out = folder.path().join("simulator");
        let expected = format!("{}\nlibcuda.so\nlibcuda.so.1\nlibnccl.so.2\n", laid_out.display());
        assert_eq!((code, printed), (Some(0), expected), "{told}");
    }
    let (code, _, told) = outcome(windlass(&["run", "--sim", "--", "true"]));
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("WINDLASS_CACHE=off"), "{told}");
}

/// Compiles a program whose loader is a file of this folder, and beside it a C library with versions up to the given one.
fn program_of(folder: &Path, loader: &str, version: &str) -> String {
    let versions = folder.join("versions");
    std::fs::write(&versions, format!("GLIBC_2.2.5 {{ global: made; }};\n{version} {{ global: later; }};\n"))
        .unwrap();
    compile(
        "int made(void) { return 0; } int later(void) { return 0; }",
        &folder.join("libc.so.6"),
        &["-shared", "-fPIC", "-nostdlib", &format!("-Wl,--version-script={}", versions.display())],
    );
    let loader = folder.join(loader);
    std::fs::write(&loader, "").unwrap();
    let program = folder.join("program");
    compile(
        "int main(void) { return 0; }",
        &program,
        &[&format!("-Wl,--dynamic-linker={}", loader.display())],
    );
    program.display().to_string()
}

/// The C library of a program is checked before the program starts: too old, of another kind, or missing.
#[test]
fn refuses_c_libraries() {
    let nccl = simulated_nccl();
    let folder = tempfile::tempdir().unwrap();
    let old = program_of(folder.path(), "ld-linux-x86-64.so.2", "GLIBC_2.5");
    let has =
        format!("but {} of {old} has versions up to GLIBC_2.5", folder.path().join("libc.so.6").display());
    refused(&["--nccl", &nccl, "--", &old], &has);
    refused(&["--nccl", &nccl, "--", "env", "A=1", &old], &has);
    std::fs::remove_file(folder.path().join("ld-linux-x86-64.so.2")).unwrap();
    refused(&["--nccl", &nccl, "--", &old], "ld-linux-x86-64.so.2, which is not there");
    let musl = program_of(folder.path(), "ld-musl-x86_64.so.1", "GLIBC_2.5");
    refused(&["--nccl", &nccl, "--", &musl], "is a program for musl (its loader is ");
}

/// A program that would start without the preload is refused.
#[test]
fn refuses_cleared_environments() {
    let nccl = simulated_nccl();
    refused(&["--nccl", &nccl, "--", "env", "-i", "true"], "env -i starts ");
    refused(&["--nccl", &nccl, "--", "env", "-u", "LD_PRELOAD", "true"], "env -u LD_PRELOAD starts ");
}

/// A program that runs with another user's rights is refused.
#[test]
fn refuses_privileged_programs() {
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join("privileged");
    let program = match std::fs::copy("/bin/true", &own)
        .and_then(|_| std::os::unix::fs::chown(&own, Some(4711), None))
    {
        Ok(()) => own,
        // Only root can change a file's owner; other users find such programs on every machine.
        Err(_) => ["/usr/bin/su", "/usr/bin/passwd", "/bin/su"]
            .map(Into::into)
            .into_iter()
            .find(|file: &std::path::PathBuf| file.exists())
            .unwrap(),
    };
    let _ = std::fs::set_permissions(&program, PermissionsExt::from_mode(0o4755));
    refused(&["--nccl", &simulated_nccl(), "--", &program.display().to_string()], "it is set-user-id");
}

/// A library that cannot be the real one, or that Windlass does not cover, is refused.
#[test]
fn refuses_libraries() {
    let folder = tempfile::tempdir().unwrap();
    let windlass = built("libwindlass.so").display().to_string();
    refused(
        &["--nccl", "/no/such/libnccl.so.2", "--", "true"],
        "/no/such/libnccl.so.2 (--nccl): no such file",
    );
    refused(&["--nccl", &windlass, "--", "true"], "it is Windlass itself");
    let other = built("libsim_cuda.so").display().to_string();
    refused(&["--nccl", &other, "--", "true"], "not NCCL");
    let newer = make_nccl(folder.path(), 99999, "int ncclTeleport(void) { return 0; }").display().to_string();
    refused(&["--nccl", &newer, "--", "true"], "exports 1 functions that Windlass lacks (ncclTeleport)");
}

/// Windlass itself must be found.
#[test]
fn refuses_without_windlass() {
    let folder = tempfile::tempdir().unwrap();
    let alone = folder.path().join("windlass");
    std::fs::copy(built("windlass"), &alone).unwrap();
    let mut command = Command::new(&alone);
    command.args(["run", "--nccl", &simulated_nccl(), "--", "true"]);
    let (code, _, told) = outcome(command);
    assert_eq!(code, REFUSED);
    assert!(told.contains("libwindlass.so is not in "), "{told}");
    assert!(told.contains("install Windlass again, or in a checkout run `cargo build"), "{told}");
}

/// A program that opens NCCL itself by a path gets a warning, and runs.
#[test]
fn warns() {
    let mut command = windlass(&["run", "--nccl", &simulated_nccl(), "--", "true"]);
    command.env("VLLM_NCCL_SO_PATH", "/x/libnccl.so.2");
    let (code, _, told) = outcome(command);
    assert_eq!(code, Some(0));
    assert!(told.contains("warning: VLLM_NCCL_SO_PATH is /x/libnccl.so.2"), "{told}");
}

/// A tracer of NCCL's calls with handles of its own, as NVIDIA's checkpoint shim has them. It passes calls on in both usual ways.
const TRACER: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
static void *given[8];
static int count;
static void saw(const char *name) { fprintf(stderr, "tracer %s\n", name); }
static void *behind(void *handle) {
  long place = (long)handle - 1000;
  if (place < 0 || place >= count) { fprintf(stderr, "tracer unknown handle %p\n", handle); abort(); }
  return given[place];
}
int pncclCommInitAll(void **, int, const int *), pncclCommDestroy(void *), pncclGroupStart(void);
int ncclCommInitRank(void) { abort(); }
int ncclCommInitAll(void **comms, int ranks, const int *devices) {
  saw("ncclCommInitAll");
  int code = pncclCommInitAll(comms, ranks, devices);
  for (int i = 0; i < ranks; i++) { given[count] = comms[i]; comms[i] = (void *)(1000l + count++); }
  return code;
}
int ncclCommDestroy(void *comm) { saw("ncclCommDestroy"); return pncclCommDestroy(behind(comm)); }
int ncclGroupStart(void) { saw("ncclGroupStart"); return pncclGroupStart(); }
int ncclGroupEnd(void) { saw("ncclGroupEnd"); return ((int (*)(void))dlsym(RTLD_NEXT, "ncclGroupEnd"))(); }
int ncclAllReduce(void *in, void *out, size_t count, int type, int operation, void *comm, void *stream) {
  saw("ncclAllReduce");
  int (*next)(void *, void *, size_t, int, int, void *, void *) = dlsym(RTLD_NEXT, "ncclAllReduce");
  return next(in, out, count, type, operation, behind(comm), stream);
}
"#;

/// A tracer that was preloaded stays in front: it sees each call once, with handles that it was given, and Windlass runs them. It is named,
/// and is no second NCCL.
#[test]
fn tracers() {
    let folder = tempfile::tempdir().unwrap();
    let program = example(folder.path());
    let tracer = folder.path().join("libtracer.so");
    compile(TRACER, &tracer, &["-shared", "-fPIC"]);
    let preload = format!("libm.so.6:{}", tracer.display());
    let mut command = windlass(&["run", "--nccl", &simulated_nccl(), "--"]);
    command.arg(program).env("LD_LIBRARY_PATH", folder.path()).env("WINDLASS_SIM_DEVICES", "2");
    command.env("LD_PRELOAD", &preload).env("WINDLASS_LOG", "warn").env("WINDLASS_REPORT", "text");
    let (code, printed, told) = outcome(command);
    assert_eq!((code, &*printed), (Some(0), "all-reduce over 2 GPUs: 0 wrong\n"), "{told}");
    let mut seen: Vec<&str> = told.lines().filter_map(|line| line.strip_prefix("tracer ")).collect();
    seen.sort();
    let [all_reduce, destroy] = ["ncclAllReduce", "ncclCommDestroy"];
    let expected =
        [all_reduce, all_reduce, destroy, destroy, "ncclCommInitAll", "ncclGroupEnd", "ncclGroupStart"];
    assert_eq!(seen, expected, "{told}");
    let named = format!(
        "windlass: preloaded in front of Windlass, to see NCCL's calls: {}; behind it: libm.so.6\n",
        tracer.display()
    );
    assert!(told.starts_with(&named), "{told}");
    assert!(told.contains("ncclAllReduce  ") && !told.contains("second NCCL"), "{told}");
    let mut doctor = windlass(&["doctor", "--nccl", &simulated_nccl()]);
    let (_, printed, _) = outcome({
        doctor.env("LD_PRELOAD", &preload);
        doctor
    });
    assert!(printed.contains(named.strip_prefix("windlass: ").unwrap().trim()), "{printed}");
}
