#![cfg(test)]
//! Tests with processes that live, end and are killed. Each is this test binary again, with variables that name its
//! part.

#![allow(unsafe_code)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

use crate::call::tests::send;
use crate::path::Path as Way;
use crate::stats::segment::{Opened, Segment};
use crate::stats::snapshot::Snapshot;
use crate::stats::{count, segment};

const PART: &str = "WINDLASS_SIM_PART";
const WHERE: &str = "WINDLASS_SIM_FOLDER";

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(FOLDER).unwrap()
}

/// Starts a process that shares its counters, and waits until it does. The process ends when its standard input is
/// closed.
fn start(part: &str, folder: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "stats::files::tests::part", "--ignored", "--nocapture"])
        .env(PART, part)
        .env(WHERE, folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let says = BufReader::new(child.stdout.take().unwrap());
    assert!(says.lines().any(|line| line.unwrap().contains("part: shared")), "the process ended silently");
    child
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// The parts of processes, which only other tests run.
#[test]
#[ignore = "a process of the other tests"]
fn part() {
    let Ok(part) = std::env::var(PART) else { return };
    // Writes without the lock of standard output, which a forked child may find locked.
    let say_and_wait = || {
        rustix::io::write(std::io::stdout(), b"part: shared\n").unwrap();
        let _ = rustix::io::read(std::io::stdin(), &mut [0; 1]);
    };
    if part == "share" {
        let _held = segment::share(Path::new(&std::env::var(WHERE).unwrap())).unwrap();
        return say_and_wait();
    }
    crate::process::first_communicator();
    // SAFETY: the child calls only what is allowed after a fork of a process with threads.
    let child = unsafe { libc::fork() };
    if child == 0 {
        say_and_wait();
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    // SAFETY: this process's own child.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
}

/// Of thirty processes, killed one after the other, the files of the last ones are left. A living process's file stays, and is found.
#[test]
fn killed_processes() {
    let folder = folder();
    let living = start("share", folder.path());
    for _ in 0..30 {
        kill(start("share", folder.path()));
    }
    let left = list(folder.path());
    assert_eq!(left.len(), 2 + ENDED_MAX, "{left:?}");
    for path in &left {
        let lives = owner(path).unwrap().process == living.id();
        assert_eq!(has_ended(path), !lives);
        assert_eq!(Opened::open(path).unwrap().read().unwrap().magic.load(Ordering::Relaxed), segment::MAGIC);
    }
    kill(living);
    assert_eq!((remove_ended(folder.path()), remove_ended(folder.path())), (2, 0));
}

/// Of the files of ended processes the newest stay, whatever their names' order, where other files are newer, and if there are very many.
#[test]
fn newest_stay() {
    let folder = folder();
    let user = rustix::process::getuid().as_raw();
    let write = |number: usize, text: &str| {
        // Larger numbers of processes began earlier.
        let name = format!("windlass-{user}-{number}-{:x}-held", 1_000_000 - number);
        std::fs::write(folder.path().join(name), text).unwrap();
    };
    (0..5).for_each(|number| write(number, ""));
    (5..LOOKED_AT_MAX + 60).for_each(|number| write(number, "calls"));
    let living = Held::make(folder.path(), None).unwrap();
    while remove_ended(folder.path()) > 0 {}
    let mut left: Vec<u32> =
        list(folder.path()).iter().filter_map(|path| Some(owner(path)?.process)).collect();
    left.sort();
    assert_eq!(left, (5..).take(ENDED_MAX).chain([std::process::id()]).collect::<Vec<u32>>());
    drop(living);
}

/// A forked child that lives on does not keep its killed parent's file.
#[test]
fn forked_child_outlives() {
    let mut parent = start("fork", Path::new(FOLDER));
    let shared = list(Path::new(FOLDER))
        .into_iter()
        .find(|path| owner(path).is_some_and(|owner| owner.process == parent.id()));
    let shared = shared.unwrap();
    assert!(!has_ended(&shared));
    parent.kill().unwrap();
    let child_waits_for = parent.stdin.take();
    parent.wait().unwrap();
    // A process of another test may be removing the file.
    let gone = (0..1000).any(|_| {
        std::thread::yield_now();
        remove_if_ended(&shared).unwrap() || !shared.exists()
    });
    assert!(gone);
    drop(child_waits_for);
}

/// A process takes as much of shared memory as its communicators need, and what it leaves has all that was counted.
#[test]
fn takes_little() {
    use std::os::unix::fs::MetadataExt;
    let folder = folder();
    let held = segment::share(folder.path()).unwrap();
    let identity = count::Identity { rank: 1, ranks: 2, device: 1 };
    let places = [count::begin(identity), count::begin(identity)];
    places.iter().for_each(|place| count::call(*place, &send(8), Way::P2p, 2));
    let bytes = || std::fs::metadata(&held.path).unwrap().blocks() * 512;
    let seen = || Snapshot::of_file(&held.path).unwrap();
    assert_eq!(seen(), Snapshot::of(segment::current()));
    // Besides the counters, each communicator has a ring of calls.
    let rings = |count: u64| count * size_of::<crate::stats::calls::CallRing>() as u64;
    assert!(bytes() < 64 << 10, "{}", bytes());
    (0..40).for_each(|_| count::call(count::begin(identity), &send(8), Way::P2p, 2));
    assert_eq!((seen().functions["ncclSend"], seen().communicators.len()), (42, 42));
    assert!(bytes() > 64 << 10 && bytes() < (128 << 10) + rings(42), "{}", bytes());
    // Without a file that can grow, ended places are taken again.
    std::fs::remove_file(&held.path).unwrap();
    places.iter().for_each(|place| count::end(*place));
    (0..20).for_each(|_| count::call(count::begin(identity), &send(8), Way::P2p, 2));
    assert_eq!(Snapshot::of(segment::current()).functions["ncclSend"], 62);
}

/// Makers never lose a file that they hold, and no file stays that is not held.
#[test]
fn makers_and_removers() {
    let folder = folder();
    let made = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !made.load(Ordering::Relaxed) {
                    remove_ended(folder.path());
                }
            });
        }
        let makers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let held = Held::make(folder.path(), None).unwrap();
                        std::thread::yield_now();
                        assert!(held.path.exists());
                    }
                })
            })
            .collect();
        let ended: Vec<_> = makers.into_iter().map(|maker| maker.join()).collect();
        made.store(true, Ordering::Relaxed);
        ended.into_iter().for_each(|ended| ended.unwrap());
    });
    while remove_ended(folder.path()) > 0 {}
    assert_eq!(list(folder.path()), Vec::<PathBuf>::new());
}

/// One start looks at a limited number of files, and the next starts remove the rest.
#[test]
fn limit_of_files() {
    let folder = folder();
    let user = rustix::process::getuid().as_raw();
    for number in 0..LOOKED_AT_MAX + 6 {
        std::fs::write(folder.path().join(format!("windlass-{user}-{number}-1-held")), "").unwrap();
    }
    assert_eq!((remove_ended(folder.path()), remove_ended(folder.path())), (LOOKED_AT_MAX, 6));
}

/// A start leaves files of other users, of versions without locks, and of other programs, links and pipes.
#[test]
fn what_is_left_alone() {
    let folder = folder();
    let user = rustix::process::getuid().as_raw();
    let at = |name: String| folder.path().join(name);
    let names = [
        format!("windlass-{}-1-1-held", user + 1),
        format!("windlass-{user}-4000000000-1"),
        "windlass-sim".into(),
    ];
    names.into_iter().for_each(|name| std::fs::write(at(name), "").unwrap());
    std::os::unix::fs::symlink("windlass-sim", at(format!("windlass-{user}-2-1-held"))).unwrap();
    let before = list(folder.path());
    assert_eq!((remove_ended(folder.path()), before.len()), (0, 4));
    assert_eq!(list(folder.path()), before);
    let pipe = at(format!("windlass-{user}-3-1-held"));
    let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success() && has_ended(&pipe), "a pipe is no reason to wait");
    // A caller that asks for the old one removes it by its process number.
    assert!(remove_if_ended(&before[1]).unwrap() || remove_if_ended(&before[2]).unwrap());
}

/// Anybody may put anything into the folder. A link, a pipe and a file that is cut while it is open are errors, and control characters
/// reach no terminal.
#[test]
fn hostile_files() {
    use std::os::unix::fs::FileExt;
    let folder = folder();
    let held = segment::share(folder.path()).unwrap();
    let at = |name: &str| folder.path().join(name);
    let (link, pipe) = (at("windlass-0-1-1-held"), at("windlass-0-2-1-held"));
    std::os::unix::fs::symlink(&held.path, &link).unwrap();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for path in [&link, &pipe] {
        assert!(Snapshot::of_file(path).is_err(), "{path:?}");
        assert!(!remove_if_ended(path).unwrap() && path.symlink_metadata().is_ok(), "{path:?}");
    }
    let file = held.open().unwrap();
    let program = std::mem::offset_of!(Segment, program) as u64;
    file.write_all_at("\x1b[2J\u{9b}x\0".as_bytes(), program).unwrap();
    let opened = Opened::open(&held.path).unwrap();
    assert_eq!(Snapshot::of(&opened.read().unwrap()).program, "?[2J?x");
    let cut = at("cut");
    std::fs::copy(&held.path, &cut).unwrap();
    let opened = Opened::open(&cut).unwrap();
    File::options().write(true).open(&cut).unwrap().set_len(4096).unwrap();
    assert!(opened.read().is_err());
}

/// A segment's name has the user, the process, and how others tell whether the process lives.
#[test]
fn names_of_segments() {
    let owner = |name: &str| owner(&Path::new(FOLDER).join(name));
    let owned = |life, run| Some(Owner { user: 1000, process: 4711, made_ns: 0x18b3, life, run });
    let run = Run { began: 9, process: 7 };
    assert_eq!(owner("windlass-1000-4711-18b3-held"), owned(Life::Lock, None));
    assert_eq!(owner("windlass-1000-4711-18b3-held-7.9"), owned(Life::Lock, Some(run)));
    assert_eq!(owner("windlass-1000-4711-18b3"), owned(Life::Number, None));
    for other in [
        "windlass-sim",
        "other-0-4711-1",
        "windlass-0-1-\x1b[2J-held",
        "windlass-0-1-1-held-7.9-x",
        "windlass-0-1-1-x",
    ] {
        assert_eq!(owner(other), None, "{other}");
    }
    assert_eq!(owner(&name(None)).map(|owner| (owner.life, owner.run)), Some((Life::Lock, None)));
    assert_eq!(owner(&name(Some(run))).and_then(|owner| owner.run), Some(run));
}

/// The files of a run stay while its process lives, as many as may. Afterwards they go.
#[test]
fn runs() {
    let folder = folder();
    let user = rustix::process::getuid().as_raw();
    let mut process = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let living = Run { process: process.id(), ..Run::of_this_process().unwrap() };
    // The process may have begun a tick later than this one.
    let living = (0..1000)
        .map(|later| Run { began: living.began + later, ..living })
        .find(|run| run.is_alive())
        .unwrap();
    let ended = Run { began: living.began - 1, ..living };
    let write = |number: usize, run: Run| {
        std::fs::write(folder.path().join(format!("windlass-{user}-{number}-1-held-{run}")), "").unwrap();
    };
    (0..FILES_OF_RUN_MAX).for_each(|number| write(number, living));
    write(1, ended);
    assert_eq!((newest_run(folder.path()), of_run(folder.path(), ended).len()), (Some(living), 1));
    assert_eq!(of_run_and_ended(folder.path(), living).len(), FILES_OF_RUN_MAX + 1);
    assert_eq!(of_run_and_ended(folder.path(), ended).len(), 1);
    assert_eq!((remove_ended(folder.path()), of_run(folder.path(), living).len()), (1, FILES_OF_RUN_MAX));
    write(FILES_OF_RUN_MAX, living);
    assert_eq!((remove_ended(folder.path()), remove_ended(folder.path())), (1, 0));
    process.kill().unwrap();
    process.wait().unwrap();
    assert_eq!((remove_ended(folder.path()), newest_run(folder.path())), (FILES_OF_RUN_MAX, None));
}
