//! Starts what a process needs, and writes its report, and a run's closing line, at the end. Options and the log start at the first call, shared
//! counters and the report at the first communicator. Loading the library starts nothing.

#![allow(unsafe_code)]

pub mod fork_local;

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use nccl_sys::{forked, open, second, slots};
use once_cell::sync::OnceCell;

use crate::config::{
    self, Form, Report, Startup, Switch, complaints, config, expand_file_name, nccl, startup,
};
use crate::lock::Mutex;
use crate::stats::files::{self, FILES_OF_RUN_MAX, FOLDER, Held};
use crate::stats::run::{self, Run};
use crate::stats::snapshot::{self, Snapshot};
use crate::stats::{closing, report, segment};
use crate::{descriptor, guard, log, observers};

static FIRST_CALL: Once = Once::new();
/// The process's file of counters. Its lock, held until the process ends, tells other processes that this one lives.
static SEGMENT_FILE: OnceCell<Held> = OnceCell::new();
/// How many forks lie between this process and the first one in which Windlass has started something.
static FORKS: AtomicUsize = AtomicUsize::new(0);
/// The process that asked for the first communicator; 0 before.
static OWNER: AtomicU32 = AtomicU32::new(0);
/// Whether this process was forked from [`OWNER`].
static FORKED: AtomicBool = AtomicBool::new(false);
/// The report that was written to a file at exit.
static REPORT: Mutex<String> = Mutex::new(String::new());

/// Runs when the library is loaded: notes what a program may have changed by the time at which it is needed. Nothing else happens then.
pub fn loaded() {
    run::note();
    log::note_standard_error();
}

/// Runs at the first call of all: starts the log. The real library is not open yet.
pub fn first_call() {
    FIRST_CALL.call_once(|| {
        log::start(startup());
        config::say(complaints().iter());
        slots::PASSED.store(segment::current().passed.as_ptr().cast_mut(), Ordering::Release);
    });
}

/// Runs once the real library is open, on every thread that has opened it; only the first one acts. With
/// `WINDLASS=off`, all later calls are forwarded.
pub fn library_opened(library: &open::RealLibrary) {
    static OPENED: Once = Once::new();
    OPENED.call_once(|| {
        ::log::info!(
            "real NCCL {} ({}), {} candidates refused before it",
            library.path.display(),
            library.chosen.reason,
            library.refused.len()
        );
        if startup().windlass == Switch::Off {
            ::log::info!("switched off by WINDLASS: every call goes straight to the real NCCL");
            slots::forward_everything();
        }
    });
}

/// Logs once that no real library could be opened, with all that was searched.
pub fn library_missing(refused: &[open::Refusal]) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        let tried: Vec<String> = refused
            .iter()
            .map(|refusal| format!("{} ({}): {}", refusal.candidate.path.display(), refusal.candidate.reason, refusal.why))
            .collect();
        ::log::error!(
            "no usable libnccl.so.2: every call answers ncclSystemError; set WINDLASS_NCCL to its path. Searched: {}",
            if tried.is_empty() { "nothing".into() } else { tried.join("; ") }
        );
    });
}

/// Runs at the first init. Counters move to shared memory, and the report at exit is registered. A child that is
/// forked from now on only forwards.
pub fn first_communicator() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // First: what follows opens descriptors, while another thread may fork.
        let_forked_children_restart();
        OWNER.store(std::process::id(), Ordering::Relaxed);
        forked::on_init(told_of_init);
        // SAFETY: both functions are of this library, which stays mapped.
        unsafe {
            libc::atexit(at_exit);
            libc::pthread_atfork(None, None, Some(in_child));
        }
        if startup().stats == Switch::On {
            match segment::share(Path::new(FOLDER)) {
                Ok(file) => drop(SEGMENT_FILE.set(file)),
                Err(error) => {
                    ::log::warn!("no shared counters ({error}): `windlass stats` will not see this process")
                }
            }
        }
        slots::PASSED.store(segment::current().passed.as_ptr().cast_mut(), Ordering::Release);
        describe_process();
        warn_of_second_nccl();
        observers::start();
    });
}

/// Runs when the first lazy communicator is made. A second NCCL refuses its handle, which is Windlass's own. Programs may map a
/// second NCCL after their first communicator, so this looks again.
pub fn first_lazy() {
    static ONCE: Once = Once::new();
    ONCE.call_once(warn_of_second_nccl);
}

/// Warns once if a second NCCL is mapped. Does not look where the log has no warnings.
fn warn_of_second_nccl() {
    static SAID: Once = Once::new();
    if !::log::log_enabled!(::log::Level::Warn) || SAID.is_completed() {
        return;
    }
    let (Some(opened), [first, ..]) = (open::opened(), &second::beside_the_opened()[..]) else { return };
    SAID.call_once(|| {
        ::log::warn!(
            "a second NCCL is mapped: {} beside {}; calls into it bypass Windlass, and it refuses communicators that are \
             lazy communicators (WINDLASS_LAZY=off makes none)",
            first.display(),
            opened.path.display()
        );
    });
}

fn describe_process() {
    let segment = segment::current();
    segment.process.store(std::process::id(), Ordering::Relaxed);
    // Not `self`: the main thread may have ended.
    let program = std::fs::read_link("/proc/thread-self/exe").unwrap_or_default();
    let name = program.file_name().unwrap_or_default();
    segment::write_text(&segment.program, name.as_encoded_bytes());
    let Some(library) = open::opened() else { return };
    segment::write_text(&segment.nccl_path, library.path.as_os_str().as_encoded_bytes());
    segment.nccl_version.store(know_version(), Ordering::Relaxed);
    // A child of a process with communicators only forwards, so it has no order of its own.
    if segment.forked_from.load(Ordering::Relaxed) == 0 {
        segment.order.store(config().order as u64, Ordering::Relaxed);
    }
}

/// The real library's version code, 0 if unknown. Call it before any variable of NCCL's is read: they are taken as this release takes
/// them. NCCL reads no variable to answer.
pub fn know_version() -> i32 {
    static VERSION: OnceCell<i32> = OnceCell::new();
    if open::opened().is_none() {
        return 0;
    }
    *VERSION.get_or_init(|| {
        let mut version = 0;
        // SAFETY: the library is open and the pointer is to a local.
        let result = unsafe { nccl_sys::real::ncclGetVersion(&mut version) };
        let version = if result == nccl_sys::ncclSuccess { version } else { 0 };
        nccl::note_version(version);
        version
    })
}

/// Runs in a child of a process with communicators. They and CUDA do not work in the child, so Windlass starts nothing there.
extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
    slots::forward_everything();
    // The real library does not know Windlass's own handles.
    forked::guard();
    restart_in_forked_child();
}

/// Runs in a child of a process in which Windlass has started something. The child has none of the parent's threads. The parent's
/// descriptors, with the lock that tells its life, and its counters must not stay the child's.
extern "C" fn restart_in_forked_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    descriptor::fork_lock::release_in_child();
    descriptor::close_in_child();
    segment::restart_in_forked_child();
    slots::PASSED.store(segment::current().passed.as_ptr().cast_mut(), Ordering::Release);
}

/// Makes children that are forked from now on restart, since Windlass has state that they must not inherit.
pub fn let_forked_children_restart() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        open::stay_mapped();
        // SAFETY: functions of this library, which stays mapped.
        unsafe {
            libc::pthread_atfork(
                Some(descriptor::fork_lock::before_fork),
                Some(descriptor::fork_lock::after_fork),
                Some(restart_in_forked_child),
            )
        };
    });
}

fn forks() -> usize {
    FORKS.load(Ordering::Relaxed)
}

/// Whether this process was forked from one with communicators: Windlass starts nothing here.
pub fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Runs when such a child asks for a communicator: the log and the report say why NCCL alone serves it.
fn told_of_init() {
    guard::or_else(
        || (),
        || {
            let owner = OWNER.load(Ordering::Relaxed);
            let first = segment::current().forked_from.swap(owner, Ordering::Relaxed) == 0;
            if first {
                ::log::warn!("this process was {}", report::forked_from(owner));
                describe_process();
            }
        },
    );
}

/// Runs `at_exit` when the process exits, before the report is written.
pub fn on_exit(at_exit: extern "C" fn()) {
    // SAFETY: a function of this library, which stays mapped since the first communicator.
    unsafe { libc::atexit(at_exit) };
}

/// Runs behind all exit handlers and static destructors: some are older than Windlass's and make calls. Writes a report in a file again if its
/// text has changed since. A report on standard error is not repeated.
pub extern "C" fn at_end() {
    let is_ours = segment::current().process.load(Ordering::Relaxed) == std::process::id();
    guard::or_else(
        || (),
        || {
            // Most processes below `windlass run` are others, and do nothing here: any program may have the library preloaded.
            if let Some(run) = Run::noted().filter(|run| run.process == std::process::id()) {
                close_run(run, is_ours);
            }
            if is_ours && let Some(Report { file: Some(file), form }) = &startup().report {
                let text = told(*form);
                let written = REPORT.lock();
                if !written.is_empty() && *written != text {
                    report_to(file, &text);
                }
            }
        },
    );
}

extern "C" fn at_exit() {
    let Some(owner) = std::num::NonZero::new(segment::current().process.load(Ordering::Relaxed)) else {
        return;
    };
    if owner.get() != std::process::id() {
        return;
    }
    segment::current().exited.store(1, Ordering::Relaxed);
    if let Some(wanted) = &startup().report {
        write_report(wanted);
    }
    // In a forked child the file is the parent's.
    if let Some(file) = SEGMENT_FILE.get().filter(|file| !is_forked() && !stays(file)) {
        let _ = std::fs::remove_file(&file.path);
    }
}

/// Whether this process's file is left for the run's closing line.
fn stays(file: &Held) -> bool {
    let run = files::owner(&file.path).and_then(|owner| owner.run).filter(|run| run.is_alive());
    run.is_some_and(|run| files::of_run(Path::new(FOLDER), run).len() <= FILES_OF_RUN_MAX)
}

/// In the process that `windlass run` became, tells what became of the run, and removes its files. Those of earlier runs go, too, if this one
/// called NCCL: they would be taken for the last run's. A child that was forked from this process has another number.
fn close_run(run: Run, is_ours: bool) {
    if Run::of_this_process() != Some(run) {
        return;
    }
    let Startup { windlass: Switch::On, stats: Switch::On, .. } = startup() else { return };
    let folder = Path::new(FOLDER);
    let mut processes = snapshot::of_run(folder, run);
    if is_ours && SEGMENT_FILE.get().is_none() {
        processes.push(Snapshot::of(segment::current()));
    }
    log::tell(format_args!("{}", closing::line(&processes)));
    let paths = if processes.is_empty() { files::of_run } else { files::of_run_and_ended };
    for path in paths(folder, run) {
        let is_own = SEGMENT_FILE.get().is_some_and(|file| file.path == path);
        let _ = if is_own { std::fs::remove_file(&path) } else { files::remove_if_ended(&path).map(drop) };
    }
}

/// Writes the report so far, as JSON.
pub fn dump(path: &Path) -> std::io::Result<()> {
    write_file(&expand_file_name(path), &report::json(&Snapshot::of(segment::current())))
}

fn told(form: Form) -> String {
    let snapshot = Snapshot::of(segment::current());
    match form {
        Form::Text => report::text(&snapshot),
        Form::Json => report::json(&snapshot),
    }
}

fn report_to(file: &Path, text: &str) {
    let file = expand_file_name(file);
    if let Err(error) = write_file(&file, text) {
        ::log::error!("the report could not be written to {}: {error}", file.display());
    }
}

fn write_report(wanted: &Report) {
    let text = told(wanted.form);
    match &wanted.file {
        Some(file) => {
            report_to(file, &text);
            *REPORT.lock() = text;
        }
        None => {
            // SAFETY: as for log lines: descriptor 2 may be anything by now, and is not closed here.
            let standard_error = unsafe { BorrowedFd::borrow_raw(2) };
            log::write_without_signal(standard_error.as_fd(), text.as_bytes());
        }
    }
}

/// Writes the whole report or none of it. Readers may wait for the file, and other processes write to the same name
/// if the user left out `%p`.
fn write_file(path: &Path, text: &str) -> std::io::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}.part", std::process::id()));
    std::fs::File::create(&partial)?.write_all(text.as_bytes())?;
    std::fs::rename(&partial, path)
}
