//! How far every connection of a rank came.

use windlass_kernels::launch::{BULK_WORD_STRIDE, LL128_WORD_STRIDE};

use crate::error::TransportError;
use crate::p2p::{Direction, P2p, Wire};
use windlass_base::gpu::{Address, Failure};

/// How far a connection came since init, readable while kernels run: what does not grow for long is stuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The other side.
    pub peer: u32,
    /// Seen from this rank.
    pub direction: Direction,
    /// Packets that the receiver has consumed and told of, over all channels; it tells at least every quarter of a ring.
    pub packets: u64,
    /// Chunks, likewise.
    pub chunks: u64,
    /// This side's kernels may use a larger ring of LL128.
    pub ll128_grown: bool,
    /// A larger ring of chunks, likewise.
    pub bulk_grown: bool,
}

impl P2p {
    /// How far every connection of this rank came. For reports and for who watches over stuck operations: it allocates
    /// and waits for copies of ours.
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
