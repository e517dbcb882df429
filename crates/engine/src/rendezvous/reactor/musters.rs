//! The musters whose roll this process keeps: who enters, asks and goes.

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use crate::contract::Token;
use crate::descriptor::Ours;

use super::hosting::Meeting;
use super::{Endpoint, Expected, Reactor};
use crate::rendezvous::agreement::{Event, Seat};
use crate::rendezvous::connection::{self, Connection, Line};
use crate::rendezvous::counts::Counts;
use crate::rendezvous::derived;
use crate::rendezvous::message::FromRank;
use crate::rendezvous::muster::{self, Answer, Course, GREETING_BYTES, Roll, WORD_BYTES, Word};
use crate::rendezvous::verdict::{Reason, Verdict};

/// A muster, for as long as anybody is connected to it.
#[derive(Debug)]
pub(super) struct Muster {
    listener: u64,
    /// Those that have not said who they are, too.
    connections: usize,
    roll: Roll,
}

/// A connection to a muster.
#[derive(Debug)]
pub(super) struct Visit {
    connection: Connection,
    name: Token,
    has_entered: bool,
    /// Whether it has said that it goes.
    leaves: bool,
}

impl Reactor {
    pub(super) fn open_muster(&mut self, name: Token, listener: Ours) {
        let mut watched = self.poll.watch(listener);
        // Without it whoever connects hears that nobody is there.
        if let Err(error) = watched.want(EventFlags::IN) {
            return log::warn!("rendezvous cannot wait at a muster: {error}");
        }
        let muster = Muster { listener: watched.key(), connections: 0, roll: Roll::default() };
        self.endpoints.insert(watched.key(), Endpoint::Muster(watched, name));
        self.musters.insert(name, muster);
    }

    pub(super) fn accept_at_muster(&mut self, listener: u64, name: Token) {
        for _ in 0..self.limits.accepts_per_turn {
            let Some(Endpoint::Muster(watched, _)) = self.endpoints.get(&listener) else { return };
            let accepted = match connection::accept_locally(watched) {
                Ok(accepted) => accepted,
                Err(Errno::AGAIN) => return,
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                Err(error) => {
                    log::warn!("rendezvous cannot accept at a muster: {error}, trying again soon");
                    Counts::up(&self.shared.counts.starved);
                    return self.pause(listener);
                }
            };
            let mut watched = self.poll.watch(accepted);
            let key = watched.key();
            if watched.want(EventFlags::IN).is_err() {
                continue;
            }
            let Some(muster) = self.musters.get_mut(&name) else { return };
            muster.connections += 1;
            let connection = Connection::new(watched);
            let visit = Visit { connection, name, has_entered: false, leaves: false };
            self.endpoints.insert(key, Endpoint::AtMuster(visit));
        }
    }

    pub(super) fn at_muster(&mut self, key: u64) {
        // What was said before the line closed counts.
        while let Some(said) = self.next_said(key) {
            match said {
                Said::Nothing => return,
                Said::Closed => return self.leave_muster(key),
                Said::Greeting(rank) => self.enter_muster(key, rank),
                Said::Word(Word::Ask { ranks }) => self.ask_muster(key, ranks),
                Said::Word(Word::Leave) => {
                    if let Some(Endpoint::AtMuster(visit)) = self.endpoints.get_mut(&key) {
                        visit.leaves = true;
                    }
                }
            }
        }
    }

    fn next_said(&mut self, key: u64) -> Option<Said> {
        let Some(Endpoint::AtMuster(visit)) = self.endpoints.get_mut(&key) else { return None };
        let length = if visit.has_entered { WORD_BYTES } else { GREETING_BYTES };
        let line = visit.connection.fill(length);
        if visit.connection.input.len() < length {
            return Some(if line == Line::Open { Said::Nothing } else { Said::Closed });
        }
        let words: Vec<u8> = visit.connection.input.drain(..length).collect();
        let said = match visit.has_entered {
            false => muster::who(&words, visit.name).map(Said::Greeting),
            true => Word::decode(&words).map(Said::Word),
        };
        if said.is_none() {
            Counts::up(&self.shared.counts.turned_away);
        }
        Some(said.unwrap_or(Said::Closed))
    }

    fn enter_muster(&mut self, key: u64, rank: u32) {
        let Some(Endpoint::AtMuster(visit)) = self.endpoints.get_mut(&key) else { return };
        visit.has_entered = true;
        let Some(muster) = self.musters.get_mut(&visit.name) else { return };
        let answer = if muster.roll.enter(key, rank) { Answer::Entered } else { Answer::Apart };
        if visit.connection.say(&answer.encode()) == Line::Closed || answer == Answer::Apart {
            self.leave_muster(key);
        }
    }

    fn ask_muster(&mut self, key: u64, ranks: u32) {
        let lobby = self.lobby;
        let Some(Endpoint::AtMuster(visit)) = self.endpoints.get_mut(&key) else { return };
        let name = visit.name;
        let course = self.musters.get_mut(&name).and_then(|muster| muster.roll.ask(key, ranks));
        let Some(course) = course else { return self.leave_muster(key) };
        log::debug!("rendezvous muster {name:?} of {ranks} ranks: {course:?}");
        let answer = match course {
            Course::Meet { place, .. } => Answer::Complete { place, lobby },
            Course::Apart => Answer::Apart,
        };
        // Before anybody can come.
        if let Course::Meet { expected: Some(ranks), .. } = course {
            self.await_ranks(Expected { call: name, ranks, lives: Vec::new() });
        }
        let Some(Endpoint::AtMuster(visit)) = self.endpoints.get_mut(&key) else { return };
        if visit.connection.say(&answer.encode()) == Line::Closed {
            self.leave_muster(key);
        }
    }

    fn leave_muster(&mut self, key: u64) {
        let Some(Endpoint::AtMuster(visit)) = self.endpoints.remove(&key) else { return };
        let name = visit.name;
        let Some(muster) = self.musters.get_mut(&name) else { return };
        muster.connections -= 1;
        let missed = muster.roll.left(key, visit.leaves);
        if muster.connections == 0 {
            // Who is on its way here is refused, and comes to the next.
            let listener = muster.listener;
            self.musters.remove(&name);
            self.endpoints.remove(&listener);
        }
        if let Some(place) = missed.filter(|_| self.gatherings.contains_key(&name)) {
            log::debug!("rendezvous muster {name:?} place {place} has gone without a word");
            self.does_not_come(name, place, visit.leaves);
        }
    }

    /// Where NCCL failed a rank, the others have what NCCL gave them; where its process died, they are told.
    fn does_not_come(&mut self, name: Token, place: u32, in_order: bool) {
        let child = derived::child(name, 0);
        if in_order {
            let gathering = self.gathering(name);
            gathering.comes_for(child);
            gathering.spoke(place);
            self.meetings.entry(child).or_insert_with(|| Meeting::of_call(name, derived::birth(child)));
            let nobody = Seat(NOBODYS_KEY);
            self.happen(child, Event::Said(nobody, FromRank::Decline(Verdict::Plain(Reason::Apart))));
        } else {
            self.gathering(name).died(place);
        }
        self.look_at(name);
    }
}

/// Of no connection.
const NOBODYS_KEY: u64 = 0;

enum Said {
    /// Nothing yet.
    Nothing,
    /// Nothing any more.
    Closed,
    Greeting(u32),
    Word(Word),
}
