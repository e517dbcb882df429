//! Decides how a rank begins a split or shrink, by what it knows before it hears from other ranks. Pure.

/// What a rank knows of the call.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CallFacts {
    /// NCCL refuses the call by its arguments.
    pub is_refused: bool,
    /// The ranks hold a round; equal on all ranks.
    pub has_round: bool,
    /// The child must be made without the parent, which NCCL has not built and will not build.
    pub is_without_parent: bool,
    /// NCCL has built the parent on some ranks only.
    pub has_lost_parent: bool,
    /// The call stands in a group.
    pub is_in_group: bool,
    /// This rank's device is known.
    pub has_device: bool,
    /// The configuration can be read.
    pub is_readable: bool,
}

/// How a rank begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// NCCL's call, and no session.
    Nccl,
    /// NCCL's call. The ranks meet after it.
    Roster,
    /// The same. This rank says so in the round, without waiting for its result.
    Hurry,
    /// This rank says in the round that it goes to NCCL, and makes the child without the parent.
    Alone,
    /// This rank waits for the round.
    Round,
    /// The call fails.
    Fail,
}

/// Decides the way.
pub(super) fn way(known: CallFacts) -> Way {
    if known.is_refused {
        // NCCL, or the check in its place, says why.
        return Way::Nccl;
    }
    if !known.has_round && !known.is_without_parent {
        return Way::Roster;
    }
    if known.has_lost_parent && known.is_in_group {
        return Way::Fail;
    }
    let waits = known.is_without_parent || !known.is_in_group;
    match (known.has_device, known.is_readable && waits, known.is_without_parent) {
        (true, true, _) => Way::Round,
        // Only NCCL knows what this configuration means.
        (true, false, true) => Way::Alone,
        _ => Way::Hurry,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every combination of facts, and its way.
    #[test]
    fn ways() {
        let sound =
            CallFacts { has_round: true, has_device: true, is_readable: true, ..CallFacts::default() };
        let without = CallFacts { is_without_parent: true, ..sound };
        let table = [
            (sound, Way::Round),
            (CallFacts { is_refused: true, ..sound }, Way::Nccl),
            (CallFacts { is_refused: true, ..without }, Way::Nccl),
            (CallFacts { has_round: false, ..sound }, Way::Roster),
            (CallFacts { has_round: false, is_in_group: true, ..sound }, Way::Roster),
            (CallFacts { is_in_group: true, ..sound }, Way::Hurry),
            (CallFacts { is_readable: false, ..sound }, Way::Hurry),
            (CallFacts { has_device: false, ..sound }, Way::Hurry),
            (CallFacts { has_lost_parent: true, ..sound }, Way::Round),
            (CallFacts { has_lost_parent: true, is_in_group: true, ..sound }, Way::Fail),
            (CallFacts { has_lost_parent: true, is_readable: false, ..sound }, Way::Hurry),
            (without, Way::Round),
            (CallFacts { has_round: false, ..without }, Way::Round),
            (CallFacts { is_in_group: true, ..without }, Way::Round),
            (CallFacts { is_readable: false, ..without }, Way::Alone),
            (CallFacts { is_readable: false, is_in_group: true, ..without }, Way::Alone),
            (CallFacts { has_device: false, ..without }, Way::Hurry),
        ];
        for (known, expected) in table {
            assert_eq!(way(known), expected, "{known:?}");
        }
    }
}
