//! Messages of the simulator on stderr. A line that cannot be written is dropped: stderr may be closed.

use std::fmt::Arguments;
use std::io::Write;

pub fn line(text: Arguments<'_>) {
    // There is nowhere to report a failed write.
    let _ = writeln!(std::io::stderr(), "sim-cuda: {text}");
}
