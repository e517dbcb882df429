//! The ids with which NCCL's own communicators are made later than the fabric. All ranks ask the process of rank 0, which
//! makes one at the first question, on its watch thread: rank 0 itself may come to it last, or first.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nccl_sys::{NCCL_UNIQUE_ID_BYTES, ncclInternalError, ncclResult_t};

use crate::contract::Token;
use crate::contract::bytes::{Reader, Writer};
use crate::error::refuse;
use crate::forward::birth;
use crate::rendezvous::asking::Answer;
use crate::rendezvous::card::Id;

use super::{Fabric, watch};

/// Attempts whose ids are kept: ranks are at most a failed one apart.
const KEPT_MAX: usize = 16;
/// How soon a process that gave none is asked again: it may not be through its birth yet.
const AGAIN_AFTER: Duration = Duration::from_millis(20);
/// How often a rank that waits looks whether it should.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Rank 0's ids, by attempt. Held while NCCL makes one, which waits for nobody.
#[derive(Debug, Default)]
pub(super) struct Ids(Mutex<BTreeMap<u64, Id>>);

/// Which id is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub birth: Token,
    pub attempt: u64,
}

const WORD: &[u8; 8] = b"which id";

impl Question {
    pub fn encode(self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.raw(WORD).token(self.birth).u64(self.attempt);
        writer.finish()
    }

    pub fn decode(words: &[u8]) -> Option<Question> {
        let mut reader = Reader::new(words);
        if reader.raw::<8>()? != *WORD {
            return None;
        }
        let (birth, attempt) = (reader.token()?, reader.u64()?);
        reader.finish()?;
        Some(Question { birth, attempt })
    }
}

/// A question that a thread waits with.
#[derive(Debug)]
pub(super) struct Asking {
    pub desk: Token,
    pub question: Question,
    pub answers: SyncSender<Option<Answer>>,
}

impl Fabric {
    /// The id of an attempt, the same on all ranks. Waits for rank 0's process, whatever its threads do, until `stopped`.
    pub fn id(&self, attempt: u64, stopped: &AtomicBool) -> Result<Id, ncclResult_t> {
        if self.rank == 0 {
            return self.make_id(attempt);
        }
        let question = Question { birth: self.contract.birth, attempt };
        while !stopped.load(Ordering::Acquire) {
            let (answers, answer) = sync_channel(1);
            if !watch::ask_for_id(self, question, answers) {
                return Err(refuse(ncclInternalError, format_args!("nobody to ask for an id")));
            }
            loop {
                match answer.recv_timeout(LOOK_EVERY) {
                    Ok(Some(answer)) => {
                        return answer.words.try_into().map_err(|words: Vec<u8>| {
                            let bytes = words.len();
                            refuse(
                                ncclInternalError,
                                format_args!("an id of {bytes} bytes, expected {NCCL_UNIQUE_ID_BYTES}"),
                            )
                        });
                    }
                    Ok(None) | Err(RecvTimeoutError::Disconnected) => break,
                    Err(RecvTimeoutError::Timeout) if stopped.load(Ordering::Acquire) => break,
                    Err(RecvTimeoutError::Timeout) => {}
                }
            }
            // Divergence: where rank 0's process is dead NCCL would wait in its bootstrap; here, too, until an abort.
            std::thread::sleep(AGAIN_AFTER);
        }
        Err(ncclInternalError)
    }

    /// As rank 0.
    pub(super) fn make_id(&self, attempt: u64) -> Result<Id, ncclResult_t> {
        let mut ids = self.ids.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(id) = ids.get(&attempt) {
            return Ok(*id);
        }
        let id = super::spare_id().map_or_else(birth::make_id, Ok);
        let id = id.map_err(|code| refuse(code, format_args!("NCCL makes no id")))?;
        if ids.len() >= KEPT_MAX {
            ids.pop_first();
        }
        ids.insert(attempt, id);
        Ok(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Questions read back; anything else is none.
    #[test]
    fn questions() {
        let question = Question { birth: Token([5; 16]), attempt: 7 };
        let bytes = question.encode();
        assert_eq!(Question::decode(&bytes), Some(question));
        assert_eq!(Question::decode(&bytes[1..]), None);
        assert_eq!(Question::decode(&[0; 32]), None);
    }
}
