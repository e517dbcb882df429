//! The ids with which NCCL's own communicators are made later than the peer group. All ranks ask the process of one of them, which
//! makes one at the first question, on its background worker: that rank itself may come to it last, or first.

use std::collections::VecDeque;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nccl_sys::{NCCL_UNIQUE_ID_BYTES, ncclInternalError, ncclResult_t, ncclSystemError};

use crate::forward::init;
use windlass_base::descriptor;
use windlass_base::error::refuse;
use windlass_bootstrap::id_tag::Id;
use windlass_bootstrap::negotiated::Token;
use windlass_bootstrap::negotiated::bytes::{Reader, Writer};
use windlass_bootstrap::request_socket::Answered;

use super::{PeerGroup, process_exit, worker};

/// Ids that are kept: ranks are at most a failed attempt apart, and a rank that has made a communicator from this one asks soon.
const KEPT_MAX: usize = 64;
/// How soon a process that gave none is asked again: it may not be through its init yet.
const AGAIN_AFTER: Duration = Duration::from_millis(20);
/// How often a rank that waits looks whether it should.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A rank's ids, by what they are for, the oldest first. Held while NCCL makes one, which waits for nobody.
#[derive(Debug, Default)]
pub(super) struct Ids(Mutex<VecDeque<(u64, Id)>>);

/// Which id is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub comm: Token,
    /// The rank whose process makes it.
    pub of: u32,
    /// What it is for.
    pub number: u64,
}

const MAGIC: &[u8; 8] = b"which id";

impl Question {
    pub(super) fn encode(self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.raw(MAGIC).token(self.comm).u32(self.of).u64(self.number);
        writer.finish()
    }

    pub(super) fn decode(words: &[u8]) -> Option<Question> {
        let mut reader = Reader::new(words);
        if reader.raw::<8>()? != *MAGIC {
            return None;
        }
        let (comm, of, number) = (reader.token()?, reader.u32()?, reader.u64()?);
        reader.finish()?;
        Some(Question { comm, of, number })
    }
}

/// A question that a thread waits with.
#[derive(Debug)]
pub(super) struct Asking {
    pub request_socket: Token,
    pub question: Question,
    pub answers: SyncSender<Answered>,
}

impl PeerGroup {
    /// An id for something that ranks number alike, the same for all who ask the same rank. Waits for its process, whatever its
    /// threads do, until `stopped`, which is asked every 50 ms, or this process had no descriptor to ask with [for a while](descriptor::WANTED_FOR).
    pub fn id(&self, of: u32, number: u64, stopped: &dyn Fn() -> bool) -> Result<Id, ncclResult_t> {
        if self.rank == of {
            // The others ask this process.
            process_exit::go_on();
            return self.make_id(number);
        }
        let question = Question { comm: self.negotiated.comm, of, number };
        let mut wanting: Option<Instant> = None;
        while !stopped() {
            let (answers, answer) = sync_channel(1);
            if !worker::ask_for_id(self, question, answers) {
                return Err(refuse(ncclInternalError, format_args!("nobody to ask for an id")));
            }
            loop {
                match answer.recv_timeout(LOOK_EVERY) {
                    Ok(Ok(answer)) => {
                        return answer.words.try_into().map_err(|words: Vec<u8>| {
                            let bytes = words.len();
                            refuse(
                                ncclInternalError,
                                format_args!("an id of {bytes} bytes, expected {NCCL_UNIQUE_ID_BYTES}"),
                            )
                        });
                    }
                    Ok(Err(silence)) => {
                        wanting = silence.is_want().then(|| wanting.unwrap_or_else(Instant::now));
                        break;
                    }
                    Err(RecvTimeoutError::Disconnected) => break,
                    Err(RecvTimeoutError::Timeout) if stopped() => break,
                    Err(RecvTimeoutError::Timeout) => {}
                }
            }
            if wanting.is_some_and(|since| since.elapsed() >= descriptor::WANTED_FOR) {
                let why = format_args!("no file descriptor to ask rank {of} for an id");
                return Err(refuse(ncclSystemError, why));
            }
            // Divergence: where that process is dead NCCL would wait in its bootstrap; here, too, until an abort.
            std::thread::sleep(AGAIN_AFTER);
        }
        Err(ncclInternalError)
    }

    /// As the rank that is asked.
    pub(super) fn make_id(&self, number: u64) -> Result<Id, ncclResult_t> {
        let mut ids = self.ids.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, id)) = ids.iter().find(|(known, _)| *known == number) {
            return Ok(*id);
        }
        let id = super::spare_id().map_or_else(init::make_id, Ok);
        let id = id.map_err(|code| refuse(code, format_args!("NCCL makes no id")))?;
        if ids.len() >= KEPT_MAX {
            ids.pop_front();
        }
        ids.push_back((number, id));
        Ok(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Questions read back; anything else is none.
    #[test]
    fn questions() {
        let question = Question { comm: Token([5; 16]), of: 2, number: 7 };
        let bytes = question.encode();
        assert_eq!(Question::decode(&bytes), Some(question));
        assert_eq!(Question::decode(&bytes[1..]), None);
        assert_eq!(Question::decode(&[0; 32]), None);
    }
}
