//! The device code of Windlass as data, and its launch parameters. README.md describes the protocol.
//!
//! Nothing here calls CUDA. [`arrange`] turns sends and receives into a [`launch::Launch`] and a [`arrange::Shape`]; [`collectives`] turns a
//! collective into a [`collective::CollectiveLaunch`] and a [`collectives::Shape`]. Whoever launches passes the used part of it to the driver,
//! with the kernel of an [`images::Image`].

pub mod arrange;
pub mod collective;
pub mod collectives;
pub mod growth;
pub mod images;
pub mod launch;
