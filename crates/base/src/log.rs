//! Log lines in NCCL's shape: `host:pid:tid WINDLASS LEVEL text`, errors only unless asked.
//!
//! A line is one write, straight to the descriptor. Standard error may be closed, full or a broken pipe, and a
//! library must neither panic nor kill the process (SIGPIPE) over a log line. A line that cannot be written is
//! dropped.

#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use log::{LevelFilter, Log, Metadata, Record};

use crate::config::{Startup, expand_file_name, startup};

/// The logger, made once: the host's name, and the log file (none for standard error).
#[derive(Debug)]
struct Lines {
    host: String,
    file: Option<File>,
}

/// Starts logging as the options say. If the log file cannot be opened, lines go to standard error, and the first one
/// says why.
pub fn start(config: &Startup) {
    if config.log == LevelFilter::Off {
        return;
    }
    let opened = config.log_file.as_deref().map(|name| {
        let name = expand_file_name(name);
        File::options()
            .create(true)
            .append(true)
            .open(&name)
            .map_err(|error| format!("{}: {error}", name.display()))
    });
    let (file, complaint) = match opened {
        None => (None, None),
        Some(Ok(file)) => (Some(file), None),
        Some(Err(complaint)) => (None, Some(complaint)),
    };
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if log::set_logger(Box::leak(Box::new(Lines { host, file }))).is_ok() {
        log::set_max_level(config.log);
    }
    if let Some(complaint) = complaint {
        log::error!("log file {complaint}: logging to standard error");
    }
}

impl Log for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let process = rustix::process::getpid().as_raw_nonzero();
        let thread = rustix::thread::gettid().as_raw_nonzero();
        let line =
            format!("{}:{process}:{thread} WINDLASS {} {}\n", self.host, record.level(), record.args());
        // SAFETY: descriptor 2 may be closed or another file by now; writing to it then fails or does what any
        // program's message would do. It is not closed here.
        let standard_error = unsafe { BorrowedFd::borrow_raw(2) };
        write_without_signal(self.file.as_ref().map_or(standard_error, AsFd::as_fd), line.as_bytes());
    }

    fn flush(&self) {}
}

/// Where standard error led when the library was loaded: device and inode, 0 where it was closed.
static BEGAN_AT: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Notes where standard error leads.
pub fn note_standard_error() {
    BEGAN_AT.iter().zip(at_standard_error()).for_each(|(word, now)| word.store(now, Ordering::Relaxed));
}

fn at_standard_error() -> [u64; 2] {
    // SAFETY: only asked where it leads.
    let facts = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(2) });
    facts.map_or([0, 0], |facts| [facts.st_dev, facts.st_ino])
}

/// Tells the user one line on standard error, whatever the level of the log; `WINDLASS_LOG=off` silences it. Nothing is told where the
/// program has put another file in the place of its standard error, or where the write would wait for a reader.
pub fn tell(text: std::fmt::Arguments<'_>) {
    let began_at = [0, 1].map(|word| BEGAN_AT[word].load(Ordering::Relaxed));
    let mut ready = libc::pollfd { fd: 2, events: libc::POLLOUT, revents: 0 };
    if startup().log == LevelFilter::Off || began_at == [0, 0] || began_at != at_standard_error() {
        return;
    }
    // SAFETY: one local entry. Where standard error is still the one of the beginning, writing a line to it is what any program does.
    unsafe {
        if libc::poll(&mut ready, 1, 0) == 1 && ready.revents & libc::POLLOUT != 0 {
            write_without_signal(BorrowedFd::borrow_raw(2), format!("windlass: {text}\n").as_bytes());
        }
    }
}

/// Writes once. A broken pipe raises no signal in this process, and a terminal does not stop it.
pub(crate) fn write_without_signal(to: BorrowedFd<'_>, bytes: &[u8]) {
    // SAFETY: plain signal-mask calls on this thread with sets made here; a SIGPIPE that was pending before is
    // left pending, one that our write raised is taken back before the mask is restored.
    unsafe {
        let mut pipe: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        let mut pending: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut pipe);
        libc::sigaddset(&mut pipe, libc::SIGPIPE);
        libc::sigpending(&mut pending);
        let was_pending = libc::sigismember(&pending, libc::SIGPIPE) == 1;
        libc::pthread_sigmask(libc::SIG_BLOCK, &pipe, &mut before);
        let mut terminal: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut terminal);
        libc::sigaddset(&mut terminal, libc::SIGTTOU);
        libc::pthread_sigmask(libc::SIG_BLOCK, &terminal, std::ptr::null_mut());
        let broken = rustix::io::write(to, bytes) == Err(rustix::io::Errno::PIPE);
        if broken && !was_pending {
            let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            libc::sigtimedwait(&pipe, std::ptr::null_mut(), &at_once);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A write into a pipe without a reader neither kills nor panics.
    #[test]
    fn broken_pipe() {
        // SAFETY: restores the default action, which Rust's test runner has replaced by ignoring.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        write_without_signal(writer.as_fd(), b"nobody reads this\n");
    }
}
