//! Counters of a process. [`segment`] is their memory, [`files`] the files of segments, [`count`] the counting, [`snapshot`] what a
//! reader sees, [`report`] its text, [`calls`] the last calls, and [`closing`] a run's last line.

pub mod calls;
pub mod closing;
pub mod count;
pub mod features;
pub mod files;
pub mod limits;
mod named;
pub mod order;
pub mod peer_group;
pub mod pool;
pub mod registration;
pub mod why;
pub mod windows;

pub mod report;
pub mod run;
pub mod segment;
pub mod snapshot;
