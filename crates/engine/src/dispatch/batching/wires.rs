//! Over what a call of a group goes beside others: LL or LL128, as all of its work is small, or little enough.

use windlass_kernels::collective::BATCH_ENTRIES;
use windlass_kernels::collectives::{Kind, batch_bytes_max};

use crate::plan::Terms;
use windlass_transport::tuning;

use super::{Batches, Candidate, Work};

/// What goes by LL of all that does one work may be of several kinds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wire {
    Ll,
    Ll128(Kind),
}

/// What there is of each work in all.
pub(super) struct Sums {
    /// Packets of LL; none where something of it is not small.
    packets: Vec<(Work, Option<u64>)>,
    /// Bytes of each kind.
    bytes: Vec<((Work, Kind), u64)>,
}

impl Sums {
    pub(super) fn of<'a>(candidates: impl Iterator<Item = &'a Candidate>) -> Sums {
        let mut sums = Sums { packets: Vec::new(), bytes: Vec::new() };
        for Candidate { work, kind, bytes, packets, .. } in candidates {
            match sums.packets.iter_mut().find(|(known, _)| known == work) {
                Some((_, sum)) => *sum = sum.zip(*packets).map(|(sum, packets)| sum + packets),
                None => sums.packets.push((*work, *packets)),
            }
            match sums.bytes.iter_mut().find(|(known, _)| *known == (*work, *kind)) {
                Some((_, sum)) => *sum = sum.saturating_add(*bytes),
                None => sums.bytes.push(((*work, *kind), *bytes)),
            }
        }
        sums
    }

    /// How a call goes beside others; none: alone.
    pub(super) fn wire(&self, call: &Candidate, terms: &Terms, batches: Batches) -> Option<Wire> {
        let by_ll = call.packets.map(|_| Wire::Ll);
        match batches {
            Batches::None => None,
            Batches::Small => by_ll,
            Batches::All if self.are_few_packets(call) || !self.suit_ll128(call, terms) => by_ll,
            Batches::All => Some(Wire::Ll128(call.kind)),
        }
    }

    /// Whether all of its work is small, and little enough for one kernel. What is more, or larger, is quicker over LL128.
    fn are_few_packets(&self, call: &Candidate) -> bool {
        let sum = self.packets.iter().find(|(known, _)| *known == call.work).and_then(|(_, sum)| *sum);
        sum.is_some_and(|packets| packets <= BATCH_ENTRIES as u64)
    }

    /// Whether all of its kind is so little that NCCL's kernel for it is not ahead. Several kernels of ours would be behind that. Where
    /// nobody measured even single ones only what is small goes together.
    fn suit_ll128(&self, call: &Candidate, terms: &Terms) -> bool {
        if !terms.native.serve(call.collective, tuning::UNMEASURED_BYTES_MAX + 1) {
            return false;
        }
        let sum = self.bytes.iter().find(|(known, _)| *known == (call.work, call.kind));
        let most = u32::try_from(terms.ranks).map_or(0, |ranks| batch_bytes_max(call.kind, ranks));
        sum.is_some_and(|(_, bytes)| *bytes <= most)
    }
}
