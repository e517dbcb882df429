//! Prints where a test hangs on a GPU machine, where there is no debugger, before the test runner ends it.

use std::fs;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Longer than any test takes on GPUs, and shorter than the runner's limit.
const LATE: Duration = Duration::from_secs(20);

static LAST: Mutex<Option<(String, Instant)>> = Mutex::new(None);

/// Notes the test's next step, which is printed only if it hangs there.
pub fn step(what: impl Into<String>) {
    *LAST.lock().unwrap() = Some((what.into(), Instant::now()));
}

/// Looks once, late, on its own thread.
pub fn begin() {
    std::thread::spawn(|| {
        std::thread::sleep(LATE);
        match &*LAST.lock().unwrap() {
            Some((what, since)) => eprintln!("hangs? for {:.1} s at: {what}", since.elapsed().as_secs_f64()),
            None => eprintln!("hangs? no step was told"),
        }
        // Printed twice, as the difference of processor times shows which threads run.
        for _ in 0..2 {
            tasks().for_each(|line| eprintln!("{line}"));
            std::thread::sleep(Duration::from_secs(1));
        }
    });
}

/// Of each thread: its name, state and processor time (clock ticks, of user and of system), the system call that it is in (number
/// first) and, where that may be read, what the kernel waits at.
fn tasks() -> impl Iterator<Item = String> {
    fs::read_dir("/proc/self/task").into_iter().flatten().flatten().map(|task| {
        let read =
            |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_else(|error| error.to_string());
        let stat = read("stat");
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
        let field = |index: usize| fields.get(index).copied().unwrap_or("?").to_owned();
        format!(
            "thread {:?} {}: state {}, time {} + {}, call {}, at {}",
            task.file_name(),
            read("comm").trim(),
            field(0),
            field(11),
            field(12),
            read("syscall").trim(),
            read("wchan").trim()
        )
    })
}
