//! Everything that moves bytes, given the memory of peers: the symmetric heap, the sequencer, p2p and native collectives.

#![deny(unsafe_code)]
#![deny(unreachable_pub)]

mod error;

pub use error::TransportError;

pub mod heap;

// The sequencer is the base of the mechanisms that launch kernels.
pub mod sequencer;

pub mod p2p;

pub mod native;

pub mod circumstances;
pub mod tuning;
