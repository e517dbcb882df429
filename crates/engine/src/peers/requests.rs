//! How a rank speaks with the processes of the other ranks of its peer group, through the [worker].

use std::sync::Arc;
use std::time::{Duration, Instant};

use windlass_bootstrap::negotiated::{Member, NegotiatedConfig, Token};
use windlass_bootstrap::request_socket::Answered;

use crate::background::worker;

/// How long a peer is told that does not answer: it may not be through its init yet, or have ended.
const TOLD_WITHIN: Duration = Duration::from_secs(60);
const TELL_EVERY: Duration = Duration::from_millis(100);

/// The other ranks of one rank.
#[derive(Clone, Debug)]
pub(super) struct Others {
    negotiated: Arc<NegotiatedConfig>,
    rank: u32,
}

impl Others {
    /// Of this rank.
    pub(super) fn new(negotiated: Arc<NegotiatedConfig>, rank: u32) -> Others {
        Others { negotiated, rank }
    }

    /// What all agreed on.
    pub(super) fn negotiated(&self) -> &Arc<NegotiatedConfig> {
        &self.negotiated
    }

    /// What names the peer group.
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

    /// Whether a rank lives in this process, too.
    pub(super) fn is_near(&self, rank: u32) -> bool {
        let process = |rank: u32| self.negotiated.members.get(rank as usize).map(|member| member.process);
        process(rank) == process(self.rank)
    }

    /// Those whose bit is set, and all if all are.
    pub(super) fn among(&self, ranks: u64) -> impl Iterator<Item = u32> + use<> {
        (0..self.negotiated.members.len() as u32).filter(move |rank| ranks & (1 << rank) != 0)
    }

    /// Asks a rank's process; whether there will be an answer, or a silence that is one.
    pub(super) fn ask(
        &self,
        rank: u32,
        words: Vec<u8>,
        heard: impl FnOnce(Answered) + Send + 'static,
    ) -> bool {
        let request_socket = self.negotiated.members.get(rank as usize).and_then(request_socket_of);
        request_socket.is_some_and(|to| worker::ask(to, words, Instant::now(), heard))
    }

    /// Has each other rank hear its words, also if this one ends at once.
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

/// Says it until it is heard, or was said for long enough.
fn tell(to: Token, words: Vec<u8>, due: Instant, until: Instant) {
    let again = words.clone();
    worker::ask(to, words, due, move |answer| {
        let due = Instant::now() + TELL_EVERY;
        if answer.is_err() && due < until {
            tell(to, again, due, until);
        }
    });
}

/// Where the process of a rank is asked.
fn request_socket_of(member: &Member) -> Option<Token> {
    Some(Token(*member.attachment.first_chunk()?))
}
