//! Counters of a process. [`segment`] is their memory, [`files`] the files of segments, [`count`] the counting, [`snapshot`] what a
//! reader sees, [`report`] its text, [`calls`] the last calls, and [`closing`] a run's last line.

pub mod calls;
pub mod closing;
pub mod count;
pub mod features;
pub mod files;
pub mod limits;
pub mod order;
pub mod peer_group;
pub mod resources;
pub mod why;

pub mod report;
pub mod run;
pub mod segment;
pub mod snapshot;
