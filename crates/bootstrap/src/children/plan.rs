//! The plan of a split or shrink: what a rank knows, what it says to the other ranks, and what it does next. Pure.
//!
//! [`CallFacts::first`] decides before a rank hears from others. A rank that can wait says in the round what it wants, and
//! gets the messages of all ranks as a [`Table`], from which [`Table::plan`] decides the rest. So the ranks that wait
//! decide alike. A rank that cannot wait says so, and goes on.
//!
//! NCCL's split is a call of all ranks of the parent, whatever their color. It is skipped only if no rank needs it. If
//! one does, ranks of lazy communicators make the call, too: without a color.
//!
//! It is a call on the parent. NCCL must have built the parent on all of these ranks, or be about to build it with all
//! of them. If that failed on some ranks only, or needs ranks that do not come, no rank makes the call. The new
//! communicators are made by ids then. In a shrink all ranks have one color.

use crate::negotiated::RANKS_MAX;
use crate::negotiated::bytes::{Reader, Writer};

/// Whether a rank wants its new communicator lazy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LazyVote {
    /// The rank goes to NCCL without waiting for the others, so NCCL makes all new communicators.
    InNccl,
    /// NCCL must make this rank's communicator.
    No,
    /// The rank accepts a lazy communicator of two ranks.
    InPair,
    /// The rank accepts a lazy communicator of any size.
    Always,
}

const VOTES: [LazyVote; 4] = [LazyVote::InNccl, LazyVote::No, LazyVote::InPair, LazyVote::Always];

impl LazyVote {
    fn accepts(self, ranks: usize) -> bool {
        self == LazyVote::Always || self == LazyVote::InPair && ranks == 2
    }
}

/// Whether NCCL has built a rank's parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Parent {
    /// NCCL has built it.
    Built,
    /// NCCL has not built it and can: all ranks that this takes make the call.
    Lazy,
    /// NCCL has built it, but not on all ranks, as this rank was told.
    Lost,
    /// NCCL has not built it on all ranks and cannot: some do not make the call.
    Unbuildable,
}

const PARENTS: [Parent; 4] = [Parent::Built, Parent::Lazy, Parent::Lost, Parent::Unbuildable];

/// A rank's message before a split or shrink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SplitMessage {
    /// None if the rank will be in no new communicator.
    pub color: Option<i32>,
    /// Orders the ranks of one color.
    pub key: i32,
    /// Whether it wants a lazy communicator.
    pub vote: LazyVote,
    /// The state of the rank's parent.
    pub parent: Parent,
}

/// What a rank knows of a call before it hears from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallFacts {
    /// What it says if it waits.
    pub message: SplitMessage,
    /// Its place among the ranks that make the call, in the order of the parent.
    pub place: u32,
    /// How many ranks make the call.
    pub ranks: u32,
    /// NCCL refuses the call by its arguments.
    pub is_refused: bool,
    /// The ranks hold a round; equal on all ranks.
    pub has_round: bool,
    /// The rank has said before that it does not wait. NCCL refused that call, and this one takes its place.
    pub has_said: bool,
    /// The call stands in a group, where a rank waits for no other.
    pub is_in_group: bool,
    /// The rank's device and configuration are known. Otherwise only NCCL knows what the call means.
    pub is_known: bool,
}

/// What a rank does next.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ChildPlan {
    /// Makes NCCL's call, which NCCL refuses. No other rank hears of the call.
    Refused,
    /// Says its message, waits for the messages of all, and goes on by [`Table::plan`].
    Round,
    /// Makes NCCL's call as the program made it. The ranks of the new communicator meet after it.
    Nccl,
    /// Meets the ranks of its new communicator. Without a peer group NCCL makes the communicator by an id of its first
    /// rank.
    Meet {
        /// The rank's number in the new communicator.
        rank: u32,
        /// The places of its ranks, in the order of the new ranks.
        ranks: Vec<u32>,
        /// Whether all of them want it lazy.
        is_lazy: bool,
        /// Whether ranks of other new communicators need NCCL's split: then this rank makes it, too, without a color.
        splits_too: bool,
    },
    /// The same by an id, but the rank does not come, and tells the others.
    StayAway {
        /// The rank's number in the new communicator.
        rank: u32,
        /// The places of its ranks.
        ranks: Vec<u32>,
    },
    /// Nothing: the rank is in no new communicator, and no rank needs a call on the parent.
    Nothing,
    /// Fails: NCCL's call on the parent is needed, and some ranks cannot make it.
    Torn,
}

impl CallFacts {
    /// What the rank says without waiting, if anything, and what it does first.
    pub fn first(&self) -> (Option<SplitMessage>, ChildPlan) {
        let parent = self.message.parent;
        // A shrink without the parent has all ranks in one communicator.
        let all = || (self.place, (0..self.ranks).collect());
        let waits = self.is_known && (!self.is_in_group || parent == Parent::Unbuildable);
        let is_due = self.has_round && !self.has_said;
        let plan = match parent {
            // NCCL, or the check in its place, says why.
            _ if self.is_refused => return (None, ChildPlan::Refused),
            _ if waits && is_due => return (None, ChildPlan::Round),
            Parent::Unbuildable if self.is_known => {
                let (rank, ranks) = all();
                ChildPlan::Meet { rank, ranks, is_lazy: false, splits_too: false }
            }
            Parent::Unbuildable => {
                let (rank, ranks) = all();
                ChildPlan::StayAway { rank, ranks }
            }
            // Some ranks cannot make the call in which this one would wait for them.
            Parent::Lost if self.has_round => return (None, ChildPlan::Torn),
            Parent::Built | Parent::Lazy | Parent::Lost => ChildPlan::Nccl,
        };
        let hurries = SplitMessage { color: None, key: 0, vote: LazyVote::InNccl, parent };
        (is_due.then_some(hurries), plan)
    }
}

/// The messages of all ranks that make the call, in the order of the parent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Table(Vec<SplitMessage>);

impl Table {
    /// All messages, in the order of their places.
    pub fn new(messages: Vec<SplitMessage>) -> Table {
        Table(messages)
    }

    /// How many ranks sent a message.
    pub fn ranks(&self) -> usize {
        self.0.len()
    }

    /// What the rank with this place does, which has waited.
    pub fn plan(&self, rank: u32) -> ChildPlan {
        let nccl = self.needs_nccl();
        let is_shared = self.is_parent_shared();
        let color = self.0.get(rank as usize).and_then(|message| message.color);
        let meet = |ranks: Vec<u32>, is_lazy| {
            let rank = ranks.iter().position(|other| *other == rank).unwrap_or_default() as u32;
            ChildPlan::Meet { rank, ranks, is_lazy, splits_too: is_lazy && nccl && is_shared }
        };
        match color.map(|color| self.ordered(color)) {
            Some(ranks) if self.is_lazy(&ranks) => meet(ranks, true),
            _ if nccl && is_shared => ChildPlan::Nccl,
            _ if self.is_torn() => ChildPlan::Torn,
            // A shrink has all ranks in one communicator, also those that did not say so because they did not wait.
            Some(_) if self.is_shrink_without_parent() => meet((0..self.ranks() as u32).collect(), false),
            Some(ranks) if nccl => meet(ranks, false),
            _ => ChildPlan::Nothing,
        }
    }

    /// Whether all ranks can make NCCL's call: NCCL has built the parent on all of them, or will with all.
    fn is_parent_shared(&self) -> bool {
        let first = self.0.first().map(|message| message.parent);
        matches!(first, Some(Parent::Built | Parent::Lazy))
            && self.0.iter().all(|message| Some(message.parent) == first)
    }

    fn is_shrink_without_parent(&self) -> bool {
        self.0.iter().any(|message| message.parent == Parent::Unbuildable)
    }

    /// A rank that does not wait makes a shrink without the parent if the parent cannot be built, and NCCL's call
    /// otherwise.
    fn is_torn(&self) -> bool {
        let in_nccl = |message: &SplitMessage| {
            message.vote == LazyVote::InNccl && message.parent != Parent::Unbuildable
        };
        !self.is_parent_shared() && self.0.iter().any(in_nccl)
    }

    fn needs_nccl(&self) -> bool {
        let by_nccl = |color| !self.is_lazy(&self.ordered(color));
        self.is_real() || self.0.iter().filter_map(|message| message.color).any(by_nccl)
    }

    fn is_real(&self) -> bool {
        self.0.iter().any(|message| message.vote == LazyVote::InNccl)
    }

    /// The ranks of a color in NCCL's order: by key, then by the rank in the parent.
    fn ordered(&self, color: i32) -> Vec<u32> {
        let of_color = (0..).zip(&self.0).filter(|(_, message)| message.color == Some(color));
        let mut ranks: Vec<(i32, u32)> = of_color.map(|(rank, message)| (message.key, rank)).collect();
        ranks.sort();
        ranks.into_iter().map(|(_, rank)| rank).collect()
    }

    fn is_lazy(&self, ranks: &[u32]) -> bool {
        let accepts = |rank: &u32| self.0[*rank as usize].vote.accepts(ranks.len());
        ranks.len() >= 2 && !self.is_real() && ranks.iter().all(accepts)
    }

    pub(crate) fn put(&self, writer: &mut Writer) {
        writer.u32(self.0.len() as u32);
        self.0.iter().for_each(|message| message.put(writer));
    }

    pub(crate) fn take(reader: &mut Reader<'_>) -> Option<Table> {
        let ranks = reader.u32()? as usize;
        if ranks > RANKS_MAX {
            return None;
        }
        (0..ranks).map(|_| SplitMessage::take(reader)).collect::<Option<_>>().map(Table)
    }
}

impl SplitMessage {
    pub(crate) fn put(&self, writer: &mut Writer) {
        writer.u8(self.color.is_some().into()).u32(self.color.unwrap_or_default() as u32);
        writer.u32(self.key as u32).u8(self.vote as u8).u8(self.parent as u8);
    }

    pub(crate) fn take(reader: &mut Reader<'_>) -> Option<SplitMessage> {
        let color = match (reader.u8()?, reader.u32()? as i32) {
            (0, 0) => None,
            (1, color) => Some(color),
            _ => return None,
        };
        let key = reader.u32()? as i32;
        let vote = *VOTES.get(usize::from(reader.u8()?))?;
        let parent = *PARENTS.get(usize::from(reader.u8()?))?;
        Some(SplitMessage { color, key, vote, parent })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn messages() -> impl Strategy<Value = Vec<SplitMessage>> {
        let vote = prop_oneof![
            1 => Just(LazyVote::InNccl),
            2 => Just(LazyVote::No),
            10 => Just(LazyVote::InPair),
            20 => Just(LazyVote::Always),
        ];
        // Few colors and keys, so that ranks share them; the ends of the range, too.
        let key = prop_oneof![-2..3, Just(i32::MIN), Just(i32::MAX)];
        let color =
            proptest::option::weighted(0.8, prop_oneof![4 => 0..3, 1 => Just(i32::MAX), 1 => Just(-7)]);
        let message = (color, key, vote).prop_map(|(color, key, vote)| SplitMessage {
            color,
            key,
            vote,
            parent: Parent::Built,
        });
        proptest::collection::vec(message, 1..=RANKS_MAX)
    }

    /// The same messages, with a parent that NCCL has built on some ranks only.
    fn messages_of_any_parent() -> impl Strategy<Value = Vec<SplitMessage>> {
        let unbuilt = prop_oneof![Just(Parent::Lazy), Just(Parent::Lost), Just(Parent::Unbuildable)];
        let built = proptest::collection::vec(any::<bool>(), RANKS_MAX);
        (messages(), built, unbuilt).prop_map(|(mut messages, built, unbuilt)| {
            for (message, built) in messages.iter_mut().zip(built) {
                message.parent = if built { Parent::Built } else { unbuilt };
                // A shrink has one color. A rank that does not wait names none.
                if unbuilt == Parent::Unbuildable {
                    message.color = if message.vote == LazyVote::InNccl { None } else { Some(0) };
                    message.key = 0;
                }
            }
            messages
        })
    }

    /// A communicator that is not lazy, made without the parent.
    fn apart(rank: u32, ranks: &[u32]) -> ChildPlan {
        ChildPlan::Meet { rank, ranks: ranks.to_vec(), is_lazy: false, splits_too: false }
    }

    /// As NCCL's source describes it: each rank is put behind those whose key is not greater.
    fn ordered_by_nccl(messages: &[SplitMessage], color: i32) -> Vec<u32> {
        let mut ranks: Vec<u32> = Vec::new();
        for (rank, message) in (0..).zip(messages) {
            if message.color == Some(color) {
                let behind =
                    ranks.iter().take_while(|other| messages[**other as usize].key <= message.key).count();
                ranks.insert(behind, rank);
            }
        }
        ranks
    }

    proptest! {
        /// Every rank's plan fits all others'. Lazy communicators have the same ranks on all of them, in NCCL's
        /// order, each once. NCCL's split is made by all ranks or by none.
        #[test]
        fn plans_fit(messages in messages()) {
            let table = Table::new(messages.clone());
            let plans: Vec<ChildPlan> = (0..messages.len() as u32).map(|rank| table.plan(rank)).collect();
            let makes_nccl =
                |plan: &ChildPlan| matches!(plan, ChildPlan::Nccl | ChildPlan::Meet { splits_too: true, .. });
            prop_assert!(plans.windows(2).all(|two| makes_nccl(&two[0]) == makes_nccl(&two[1])));
            for (own, (plan, message)) in (0..).zip(plans.iter().zip(&messages)) {
                match plan {
                    ChildPlan::Meet { rank, ranks, is_lazy: true, .. } => {
                        let color = message.color.unwrap();
                        prop_assert_eq!(ranks, &ordered_by_nccl(&messages, color));
                        prop_assert_eq!(ranks[*rank as usize], own);
                        prop_assert!(ranks.len() >= 2);
                        prop_assert!(messages.iter().all(|message| message.vote != LazyVote::InNccl));
                        for other in ranks {
                            let vote = messages[*other as usize].vote;
                            prop_assert!(vote == LazyVote::Always || vote == LazyVote::InPair && ranks.len() == 2);
                        }
                    }
                    ChildPlan::Nccl => prop_assert!(plans.iter().all(makes_nccl)),
                    ChildPlan::Nothing => prop_assert_eq!(message.color, None),
                    _ => prop_assert!(false, "{plan:?}"),
                }
            }
        }

        /// The same if the parent is built on some ranks only. Then no rank makes NCCL's call but those that did not
        /// wait. A rank of a communicator without the parent agrees with all others of it, or all that wait hear that
        /// they cannot.
        #[test]
        fn plans_fit_without_a_parent(messages in messages_of_any_parent()) {
            let table = Table::new(messages.clone());
            let alike = messages.iter().all(|message| message.parent == messages[0].parent)
                && matches!(messages[0].parent, Parent::Built | Parent::Lazy);
            let waiting = (0..).zip(&messages).filter(|(_, message)| message.vote != LazyVote::InNccl);
            let plans: Vec<(u32, ChildPlan)> = waiting.map(|(rank, _)| (rank, table.plan(rank))).collect();
            let is_torn = plans.iter().any(|(_, plan)| *plan == ChildPlan::Torn);
            for (own, plan) in &plans {
                match plan {
                    ChildPlan::Nccl => prop_assert!(alike),
                    ChildPlan::Meet { is_lazy: true, splits_too, .. } => prop_assert!(alike || !splits_too),
                    ChildPlan::Nothing => prop_assert!(messages[*own as usize].color.is_none() && !is_torn),
                    ChildPlan::Torn => prop_assert!(!alike),
                    ChildPlan::Meet { rank, ranks, .. } => {
                        prop_assert!(!alike && !is_torn);
                        prop_assert_eq!(ranks[*rank as usize], *own);
                        for (other, plan) in plans.iter().filter(|(other, _)| ranks.contains(other)) {
                            let place = ranks.iter().position(|rank| rank == other).unwrap() as u32;
                            prop_assert_eq!(plan, &apart(place, ranks));
                        }
                    }
                    _ => prop_assert!(false, "{plan:?}"),
                }
            }
        }

        /// Ranks go to NCCL only with a reason: one cannot wait, is alone, or does not want a lazy communicator of that
        /// size.
        #[test]
        fn nccl_has_a_reason(messages in messages()) {
            let table = Table::new(messages.clone());
            let reason = |message: &SplitMessage| {
                let size = message.color.map_or(0, |color| ordered_by_nccl(&messages, color).len());
                let refuses = match message.vote {
                    LazyVote::No => true,
                    LazyVote::InPair => size != 2,
                    _ => false,
                };
                message.vote == LazyVote::InNccl || message.color.is_some() && (size == 1 || refuses)
            };
            let needed = messages.iter().any(reason);
            prop_assert_eq!((0..messages.len() as u32).any(|rank| table.plan(rank) == ChildPlan::Nccl), needed);
        }

        /// A table is read back. One that is cut, or has more bytes behind it, is none.
        #[test]
        fn read_back(messages in messages()) {
            let table = Table::new(messages);
            let mut writer = Writer::default();
            table.put(&mut writer);
            let bytes = writer.finish();
            let mut reader = Reader::new(&bytes);
            prop_assert_eq!(Table::take(&mut reader), Some(table));
            prop_assert_eq!(reader.finish(), Some(()));
            prop_assert_eq!(Table::take(&mut Reader::new(&bytes[..bytes.len() - 1])), None);
        }
    }

    /// A message as it is written, pinned; and what no rank says is not read.
    #[test]
    fn unreadable() {
        let message = SplitMessage { color: Some(-7), key: -1, vote: LazyVote::InPair, parent: Parent::Lazy };
        let mut writer = Writer::default();
        message.put(&mut writer);
        let good = writer.finish();
        assert_eq!(good, [1, 0xf9, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 1]);
        for (place, wrong) in [(0, 0), (0, 2), (9, 4), (10, 4)] {
            let mut bytes = good.clone();
            bytes[place] = wrong;
            assert_eq!(SplitMessage::take(&mut Reader::new(&bytes)), None);
        }
        let mut too_many = Writer::default();
        too_many.u32(RANKS_MAX as u32 + 1);
        (0..=RANKS_MAX).for_each(|_| message.put(&mut too_many));
        assert_eq!(Table::take(&mut Reader::new(&too_many.finish())), None);
    }

    /// Some splits, as programs make them.
    #[test]
    fn examples() {
        let message = |color, vote| SplitMessage { color, key: 0, vote, parent: Parent::Built };
        let lazy = |rank, ranks: &[u32], splits_too| ChildPlan::Meet {
            rank,
            ranks: ranks.to_vec(),
            is_lazy: true,
            splits_too,
        };
        let pairs = LazyVote::InPair;
        let two_pairs = Table::new([0, 1, 0, 1].map(|color| message(Some(color), pairs)).to_vec());
        assert_eq!(two_pairs.plan(2), lazy(1, &[0, 2], false));
        // One pair; the other rank is in no new communicator.
        let one = Table::new(vec![message(None, pairs), message(Some(5), pairs), message(Some(5), pairs)]);
        assert_eq!([one.plan(0), one.plan(1)], [ChildPlan::Nothing, lazy(0, &[1, 2], false)]);
        // A pair beside three ranks that are not lazy.
        let mixed = Table::new([0, 1, 1, 1, 0].map(|color| message(Some(color), pairs)).to_vec());
        assert_eq!([mixed.plan(1), mixed.plan(4)], [ChildPlan::Nccl, lazy(1, &[0, 4], true)]);
        let all_in_none = Table::new(vec![message(None, LazyVote::No); 3]);
        assert_eq!(all_in_none.plan(0), ChildPlan::Nothing);
        let alone = Table::new(vec![message(Some(0), LazyVote::Always), message(None, LazyVote::Always)]);
        assert_eq!([alone.plan(0), alone.plan(1)], [ChildPlan::Nccl, ChildPlan::Nccl]);
        // A rank in no new communicator cannot wait.
        let hurried = Table::new(vec![
            message(Some(0), pairs),
            message(Some(0), pairs),
            message(None, LazyVote::InNccl),
        ]);
        assert_eq!(hurried.plan(0), ChildPlan::Nccl);
    }

    /// Parents that are not built, on all ranks or on some.
    #[test]
    fn parents() {
        use Parent::{Built, Lazy, Lost, Unbuildable};
        let table = |parents: [Parent; 3], vote: [LazyVote; 3]| {
            let color = |vote| if vote == LazyVote::InNccl { None } else { Some(0) };
            let message = |(parent, vote)| SplitMessage { color: color(vote), key: 0, vote, parent };
            Table::new(parents.into_iter().zip(vote).map(message).collect())
        };
        let wait = [LazyVote::No; 3];
        let apart = |rank| apart(rank, &[0, 1, 2]);
        assert_eq!(table([Lazy; 3], wait).plan(1), ChildPlan::Nccl);
        assert_eq!(table([Built, Lazy, Built], wait).plan(1), apart(1));
        assert_eq!(table([Lost; 3], wait).plan(0), apart(0));
        assert_eq!(table([Unbuildable; 3], wait).plan(2), apart(2));
        assert_eq!(table([Built, Unbuildable, Built], wait).plan(0), apart(0));
        // A rank that does not wait is in it, too, unless it is in NCCL.
        let hurried = [LazyVote::No, LazyVote::InNccl, LazyVote::No];
        assert_eq!(table([Built, Unbuildable, Built], hurried).plan(2), apart(2));
        assert_eq!(table([Unbuildable, Built, Built], hurried).plan(2), ChildPlan::Torn);
        assert_eq!(table([Lazy, Built, Lazy], hurried).plan(0), ChildPlan::Torn);
        assert_eq!(table([Lazy; 3], hurried).plan(0), ChildPlan::Nccl);
        // A lazy communicator does not need the parent.
        let lazy = ChildPlan::Meet { rank: 2, ranks: vec![0, 1, 2], is_lazy: true, splits_too: false };
        assert_eq!(table([Built, Lazy, Built], [LazyVote::Always; 3]).plan(2), lazy);
    }

    /// Every combination of facts, the first step and whether the rank says that it does not wait.
    #[test]
    fn firsts() {
        use Parent::{Built, Lazy, Lost, Unbuildable};
        let of = |parent| CallFacts {
            message: SplitMessage { color: Some(4), key: 7, vote: LazyVote::InPair, parent },
            place: 1,
            ranks: 3,
            is_refused: false,
            has_round: true,
            has_said: false,
            is_in_group: false,
            is_known: true,
        };
        let (built, without) = (of(Built), of(Unbuildable));
        let away = ChildPlan::StayAway { rank: 1, ranks: vec![0, 1, 2] };
        let (silent, says) = (false, true);
        let table = [
            (built, silent, ChildPlan::Round),
            (of(Lazy), silent, ChildPlan::Round),
            (of(Lost), silent, ChildPlan::Round),
            (CallFacts { is_refused: true, ..built }, silent, ChildPlan::Refused),
            (CallFacts { is_refused: true, ..without }, silent, ChildPlan::Refused),
            (CallFacts { has_round: false, ..built }, silent, ChildPlan::Nccl),
            (CallFacts { has_round: false, is_in_group: true, ..built }, silent, ChildPlan::Nccl),
            (CallFacts { has_round: false, is_known: false, ..built }, silent, ChildPlan::Nccl),
            (CallFacts { has_said: true, ..built }, silent, ChildPlan::Nccl),
            (CallFacts { is_in_group: true, ..built }, says, ChildPlan::Nccl),
            (CallFacts { is_in_group: true, ..of(Lazy) }, says, ChildPlan::Nccl),
            (CallFacts { is_known: false, ..built }, says, ChildPlan::Nccl),
            (CallFacts { is_in_group: true, ..of(Lost) }, silent, ChildPlan::Torn),
            (CallFacts { is_known: false, ..of(Lost) }, silent, ChildPlan::Torn),
            (without, silent, ChildPlan::Round),
            (CallFacts { is_in_group: true, ..without }, silent, ChildPlan::Round),
            (CallFacts { has_round: false, ..without }, silent, apart(1, &[0, 1, 2])),
            (CallFacts { has_said: true, ..without }, silent, apart(1, &[0, 1, 2])),
            (CallFacts { is_known: false, ..without }, says, away.clone()),
            (CallFacts { is_known: false, is_in_group: true, ..without }, says, away.clone()),
            (CallFacts { is_known: false, has_round: false, ..without }, silent, away),
        ];
        for (facts, says, plan) in table {
            let parent = facts.message.parent;
            let hurries = SplitMessage { color: None, key: 0, vote: LazyVote::InNccl, parent };
            assert_eq!(facts.first(), (says.then_some(hurries), plan), "{facts:?}");
        }
    }
}
