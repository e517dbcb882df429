//! Decides which new communicator each rank joins in a split or shrink, and which of these are lazy. Pure functions of
//! the messages of all ranks, so the result is the same on every rank. In a shrink all ranks have one color.
//!
//! NCCL's split is a call of all ranks of the parent, whatever their color. It is skipped only if no rank needs it. If
//! one does, ranks of lazy communicators make the call, too: without a color.
//!
//! It is a call on the parent. NCCL must have built the parent on all of these ranks, or be about to build it with all
//! of them. If that failed on some ranks only, or needs ranks that do not come, no rank makes the call. The new
//! communicators are made by ids then.

use crate::negotiated::RANKS_MAX;
use crate::negotiated::bytes::{Reader, Writer};

/// Whether a rank wants its new communicator lazy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

impl LazyVote {
    fn accepts(self, ranks: usize) -> bool {
        match self {
            LazyVote::InNccl | LazyVote::No => false,
            LazyVote::InPair => ranks == 2,
            LazyVote::Always => true,
        }
    }
}

/// Whether NCCL has built a rank's parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// A rank's message before a split or shrink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// The messages of all ranks that make the call, in the order of the parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table(Vec<SplitMessage>);

/// What a rank does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Course {
    /// The rank makes NCCL's split as the program called it.
    Nccl,
    /// The rank's new communicator is lazy.
    Lazy {
        /// The rank's number in the new communicator.
        rank: u32,
        /// The places of its ranks in the table, in the order of the new ranks. If all ranks of the parent make the
        /// call, these are their ranks in the parent.
        ranks: Vec<u32>,
        /// What ranks of other new communicators need.
        others: Others,
    },
    /// NCCL makes the rank's communicator without the parent, by an id of its first rank.
    Apart {
        /// The rank's number in the new communicator.
        rank: u32,
        /// The places of its ranks, as in [`Course::Lazy`].
        ranks: Vec<u32>,
    },
    /// The rank is in no new communicator, and no rank needs a call on the parent.
    Nothing,
    /// A rank that cannot wait is in NCCL's call on the parent, which this rank cannot make.
    Torn,
}

/// What ranks of other new communicators need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// Nothing.
    Nothing,
    /// NCCL's split, which all ranks make: this rank without a color.
    Nccl,
}

impl Table {
    /// All messages, in the order of their places.
    pub fn new(messages: Vec<SplitMessage>) -> Table {
        Table(messages)
    }

    /// How many ranks sent a message.
    pub fn ranks(&self) -> usize {
        self.0.len()
    }

    /// What the rank with this place does next.
    pub fn course(&self, rank: u32) -> Course {
        let nccl = self.needs_nccl();
        let is_shared = self.is_parent_shared();
        let color = self.0.get(rank as usize).and_then(|message| message.color);
        let ranks = color.map(|color| self.ordered(color));
        let place = |ranks: &[u32]| ranks.iter().position(|other| *other == rank).unwrap_or_default() as u32;
        match ranks {
            Some(ranks) if self.is_lazy(&ranks) => Course::Lazy {
                rank: place(&ranks),
                ranks,
                others: if nccl && is_shared { Others::Nccl } else { Others::Nothing },
            },
            _ if nccl && is_shared => Course::Nccl,
            _ if self.is_torn() => Course::Torn,
            // A shrink has all ranks in one communicator, also those that did not say so because they did not wait.
            Some(_) if self.is_shrink_without_parent() => {
                Course::Apart { rank, ranks: (0..self.ranks() as u32).collect() }
            }
            Some(ranks) if nccl => Course::Apart { rank: place(&ranks), ranks },
            _ => Course::Nothing,
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

    pub(super) fn put(&self, writer: &mut Writer) {
        writer.u32(self.0.len() as u32);
        self.0.iter().for_each(|message| message.put(writer));
    }

    pub(super) fn take(reader: &mut Reader<'_>) -> Option<Table> {
        let ranks = reader.u32()? as usize;
        if ranks > RANKS_MAX {
            return None;
        }
        (0..ranks).map(|_| SplitMessage::take(reader)).collect::<Option<_>>().map(Table)
    }
}

impl SplitMessage {
    pub(super) fn put(&self, writer: &mut Writer) {
        let vote = match self.vote {
            LazyVote::InNccl => 0,
            LazyVote::No => 1,
            LazyVote::InPair => 2,
            LazyVote::Always => 3,
        };
        writer.u8(self.color.is_some().into()).u32(self.color.unwrap_or_default() as u32);
        let parent = match self.parent {
            Parent::Built => 0,
            Parent::Lazy => 1,
            Parent::Lost => 2,
            Parent::Unbuildable => 3,
        };
        writer.u32(self.key as u32).u8(vote).u8(parent);
    }

    pub(super) fn take(reader: &mut Reader<'_>) -> Option<SplitMessage> {
        let (has_color, color) = (reader.u8()?, reader.u32()? as i32);
        let color = match has_color {
            0 if color == 0 => None,
            1 => Some(color),
            _ => return None,
        };
        let key = reader.u32()? as i32;
        let vote = match reader.u8()? {
            0 => LazyVote::InNccl,
            1 => LazyVote::No,
            2 => LazyVote::InPair,
            3 => LazyVote::Always,
            _ => return None,
        };
        let parent = match reader.u8()? {
            0 => Parent::Built,
            1 => Parent::Lazy,
            2 => Parent::Lost,
            3 => Parent::Unbuildable,
            _ => return None,
        };
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
        /// Every rank's course fits all others'. Lazy communicators have the same ranks on all of them, in NCCL's
        /// order, each once. NCCL's split is made by all ranks or by none.
        #[test]
        fn courses_fit(messages in messages()) {
            let table = Table::new(messages.clone());
            let courses: Vec<Course> = (0..messages.len() as u32).map(|rank| table.course(rank)).collect();
            let makes_nccl = |course: &Course| match course {
                Course::Nccl => true,
                Course::Lazy { others, .. } => *others == Others::Nccl,
                Course::Nothing | Course::Apart { .. } | Course::Torn => false,
            };
            prop_assert!(courses.windows(2).all(|two| makes_nccl(&two[0]) == makes_nccl(&two[1])));
            for (own, (course, message)) in (0..).zip(courses.iter().zip(&messages)) {
                match course {
                    Course::Lazy { rank, ranks, .. } => {
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
                    Course::Nccl => prop_assert!(courses.iter().all(makes_nccl)),
                    Course::Nothing => prop_assert_eq!(message.color, None),
                    Course::Apart { .. } | Course::Torn => prop_assert!(false, "{course:?}"),
                }
            }
        }

        /// The same if the parent is built on some ranks only. Then no rank makes NCCL's call but those that did not
        /// wait. A rank of a communicator without the parent agrees with all others of it, or all that wait hear that
        /// they cannot.
        #[test]
        fn courses_fit_without_a_parent(messages in messages_of_any_parent()) {
            let table = Table::new(messages.clone());
            let alike = messages.iter().all(|message| message.parent == messages[0].parent)
                && matches!(messages[0].parent, Parent::Built | Parent::Lazy);
            let waiting = (0..).zip(&messages).filter(|(_, message)| message.vote != LazyVote::InNccl);
            let courses: Vec<(u32, Course)> = waiting.map(|(rank, _)| (rank, table.course(rank))).collect();
            let is_torn = courses.iter().any(|(_, course)| *course == Course::Torn);
            for (own, course) in &courses {
                match course {
                    Course::Nccl => prop_assert!(alike),
                    Course::Lazy { others, .. } => prop_assert!(alike || *others == Others::Nothing),
                    Course::Nothing => prop_assert!(messages[*own as usize].color.is_none() && !is_torn),
                    Course::Torn => prop_assert!(!alike),
                    Course::Apart { rank, ranks } => {
                        prop_assert!(!alike && !is_torn);
                        prop_assert_eq!(ranks[*rank as usize], *own);
                        for (other, course) in courses.iter().filter(|(other, _)| ranks.contains(other)) {
                            let place = ranks.iter().position(|rank| rank == other).unwrap() as u32;
                            prop_assert_eq!(course, &Course::Apart { rank: place, ranks: ranks.clone() });
                        }
                    }
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
            prop_assert_eq!((0..messages.len() as u32).any(|rank| table.course(rank) == Course::Nccl), needed);
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
        let lazy_course = |rank, ranks: &[u32], others| Course::Lazy { rank, ranks: ranks.to_vec(), others };
        let pairs = LazyVote::InPair;
        let two_pairs = Table::new([0, 1, 0, 1].map(|color| message(Some(color), pairs)).to_vec());
        assert_eq!(two_pairs.course(2), lazy_course(1, &[0, 2], Others::Nothing));
        // One pair; the other rank is in no new communicator.
        let one = Table::new(vec![message(None, pairs), message(Some(5), pairs), message(Some(5), pairs)]);
        assert_eq!(
            [one.course(0), one.course(1)],
            [Course::Nothing, lazy_course(0, &[1, 2], Others::Nothing)]
        );
        // A pair beside three ranks that are not lazy.
        let mixed = Table::new([0, 1, 1, 1, 0].map(|color| message(Some(color), pairs)).to_vec());
        assert_eq!([mixed.course(1), mixed.course(4)], [Course::Nccl, lazy_course(1, &[0, 4], Others::Nccl)]);
        let all_in_none = Table::new(vec![message(None, LazyVote::No); 3]);
        assert_eq!(all_in_none.course(0), Course::Nothing);
        let alone = Table::new(vec![message(Some(0), LazyVote::Always), message(None, LazyVote::Always)]);
        assert_eq!([alone.course(0), alone.course(1)], [Course::Nccl, Course::Nccl]);
        // A rank in no new communicator cannot wait.
        let hurried = Table::new(vec![
            message(Some(0), pairs),
            message(Some(0), pairs),
            message(None, LazyVote::InNccl),
        ]);
        assert_eq!(hurried.course(0), Course::Nccl);
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
        let apart = |rank| Course::Apart { rank, ranks: vec![0, 1, 2] };
        assert_eq!(table([Lazy; 3], wait).course(1), Course::Nccl);
        assert_eq!(table([Built, Lazy, Built], wait).course(1), apart(1));
        assert_eq!(table([Lost; 3], wait).course(0), apart(0));
        assert_eq!(table([Unbuildable; 3], wait).course(2), apart(2));
        assert_eq!(table([Built, Unbuildable, Built], wait).course(0), apart(0));
        // A rank that does not wait is in it, too, unless it is in NCCL.
        let hurried = [LazyVote::No, LazyVote::InNccl, LazyVote::No];
        assert_eq!(table([Built, Unbuildable, Built], hurried).course(2), apart(2));
        assert_eq!(table([Unbuildable, Built, Built], hurried).course(2), Course::Torn);
        assert_eq!(table([Lazy, Built, Lazy], hurried).course(0), Course::Torn);
        assert_eq!(table([Lazy; 3], hurried).course(0), Course::Nccl);
        // A lazy communicator does not need the parent.
        let lazy = Course::Lazy { rank: 2, ranks: vec![0, 1, 2], others: Others::Nothing };
        assert_eq!(table([Built, Lazy, Built], [LazyVote::Always; 3]).course(2), lazy);
    }
}
