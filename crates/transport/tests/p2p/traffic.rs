//! Shared by the tests: messages that are verified, with buffers, contents, and one rank's operations.

use windlass_transport::p2p::{Direction, Operation};

use crate::support::*;

/// Device memory of the application, between guard bytes.
pub struct Buffer {
    base: u64,
    pub address: u64,
    pub bytes: u64,
}

const MARGIN: u64 = 64;
const CANARY: u8 = 0x5e;

fn expected(id: u64, index: u64) -> u8 {
    let mut z = ((id << 40) ^ (index / 8)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z >> (8 * (index % 8))) as u8
}

impl Buffer {
    /// A buffer at `offset` from a multiple of 16.
    pub fn new(bytes: u64, offset: u64) -> Buffer {
        let mut base = 0;
        ok(cuMemAlloc_v2(&mut base, (bytes + 2 * MARGIN + 16) as usize));
        let buffer = Buffer { base, address: base.next_multiple_of(16) + MARGIN - 16 + offset, bytes };
        buffer.clear();
        buffer
    }

    fn whole_bytes(&self) -> usize {
        (self.bytes + 2 * MARGIN + 16) as usize
    }

    pub fn clear(&self) {
        let bytes = vec![CANARY; self.whole_bytes()];
        to_device(self.base, &bytes);
    }

    pub fn fill(&self, id: u64) {
        let bytes: Vec<u8> = (0..self.bytes).map(|index| expected(id, index)).collect();
        to_device(self.address, &bytes);
    }

    /// What is wrong, if anything: the bytes must be those of `id`, and the guard bytes unchanged.
    pub fn fault(&self, id: u64) -> Option<String> {
        let mut all = vec![0; self.whole_bytes()];
        ok(cuMemcpyDtoH_v2(all.as_mut_ptr().cast(), self.base, all.len()));
        let begin = (self.address - self.base) as usize;
        (0..).zip(all).find_map(|(index, found)| {
            let inside = index >= begin && index < begin + self.bytes as usize;
            let right = if inside { expected(id, (index - begin) as u64) } else { CANARY };
            let at = index as i64 - begin as i64;
            (found != right)
                .then(|| format!("message {id}: byte {at} of {} is {found}, not {right}", self.bytes))
        })
    }

    pub fn holds(&self, id: u64) {
        assert_eq!(self.fault(id), None);
    }
}

/// Copies, and returns when the copy is done. From pageable memory the driver's own call may return earlier, and streams of the
/// application do not wait for its stream. (Seen on H200: the end of a clear overwrote the kernel's bytes.)
fn to_device(to: u64, bytes: &[u8]) {
    if !bytes.is_empty() {
        ok(cuMemcpyHtoD_v2(to, bytes.as_ptr().cast(), bytes.len()));
        ok(cuStreamSynchronize(0));
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Freeing waits for all kernels, also for one that a failed test left waiting.
        if std::thread::panicking() {
            return;
        }
        ok(cuMemFree_v2(self.base));
    }
}

#[derive(Clone, Copy)]
pub struct Message {
    pub from: u32,
    pub to: u32,
    pub bytes: u64,
    pub offset: u64,
}

pub fn message(from: u32, to: u32, bytes: u64) -> Message {
    Message { from, to, bytes, offset: 0 }
}

/// One rank's buffers and operations for a list of messages.
pub struct Side {
    pub operations: Vec<Operation>,
    sent: Vec<Buffer>,
    received: Vec<(u64, Buffer)>,
}

impl Side {
    pub fn of(rank: u32, messages: &[Message]) -> Side {
        let mut side = Side { operations: Vec::new(), sent: Vec::new(), received: Vec::new() };
        for (id, message) in messages.iter().enumerate() {
            if message.from == rank {
                let buffer = Buffer::new(message.bytes, message.offset);
                buffer.fill(id as u64);
                side.operations.push(send(&buffer, message.to));
                side.sent.push(buffer);
            }
            if message.to == rank {
                let buffer = Buffer::new(message.bytes, (message.offset * 7) % 16);
                side.operations.push(receive(&buffer, message.from));
                side.received.push((id as u64, buffer));
            }
        }
        side
    }

    pub fn check(&self) {
        self.received.iter().for_each(|(id, buffer)| buffer.holds(*id));
    }

    pub fn has_arrived(&self) -> bool {
        self.received.iter().all(|(id, buffer)| buffer.fault(*id).is_none())
    }

    pub fn clear(&self) {
        self.received.iter().for_each(|(_, buffer)| buffer.clear());
    }
}

pub fn send(buffer: &Buffer, peer: u32) -> Operation {
    Operation { address: buffer.address, bytes: buffer.bytes, peer, direction: Direction::Send }
}

pub fn receive(buffer: &Buffer, peer: u32) -> Operation {
    Operation { address: buffer.address, bytes: buffer.bytes, peer, direction: Direction::Receive }
}
