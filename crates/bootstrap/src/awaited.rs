//! What `windlass hang` asks a process at its [request socket](super::request_socket): for which ranks one of its own waits on the GPU.
//!
//! The question has a half of the token of the rank's peer group, which only ranks and readers of the process's counters know.

use crate::negotiated::bytes::{Reader, Writer};

const MAGIC: &[u8; 8] = b"awaited?";
const AWAITED_BYTES: usize = 17;

/// For whom does this rank wait?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// A half of the token of its peer group.
    pub token: u64,
    /// The rank.
    pub rank: u32,
}

/// A launch to which a rank has come, and other ranks have not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// The number of the launch's wire.
    pub wire: u8,
    /// The launch's number on that wire.
    pub launch: u64,
    /// The ranks that have not come, a bit each.
    pub ranks: u64,
}

impl Question {
    /// Its bytes.
    pub fn encode(self) -> Vec<u8> {
        Writer::default().raw(MAGIC).u64(self.token).u32(self.rank).finish()
    }

    /// Reads a question.
    pub fn decode(words: &[u8]) -> Option<Question> {
        let (magic, token, rank) =
            Reader::whole(words, |reader| Some((reader.raw()?, reader.u64()?, reader.u32()?)))?;
        (magic == *MAGIC).then_some(Question { token, rank })
    }
}

impl Awaited {
    /// The bytes of an answer.
    pub fn encode(all: &[Awaited]) -> Vec<u8> {
        let mut writer = Writer::default();
        for one in all {
            writer.u8(one.wire).u64(one.launch).u64(one.ranks);
        }
        writer.finish()
    }

    /// Reads an answer. Bytes that are none say nothing.
    pub fn decode(words: &[u8]) -> Vec<Awaited> {
        let read = |reader: &mut Reader<'_>| {
            Some(Awaited { wire: reader.u8()?, launch: reader.u64()?, ranks: reader.u64()? })
        };
        words.chunks(AWAITED_BYTES).filter_map(|one| Reader::whole(one, read)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Questions and answers survive encoding and decoding; other bytes are none.
    #[test]
    fn words() {
        let question = Question { token: u64::MAX - 1, rank: 3 };
        assert_eq!(Question::decode(&question.encode()), Some(question));
        assert_eq!(Question::decode(&question.encode()[1..]), None);
        let all = [Awaited { wire: 0, launch: 7, ranks: 2 }, Awaited { wire: 1, launch: u64::MAX, ranks: 5 }];
        assert_eq!(Awaited::decode(&Awaited::encode(&all)), all);
        assert_eq!(Awaited::decode(&Awaited::encode(&all)[..33]), all[..1]);
        assert_eq!(Awaited::decode(b""), []);
    }
}
