//! Shared by the test programs of this folder's crates: the driver that they run on, streams of the application, processes side by
//! side.

#![allow(dead_code, unused_imports, reason = "each test program uses a part")]

mod driver;

mod stream;

mod processes;

mod watch;

pub use driver::*;
pub use processes::*;
pub use stream::*;
pub use watch::step;
