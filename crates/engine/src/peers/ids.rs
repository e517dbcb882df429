//! Ids for NCCL communicators that are made later than the peer group. All ranks ask the process of one rank. Its background worker makes
//! the id at the first request, so that rank may ask for it first or last itself.

use std::collections::VecDeque;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use nccl_sys::{
    NCCL_UNIQUE_ID_BYTES, ncclInProgress, ncclInternalError, ncclResult_t, ncclSuccess, ncclSystemError,
};

use crate::forward::init;
use windlass_base::descriptor;
use windlass_base::error::refuse;
use windlass_base::lock::Mutex;
use windlass_bootstrap::id_tag::Id;
use windlass_bootstrap::request_socket::Answer;

use super::requests::{Matter, Others};
use crate::background::process_exit;
use crate::peers::setup::hosting;

/// How many ids are kept. Ranks are at most one failed attempt apart, and a rank that has made one communicator soon asks for the next.
const KEPT_MAX: usize = 64;
/// After how long a process that gave no id is asked again: it may still be in its init.
const AGAIN_AFTER: Duration = Duration::from_millis(20);
/// How often a waiting rank checks whether to stop.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A rank's ids.
#[derive(Debug)]
pub(crate) struct Ids {
    others: Others,
    /// The ids made here. Locked while NCCL makes one, which waits for no other rank.
    made: Mutex<Made>,
}

/// The answers by number, the oldest first: all ranks that ask for a number get the same answer.
#[derive(Debug, Default)]
struct Made(VecDeque<(u64, State)>);

#[derive(Clone, Copy, Debug)]
enum State {
    /// NCCL has made no id since this time. This process may lack descriptors for a while.
    Lacking(Instant),
    Over(Result<Id, ncclResult_t>),
}

impl Made {
    /// The answer for a number. None while NCCL may yet make an id: each call tries again.
    fn get(
        &mut self,
        number: u64,
        make: impl FnOnce() -> Result<Id, ncclResult_t>,
    ) -> Option<Result<Id, ncclResult_t>> {
        let place = self.0.iter().position(|(known, _)| *known == number).unwrap_or_else(|| {
            if self.0.len() >= KEPT_MAX {
                self.0.pop_front();
            }
            self.0.push_back((number, State::Lacking(Instant::now())));
            self.0.len() - 1
        });
        let (_, state) = self.0.get_mut(place)?;
        if let State::Lacking(since) = *state {
            match make() {
                Ok(id) => *state = State::Over(Ok(id)),
                Err(code) if since.elapsed() >= descriptor::WANTED_FOR => {
                    let code = refuse(code, format_args!("NCCL makes no id"));
                    *state = State::Over(Err(code));
                }
                Err(_) => {}
            }
        }
        match *state {
            State::Lacking(_) => None,
            State::Over(made) => Some(made),
        }
    }
}

impl Ids {
    /// The state before the first id.
    pub(super) fn new(others: Others) -> Ids {
        Ids { others, made: Mutex::default() }
    }

    /// The id of a number, the same on all ranks that ask rank `of`. Waits for that rank's process, not for its threads. Fails when `stopped`
    /// says so, which is asked at least every 50 ms, or when this process lacks a descriptor to ask with [for too long](descriptor::WANTED_FOR).
    pub(crate) fn get(&self, of: u32, number: u64, stopped: &dyn Fn() -> bool) -> Result<Id, ncclResult_t> {
        if self.others.rank == of {
            // The others ask this process.
            process_exit::go_on();
            loop {
                match self.make(number) {
                    Some(made) => return made,
                    None if stopped() => return Err(ncclInternalError),
                    None => std::thread::sleep(AGAIN_AFTER),
                }
            }
        }
        let mut wanting: Option<Instant> = None;
        while !stopped() {
            let (tell, answer) = sync_channel(1);
            // This rank may have stopped waiting.
            let heard = move |answer| drop(tell.try_send(answer));
            if !self.others.ask(of, Matter::Id(number), heard) {
                return Err(refuse(ncclInternalError, format_args!("nobody to ask for an id")));
            }
            loop {
                match answer.recv_timeout(LOOK_EVERY) {
                    Ok(Ok(answer)) => {
                        return read(&answer.words).map_err(|code| {
                            refuse(code, format_args!("the process of rank {of} makes no id"))
                        });
                    }
                    Ok(Err(silence)) => {
                        wanting = silence.is_want().then(|| wanting.unwrap_or_else(Instant::now));
                        break;
                    }
                    Err(RecvTimeoutError::Disconnected) => break,
                    Err(RecvTimeoutError::Timeout) if stopped() => break,
                    // A request made while the process ended is sent only once the worker has begun again.
                    Err(RecvTimeoutError::Timeout) => process_exit::go_on(),
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

    /// On the rank that is asked: the id, or NCCL's code where this process can make none. None while an id may yet be made.
    pub(super) fn answer(&self, number: u64) -> Option<Answer> {
        let words = match self.make(number)? {
            Ok(id) => id.to_vec(),
            Err(code) => code.0.to_le_bytes().to_vec(),
        };
        Some(Answer { words, descriptor: None })
    }

    fn make(&self, number: u64) -> Option<Result<Id, ncclResult_t>> {
        let mut made = self.made.lock();
        made.get(number, || hosting::spare_id().map_or_else(init::make_id, Ok))
    }
}

/// Decodes what [`Ids::answer`] has written.
fn read(words: &[u8]) -> Result<Id, ncclResult_t> {
    if let Ok(code) = words.try_into() {
        let code = ncclResult_t(i32::from_le_bytes(code));
        // These codes are no failures, so the other process has made a mistake.
        let is_none = code == ncclSuccess || code == ncclInProgress;
        return Err(if is_none { ncclInternalError } else { code });
    }
    words.try_into().map_err(|_| {
        let bytes = words.len();
        refuse(ncclInternalError, format_args!("an id of {bytes} bytes, expected {NCCL_UNIQUE_ID_BYTES}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that can make no id answers with NCCL's code, which is not taken for an id.
    #[test]
    fn answers() {
        let id = [7; NCCL_UNIQUE_ID_BYTES];
        assert_eq!(read(&id), Ok(id));
        assert_eq!(read(&ncclSystemError.0.to_le_bytes()), Err(ncclSystemError));
        assert_eq!(read(&id[1..]), Err(ncclInternalError));
        assert_eq!(read(&ncclSuccess.0.to_le_bytes()), Err(ncclInternalError));
    }

    /// All who ask for one number get one answer: the id, or a failure that has lasted.
    #[test]
    fn one_answer() {
        let (id, fails) = ([7; NCCL_UNIQUE_ID_BYTES], || Err(ncclSystemError));
        let mut made = Made::default();
        assert_eq!(made.get(1, fails), None);
        assert_eq!(made.get(1, || Ok(id)), Some(Ok(id)));
        assert_eq!(made.get(1, fails), Some(Ok(id)));
        let Some(long_ago) = Instant::now().checked_sub(descriptor::WANTED_FOR) else { return };
        made.0.push_back((2, State::Lacking(long_ago)));
        assert_eq!(made.get(2, fails), Some(Err(ncclSystemError)));
        assert_eq!(made.get(2, || Ok(id)), Some(Err(ncclSystemError)));
        (3..100).for_each(|number| assert_eq!(made.get(number, || Ok(id)), Some(Ok(id))));
        assert_eq!(made.0.len(), KEPT_MAX);
    }
}
