//! The device code of Windlass as data, and what it is launched with. See README.md for the protocol.
//!
//! Nothing here calls CUDA: [`arrange`] makes a [`launch::Launch`] and a [`arrange::Shape`] of plain sends and receives,
//! [`collectives`] a [`collective::CollectiveLaunch`] and a [`collectives::Shape`] of a collective; whoever launches hands
//! the used part of it to the driver with the kernel of an [`images::Image`].

pub mod arrange;
pub mod collective;
pub mod collectives;
pub mod growth;
pub mod images;
pub mod launch;
