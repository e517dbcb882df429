//! Holds that `windlass run` measures a machine once, before its first command, and that the command runs whatever fails there.

use crate::{built, compile, outcome, simulated_nccl, windlass};
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A run on the simulator that measures, with a command that ends with status 7.
fn run(cache: &Path, devices: &str) -> Command {
    let mut command = windlass(&["run", "--nccl", &simulated_nccl(), "--", "sh", "-c", "echo ran; exit 7"]);
    command
        .env("WINDLASS_SIM_CALIBRATE", "1")
        .env("WINDLASS_CACHE", cache)
        .env("WINDLASS_SIM_DEVICES", devices);
    command
}

/// The run's standard error, once the command has run.
fn told(command: Command) -> String {
    let (code, printed, told) = outcome(command);
    assert_eq!((code, &*printed), (Some(7), "ran\n"), "{told}");
    told
}

fn files(folder: &Path, beginning: &str) -> Vec<PathBuf> {
    let all = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_such = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with(beginning);
    all.filter(is_such).collect()
}

const MEASURED: &str = "windlass: measured this machine in ";

/// The first run measures, says so, and keeps the limits for this user alone. The second run does not measure, and is quick.
#[test]
fn once() {
    let place = tempfile::tempdir().unwrap();
    let cache = place.path().join("windlass");
    let first = told(run(&cache, "2"));
    let lines: Vec<&str> = first.lines().collect();
    assert!(lines[0].starts_with("windlass: measuring up to which sizes"), "{first}");
    assert!(lines[1].starts_with(MEASURED) && lines[1].contains(" s: 2 ranks: all_reduce "), "{first}");
    assert!(lines[1].ends_with(&format!("; kept in {}", cache.display())), "{first}");
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let cells = files(&cache, "cells-");
    assert_eq!((cells.len(), files(&cache, "measured-").len(), files(&cache, ".").len()), (1, 1, 0));
    assert_eq!((mode(&cache), mode(&cells[0])), (0o700, 0o600));
    let least = |arguments: &[&str]| {
        let once = || {
            let began = Instant::now();
            let mut command = run(&cache, "2");
            if !arguments.is_empty() {
                command = windlass(
                    &[
                        &["run"],
                        arguments,
                        &["--nccl", &simulated_nccl(), "--", "sh", "-c", "echo ran; exit 7"],
                    ]
                    .concat(),
                );
            }
            assert_eq!(told(command), "");
            began.elapsed()
        };
        (0..7).map(|_| once()).min().unwrap()
    };
    let (with, without) = (least(&[]), least(&["--no-calibrate"]));
    assert!(with < without + Duration::from_millis(20), "{with:?}, without {without:?}");
}

/// On the simulator's modelled clock the limit is known: 4 KiB, where 16.5 us and a byte a ns are at most 0.95 of NCCL's 22 us.
#[test]
fn finds_the_limit() {
    let place = tempfile::tempdir().unwrap();
    let mut command = run(place.path(), "2");
    command.env("WINDLASS_SIM_CLOCK", "nccl=22:100,windlass=16.5:1");
    let words = told(command);
    let text = std::fs::read_to_string(files(place.path(), "cells-").remove(0)).unwrap();
    // How many limits are found in the time depends on the load of this machine.
    for (text, before) in [(&words, " up to "), (&text, " native_bytes_max ")] {
        let limits: Vec<&str> = text.split(before).skip(1).map(|rest| &rest[..2]).collect();
        let found: Vec<&&str> =
            limits.iter().filter(|limit| limit.starts_with(|c: char| c.is_ascii_digit())).collect();
        assert!(!found.is_empty() && found.iter().all(|limit| **limit == "4K"), "{text}");
    }
}

/// Other devices count as another machine; then the limits of both are kept.
#[test]
fn for_each_machine() {
    let place = tempfile::tempdir().unwrap();
    for (devices, known) in [("2", 0), ("3", 1), ("2", 2), ("3", 2)] {
        assert_eq!(files(place.path(), "measured-").len(), known);
        assert_eq!(told(run(place.path(), devices)).contains(MEASURED), known < 2, "{devices}");
    }
    assert_eq!(files(place.path(), "cells-").len(), 2);
}

/// A kept file that cannot be read is measured again when it is due, and replaced. A readable one stays. Tests of `limits::store`
/// hold which files count as broken.
#[test]
fn broken_caches() {
    let place = tempfile::tempdir().unwrap();
    told(run(place.path(), "2"));
    let cells = files(place.path(), "cells-").remove(0);
    let whole = std::fs::read_to_string(&cells).unwrap();
    let again = || {
        std::fs::remove_file(files(place.path(), "measured-").remove(0)).unwrap();
        assert!(told(run(place.path(), "2")).contains(MEASURED));
        std::fs::read_to_string(&cells).unwrap()
    };
    assert_eq!(again(), whole);
    std::fs::write(&cells, &whole[..whole.len() / 2]).unwrap();
    let text = again();
    assert!(
        text.starts_with("windlass-cache 1\n") && text.lines().last().unwrap().starts_with("end "),
        "{text}"
    );
}

/// The command runs, with one line of warning, where the folder cannot be written or is a file, there is no home, or the disk is
/// full.
#[test]
fn nowhere_to_keep() {
    for cache in ["/proc/self", "/dev/null/windlass"] {
        let told = told(run(Path::new(cache), "2"));
        assert_eq!(told.lines().count(), 1, "{told}");
        assert!(
            told.contains("not measured, because they cannot be kept: cannot ") && told.contains(cache),
            "{told}"
        );
    }
    let mut homeless = run(Path::new("/x"), "2");
    homeless.env_remove("WINDLASS_CACHE").env_remove("HOME").env_remove("XDG_CACHE_HOME");
    let words = told(homeless);
    assert!(words.contains("neither HOME nor XDG_CACHE_HOME is an absolute path"), "{words}");
    let place = tempfile::tempdir().unwrap();
    let full = run(place.path(), "2");
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "trap '' XFSZ; ulimit -f 0; exec \"$0\" \"$@\""])
        .arg(full.get_program())
        .args(full.get_args());
    shell.envs(full.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let words = told(shell);
    assert!(words.contains("could not be measured") || words.contains("cannot write"), "{words}");
    assert_eq!(files(place.path(), "cells-").len() + files(place.path(), "measured-").len(), 0);
}

/// While one run measures no other does. A run inside of a job of several ranks does not measure, nor one that is told not to.
#[test]
fn not_now() {
    let place = tempfile::tempdir().unwrap();
    let lock = File::create(place.path().join("lock")).unwrap();
    lock.lock().unwrap();
    let words = told(run(place.path(), "2"));
    assert!(words.starts_with("windlass: another process measures this machine's limits now"), "{words}");
    drop(lock);
    for (name, value) in [
        ("RANK", "1"),
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("WINDLASS_COLLECTIVES", "off"),
        ("WINDLASS_CACHE", "off"),
    ] {
        let mut command = run(place.path(), "2");
        command.env(name, value);
        assert_eq!(told(command), "", "{name}");
    }
    assert!(told(run(place.path(), "1")).contains("the command sees one GPU"));
    assert_eq!(told(run(place.path(), "1")), "");
}

/// Starts a run that measures for seconds, and waits until all its ranks run.
fn measuring(cache: &Path) -> (Child, Vec<u32>) {
    let mut command = run(cache, "8");
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let ranks = all_ranks_of(child.id());
    // Far enough that ranks wait for each other.
    std::thread::sleep(Duration::from_millis(500));
    (child, ranks)
}

fn all_ranks_of(parent: u32) -> Vec<u32> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let ranks = ranks_of(parent);
        if ranks.len() == 8 {
            return ranks;
        }
        assert!(Instant::now() < deadline, "no ranks were started");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Child processes that are ranks.
fn ranks_of(parent: u32) -> Vec<u32> {
    let numbers = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_rank = |process: &u32| {
        let read =
            |name: &str| std::fs::read_to_string(format!("/proc/{process}/{name}")).unwrap_or_default();
        read("cmdline").contains("limits-rank") && read("status").contains(&format!("\nPPid:\t{parent}\n"))
    };
    numbers.filter(is_rank).collect()
}

fn signal(process: u32, name: &str) {
    assert!(
        Command::new("kill").args([&format!("-{name}"), &process.to_string()]).status().unwrap().success()
    );
}

/// The command's exit status, and the output.
fn ended(child: Child) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    (status.code(), text(&stdout), text(&stderr))
}

/// A rank that dies or hangs costs a warning and its time. The command runs, and the next run does not measure again.
#[test]
fn ranks_that_fail() {
    for (name, reason, most) in [("KILL", "", 10), ("STOP", "the time is over", 19)] {
        let place = tempfile::tempdir().unwrap();
        let began = Instant::now();
        let (child, ranks) = measuring(place.path());
        signal(ranks[3], name);
        let (code, printed, words) = ended(child);
        assert_eq!((code, &*printed), (Some(7), "ran\n"), "{words}");
        assert!(words.contains("could not be measured: ") && words.contains(reason), "{words}");
        assert!(words.contains("runs try again in a day (`windlass tune` at once)"), "{words}");
        assert!(began.elapsed() < Duration::from_secs(most), "{name}: {:?}", began.elapsed());
        assert!(ranks.iter().all(|rank| !Path::new(&format!("/proc/{rank}")).exists()), "{name}");
        assert_eq!(told(run(place.path(), "8")), "");
        assert_eq!(files(place.path(), "cells-").len(), 0);
    }
}

/// Ctrl-C ends all ranks, and the command does not run. The next run measures.
#[test]
fn interrupted() {
    let place = tempfile::tempdir().unwrap();
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let (child, ranks) = measuring(place.path());
        signal(child.id(), name);
        let (found, printed, words) = ended(child);
        assert_eq!((found, &*printed), (Some(code), ""), "{words}");
        assert!(ranks.iter().all(|rank| !Path::new(&format!("/proc/{rank}")).exists()), "{name}");
        assert_eq!(files(place.path(), "measured-").len(), 0);
    }
}

/// A replacement of NVML that reports a process on each device: with BUSY always; with LATER, the path of a file, from the second
/// query on.
fn lay_out_nvml(folder: &Path) {
    let source = r#"
        #include <fcntl.h>
        #include <stdlib.h>
        #include <unistd.h>
        static int is_first;
        int nvmlInit_v2(void) { return 0; }
        int nvmlShutdown(void) { return 0; }
        int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { *device = (void *)1; return 0; }
        int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) { memory[2] = 600 << 20; return 0; }
        int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) { rates[0] = 0; return 0; }
        int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *processes) {
          const char *later = getenv("LATER");
          if (later && access(later, F_OK)) is_first = close(open(later, O_CREAT, 0600)) == 0;
          *count = getenv("BUSY") || (later && !is_first);
          return 0;
        }"#;
    compile(source, &folder.join("libnvidia-ml.so.1"), &["-shared", "-fPIC"]);
}

/// Limits measured while another process came to a device are not kept.
#[test]
fn disturbed() {
    let place = tempfile::tempdir().unwrap();
    lay_out_nvml(place.path());
    let mut command = run(&place.path().join("cache"), "2");
    command.env("LD_LIBRARY_PATH", place.path()).env("LATER", place.path().join("asked"));
    let words = told(command);
    assert!(
        words.contains("what was measured of this machine is left out: GPU 0 had 1 processes meanwhile"),
        "{words}"
    );
    assert_eq!(files(&place.path().join("cache"), "cells-").len(), 0);
}

/// Devices in use are not measured, and not checked again for a while. Idle ones are measured.
#[test]
fn busy_devices() {
    let place = tempfile::tempdir().unwrap();
    lay_out_nvml(place.path());
    let run = |busy: bool| {
        let mut command = run(&place.path().join("cache"), "2");
        command.env("LD_LIBRARY_PATH", place.path());
        if busy {
            command.env("BUSY", "1");
        }
        told(command)
    };
    let words = run(true);
    assert_eq!(words.lines().count(), 1, "{words}");
    assert!(words.contains("not measured: GPU 0 is in use (1 processes, 0.6 GiB, 0 % busy)"), "{words}");
    // For a while devices are not checked again.
    assert_eq!(run(false), "");
    let notes = files(&place.path().join("cache"), "not-before-");
    assert_eq!(notes.len(), 1);
    let late =
        std::fs::read_to_string(&notes[0]).unwrap().replacen(|digit: char| digit.is_ascii_digit(), "", 2);
    std::fs::write(&notes[0], late).unwrap();
    assert!(run(false).contains(MEASURED));
    assert_eq!(run(true), "");
}

/// Makes a communicator of two ranks.
const PROGRAM: &str = "
import ctypes
comms = (ctypes.c_void_p * 2)()
assert ctypes.CDLL('libnccl.so.2').ncclCommInitAll(comms, 2, (ctypes.c_int * 2)(0, 1)) == 0
for comm in comms:
    ctypes.CDLL('libnccl.so.2').ncclCommDestroy(ctypes.c_void_p(comm))
";

/// Where nobody has measured, the report of a program says what measures, and why no run has.
#[test]
fn told_in_reports() {
    let place = tempfile::tempdir().unwrap();
    lay_out_nvml(place.path());
    std::os::unix::fs::symlink(built("libsim_cuda.so"), place.path().join("libcuda.so.1")).unwrap();
    let report = |options: &[&str], variables: &[(&str, &str)]| {
        let nccl = simulated_nccl();
        let all = [&["run", "--nccl", &nccl], options, &["--", "python3", "-c", PROGRAM]].concat();
        let mut command = windlass(&all);
        if options == ["plain"] {
            command = windlass(&[]);
            let mut python = Command::new("python3");
            python
                .args(["-c", PROGRAM])
                .env("LD_PRELOAD", built("libwindlass.so"))
                .env("WINDLASS_NCCL", &nccl);
            python.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
            command = python;
        }
        command
            .env("WINDLASS_SIM_CALIBRATE", "1")
            .env("WINDLASS_SIM_DEVICES", "2")
            .env("WINDLASS_REPORT", "text")
            .env("WINDLASS_CACHE", place.path().join("cache"))
            .env("LD_LIBRARY_PATH", place.path())
            .envs(variables.iter().copied());
        let (code, _, told) = outcome(command);
        assert_eq!(code, Some(0), "{told}");
        told
    };
    const BEGINNING: &str = "\n  limits not measured here (`windlass tune` measures them, on idle GPUs): ";
    for (options, variables, why) in [
        (&["plain"][..], &[][..], "Windlass was loaded without `windlass run`"),
        (&["--no-calibrate"], &[], "--no-calibrate"),
        (&["--quiet"], &[("RANK", "0")], "`windlass run` was started for each rank"),
        (&[], &[("WINDLASS_CACHE", "/dev/null/windlass")], "cannot make /dev/null/windlass"),
        (&[], &[("WINDLASS_CACHE", "off")], "there is no folder for them"),
        (&[], &[("BUSY", "1")], "GPU 0 is in use (1 processes, 0.6 GiB, 0 % busy)"),
        // The next runs do not ask again for a while.
        (&[], &[], "GPU 0 is in use (1 processes, 0.6 GiB, 0 % busy)"),
    ] {
        let told = report(options, variables);
        assert!(told.contains(&format!("{BEGINNING}{why}")), "{options:?}: {told}");
    }
    std::fs::remove_dir_all(place.path().join("cache")).unwrap();
    let measured = report(&[], &[]);
    // How many limits are found in the time depends on the load of this machine.
    let is_measured = measured.contains(" s: 2 ranks: all_reduce ");
    for told in [&measured, &report(&[], &[])] {
        let says = told.contains(&format!("{BEGINNING}what `windlass run` has measured does not hold"));
        assert_eq!((told.contains("limits not measured here"), says), (!is_measured, !is_measured), "{told}");
    }
}
