//! What the process's end does to all that peer groups have here, and what begins again where the process goes on behind it.

use super::{closing, draining, process_exit, registry, side_thread, transports, worker};

/// At exit the memory of closed peer groups is given back whoever else has it mapped: a mapping keeps it for him.
pub(super) fn at_exit_too() {
    process_exit::handle(give_back, begin_again);
}

fn give_back() {
    // Before the report.
    registry::end_checking();
    worker::end();
    side_thread::end();
    draining::look();
    draining::forget();
    closing::end();
    transports::give_back();
}

fn begin_again() {
    closing::begin_again();
    side_thread::begin_again();
    worker::begin_again();
}
