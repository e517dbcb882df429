//! What was counted: [`segment`] is where, [`files`] whose, [`count`] how, [`snapshot`] what a reader sees, [`report`] how it is told.

pub mod check;
pub mod count;
pub mod features;
pub mod files;
pub mod limits;
mod named;
pub mod order;
pub mod peer_group;
pub mod pool;
pub mod registration;
pub mod windows;

pub mod report;
pub mod segment;
pub mod snapshot;
