//! What this process starts when it is needed, and how it ends: options and log at the first call, shared counters
//! and the report at the first communicator. Loading the library starts nothing.

#![allow(unsafe_code)]

pub mod fork_local;

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use nccl_sys::{forked, open, second, slots};
use once_cell::sync::OnceCell;

use crate::config::nccl;
use crate::config::{Form, Report, Switch, complaints, config, expand_file_name, startup};
use crate::stats::files::{FOLDER, Held};
use crate::stats::{order, segment};
use crate::stats::{report, snapshot::Snapshot};
use crate::{annotate, descriptor, guard, log};

static FIRST_CALL: Once = Once::new();
/// Held until the process ends, which tells others that it lives.
static SEGMENT_FILE: OnceCell<Held> = OnceCell::new();
/// How many forks lie between this process and the first one in which something of ours began.
static FORKS: AtomicUsize = AtomicUsize::new(0);
/// The process that asked for the first communicator; 0 before.
static OWNER: AtomicU32 = AtomicU32::new(0);
/// Whether this process was forked from that one.
static FORKED: AtomicBool = AtomicBool::new(false);
/// The report that was written at exit to a file.
static REPORT: Mutex<String> = Mutex::new(String::new());

/// The first call of all: options, log, kill switch. The real library is not open yet.
pub fn first_call() {
    FIRST_CALL.call_once(|| {
        log::start(startup());
        annotate::start(startup());
        complaints().iter().for_each(|complaint| ::log::warn!("{complaint}"));
        slots::PASSED.store(segment::current().passed.as_ptr().cast_mut(), Ordering::Release);
    });
}

/// The real library is open; with the kill switch, nothing more is looked at. Threads that came meanwhile all tell.
pub fn library_opened(library: &open::RealLibrary) {
    static OPENED: Once = Once::new();
    OPENED.call_once(|| {
        ::log::info!(
            "real NCCL {} ({}), {} bound, {} candidates refused before it",
            library.path.display(),
            library.chosen.reason,
            if library.deep_bound { "deep" } else { "not deep" },
            library.refused.len()
        );
        if startup().windlass == Switch::Off {
            ::log::info!("switched off by WINDLASS: every call goes straight to the real NCCL");
            slots::forward_everything();
        }
    });
}

/// No real library could be opened: says once all that was searched.
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

/// The first communicator is asked for: counters move to shared memory, the report is ordered, and children that
/// are forked from now on only forward.
pub fn first_communicator() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        open::stay_mapped();
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
    });
}

/// The first lazy communicator is made. Its handle is ours, which a second NCCL refuses: looked for once more, since programs may map
/// one after their first communicator.
pub fn first_lazy() {
    static ONCE: Once = Once::new();
    ONCE.call_once(warn_of_second_nccl);
}

/// Where the log has no warnings nobody would hear, and nothing is looked for.
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
    let program = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    let name = program.file_name().unwrap_or_default();
    segment::write_text(&segment.program, name.as_encoded_bytes());
    let Some(library) = open::opened() else { return };
    segment::write_text(&segment.nccl_path, library.path.as_os_str().as_encoded_bytes());
    segment.nccl_version.store(know_version(), Ordering::Relaxed);
    segment.order.store(order::number(config().order), Ordering::Relaxed);
}

/// The real library's version code, 0 if unknown; from now on NCCL's variables are taken as that release takes them. NCCL reads none for
/// the answer. To be called before any is asked for.
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

/// The fork of a process with communicators: what they have on the GPU is the parent's, and CUDA is dead here. Nothing of ours begins.
extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
    slots::forward_everything();
    // What is ours the real library does not know.
    forked::guard();
    restart_in_forked_child();
}

/// The fork of a process in which something of ours has begun: its threads are not here, and its descriptors, also what says that it
/// lives, and its counters are not ours.
extern "C" fn restart_in_forked_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    descriptor::close_in_child();
    segment::restart_in_forked_child();
    slots::PASSED.store(segment::current().passed.as_ptr().cast_mut(), Ordering::Release);
}

/// From now on there is something that a forked child must not have from here.
pub fn let_forked_children_restart() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| on_fork(restart_in_forked_child));
}

fn forks() -> usize {
    FORKS.load(Ordering::Relaxed)
}

/// Whether this process was forked from one that had asked for a communicator: nothing of ours begins here.
pub fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// A communicator is asked for in such a process: its log and its report say why NCCL alone serves it.
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

/// Lets a mechanism hear of forks, in the child, which may allocate nothing and take no lock. This library stays mapped.
pub fn on_fork(in_child: extern "C" fn()) {
    open::stay_mapped();
    // SAFETY: a function of this library, which stays mapped.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}

/// Lets a mechanism hear of the process's exit, before the report that is ordered already.
pub fn on_exit(at_exit: extern "C" fn()) {
    // SAFETY: a function of this library, which stays mapped since the first communicator.
    unsafe { libc::atexit(at_exit) };
}

/// Behind all exit handlers and static destructors: some are older than ours, and make calls.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_END: extern "C" fn() = at_end;

/// Writes a report in a file once more if it tells more by now. One on standard error has been read.
extern "C" fn at_end() {
    let is_ours = segment::current().process.load(Ordering::Relaxed) == std::process::id();
    guard::or_else(
        || (),
        || {
            if is_ours && let Some(Report { file: Some(file), form }) = &startup().report {
                let text = told(*form);
                let written = REPORT.lock().unwrap_or_else(PoisonError::into_inner);
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
    if let Some(wanted) = &startup().report {
        write_report(wanted);
    }
    // Of a forked child it is the parent's.
    if let Some(file) = SEGMENT_FILE.get().filter(|_| !is_forked()) {
        let _ = std::fs::remove_file(file.path());
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
            *REPORT.lock().unwrap_or_else(PoisonError::into_inner) = text;
        }
        None => {
            // SAFETY: as for log lines: descriptor 2 may be anything by now, and is not closed here.
            let standard_error = unsafe { BorrowedFd::borrow_raw(2) };
            log::write_without_signal(standard_error.as_fd(), text.as_bytes());
        }
    }
}

/// Writes the whole report or none of it: readers may be waiting for the file, and other processes write to the same
/// name if the user left out `%p`.
fn write_file(path: &Path, text: &str) -> std::io::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}.part", std::process::id()));
    std::fs::File::create(&partial)?.write_all(text.as_bytes())?;
    std::fs::rename(&partial, path)
}
