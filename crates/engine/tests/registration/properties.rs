//! Whatever happens in whatever order, what is wanted is registered as it is, or there is a reason that it is not.

use proptest::prelude::*;
use windlass_engine::range::Range;
use windlass_engine::registration::{Answer, Cache, EntryId, Epoch, Key, Token, Why};

use crate::strict::{Live, Strict, cache, close, pass, range};

const ENTRIES_MAX: usize = 4;
const BYTES_MAX: u64 = 20;
const PLACES: u64 = 40;

#[derive(Clone, Debug)]
enum Step {
    Allocate { base: u64, bytes: u64, registrable: bool },
    Free { which: usize, told: bool },
    FalseAlarm { which: usize },
    Use { which: usize, offset: u64, bytes: u64, captured: bool, fails: bool },
    Replay,
    EndGraph { which: usize },
    Pass { behind: u64 },
    Drain { fails: bool },
    Register { which: usize, offset: u64, bytes: u64 },
    Deregister { which: usize },
    MakeWay { which: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let which = || 0_usize..64;
    prop_oneof![
        5 => (0..PLACES, 1..9_u64, proptest::bool::weighted(0.9))
            .prop_map(|(base, bytes, registrable)| Step::Allocate { base, bytes, registrable }),
        3 => (which(), any::<bool>()).prop_map(|(which, told)| Step::Free { which, told }),
        1 => which().prop_map(|which| Step::FalseAlarm { which }),
        10 => (which(), 0..9_u64, 1..9_u64, proptest::bool::weighted(0.1), proptest::bool::weighted(0.05))
            .prop_map(|(which, offset, bytes, captured, fails)| Step::Use { which, offset, bytes, captured, fails }),
        1 => Just(Step::Replay),
        1 => which().prop_map(|which| Step::EndGraph { which }),
        3 => (0..4_u64).prop_map(|behind| Step::Pass { behind }),
        1 => proptest::bool::weighted(0.03).prop_map(|fails| Step::Drain { fails }),
        1 => (which(), 0..9_u64, 1..9_u64).prop_map(|(which, offset, bytes)| Step::Register { which, offset, bytes }),
        1 => which().prop_map(|which| Step::Deregister { which }),
        1 => which().prop_map(|which| Step::MakeWay { which }),
    ]
}

struct Run {
    cache: Cache<u64>,
    strict: Strict,
    epoch: u64,
    /// What graphs hold.
    graphs: Vec<(EntryId, Key)>,
    applications: Vec<(Token, Key, Range)>,
    used: u64,
}

fn pick<T: Copy>(list: &[T], which: usize) -> Option<T> {
    (!list.is_empty()).then(|| list[which % list.len()])
}

impl Run {
    fn new() -> Self {
        Run {
            cache: cache(ENTRIES_MAX, BYTES_MAX),
            strict: Strict::new(),
            epoch: 0,
            graphs: Vec::new(),
            applications: Vec::new(),
            used: 0,
        }
    }

    fn live_at(&self, at: Range) -> Vec<Live> {
        self.strict.live.iter().filter(|live| live.key.range.overlaps(at)).cloned().collect()
    }

    /// Other memory is seen there.
    fn retire_others(&mut self, key: Key) {
        for live in &mut self.strict.live {
            live.is_active &= live.key == key || !live.key.range.overlaps(key.range);
        }
    }

    /// Whether the application's registrations speak of other memory at these addresses.
    fn is_stale_application(&self, key: Key) -> bool {
        self.applications.iter().any(|(_, known, range)| *known != key && range.overlaps(key.range))
    }

    fn is_applications(&self, key: Key, part: Range) -> bool {
        self.applications.iter().any(|(_, known, range)| *known == key && range.contains(part))
    }

    /// Whether all that may leave is room enough.
    fn could_have_room(&self, bytes: u64) -> bool {
        let stays = |live: &&Live| !live.may_leave(self.strict.passed);
        let staying: Vec<&Live> = self.strict.live.iter().filter(stays).collect();
        let staying_bytes: u64 = staying.iter().map(|live| live.key.range.bytes).sum();
        staying.len() < ENTRIES_MAX && staying_bytes + bytes <= BYTES_MAX
    }

    fn want(&mut self, key: Key, part: Range, captured: bool, fails: bool) {
        self.epoch += 1;
        self.used += 1;
        let within = key.range.contains(part);
        if within {
            self.retire_others(key);
        }
        self.strict.fails_now = fails;
        let answer = self.cache.want(&mut self.strict, key, part, Epoch(self.epoch));
        self.strict.fails_now = false;
        let there = self.live_at(key.range);
        match answer {
            Answer::Registered(id) => {
                assert!(within);
                assert!(
                    there.len() == 1 && there[0].key == key && there[0].is_active,
                    "{key:?} among {there:?}"
                );
                if captured {
                    assert!(self.cache.hold(id));
                    self.graphs.push((id, key));
                }
                let (epoch, used) = (self.epoch, self.used);
                let live = self.strict.find(key).unwrap();
                (live.last_use, live.used_at) = (epoch, used);
                live.holds += u64::from(captured);
            }
            Answer::Applications => {
                assert!(self.is_applications(key, part) && !self.is_stale_application(key));
                // What was there before is gone, or NCCL might take the buffer for that.
                assert!(there.iter().all(|live| live.key == key));
            }
            Answer::Staged(why) => self.justify(why, key, part, fails, &there),
        }
    }

    fn justify(&self, why: Why, key: Key, part: Range, fails: bool, there: &[Live]) {
        let others = || there.iter().filter(|live| live.key != key);
        assert!(
            !there.iter().any(|live| live.key == key && live.is_active) || why == Why::Straddles,
            "{why:?}"
        );
        match why {
            Why::Straddles => assert!(!key.range.contains(part)),
            // What was said to be freed waits, too, also if it was not.
            Why::Waits => assert!(
                there.iter().any(|live| !live.is_stuck && !live.may_leave(self.strict.passed)),
                "waits for none of {there:?}"
            ),
            Why::Stuck => assert!(there.iter().any(|live| live.is_stuck)),
            Why::Applications => assert!(self.is_stale_application(key) && others().next().is_none()),
            Why::Full => assert!(!self.could_have_room(key.range.bytes), "room in {:?}", self.strict.live),
            Why::Refused => assert!(self.strict.never.contains(&key.id.0)),
            Why::Failed => assert!(fails),
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Allocate { base, bytes, registrable } => {
                let at = range(base, bytes);
                if self.strict.memory.iter().all(|key| !key.range.overlaps(at)) {
                    let key = self.strict.allocate(at);
                    if !registrable {
                        self.strict.never.insert(key.id.0);
                    }
                }
            }
            Step::Free { which, told } => {
                let Some(key) = pick(&self.strict.memory, which) else { return };
                if told {
                    self.say_freed(key);
                }
                self.strict.free(key);
            }
            Step::FalseAlarm { which } => {
                let Some(key) = pick(&self.strict.memory, which) else { return };
                self.say_freed(key);
            }
            Step::Use { which, offset, bytes, captured, fails } => {
                let Some(key) = pick(&self.strict.memory, which) else { return };
                let part = range(key.range.base + offset % key.range.bytes, bytes);
                self.want(key, part, captured, fails);
            }
            Step::Replay => self.epoch += 1,
            Step::EndGraph { which } => {
                let Some((id, key)) = pick(&self.graphs, which) else { return };
                self.graphs.swap_remove(which % self.graphs.len());
                self.cache.release(id, Epoch(self.epoch));
                let epoch = self.epoch;
                let live = self.strict.find(key).expect("it was held");
                live.holds -= 1;
                live.last_use = epoch;
            }
            Step::Pass { behind } => {
                pass(&mut self.cache, &mut self.strict, self.epoch.saturating_sub(behind))
            }
            Step::Drain { fails } => {
                self.strict.gives_back = !fails;
                self.cache.drain(&mut self.strict);
                self.strict.gives_back = true;
                let waits =
                    |live: &&Live| !live.is_active && !live.is_stuck && live.may_leave(self.strict.passed);
                assert!(!self.strict.live.iter().any(|live| waits(&live)));
            }
            Step::Register { which, offset, bytes } => {
                let Some(key) = pick(&self.strict.memory, which) else { return };
                let part = range(key.range.base + offset % key.range.bytes, bytes);
                if key.range.contains(part) && self.make_way(key) {
                    let token = Token(self.applications.len() % 3);
                    self.cache.application_registers(token, key, part);
                    let ours = self.live_at(part).into_iter().map(|live| live.key.range);
                    let widened = ours.into_iter().find(|ours| ours.contains(part)).unwrap_or(part);
                    self.applications.push((token, key, widened));
                }
            }
            Step::Deregister { which } => {
                let Some((token, ..)) = pick(&self.applications, which) else { return };
                let at = self.applications.iter().position(|(known, ..)| *known == token).unwrap();
                self.applications.swap_remove(at);
                self.cache.application_deregisters(token);
            }
            Step::MakeWay { which } => {
                let Some(key) = pick(&self.strict.memory, which) else { return };
                self.make_way(key);
            }
        }
    }

    /// As a free hook says it: it knows the first address alone.
    fn say_freed(&mut self, key: Key) {
        let first = range(key.range.base, 1);
        self.cache.freed(first);
        for live in &mut self.strict.live {
            live.is_active &= !live.key.range.overlaps(first);
        }
    }

    fn make_way(&mut self, key: Key) -> bool {
        self.retire_others(key);
        let is_clear = self.cache.make_way(&mut self.strict, key);
        let there = self.live_at(key.range);
        assert_eq!(is_clear, there.iter().all(|live| live.key == key && live.is_active), "{there:?}");
        is_clear
    }

    fn check(&self) {
        assert!(self.strict.live.len() <= ENTRIES_MAX && self.strict.bytes() <= BYTES_MAX);
        let counters = self.cache.counters();
        assert_eq!((counters.entries, counters.bytes), (self.strict.live.len() as u64, self.strict.bytes()));
        let waiting = self.strict.live.iter().filter(|live| !live.is_active && !live.is_stuck).count();
        assert_eq!(counters.waiting, waiting as u64, "{:?}", self.strict.live);
        assert_eq!(counters.applications, self.applications.len() as u64);
        let answered =
            counters.hits + counters.registered + counters.applications_hits + counters.staged.all();
        assert_eq!(answered, self.used);
        assert!(counters.refused <= 4);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// Never two registrations at an address, none given back under a peer or a graph, none found for other memory; what
    /// leaves was used longest ago; the limits hold; what is staged has its reason; nothing is left at the end.
    #[test]
    fn any_history(steps in proptest::collection::vec(step(), 0..200)) {
        let mut run = Run::new();
        for step in steps {
            run.take(step);
            run.check();
        }
        close(&mut run.cache, &mut run.strict);
    }
}
