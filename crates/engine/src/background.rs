//! Threads of Windlass that work beside the application's calls, and the end of the process.

pub(crate) mod life;
pub(crate) mod own_thread;
pub(crate) mod process_exit;
pub(crate) mod side_thread;
pub(crate) mod weak_list;
pub(crate) mod worker;
