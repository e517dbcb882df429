//! Holds that a command which is asked to end does so at once, leaves no process, and prints what it had finished.

use crate::{make_nccl, simulated_nccl, windlass};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// `timeout -k 3` kills a command that is still there after 3 s; a loaded machine takes longer.
const KILLED_AFTER: Duration = Duration::from_millis(4500);

fn is_alive(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A command that was started with both outputs captured.
struct Running(Child);

impl Running {
    fn start(mut command: Command) -> Running {
        Running(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Its exit code, standard output and standard error.
    fn end(self) -> (Option<i32>, String, String) {
        let ended = self.0.wait_with_output().unwrap();
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        (ended.status.code(), text(&ended.stdout), text(&ended.stderr))
    }
}

/// `windlass compare` over a script that writes process numbers into files of a folder.
struct Comparing {
    folder: tempfile::TempDir,
    running: Running,
}

impl Comparing {
    fn start(script: &str) -> Comparing {
        let folder = tempfile::tempdir().unwrap();
        let mut command = windlass(&["compare", "--nccl", &simulated_nccl(), "--runs", "2", "--logs"]);
        command.arg(folder.path()).args(["--", "sh", "-c", script]).current_dir(folder.path());
        Comparing { running: Running::start(command), folder }
    }

    fn process(&self, file: &str) -> u32 {
        let read = || {
            let text = std::fs::read_to_string(self.folder.path().join(file)).ok()?;
            text.strip_suffix('\n')?.parse().ok()
        };
        wait_until("the command has not begun", || read().is_some());
        read().unwrap()
    }
}

/// The end of what all interrupted comparisons say.
const ALL_ENDED: &str = "compare: interrupted; all that the command has started is ended\n";

/// Ctrl-C ends the command and the processes that it has started, also one in another session. Those that ignore the signal are killed
/// at the second one. The exit code is that of a shell.
#[test]
fn by_the_terminal() {
    let interrupt = || {
        let comparing = Comparing::start(
            "setsid sh -c 'echo $$ >detached; exec sleep 1000' & echo $$ >command; sleep 1000",
        );
        let processes = ["command", "detached"].map(|file| comparing.process(file));
        comparing.running.send(Signal::INT);
        std::thread::sleep(Duration::from_millis(500));
        let second = Instant::now();
        comparing.running.send(Signal::INT);
        let (code, _, told) = comparing.running.end();
        assert_eq!(code, Some(130), "{told}");
        assert!(told.ends_with(ALL_ENDED), "{told}");
        assert!(!processes.into_iter().any(is_alive), "{processes:?}");
        second.elapsed()
    };
    // A loaded machine takes longer.
    assert!((0..5).any(|_| interrupt() < Duration::from_secs(1)));
}

/// What `timeout -k 3` and job schedulers do leaves nothing: jobs of a shell get the signal itself, and who ignores it is killed in time.
#[test]
fn by_a_scheduler() {
    let ignoring = "trap '' INT TERM; ";
    let comparing = ["", ignoring].map(|trap| {
        let comparing = Comparing::start(&format!("{trap}sleep 77 & echo $! >job; echo $$ >command; wait"));
        let processes = ["command", "job"].map(|file| comparing.process(file));
        (comparing, processes)
    });
    let asked = Instant::now();
    for (comparing, _) in &comparing {
        // `timeout` sends it to its child and to the whole group.
        comparing.running.send(Signal::TERM);
        comparing.running.send(Signal::TERM);
    }
    for ((comparing, processes), least) in comparing.into_iter().zip([0, 1]) {
        let (code, _, told) = comparing.running.end();
        assert_eq!(code, Some(143), "{told}");
        assert!(told.ends_with(ALL_ENDED), "{told}");
        let took = asked.elapsed();
        assert!(Duration::from_secs(least) < took && took < KILLED_AFTER, "{took:?}: {told}");
        assert!(!processes.into_iter().any(is_alive), "{processes:?}");
    }
}

/// Pairs of runs that were finished before are printed.
#[test]
fn finished_runs() {
    let comparing =
        Comparing::start("echo run >>runs; [ $(wc -l <runs) -lt 3 ] || { echo $$ >command; sleep 1000; }");
    comparing.process("command");
    comparing.running.send(Signal::TERM);
    let (code, printed, told) = comparing.running.end();
    assert_eq!(code, Some(143), "{told}");
    assert!(printed.starts_with("1 runs of each side") && printed.contains("\nwall time, "), "{printed}");
    assert!(told.ends_with(ALL_ENDED), "{told}");
}

/// Processes that the command left behind end at once, and there is no next run.
#[test]
fn after_a_run() {
    let comparing = Comparing::start("echo run >>runs; sleep 1000 & echo $! >job");
    let job = comparing.process("job");
    // The command has ended by now, and its job has some seconds.
    std::thread::sleep(Duration::from_millis(500));
    comparing.running.send(Signal::TERM);
    let runs = comparing.folder.path().join("runs");
    let (code, printed, told) = comparing.running.end();
    assert_eq!((code, &*printed), (Some(143), ""), "{told}");
    assert_eq!(std::fs::read_to_string(runs).unwrap(), "run\n", "{told}");
    assert!(!is_alive(job));
}

/// A comparison that is killed takes the command with it.
#[test]
fn killed() {
    let comparing = Comparing::start("echo $$ >command; exec sleep 1000");
    let command = comparing.process("command");
    comparing.running.send(Signal::KILL);
    wait_until("the command lives on", || !is_alive(command));
}

/// All processes that have a file's name in their environment.
fn marked(mark: &Path) -> Vec<u32> {
    let mark = format!("MARK={}\0", mark.display());
    let numbers = std::fs::read_dir("/proc").unwrap().flatten();
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_marked = |process: &u32| {
        let environment = std::fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
        String::from_utf8_lossy(&environment).contains(&mark)
    };
    numbers.filter(is_marked).collect()
}

/// A command with a mark that its children inherit, which has said a line with these words.
fn started(mut command: Command, mark: PathBuf, words: &str) -> Running {
    let mut running = Running::start({
        command.env("MARK", mark);
        command
    });
    let mut told = BufReader::new(running.0.stderr.as_mut().unwrap());
    let mut line = String::new();
    while !line.contains(words) {
        line.clear();
        assert!(told.read_line(&mut line).unwrap() > 0, "no line with {words:?}");
    }
    running
}

/// Measurements end with their ranks and say what was finished. A killed one leaves no rank either.
#[test]
fn measurements() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("lines").display().to_string();
    let bench =
        ["bench", "--sim", "--op", "all_reduce", "--mode", "eager", "--sizes", "1K:1M:2", "--json", &json];
    for (name, arguments, words, printed) in [
        ("bench", &bench[..], "bench: 2/", "all_reduce"),
        ("tune", &["tune", "--sim", "--ranks", "2", "--seconds", "2"], "tune: 2 ranks, ", ""),
        ("demo", &["demo", "--sim", "--ranks", "4"], "demo: every collective", ""),
    ] {
        for signal in [Signal::TERM, Signal::KILL] {
            let mark = folder.path().join(format!("{name} {signal:?}"));
            let running = started(windlass(arguments), mark.clone(), words);
            assert!(marked(&mark).len() > 2, "{name}");
            let asked = Instant::now();
            running.send(signal);
            let (code, found, told) = running.end();
            assert!(asked.elapsed() < KILLED_AFTER, "{name}: {:?}", asked.elapsed());
            wait_until(&format!("ranks of {name} live on"), || marked(&mark).is_empty());
            if signal == Signal::TERM {
                assert_eq!(code, Some(143), "{name}: {told}");
                assert!(
                    found.contains(printed) && told.ends_with("windlass: interrupted\n"),
                    "{name}: {found}{told}"
                );
            }
        }
    }
    let lines = std::fs::read_to_string(&json).unwrap();
    assert!(lines.lines().count() >= 2 && lines.contains("\"nccl\":\"2.28.9\""), "{lines}");
}

/// A question to a library that does not answer ends with whoever asked.
#[test]
fn questions() {
    let folder = tempfile::tempdir().unwrap();
    let hangs = "#include <unistd.h>\n__attribute__((constructor)) static void hang(void) { write(2, \"hangs\\n\", 6); sleep(1000); }";
    let nccl = make_nccl(folder.path(), 22809, hangs).display().to_string();
    let mark = folder.path().join("asks");
    let mut command = windlass(&["doctor"]);
    command.env("WINDLASS_NCCL", &nccl).env("MARK", &mark);
    let running = Running::start(command);
    wait_until("nobody is asked", || {
        let maps =
            marked(&mark).into_iter().map(|process| std::fs::read_to_string(format!("/proc/{process}/maps")));
        maps.flatten().any(|maps| maps.contains(&nccl))
    });
    running.send(Signal::TERM);
    wait_until("the question lives on", || marked(&mark).is_empty());
    assert_eq!(running.end().0, None);
}
