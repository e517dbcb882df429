//! Properties of any sequence of steps: a requested buffer has an alias of its own memory, or a reason why not.

use proptest::prelude::*;
use windlass_base::range::Range;
use windlass_engine::features::registration::cache::{Key, Use, Why};

use crate::strict::{Run, range};

const ENTRIES_MAX: usize = 4;
const BYTES_MAX: u64 = 20;
const PLACES: u64 = 40;

#[derive(Clone, Debug)]
enum Step {
    Allocate {
        base: u64,
        bytes: u64,
        registrable: bool,
    },
    Free {
        which: usize,
        is_told: bool,
    },
    FalseAlarm {
        base: u64,
        bytes: u64,
    },
    Call {
        which: [usize; 2],
        offset: u64,
        bytes: u64,
        fails: bool,
    },
    Over {
        behind: u64,
    },
    Wait {
        which: usize,
    },
    Look,
    /// From now on deregistering fails, or works again.
    Fail {
        gives_back: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let which = || 0_usize..64;
    prop_oneof![
        6 => (0..PLACES, 1..9_u64, proptest::bool::weighted(0.9))
            .prop_map(|(base, bytes, registrable)| Step::Allocate { base, bytes, registrable }),
        4 => (which(), any::<bool>()).prop_map(|(which, is_told)| Step::Free { which, is_told }),
        1 => (0..PLACES, 0..9_u64).prop_map(|(base, bytes)| Step::FalseAlarm { base, bytes }),
        12 => ([which(), which()], 0..9_u64, 1..9_u64, proptest::bool::weighted(0.05))
            .prop_map(|(which, offset, bytes, fails)| Step::Call { which, offset, bytes, fails }),
        4 => (0..4_u64).prop_map(|behind| Step::Over { behind }),
        2 => which().prop_map(|which| Step::Wait { which }),
        2 => Just(Step::Look),
        1 => proptest::bool::weighted(0.8).prop_map(|gives_back| Step::Fail { gives_back }),
    ]
}

struct History {
    run: Run,
    calls: u64,
}

fn pick<T: Copy>(list: &[T], which: usize) -> Option<T> {
    (!list.is_empty()).then(|| list[which % list.len()])
}

impl History {
    fn want(&mut self, key: Key, part: Range, fails: bool) -> Result<u64, Why> {
        let strict = &mut self.run.strict;
        let was_live = strict.find(key).map(|live| live.alias);
        let evicted = strict.evicted;
        let registered = strict.registered;
        let gives_back = strict.gives_back;
        strict.fails_now = fails;
        let answer = self.run.want(key, part, self.calls);
        self.run.strict.fails_now = false;
        let strict = &self.run.strict;
        let is_there = key.range.contains(part) && was_live.is_some();
        assert!(!is_there || answer.ok() == was_live, "{key:?} was registered: {answer:?}");
        match answer {
            Ok(_) => assert!(key.range.contains(part)),
            Err(Why::Straddles) => assert!(!key.range.contains(part) && strict.registered == registered),
            Err(Why::Refused) => assert!(strict.never.contains(&key.id)),
            Err(Why::Failed) => assert!(fails),
            Err(Why::Full) => {
                assert!(!self.run.has_room_after(strict.over, key.range.bytes), "room in {strict:?}");
                assert!(strict.evicted == evicted || !gives_back, "one left in vain");
                let would_help = self.run.would_help(key.range.bytes).map(Use);
                assert_eq!(self.run.cache.waits_for(), would_help);
            }
        }
        answer
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Allocate { base, bytes, registrable } => {
                let at = range(base, bytes);
                if self.run.strict.memory.iter().all(|key| !key.range.overlaps(at)) {
                    let key = self.run.strict.allocate(at);
                    if !registrable {
                        self.run.strict.never.insert(key.id);
                    }
                }
            }
            Step::Free { which, is_told } => {
                let Some(key) = pick(&self.run.strict.memory, which) else { return };
                if is_told {
                    self.run.freed(key.range);
                }
                self.run.strict.free(key);
            }
            Step::FalseAlarm { base, bytes } => drop(self.run.freed(range(base, bytes))),
            Step::Call { which, offset, bytes, fails } => {
                self.calls += 1;
                let keys = which.map(|which| pick(&self.run.strict.memory, which));
                let answers = keys.map(|key| {
                    let key = key?;
                    self.want(key, range(key.range.base + offset % key.range.bytes, bytes), fails).ok()
                });
                // The second buffer did not evict the first.
                let is_live = |alias| self.run.strict.live.iter().any(|live| live.alias == alias);
                assert!(answers.into_iter().flatten().all(is_live));
            }
            Step::Over { behind } => self.run.over(self.calls.saturating_sub(behind)),
            Step::Wait { which } => {
                let Some(key) = pick(&self.run.strict.memory, which) else { return };
                self.calls += 1;
                if self.want(key, key.range, false) == Err(Why::Full)
                    && let Some(Use(call)) = self.run.cache.waits_for()
                {
                    self.run.over(call - 1);
                    assert_eq!(self.want(key, key.range, false), Err(Why::Full), "less would have done");
                    self.run.over(call);
                    assert_eq!(self.run.cache.waits_for(), None);
                    let answer = self.want(key, key.range, false);
                    assert!(answer != Err(Why::Full) || !self.run.strict.gives_back);
                }
            }
            Step::Look => {
                let gone =
                    self.run.strict.live.iter().filter(|live| !self.run.strict.memory.contains(&live.key));
                let gone = gone.count();
                assert_eq!(self.run.look(), gone);
            }
            Step::Fail { gives_back } => self.run.strict.gives_back = gives_back,
        }
    }

    fn check(&self) {
        let held = self.run.strict.held();
        assert_eq!((self.run.cache.registrations() as u64, self.run.cache.bytes()), held);
        assert!(held.0 <= ENTRIES_MAX as u64 && held.1 <= BYTES_MAX);
        let strict = &self.run.strict;
        assert!(strict.entries_highest <= ENTRIES_MAX as u64 && strict.bytes_highest <= BYTES_MAX);
        assert_eq!(self.run.cache.is_empty(), self.run.strict.live.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// No allocation has two aliases, and no alias is found for other memory or ended twice. Eviction takes the least recently
    /// used, and none that a call may use. Limits hold. A buffer without an alias has its reason and waits no longer than it must.
    /// Closing loses none.
    #[test]
    fn any_history(steps in proptest::collection::vec(step(), 0..200)) {
        let mut history = History { run: Run::new(ENTRIES_MAX, BYTES_MAX), calls: 0 };
        for step in steps {
            history.take(step);
            history.check();
        }
        history.run.close();
    }
}
