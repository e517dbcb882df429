//! Decides over which wire a batched call goes: LL or LL128, by the sizes of all calls of its work in the group.

use windlass_kernels::collective::BATCH_ENTRIES;
use windlass_kernels::collectives::{Kind, batch_bytes_max};

use crate::plan::Terms;
use windlass_transport::tuning;

use super::{Batches, Candidate, Work};

/// The wire of a batch. Over LL a batch may hold several kinds of collectives, over LL128 one kind.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wire {
    Ll,
    Ll128(Kind),
}

/// Totals over all candidates of a group.
pub(super) struct Sums {
    /// LL packets of each work; none where a call is too large for LL.
    packets: Vec<(Work, Option<u64>)>,
    /// Bytes of each work and kind.
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

    /// The wire of a call in a batch; none if the call runs alone.
    pub(super) fn wire(&self, call: &Candidate, terms: &Terms, batches: Batches) -> Option<Wire> {
        let by_ll = call.packets.map(|_| Wire::Ll);
        match batches {
            Batches::Small => by_ll,
            Batches::All if self.are_few_packets(call) || !self.suit_ll128(call, terms) => by_ll,
            Batches::All => Some(Wire::Ll128(call.kind)),
        }
    }

    /// Whether all calls of its work fit into one kernel over LL. More or larger calls are quicker over LL128.
    fn are_few_packets(&self, call: &Candidate) -> bool {
        let sum = self.packets.iter().find(|(known, _)| *known == call.work).and_then(|(_, sum)| *sum);
        sum.is_some_and(|packets| packets <= BATCH_ENTRIES as u64)
    }

    /// Whether all calls of its work and kind have so few bytes that one kernel is not slower than NCCL's. Several kernels would be slower.
    /// False where even single collectives have no measured limit. Batches of other types were not measured, and count as one call.
    fn suit_ll128(&self, call: &Candidate, terms: &Terms) -> bool {
        if !terms.native.serve(call.collective, tuning::UNMEASURED_BYTES_MAX + 1) {
            return false;
        }
        let sum = self.bytes.iter().find(|(known, _)| *known == (call.work, call.kind));
        let most = u32::try_from(terms.ranks).map_or(0, |ranks| batch_bytes_max(call.kind, ranks));
        let serves = |bytes| call.other.is_none_or(|other| terms.native.serve(other, bytes));
        sum.is_some_and(|(_, bytes)| *bytes <= most && serves(*bytes))
    }
}
