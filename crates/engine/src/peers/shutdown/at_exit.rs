//! What happens to the peer groups of this process when it ends, and what starts again if the process uses them after that.

use crate::background::{process_exit, side_thread, worker};
use crate::peers::setup::transports;
use crate::peers::shutdown::{closing, draining};
use windlass_base::observers::profiler::times;

/// Installs the exit handler. At exit the memory of closed peer groups is freed even if other ranks have it mapped: their mappings keep it.
pub(in crate::peers) fn at_exit_too() {
    process_exit::handle(give_back, begin_again);
}

fn give_back() {
    // Ended before the report at exit is written.
    worker::end();
    side_thread::end();
    draining::look();
    draining::forget();
    closing::end();
    times::end();
    transports::give_back();
}

fn begin_again() {
    closing::begin_again();
    side_thread::begin_again();
    worker::begin_again();
}
