//! What the process's end does to all that peer groups have here, and what begins again where the process goes on behind it.

use crate::background::{process_exit, side_thread, worker};
use crate::peers::registry;
use crate::peers::setup::transports;
use crate::peers::shutdown::{closing, draining};

/// At exit the memory of closed peer groups is given back whoever else has it mapped: a mapping keeps it for him.
pub(in crate::peers) fn at_exit_too() {
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
