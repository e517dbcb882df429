//! Sends and receives: a FIFO of bytes and messages for each directed pair (sender, receiver), as deep as NCCL's.
//!
//! All messages of a group progress together, those of one pair in their order.

use crate::communicator::Communicator;
use crate::lookup::{COVERED, Coverage, LARGE_BYTES};
use crate::operation::{Call, Kind};
use crate::refusal::{Outcome, refuse};
use crate::segment::{Left, MESSAGES_MAX, MessageFacts, RING_BLOCK_BYTES, Segment, absorbed_bytes};
use crate::strict;
use nccl_sys::*;
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

#[derive(Clone, Copy)]
pub struct Message {
    sends: Direction,
    peer: usize,
    address: usize,
    facts: MessageFacts,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Send,
    Receive,
}

impl Message {
    pub fn new(call: &Call, coverage: Coverage, captured: bool) -> Message {
        let (sends, address) = match call.kind {
            Kind::Send => (Direction::Send, call.send),
            _ => (Direction::Receive, call.receive),
        };
        let facts = MessageFacts { bytes: call.bytes() as u64, covered: coverage, captured: captured.into() };
        Message { sends, peer: call.root as usize, address, facts }
    }
}

/// Fails unless a group has as many sends to this rank itself as receives.
pub fn check_self(communicator: &Communicator, messages: &[Message]) -> Outcome {
    let count = |sends| messages.iter().filter(|m| m.peer == communicator.rank && m.sends == sends).count();
    let (sends, receives) = (count(Direction::Send), count(Direction::Receive));
    if sends > receives {
        return refuse(ncclInvalidUsage, "Trying to send to self without a matching recv");
    }
    if receives > sends {
        return refuse(ncclInvalidUsage, "Trying to recv to self without a matching send");
    }
    Ok(())
}

/// The messages of one directed pair in their order, and how many bytes of the first have moved.
struct Lane {
    sends: Direction,
    peer: usize,
    messages: VecDeque<Message>,
    started: bool,
    moved: u64,
}

/// Moves all messages of a group, and waits for the peers.
pub fn run(communicator: &Communicator, messages: &[Message]) -> Result<(), Left> {
    let rank = communicator.rank;
    copy_to_self(communicator, messages);
    let mut lanes: Vec<Lane> = Vec::new();
    for message in messages.iter().filter(|message| message.peer != rank) {
        let known = lanes.iter_mut().find(|lane| lane.sends == message.sends && lane.peer == message.peer);
        match known {
            Some(lane) => lane.messages.push_back(*message),
            None => lanes.push(Lane {
                sends: message.sends,
                peer: message.peer,
                messages: VecDeque::from([*message]),
                started: false,
                moved: 0,
            }),
        }
    }
    let segment = communicator.segment();
    let stuck_at = Cell::new(String::new());
    while !lanes.is_empty() {
        stuck_at
            .set(lanes.iter().map(|lane| lane.waits_for(segment, rank)).collect::<Vec<_>>().join(" and "));
        let what = || {
            let text = stuck_at.take();
            stuck_at.set(text.clone());
            text
        };
        segment.wait(rank, &communicator.leave, what, || {
            // Every lane must advance, so this does not stop at the first that moved.
            lanes.iter_mut().filter_map(|lane| lane.advance(segment, rank).then_some(())).count() > 0
        })?;
        lanes.retain(|lane| !lane.messages.is_empty());
    }
    Ok(())
}

fn copy_to_self(communicator: &Communicator, messages: &[Message]) {
    let of = |sends| messages.iter().filter(move |m| m.peer == communicator.rank && m.sends == sends);
    for (send, receive) in of(Direction::Send).zip(of(Direction::Receive)) {
        let (sent, expected) = (send.facts.bytes, receive.facts.bytes);
        if sent != expected {
            let line = format!("size mismatch: Send to self of {sent} bytes, Recv of {expected} bytes");
            strict::fail(communicator.segment(), communicator.rank, &[line]);
        }
        // SAFETY: the user's buffers hold as many bytes as the call said.
        unsafe { std::ptr::copy(send.address as *const u8, receive.address as *mut u8, sent as usize) };
    }
}

impl Lane {
    /// Moves what can be moved now, without waiting. Gives whether anything moved.
    fn advance(&mut self, segment: &Segment, rank: usize) -> bool {
        let mut moved = false;
        while let Some(message) = self.messages.front().copied() {
            let progress = match self.sends {
                Direction::Send => self.push(segment, rank, &message),
                Direction::Receive => self.pull(segment, rank, &message),
            };
            moved |= progress;
            if !self.started || self.moved < message.facts.bytes {
                break;
            }
            self.finish(segment, rank);
            moved = true;
        }
        moved
    }

    fn finish(&mut self, segment: &Segment, rank: usize) {
        if self.sends == Direction::Receive {
            segment.pair(self.peer, rank).finished.fetch_add(1, SeqCst);
            segment.ring_bell(self.peer);
        }
        self.messages.pop_front();
        self.started = false;
        self.moved = 0;
    }

    fn push(&mut self, segment: &Segment, rank: usize, message: &Message) -> bool {
        let pair = segment.pair(rank, self.peer);
        let mut progress = false;
        if !self.started {
            let posted = pair.posted.load(Relaxed);
            if posted - pair.finished.load(Acquire) >= MESSAGES_MAX {
                return false;
            }
            // SAFETY: the cell is free: fewer than MESSAGES_MAX messages are outstanding.
            unsafe { pair.messages[(posted % MESSAGES_MAX) as usize].get().write(message.facts) };
            pair.posted.store(posted + 1, SeqCst);
            segment.ring_bell(self.peer);
            (self.started, progress) = (true, true);
        }
        while self.moved < message.facts.bytes {
            let written = pair.written.load(Relaxed);
            let room = absorbed_bytes(segment.ranks()) - (written - pair.consumed.load(Acquire));
            if room == 0 {
                break;
            }
            if pair.allocated.load(Relaxed) <= written {
                if segment.allocate_ring_block(rank, self.peer, written).is_err() {
                    strict::fail(segment, rank, &["/dev/shm is full".to_owned()]);
                }
                pair.allocated.store((written / RING_BLOCK_BYTES + 1) * RING_BLOCK_BYTES, Relaxed);
            }
            let in_block = RING_BLOCK_BYTES - written % RING_BLOCK_BYTES;
            let bytes = room.min(in_block).min(message.facts.bytes - self.moved);
            let (target, _) = segment.ring(rank, self.peer, written);
            let source = (message.address as u64 + self.moved) as *const u8;
            // SAFETY: the user's buffer is as large as the call said; the block is allocated and free up to `room`.
            unsafe { std::ptr::copy_nonoverlapping(source, target, bytes as usize) };
            pair.written.store(written + bytes, Release);
            segment.ring_bell(self.peer);
            self.moved += bytes;
            progress = true;
        }
        progress
    }

    fn pull(&mut self, segment: &Segment, rank: usize, message: &Message) -> bool {
        let pair = segment.pair(self.peer, rank);
        let mut progress = false;
        if !self.started {
            let finished = pair.finished.load(Relaxed);
            if pair.posted.load(Acquire) == finished {
                return false;
            }
            // SAFETY: the message was posted and is not finished.
            let facts = unsafe { pair.messages[(finished % MESSAGES_MAX) as usize].get().read() };
            compare(segment, rank, self.peer, message, &facts);
            (self.started, progress) = (true, true);
        }
        while self.moved < message.facts.bytes {
            let consumed = pair.consumed.load(Relaxed);
            let available = pair.written.load(Acquire) - consumed;
            if available == 0 {
                break;
            }
            let in_block = RING_BLOCK_BYTES - consumed % RING_BLOCK_BYTES;
            let bytes = available.min(in_block).min(message.facts.bytes - self.moved);
            let (source, _) = segment.ring(self.peer, rank, consumed);
            let target = (message.address as u64 + self.moved) as *mut u8;
            // SAFETY: the sender has written these bytes; the user's buffer is as large as the call said.
            unsafe { std::ptr::copy_nonoverlapping(source, target, bytes as usize) };
            if bytes == in_block {
                segment.free_ring_block(self.peer, rank, consumed);
            }
            pair.consumed.store(consumed + bytes, Release);
            segment.ring_bell(self.peer);
            self.moved += bytes;
            progress = true;
        }
        progress
    }

    fn waits_for(&self, segment: &Segment, rank: usize) -> String {
        let (peer, bytes, moved) = (self.peer, self.messages[0].facts.bytes, self.moved);
        match self.sends {
            Direction::Send => {
                let pair = segment.pair(rank, peer);
                let messages = pair.posted.load(SeqCst) - pair.finished.load(SeqCst);
                let unreceived = pair.written.load(SeqCst) - pair.consumed.load(SeqCst);
                format!(
                    "rank {peer} to receive (Send of {bytes} bytes, {moved} taken; {messages} messages and {unreceived} bytes unreceived)"
                )
            }
            Direction::Receive => format!("rank {peer} to send (Recv of {bytes} bytes, {moved} received)"),
        }
    }
}

/// Compares the sender's facts with this rank's; ends the process if they do not match.
fn compare(segment: &Segment, rank: usize, peer: usize, message: &Message, sent: &MessageFacts) {
    let (here, there) = (message.facts.bytes, sent.bytes);
    if here != there {
        let lines = [
            format!(
                "size mismatch: rank {peer} Send of {there} bytes to rank {rank}, rank {rank} Recv of {here} bytes"
            ),
            format!("  rank {rank}: {}", segment.rank(rank).call.get()),
            format!("  rank {peer}: {}", segment.rank(peer).call.get()),
        ];
        strict::fail(segment, rank, &lines);
    }
    let eager = sent.captured == 0 && message.facts.captured == 0;
    if strict::enabled() && eager && here >= LARGE_BYTES && sent.covered != message.facts.covered {
        let word = |covered| if covered == COVERED { "a registered" } else { "an unregistered" };
        let line = format!(
            "mixed registration: rank {peer} sends {there} bytes from {} buffer, rank {rank} receives into {} buffer",
            word(sent.covered),
            word(message.facts.covered)
        );
        strict::fail(segment, rank, &[line]);
    }
}
