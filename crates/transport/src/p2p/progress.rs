//! Reads how far every connection of a rank has come.

use windlass_kernels::launch::{BULK_WORD_STRIDE, LL128_WORD_STRIDE};

use crate::error::TransportError;
use crate::p2p::{Direction, P2p, Wire};
use windlass_base::gpu::{Address, Failure};

/// How far a connection has come since init, readable while kernels run. If nothing grows for long, it is stuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The rank on the other side.
    pub peer: u32,
    /// Whether this rank sends or receives.
    pub direction: Direction,
    /// Packets for which the receiver has given credit, over all channels. It gives credit at least every quarter of a ring.
    pub packets: u64,
    /// Chunks for which the receiver has given credit, likewise.
    pub chunks: u64,
    /// Whether this side's kernels may use a larger ring of LL128.
    pub ll128_grown: bool,
    /// Whether this side's kernels may use a larger ring of chunks.
    pub bulk_grown: bool,
}

impl P2p {
    /// How far every connection of this rank has come, for reports and the hang detector. It allocates, and waits for copies on a stream of
    /// Windlass.
    pub fn progress(&self) -> Result<Vec<Progress>, TransportError> {
        let read = || -> Result<Vec<Progress>, Failure> {
            let mut all = Vec::new();
            for (peer, connections) in (0..).zip(&self.peers) {
                if peer == self.geometry.rank {
                    continue;
                }
                for (direction, connection) in
                    [(Direction::Send, &connections.send), (Direction::Receive, &connections.receive)]
                {
                    let geometry = &self.geometry;
                    let packets =
                        self.sum(connection.ll128_credit, geometry.ll128_channels, LL128_WORD_STRIDE)?;
                    let chunks =
                        self.sum(connection.bulk_credit, geometry.bulk_channels, BULK_WORD_STRIDE)?;
                    let [ll128_grown, bulk_grown] =
                        [Wire::Ll128, Wire::Bulk].map(|wire| self.has_grown(direction, peer, wire));
                    all.push(Progress { peer, direction, packets, chunks, ll128_grown, bulk_grown });
                }
            }
            Ok(all)
        };
        read().map_err(|failure| TransportError::from(failure).told())
    }

    /// The sum of the words of all channels.
    fn sum(&self, at: Address, channels: u32, stride: u32) -> Result<u64, Failure> {
        let step = stride as usize / size_of::<u64>();
        let mut words = vec![0; channels as usize * step];
        self.sequencer.read(at, &mut words)?;
        Ok(words.iter().step_by(step).fold(0, |sum, word| sum.wrapping_add(*word)))
    }
}
