//! Starts Windlass's threads, without the program's signals.

#![allow(unsafe_code)]

use std::io;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// Signals that a thread raises by itself. A handler of the program hears where, as with NCCL's threads.
const FAULTS: [libc::c_int; 7] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGABRT, libc::SIGSYS];

/// Starts a thread that takes none of the program's signals, so that its handlers run on the same threads as without
/// Windlass.
pub fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    without_signals(|| Builder::new().name(name.to_owned()).spawn(body))
}

/// As [`spawn`], in a scope.
pub fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    body: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    without_signals(|| Builder::new().name(name.to_owned()).spawn_scoped(scope, body))
}

/// Runs `act` so that a cancelled thread (`pthread_cancel`) does not end in it: Rust aborts the process where a cancellation meets a
/// `catch_unwind`. The thread ends later, in NCCL or in the program.
pub fn without_cancellation<T>(act: impl FnOnce() -> T) -> T {
    unsafe extern "C" {
        fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
    }
    struct Restored(libc::c_int);
    impl Drop for Restored {
        fn drop(&mut self) {
            // SAFETY: the state that the thread had; POSIX allows a null place for the one before.
            unsafe { pthread_setcancelstate(self.0, std::ptr::null_mut()) };
        }
    }
    const DISABLED: libc::c_int = 1;
    let mut restored = Restored(0);
    // SAFETY: the output is a local.
    unsafe { pthread_setcancelstate(DISABLED, &mut restored.0) };
    act()
}

/// Bytes of this thread's stack that are still free. None if the system does not say.
pub fn stack_left() -> Option<usize> {
    // SAFETY: attributes of this thread, which the system fills in; destroyed once.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        if libc::pthread_getattr_np(libc::pthread_self(), &mut attributes) != 0 {
            return None;
        }
        let (mut lowest, mut bytes) = (std::ptr::null_mut(), 0);
        let code = libc::pthread_attr_getstack(&attributes, &mut lowest, &mut bytes);
        libc::pthread_attr_destroy(&mut attributes);
        (code == 0).then(|| (&raw const attributes as usize).saturating_sub(lowest as usize))
    }
}

/// Sleeps while this thread `waits`, at most `within`, and looks again after each `every`. Returns whether the wait is over.
pub fn wait_while(within: Duration, every: Duration, mut waits: impl FnMut() -> bool) -> bool {
    look_until(within, every, || (!waits()).then_some(())).is_some()
}

/// Looks for something, at most `within`, sleeping for `every` between two looks. None if nothing was found in time.
pub fn look_until<T>(within: Duration, every: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let began = Instant::now();
    loop {
        match look() {
            None if began.elapsed() < within => std::thread::sleep(every),
            found => return found,
        }
    }
}

fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    // SAFETY: signal masks of this thread only, with sets made here; a new thread inherits the mask of its parent,
    // which is restored at once: `start` does not panic.
    unsafe {
        let mut blocked: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut blocked);
        for fault in FAULTS {
            libc::sigdelset(&mut blocked, fault);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &blocked, &mut before);
        let started = start();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        started
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread knows its stack, and what calls have taken of it.
    #[test]
    fn stacks() {
        let left =
            |bytes| Builder::new().stack_size(bytes).spawn(|| stack_left().unwrap()).unwrap().join().unwrap();
        assert!((64 << 10..128 << 10).contains(&left(128 << 10)));
        assert!((1 << 20..4 << 20).contains(&left(4 << 20)));
    }

    /// Signals that the calling thread takes, of two.
    fn taken() -> [bool; 2] {
        // SAFETY: asks for this thread's mask.
        unsafe {
            let mut mask: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_SETMASK, std::ptr::null(), &mut mask);
            [libc::SIGUSR1, libc::SIGSEGV].map(|signal| libc::sigismember(&mask, signal) == 0)
        }
    }

    /// Windlass's threads take only signals of their own faults; the starting thread keeps its mask.
    #[test]
    fn signals() {
        let before = taken();
        assert_eq!(before, [true, true]);
        assert_eq!(spawn("test", taken).unwrap().join().unwrap(), [false, true]);
        let scoped = std::thread::scope(|scope| spawn_scoped(scope, "test", taken).unwrap().join().unwrap());
        assert_eq!(scoped, [false, true]);
        assert_eq!(taken(), before);
    }
}
