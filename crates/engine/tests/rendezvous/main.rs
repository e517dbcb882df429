//! The rendezvous over real sockets and processes, and its agreement under random orders and deaths.

mod agreement;
mod derived;
mod descriptors;
mod endings;
mod ids;
mod meetings;
mod musters;
mod processes;
mod rounds;
mod strangers;
mod support;
