//! A short run of every target: its seeds, its committed corpus, and inputs made from both. Needs no fuzzer.

#![cfg(test)]

use std::path::Path;
use std::time::{Duration, Instant};

use super::{TARGETS, Target};

/// Inputs of one line each, as hexadecimal digits.
fn corpus(name: &str) -> Vec<Vec<u8>> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fuzz/corpus/{name}.txt"));
    let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let byte = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
    text.lines().map(|line| line.as_bytes().chunks(2).map(byte).collect()).collect()
}

/// Numbers that are the same in every run (xorshift64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }
}

/// One input made from others: pieces of two behind each other, with a few bytes changed.
fn made_of(inputs: &[Vec<u8>], numbers: &mut Numbers) -> Vec<u8> {
    let mut piece = |from_front: bool| {
        let input = &inputs[numbers.below(inputs.len())];
        let cut = numbers.below(input.len() + 1);
        if from_front { input[..cut].to_vec() } else { input[cut..].to_vec() }
    };
    let mut made = [piece(true), piece(false)].concat();
    for _ in 0..numbers.below(6) {
        let place = numbers.below(made.len());
        match (made.get_mut(place), numbers.below(3)) {
            (Some(byte), 0) => *byte = [0, 1, 0x7f, 0x80, 0xff][numbers.below(5)],
            (Some(byte), 1) => *byte = numbers.below(256) as u8,
            (Some(byte), _) => *byte ^= 1 << numbers.below(8),
            (None, _) => {}
        }
    }
    made
}

/// Nobody waits longer for one input: a thousand times what the slowest takes.
const INPUT_WITHIN: Duration = Duration::from_secs(10);
const RUNS_FOR: Duration = Duration::from_millis(1500);

fn run(target: &Target, input: &[u8]) {
    let began = Instant::now();
    let ran = std::panic::catch_unwind(|| (target.run)(input));
    let digits = || input.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert!(ran.is_ok(), "{}: panics at {}", target.name, digits());
    assert!(began.elapsed() < INPUT_WITHIN, "{}: {:?} at {}", target.name, began.elapsed(), digits());
}

fn replay(name: &str) {
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let inputs = [(target.seeds)(), corpus(name), vec![Vec::new()]].concat();
    inputs.iter().for_each(|input| run(target, input));
    let (mut numbers, until) = (Numbers(0x9e37_79b9_7f4a_7c15), Instant::now() + RUNS_FOR);
    while Instant::now() < until {
        (0..64).for_each(|_| run(target, &made_of(&inputs, &mut numbers)));
    }
}

/// Seeds are read: of a target whose seeds are not, nothing behind the first look is run.
#[test]
fn seeds_are_read() {
    use windlass_bootstrap::children::{Visitor, identify};
    use windlass_bootstrap::id_tag::IdTag;
    use windlass_bootstrap::message::{FromRank, Front, front};

    let tags = super::seeds::tags();
    let read = |id: &&Vec<u8>| IdTag::decode(id.as_slice().try_into().unwrap()).is_some();
    assert_eq!(tags.iter().filter(read).count(), 2);
    let greetings = super::seeds::greetings();
    let invited = |words: &&Vec<u8>| matches!(identify(words, super::seeds::TOKEN), Visitor::Invited(_));
    assert_eq!(greetings.iter().filter(invited).count(), 1);
    let report = super::seeds::report(1, 2);
    let Front::Whole(kind, body, end) = front(&report, 4096) else { panic!("{}", report.len()) };
    assert!(FromRank::decode(kind, body).is_some() && end == report.len());
    assert!(
        windlass_transport::tuning::file::Table::parse(&String::from_utf8_lossy(&super::seeds::tuning()[0]))
            .is_ok()
    );
}

macro_rules! replays {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            replay(stringify!($name));
        })*

        /// Every target is run.
        #[test]
        fn all() {
            let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}

replays! { greetings tags host participant rounds rosters descriptors requests windows agreed segments tuning options }
