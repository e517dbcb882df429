//! A communicator's init: what a rank requests and is capable of, what it prepares, and the outcome.

pub(in crate::peers) mod asked;
pub(in crate::peers) mod capabilities;
pub(in crate::peers) mod hosting;
pub(in crate::peers) mod init;
pub(in crate::peers) mod offers;
pub(in crate::peers) mod preparing;
pub(in crate::peers) mod release_socket;
pub(in crate::peers) mod request;
pub(in crate::peers) mod transports;
pub(in crate::peers) mod tuned;
