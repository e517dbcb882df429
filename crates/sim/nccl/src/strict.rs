//! Reports of misuse: lines on stderr, then the end of the process with status 86, and of the peers' processes.

use crate::dump;
use crate::segment::Segment;
use crate::settings::settings;
use std::sync::atomic::Ordering::SeqCst;

pub const STATUS: i32 = 86;

/// Whether misuse that NCCL would not detect is a failure (`WINDLASS_SIM_STRICT`).
pub fn enabled() -> bool {
    settings().strict
}

/// Writes a line to stderr in one call, so that lines of several processes do not mix. Never panics.
pub fn say(text: &str) {
    let line = format!("sim-nccl: {text}\n");
    // SAFETY: the buffer is as long as said.
    unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
}

unsafe extern "C" {
    static stdout: *mut libc::FILE;
}

/// Ends the process at once, without exit handlers, after flushing stdout.
pub fn leave() -> ! {
    // SAFETY: `stdout` is libc's. _exit runs no handlers, which may wait for threads that are stuck.
    unsafe {
        libc::fflush(stdout);
        libc::_exit(STATUS)
    }
}

/// The name of a communicator and a rank in reports.
pub fn name(segment: &Segment, rank: usize) -> String {
    let name = segment.header().name.get();
    format!("communicator {name} ({} ranks) rank {rank}", segment.ranks())
}

/// Reports misuse found by `rank` and ends the process; the peers' processes end, too, when they next wait.
pub fn fail(segment: &Segment, rank: usize, lines: &[String]) -> ! {
    let name = name(segment, rank);
    let text: Vec<String> = lines.iter().map(|line| format!("{name}: {line}")).collect();
    say(&text.join("\nsim-nccl: "));
    let _ = segment.header().failed.compare_exchange(0, rank as u32 + 1, SeqCst, SeqCst);
    segment.unlink();
    segment.ring_all();
    leave()
}

/// Ends the process because a peer has reported misuse.
pub fn follow(segment: &Segment, rank: usize) -> ! {
    let failed = segment.header().failed.load(SeqCst) - 1;
    let call = segment.rank(rank).call.get();
    let doing = if call.is_empty() { String::new() } else { format!(" while in {call}") };
    let line =
        format!("{}: leaves{doing}, because rank {failed} reported a failure", self::name(segment, rank));
    let lines: Vec<String> = std::iter::once(line).chain(dump::elsewhere(segment)).collect();
    say(&lines.join("\nsim-nccl: "));
    segment.unlink();
    leave()
}
