//! The bootstrap over real sockets and processes, and its agreement under random orders and deaths.

mod agreement;
mod children;
mod descriptors;
mod endings;
mod ids;
mod local_rendezvous;
mod processes;
mod rounds;
mod sessions;
mod support;
mod unknown_connections;
