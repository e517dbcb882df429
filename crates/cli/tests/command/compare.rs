//! Holds that `windlass compare` runs a command with and without Windlass, prints what it measured, and fails where a run fails.

use crate::{built, compile, outcome, simulated_nccl, windlass};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The command over the simulated NCCL, with its logs in a folder.
fn compare(folder: &Path, options: &[&str], command: &[&str]) -> Command {
    let mut compare = windlass(&["compare", "--nccl", &simulated_nccl(), "--logs"]);
    compare.arg(folder).args(options).arg("--").args(command);
    compare
}

/// A program of the examples, built over the simulators as a user would.
pub fn example(folder: &Path) -> PathBuf {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for (library, name) in [("libsim_nccl.so", "libnccl.so.2"), ("libsim_cuda.so", "libcuda.so.1")] {
        std::os::unix::fs::symlink(built(library), folder.join(name)).unwrap();
    }
    let program = folder.join("all_reduce");
    let source = std::fs::read_to_string(repository.join("examples/c/all_reduce.c")).unwrap();
    let include = |path: &str| format!("-I{}", repository.join(path).display());
    let arguments =
        [include("include"), include("ctests/consumers/include"), format!("-L{}", folder.display())];
    let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    arguments.extend(["-l:libnccl.so.2", "-l:libcuda.so.1"]);
    compile(&source, &program, &arguments);
    program
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// A program unaware of Windlass, on the simulator: the sides take turns, only Windlass's side is counted, and the table and the JSON
/// file agree.
#[test]
fn on_the_simulator() {
    let folder = tempfile::tempdir().unwrap();
    let program = example(folder.path());
    let file = |name: &str| folder.path().join(name).display().to_string();
    let json = file("out.json");
    let mut command = windlass(&["compare", "--sim", "--runs", "3", "--warmup", "--json", &json]);
    command.args(["--logs", &file("logs"), "--metric", r"over (?<gpus>\d+) GPUs", "--"]).arg(program);
    command.env("WINDLASS_SIM_DEVICES", "2");
    let (code, printed, told) = outcome(command);
    assert_eq!(code, Some(0), "{printed}{told}");
    assert!(printed.contains("\nwall time, s ") && printed.contains("\ngpus "), "{printed}");
    assert!(printed.contains("Both sides ran on the simulator"), "{printed}");
    assert!(told.contains("compare: run 8 of 8, "), "{told}");

    let answer = read(Path::new(&json));
    assert_eq!(answer["rows"][1]["name"], "gpus");
    assert_eq!(answer["rows"][1]["with"]["median"], 2.0);
    assert_eq!(answer["rows"][1]["difference"], "within_noise");
    let runs = answer["runs"].as_array().unwrap();
    let sides: Vec<&str> = runs.iter().map(|run| run["side"].as_str().unwrap()).collect();
    assert_eq!(sides, ["without", "with", "with", "without", "without", "with", "with", "without"]);
    for run in runs {
        if run["side"] == "without" {
            assert_eq!(run["counters"], Value::Null, "{run:#}");
        } else {
            let calls = &run["counters"]["calls"][0];
            assert_eq!(
                (calls["function"].as_str(), calls["calls"].as_u64()),
                (Some("ncclAllReduce"), Some(2)),
                "{run:#}"
            );
            assert_eq!(run["counters"]["communicators"], 2, "{run:#}");
        }
        let log = std::fs::read_to_string(run["log"].as_str().unwrap()).unwrap();
        assert_eq!(log, "all-reduce over 2 GPUs: 0 wrong\n");
    }
    assert!(printed.contains("ncclAllReduce  "), "{printed}");
}

/// The side with Windlass has the preload. The other side has neither preload nor report, and WINDLASS=off for other ways to load
/// Windlass.
#[test]
fn variables_of_both_sides() {
    let folder = tempfile::tempdir().unwrap();
    let script = "echo preload=$LD_PRELOAD switch=$WINDLASS report=$WINDLASS_REPORT";
    let mut command = compare(folder.path(), &["--runs", "1"], &["sh", "-c", script]);
    command.env("LD_PRELOAD", "libm.so.6").env("WINDLASS_REPORT", "text");
    let (code, printed, told) = outcome(command);
    assert_eq!(code, Some(0), "{printed}{told}");
    let log = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert_eq!(log("1-without.log"), "preload=libm.so.6 switch=off report=\n");
    let with = log("2-with.log");
    let preload = format!("preload={}:libm.so.6 switch= report=json:", built("libwindlass.so").display());
    assert!(with.starts_with(&preload) && with.ends_with("/2-with.counters/%h-%p.json\n"), "{with}");
    assert!(told.contains("WINDLASS_REPORT is ignored"), "{told}");
    // One pair of runs of a program without communicators gives no finding.
    assert!(
        printed.contains("no verdict") && printed.contains("Windlass counted no communicator"),
        "{printed}"
    );
}

/// A printed figure is compared, without the first ones of a run. A program without NCCL gets no verdict on Windlass.
#[test]
fn metrics() {
    let folder = tempfile::tempdir().unwrap();
    let script = "echo step 900 ms; [ -n \"$WINDLASS\" ] && echo step 20 ms || echo step 15 ms";
    let options = ["--metric", r"step (\S+) ms", "--metric-warmup", "1"];
    let (code, printed, told) = outcome(compare(folder.path(), &options, &["sh", "-c", script]));
    assert_eq!(code, Some(0), "{printed}{told}");
    let row = printed.lines().find(|line| line.starts_with(r"step (\S+) ms")).unwrap();
    let cells: Vec<&str> = row.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
    assert_eq!(
        cells[1..],
        ["20.00 (20.00 to 20.00)", "15.00 (15.00 to 15.00)", "0.750 (0.750 to 0.750)", "no verdict"]
    );
}

/// A run that fails ends the comparison. The error names the run and its output file, and shows the end of the output.
#[test]
fn failing_runs() {
    let folder = tempfile::tempdir().unwrap();
    let script = "seq 1 100; [ -n \"$WINDLASS\" ] || exit 3";
    let (code, printed, told) = outcome(compare(folder.path(), &[], &["sh", "-c", script]));
    assert_eq!(code, Some(1), "{printed}{told}");
    let log = folder.path().join("2-with.log");
    let expected = format!(
        "windlass: run 2 of 6 (with Windlass) ended with exit status: 3; its output is in {}, of which this is the end:\n81\n",
        log.display()
    );
    assert!(told.contains(&expected) && told.ends_with("\n100\n"), "{told}");
    assert_eq!(printed, "");
}

/// A pattern that matches nothing is an error after the first run.
#[test]
fn metrics_that_are_not_there() {
    let folder = tempfile::tempdir().unwrap();
    for (options, reason) in [
        (&["--metric", "loss=(.*)"][..], "found 0 figures in "),
        (&["--metric", "step (.*)"], "; \"fast\" is no number"),
        (&["--metric", "time (.*)", "--metric-warmup", "2"], ", of which --metric-warmup skips 2"),
    ] {
        let command = compare(folder.path(), options, &["sh", "-c", "echo step fast; echo time 1"]);
        let (code, _, told) = outcome(command);
        assert_eq!(code, Some(1), "{told}");
        assert!(
            told.contains("windlass: run 1 of 6 (without Windlass): --metric ") && told.contains(reason),
            "{told}"
        );
    }
    let (code, _, told) = outcome(compare(folder.path(), &["--metric", "step"], &["true"]));
    assert_eq!(code, Some(2), "{told}");
    assert!(told.contains("the pattern has no group"), "{told}");
}

/// What `windlass run` refuses `windlass compare` refuses, too.
#[test]
fn refusals() {
    let folder = tempfile::tempdir().unwrap();
    let (code, _, told) = outcome(compare(folder.path(), &[], &["no-such-command"]));
    assert_eq!(code, Some(127), "{told}");
    assert!(told.contains("command not found in PATH"), "{told}");
    let mut off = compare(folder.path(), &[], &["true"]);
    off.env("WINDLASS", "off");
    let (code, _, told) = outcome(off);
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("WINDLASS=off is set"), "{told}");
}

/// GPU memory, as a replacement of NVML reports it: of the command's processes, or of whole devices where it names none of them.
#[test]
fn gpu_memory() {
    let folder = tempfile::tempdir().unwrap();
    let process = folder.path().join("process");
    // Two GPUs. The process named in a file has 300 MiB on the second one, and 50 MiB more with Windlass.
    let source = format!(
        "#include <stdio.h>\n#include <stdlib.h>\ntypedef unsigned long long u64;\n\
         struct memory {{ u64 total, free, used; }};\n\
         struct process {{ unsigned pid; u64 used; unsigned gpu, compute; }};\n\
         static int read(int *pid, int *mib) {{ FILE *file = fopen(\"{}\", \"r\"); *pid = *mib = 0; if (!file) return 0;\n\
         int read = fscanf(file, \"%d %d\", pid, mib); fclose(file); return read == 2; }}\n\
         int nvmlInit_v2(void) {{ return 0; }} int nvmlShutdown(void) {{ return 0; }}\n\
         int nvmlDeviceGetCount_v2(unsigned *count) {{ *count = 2; return 0; }}\n\
         int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {{ *device = (void *)(size_t)(index + 1); return 0; }}\n\
         int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {{ int pid, mib; read(&pid, &mib);\n\
         memory->used = (u64)(1000 + (device == (void *)2 ? mib : 0)) << 20; return 0; }}\n\
         int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *list) {{ int pid, mib;\n\
         *count = 0; if (getenv(\"NAMES_NONE\") || device != (void *)2 || !read(&pid, &mib)) return 0;\n\
         list[0].pid = pid; list[0].used = (u64)mib << 20; *count = 1; return 0; }}\n",
        process.display()
    );
    compile(&source, &folder.path().join("libnvidia-ml.so.1"), &["-shared", "-fPIC"]);
    let script = format!(
        "[ -n \"$WINDLASS\" ] && more=0 || more=50; echo $$ $((300 + more)) >{0}.new; mv {0}.new {0}; sleep 0.8; rm {0}",
        process.display()
    );
    for (variable, source, note) in [
        ("NAMES_SOME", "processes", "GPU memory is looked at"),
        ("NAMES_NONE", "devices", "GPU memory is the growth of the whole GPU"),
    ] {
        let json = folder.path().join("json");
        let options = ["--runs", "1", "--json", json.to_str().unwrap()];
        let mut command = compare(folder.path(), &options, &["sh", "-c", &script]);
        command.env("LD_LIBRARY_PATH", folder.path()).env(variable, "1");
        let (code, printed, told) = outcome(command);
        assert_eq!(code, Some(0), "{printed}{told}");
        assert!(printed.contains(note), "{printed}");
        let answer = read(&json);
        assert_eq!(answer["memory_of"], source, "{answer:#}");
        let row = &answer["rows"][1];
        assert_eq!(row["name"], "peak memory of GPU 1", "{answer:#}");
        assert_eq!(
            (row["without"]["median"].as_f64(), row["with"]["median"].as_f64()),
            (Some(300.0), Some(350.0))
        );
        assert_eq!(answer["rows"].as_array().unwrap().len(), 2, "{answer:#}");
    }
}
