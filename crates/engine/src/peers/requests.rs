//! Sends requests and messages to the processes of the other ranks of a peer group, through the background [worker].

use std::sync::Arc;
use std::time::{Duration, Instant};

use windlass_bootstrap::negotiated::{Member, NegotiatedConfig, Token};
use windlass_bootstrap::request_socket::Answered;

use crate::background::worker;

/// How long a message is repeated to a peer that does not answer: it may still be in its init, or have ended.
const TOLD_WITHIN: Duration = Duration::from_secs(60);
const TELL_EVERY: Duration = Duration::from_millis(100);

/// One rank's way to the other ranks of its peer group.
#[derive(Clone, Debug)]
pub(super) struct Others {
    negotiated: Arc<NegotiatedConfig>,
    rank: u32,
}

impl Others {
    /// The other ranks of this rank.
    pub(super) fn new(negotiated: Arc<NegotiatedConfig>, rank: u32) -> Others {
        Others { negotiated, rank }
    }

    /// What all ranks agreed on.
    pub(super) fn negotiated(&self) -> &Arc<NegotiatedConfig> {
        &self.negotiated
    }

    /// The token that names the peer group.
    pub(super) fn comm(&self) -> Token {
        self.negotiated.comm
    }

    /// This rank.
    pub(super) fn rank(&self) -> u32 {
        self.rank
    }

    /// Another rank.
    pub(super) fn member(&self, rank: u32) -> Result<&Member, String> {
        let member = self.negotiated.members.get(rank as usize);
        member.filter(|_| rank != self.rank).ok_or_else(|| format!("there is no other rank {rank}"))
    }

    /// Whether that rank is in this process, too.
    pub(super) fn is_near(&self, rank: u32) -> bool {
        let process = |rank: u32| self.negotiated.members.get(rank as usize).map(|member| member.process);
        process(rank) == process(self.rank)
    }

    /// The ranks whose bit is set.
    pub(super) fn among(&self, ranks: u64) -> impl Iterator<Item = u32> + use<> {
        (0..self.negotiated.members.len() as u32).filter(move |rank| ranks & (1 << rank) != 0)
    }

    /// Sends a request to a rank's process. Returns whether `heard` will be called, with an answer or with the reason why none came.
    pub(super) fn ask(
        &self,
        rank: u32,
        words: Vec<u8>,
        heard: impl FnOnce(Answered) + Send + 'static,
    ) -> bool {
        let request_socket = self.negotiated.members.get(rank as usize).and_then(request_socket_of);
        request_socket.is_some_and(|to| worker::ask(to, words, Instant::now(), heard))
    }

    /// Sends a message to every other rank, made by `words` for each. It is repeated until heard, also if this communicator ends at once.
    pub(super) fn tell(&self, words: impl Fn(u32) -> Vec<u8>) {
        let until = Instant::now() + TOLD_WITHIN;
        let others = self.negotiated.members.iter().filter(|member| member.rank != self.rank);
        others.for_each(|member| {
            request_socket_of(member).into_iter().for_each(|to| {
                tell(to, words(member.rank), Instant::now(), until);
            });
        });
    }
}

/// Sends a message until it is answered, or until `until`.
fn tell(to: Token, words: Vec<u8>, due: Instant, until: Instant) {
    let again = words.clone();
    worker::ask(to, words, due, move |answer| {
        let due = Instant::now() + TELL_EVERY;
        if answer.is_err() && due < until {
            tell(to, again, due, until);
        }
    });
}

/// The request socket of a rank's process.
fn request_socket_of(member: &Member) -> Option<Token> {
    Some(Token(*member.attachment.first_chunk()?))
}
