//! Holds that a run says at its end what ran in Windlass's kernels, whatever way its command ends, and that `windlass stats --last` says
//! it where the end could not.

use crate::{built, outcome, windlass};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Makes a communicator of two ranks and calls it, says so, and goes on as its argument says.
const PROGRAM: &str = r#"
import ctypes, os, subprocess, sys

def call():
    nccl, cuda = ctypes.CDLL("libnccl.so.2"), ctypes.CDLL("libcuda.so.1")
    comms, buffers = (ctypes.c_void_p * 2)(), []
    assert nccl.ncclCommInitAll(comms, 2, (ctypes.c_int * 2)(0, 1)) == 0
    for device in 0, 1:
        context, buffer = ctypes.c_void_p(), ctypes.c_void_p()
        assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert cuda.cuCtxSetCurrent(context) == 0
        assert nccl.ncclMemAlloc(ctypes.byref(buffer), ctypes.c_size_t(64)) == 0
        buffers.append(buffer)
    assert nccl.ncclGroupStart() == 0
    for comm, buffer in zip(comms, buffers):
        assert nccl.ncclAllReduce(buffer, buffer, ctypes.c_size_t(16), 7, 0, ctypes.c_void_p(comm), None) == 0
    assert nccl.ncclGroupEnd() == 0
    for comm, buffer in zip(comms, buffers):
        assert nccl.ncclMemFree(buffer) == 0 and nccl.ncclCommDestroy(ctypes.c_void_p(comm)) == 0

how = sys.argv[1]
if how == "children":
    subprocess.run([sys.executable, __file__, "exit"], check=True)
    subprocess.run([sys.executable, __file__, "_exit"], check=True)
    sys.exit(7)
call()
print("called", flush=True)
if how == "_exit":
    os._exit(0)
if how == "wait":
    sys.stdin.read()
if how == "fork":
    child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
if how == "close":
    os.close(2)
if how == "replace":
    os.close(2)
    assert os.open("data", os.O_CREAT | os.O_WRONLY) == 2
    os.set_inheritable(2, True)
"#;

const LINE: &str = "windlass: 1 process, 1 communicator, 100 % of bytes in Windlass's kernels\n";

/// Runs the tests below in a mount namespace in which `/dev/shm` is theirs: programs of other tests remove what ended runs have left.
#[test]
fn with_own_shared_memory() {
    let unshare = |command: &[&str]| {
        let mut unshare = Command::new("unshare");
        if !rustix::process::getuid().is_root() {
            unshare.args(["--user", "--map-root-user"]);
        }
        unshare
            .args(["--mount", "sh", "-ec", "mount -t tmpfs tmpfs /dev/shm\nexec \"$@\"", "sh"])
            .args(command);
        outcome(unshare)
    };
    let (code, _, why) = unshare(&["true"]);
    if code != Some(0) {
        return eprintln!("skipped: this machine gives no mount namespace: {why}");
    }
    let tests = std::env::current_exe().unwrap().display().to_string();
    let (code, told, why) = unshare(&[&tests, "closing::", "--ignored", "--nocapture", "--test-threads=1"]);
    assert_eq!(code, Some(0), "{told}{why}");
    assert!(told.contains("test result: ok. 8 passed"), "{told}");
}

/// A run of the program on the simulator, in a folder with it.
fn run(folder: &Path, before: &[&str], options: &[&str], command: &[&str]) -> Command {
    let cuda = folder.join("libcuda.so.1");
    if !cuda.exists() {
        std::os::unix::fs::symlink(built("libsim_cuda.so"), cuda).unwrap();
        std::fs::write(folder.join("program.py"), PROGRAM).unwrap();
    }
    let nccl = crate::simulated_nccl();
    let plain = windlass(&[]);
    let words = [&["run", "--nccl", &nccl], options, &["--"], command].concat();
    let mut all = before.iter().map(std::ffi::OsStr::new).chain([plain.get_program()]);
    let mut run = Command::new(all.next().unwrap());
    run.args(all).args(words).current_dir(folder);
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => run.env(name, value),
            None => run.env_remove(name),
        };
    }
    run.env("LD_LIBRARY_PATH", folder);
    run
}

fn program(folder: &Path, how: &str) -> Command {
    run(folder, &[], &[], &["python3", "program.py", how])
}

fn last() -> String {
    let (code, printed, told) = outcome(windlass(&["stats", "--last"]));
    assert_eq!(code, Some(0), "{told}");
    printed
}

fn nothing_is_left() {
    let (code, _, told) = outcome(windlass(&["stats", "--last"]));
    assert!(
        code == Some(1)
            && told.starts_with("windlass: no run that called NCCL has left counters in /dev/shm"),
        "{told}"
    );
}

/// Starts a program that waits once it has called.
fn waiting(mut command: Command) -> Child {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "called\n");
    child
}

fn told(child: &mut Child) -> String {
    let mut told = String::new();
    child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    told
}

/// The line comes once, by the process that `windlass run` became, and sums its children. The exit code stays, and nothing else does.
#[test]
#[ignore = "in a namespace"]
fn at_an_exit() {
    let folder = tempfile::tempdir().unwrap();
    let exit = format!("{} program.py exit", "exec python3");
    let children = "windlass: 2 processes, 2 communicators, 100 % of bytes in Windlass's kernels\n";
    let none = "windlass: no process of this run called NCCL through Windlass\n";
    for (command, code, expected) in [
        (&["python3", "program.py", "exit"][..], 0, LINE),
        (&["bash", "-c", &exit], 0, LINE),
        (&["bash", "-c", &format!("{exit} &\nwait")], 0, LINE),
        (&["python3", "program.py", "children"], 7, children),
        (&["python3", "-c", "pass"], 0, none),
        // The command has the library's code, and is itself run here.
        (&[env!("CARGO_BIN_EXE_windlass"), "stats"], 0, none),
    ] {
        let (ended, _, told) = outcome(run(folder.path(), &[], &[], command));
        assert_eq!((ended, told.as_str()), (Some(code), expected), "{command:?}");
        nothing_is_left();
    }
}

/// `--quiet` prints nothing, in a run of a run, too, and leaves nothing.
#[test]
#[ignore = "in a namespace"]
fn quiet() {
    let folder = tempfile::tempdir().unwrap();
    let quiet = run(folder.path(), &[], &["--quiet"], &["python3", "program.py", "exit"]);
    let mut inherited = run(folder.path(), &[], &["--quiet"], &["sh", "-c", "echo \"<$WINDLASS_RUN>\""]);
    inherited.env("WINDLASS_RUN", "7.8");
    assert_eq!(outcome(quiet), (Some(0), "called\n".into(), String::new()));
    assert_eq!(outcome(inherited), (Some(0), "<>\n".into(), String::new()));
    nothing_is_left();
}

/// A child that was forked from the program and calls `exit` prints nothing and removes nothing.
#[test]
#[ignore = "in a namespace"]
fn forked_child() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(outcome(program(folder.path(), "fork")), (Some(0), "called\n".into(), LINE.into()));
    nothing_is_left();
}

/// Standard error may be closed from the beginning, by the program, or be another file by now, which gets nothing.
#[test]
#[ignore = "in a namespace"]
fn no_standard_error() {
    let folder = tempfile::tempdir().unwrap();
    let closed = &["sh", "-c", "exec \"$@\" 2>&-", "sh"];
    let closed = run(folder.path(), closed, &[], &["python3", "program.py", "exit"]);
    for command in [closed, program(folder.path(), "close"), program(folder.path(), "replace")] {
        assert_eq!(outcome(command), (Some(0), "called\n".into(), String::new()));
        nothing_is_left();
    }
    assert_eq!(std::fs::read_to_string(folder.path().join("data")).unwrap(), "");
}

/// `os._exit` runs nothing at the end. Then the line is what `windlass stats --last` prints, until a program with Windlass starts.
#[test]
#[ignore = "in a namespace"]
fn without_an_end() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(outcome(program(folder.path(), "_exit")), (Some(0), "called\n".into(), String::new()));
    for _ in 0..2 {
        assert!(last().starts_with(LINE) && last().contains(", which has ended; "), "{}", last());
    }
    assert_eq!(outcome(program(folder.path(), "exit")).2, LINE);
    nothing_is_left();
}

/// So it is after a signal, Ctrl-C in Python among them. While the run lives, `windlass stats --last` says so, and a program that starts
/// meanwhile leaves its counters.
#[test]
#[ignore = "in a namespace"]
fn after_a_signal() {
    let folder = tempfile::tempdir().unwrap();
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let mut child = waiting(program(folder.path(), "wait"));
        assert!(last().contains(&format!("process {}, which still runs; ", child.id())), "{}", last());
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(signal.as_raw()));
        assert!(!told(&mut child).contains("windlass: "));
        assert!(last().starts_with(LINE) && last().contains(", which has ended; "), "{}", last());
    }
}

/// A run that a hang-up does not end prints its line.
#[test]
#[ignore = "in a namespace"]
fn nohup() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = waiting(run(folder.path(), &["nohup"], &[], &["python3", "program.py", "wait"]));
    kill_process(Pid::from_child(&child), Signal::HUP).unwrap();
    drop(child.stdin.take().unwrap().write_all(b"\n"));
    assert_eq!((child.wait().unwrap().code(), told(&mut child).as_str()), (Some(0), LINE));
}

/// The first process of a container prints the line, too.
#[test]
#[ignore = "in a namespace"]
fn process_1() {
    let folder = tempfile::tempdir().unwrap();
    let namespace = ["unshare", "--pid", "--fork", "--mount-proc"];
    let (code, _, why) = outcome({
        let mut command = Command::new(namespace[0]);
        command.args(&namespace[1..]).arg("true");
        command
    });
    if code != Some(0) {
        return eprintln!("skipped: this machine gives no namespace of processes: {why}");
    }
    let command = ["bash", "-c", "echo $$; exec python3 program.py exit"];
    let first = outcome(run(folder.path(), &namespace, &[], &command));
    assert_eq!(first, (Some(0), "1\ncalled\n".into(), LINE.into()));
    nothing_is_left();
}
