//! Starting our background thread.

#![allow(unsafe_code)]

use std::thread::JoinHandle;

/// Starts a thread that takes no signal: handlers of the program run where they would without us.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    // SAFETY: signal masks of this thread only, with sets made here; a new thread inherits the mask of its parent,
    // which is restored at once.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(body);
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        spawned
    }
}
