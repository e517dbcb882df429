//! Holds that `windlass stats` reads running programs, and ends as it should.

use crate::{outcome, windlass};
use std::process::Stdio;

/// The counters of a running program are read by another process.
#[test]
fn sees_a_running_program() {
    let mut demo = windlass(&["demo", "--sim", "--ranks", "2"]);
    let mut demo = demo.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let parent = demo.id();
    let mut seen = None;
    while seen.is_none() && demo.try_wait().unwrap().is_none() {
        // Other tests' ranks are listed, too; this test's are the children of this demo.
        let (code, printed, told) = outcome(windlass(&["stats", "--json"]));
        assert_eq!(code, Some(0), "{told}");
        seen = printed.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok()).find(
            |snapshot| {
                let process = snapshot["process"].as_u64().unwrap_or(0);
                parent_of(process) == Some(parent)
                    && snapshot["functions"]["ncclAllReduce"].as_u64() > Some(0)
            },
        );
    }
    let status = demo.wait().unwrap();
    assert!(status.success());
    let seen = seen.expect("the demo ended before its counters were seen");
    assert_eq!(seen["communicators"][0]["ranks"], 2, "{seen:#}");
}

fn parent_of(process: u64) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// A process without counters is an error that names the possible reasons.
#[test]
fn no_counters() {
    let (code, _, told) = outcome(windlass(&["stats", "1"]));
    assert_eq!(code, Some(1));
    assert!(told.contains("process 1 has no counters in /dev/shm"), "{told}");
}

/// `--clean` removes counters of ended processes, and keeps those of living ones. The lock of the file tells which, or the process
/// number for versions without a lock.
#[test]
fn cleans_up() {
    // Process numbers end well below this one, so it belongs to no process here, but perhaps to one in another container.
    const ELSEWHERE: u32 = 4_000_000_000;
    let left = Leftover::new(ELSEWHERE, "0");
    let own = Leftover::new(std::process::id(), "0");
    let killed = Leftover::new(ELSEWHERE, "1-held");
    let namesake = Leftover::new(std::process::id(), "1-held");
    let living = Leftover::new(ELSEWHERE, "2-held");
    let held = std::fs::File::open(&living.0).unwrap();
    held.lock().unwrap();
    let clean = |process: u32| {
        let (code, printed, told) = outcome(windlass(&["stats", "--clean", &process.to_string()]));
        assert_eq!(code, Some(0), "{told}");
        printed
    };
    assert_eq!(clean(ELSEWHERE), format!("removed {}\nremoved {}\n", left.0.display(), killed.0.display()));
    assert_eq!(clean(std::process::id()), format!("removed {}\n", namesake.0.display()));
    assert!(own.0.exists() && living.0.exists());
    drop(held);
    assert_eq!(clean(ELSEWHERE), format!("removed {}\n", living.0.display()));
}

struct Leftover(std::path::PathBuf);

impl Leftover {
    fn new(process: u32, rest: &str) -> Self {
        // A user without a process here, so that no process that starts meanwhile removes it.
        let path = format!("/dev/shm/windlass-4000000000-{process}-{rest}").into();
        std::fs::write(&path, "left behind").unwrap();
        Self(path)
    }
}

impl Drop for Leftover {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Files of others end neither a look nor a clean-up, and stay: a link, a pipe, a file of another user, and a file that cannot be opened.
#[test]
fn files_of_others() {
    let paths = [1, 2, 3].map(|number| format!("/dev/shm/windlass-3999999999-{number}-1-held"));
    let _left = paths.clone().map(|path| Leftover(path.into()));
    let leftover = Leftover::new(3_999_999_999, "1-held");
    std::os::unix::fs::symlink("/dev/shm/no-such", &paths[0]).unwrap();
    let (code, ..) = outcome({
        let mut command = std::process::Command::new("mkfifo");
        command.arg(&paths[1]);
        command
    });
    assert_eq!(code, Some(0));
    std::fs::write(&paths[2], "another user's").unwrap();
    // Only root can give it away.
    let is_given = std::os::unix::fs::chown(&paths[2], Some(65534), Some(65534)).is_ok();
    let (code, _, told) = outcome(windlass(&["stats"]));
    assert_eq!(code, Some(0), "{told}");
    let (code, printed, told) = outcome(windlass(&["stats", "--clean"]));
    assert_eq!(code, Some(0), "{told}");
    assert!(printed.contains(&format!("removed {}\n", leftover.0.display())), "{printed}");
    for path in &paths[..if is_given { 3 } else { 2 }] {
        assert!(std::fs::symlink_metadata(path).is_ok(), "{path}");
    }
}
