//! Everything that reads bytes from outside the process, one function each, for fuzzing: `crates/engine/fuzz` runs them guided by coverage, and
//! the tests here replay its corpora. Only in tests and with the feature `fuzzing`.
//!
//! A function must return for every input, soon, with bounded memory and without a panic. It asserts what has to hold of what it read.

mod bootstrap;
mod seeds;
mod shared;
mod text;

mod replay;

/// Reads one kind of bytes.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Names its corpus.
    pub name: &'static str,
    /// For any input.
    pub run: fn(&[u8]),
    /// Inputs to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

const fn target(name: &'static str, run: fn(&[u8]), seeds: fn() -> Vec<Vec<u8>>) -> Target {
    Target { name, run, seeds }
}

/// All of them.
pub const TARGETS: &[Target] = &[
    target("greetings", bootstrap::greetings, seeds::greetings),
    target("tags", bootstrap::tags, seeds::tags),
    target("host", bootstrap::host, seeds::host),
    target("participant", bootstrap::participant, seeds::participant),
    target("rounds", bootstrap::rounds, seeds::rounds),
    target("rosters", bootstrap::rosters, seeds::rosters),
    target("descriptors", bootstrap::descriptors, seeds::descriptors),
    target("requests", bootstrap::requests, seeds::requests),
    target("windows", shared::windows, seeds::words),
    target("agreed", shared::agreed, seeds::words),
    target("segments", shared::segments, seeds::words),
    target("tuning", text::tuning, seeds::tuning),
    target("options", text::options, seeds::options),
];

/// Takes what an input decides, from its front; zeros behind its end.
#[derive(Debug)]
struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let taken = self.bytes(N);
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    fn byte(&mut self) -> u8 {
        let [byte] = self.array();
        byte
    }

    fn short(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// So many bytes as a byte says.
    fn counted(&mut self) -> &'a [u8] {
        let count = self.byte();
        self.bytes(count.into())
    }
}
