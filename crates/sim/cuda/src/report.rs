//! Lines on stderr, which may be closed: a lost line must never become a panic.

use std::fmt::Arguments;
use std::io::Write;

pub fn line(text: Arguments<'_>) {
    // Nobody is left to tell.
    let _ = writeln!(std::io::stderr(), "sim-cuda: {text}");
}
