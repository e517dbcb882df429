//! [`Checking`]: tells this rank's calls to the other ranks, and on rank 0 compares the calls of all (`WINDLASS_CHECK`). See
//! docs/symmetric-memory.md, "Finding what differs".
//!
//! A call is told before it runs. Telling never waits and never fails. Rank 0 compares what is there: a few calls at each of its
//! own calls, the rest on the background worker.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::features::check;
use crate::features::check::compare::{Rules, compare};
use crate::features::check::entry::{Called, Entry, Window};
use crate::features::check::places::Places;
use crate::features::check::slot::{CheckSlot, Found};
use crate::features::windows;
use windlass_base::call::Call;
use windlass_base::config::nccl::{self, Effect};
use windlass_base::config::{Switch, config};
use windlass_base::gpu;
use windlass_base::range::Range;
use windlass_base::shared_page::SharedPage;
use windlass_base::stats::check::Checked;
use windlass_base::stats::count;
use windlass_bootstrap::negotiated::{NegotiatedConfig, capability};
use windlass_bootstrap::outcome::FallbackReason;

use crate::features::page_layout::CHECKING_AT;

/// The rank that compares.
const COMPARES: u32 = 0;
/// How many lines are logged of a communicator, before one more that says so.
const LINES_MAX: u32 = 16;
/// How many calls are compared when rank 0 tells one.
const AT_ONCE: u32 = 4;
/// How many calls are compared at one look of the background worker.
const AT_A_LOOK: u32 = 4096;
/// After how long a rank that has not made a call is named.
const NAMED_AFTER: Duration = Duration::from_secs(10);

/// One rank's part of the comparison.
#[derive(Debug)]
pub struct Checking {
    slot: CheckSlot<Arc<SharedPage>>,
    rank: u32,
    /// The peer group's hash, equal on all ranks, for the log.
    hash: u64,
    /// The communicator's number in this process; 0 while it has none.
    serial: AtomicU64,
    rules: Rules,
    /// Whether this rank tells no more calls.
    has_ended: AtomicBool,
    /// Locked for some stores and looks.
    places: Mutex<Places>,
    /// Used on rank 0 only. Locked while some calls are compared. A thread that finds it locked skips the comparison.
    compared: Mutex<Compared>,
}

/// How far the comparison has come.
#[derive(Debug)]
struct Compared {
    /// The number of the next call to compare.
    next: u64,
    /// Lines that were logged.
    lines: u32,
    /// Since when some ranks wait for others at the next call.
    waits_since: Option<Instant>,
    /// Whether the ranks that are missing there were named.
    is_named: bool,
}

/// Logs which ranks keep a communicator from being compared. Only the first rank that wants the comparison logs it.
pub(crate) fn say_who_does_not(negotiated: &NegotiatedConfig, rank: u32) {
    let would = |wanted: bool| negotiated.members.iter().filter(move |member| member.checks == wanted);
    let without: Vec<u32> = would(false).map(|member| member.rank).collect();
    if !without.is_empty() && would(true).next().is_some_and(|member| member.rank == rank) {
        let hash = negotiated.hash();
        log::warn!(
            "check: calls of peer group {hash:016x} are not compared: WINDLASS_CHECK is not on for rank {without:?}"
        );
    }
}

/// Logs that a communicator is not compared because it has no peer group. A single rank has no other to differ from.
pub(crate) fn say_why_not(serial: u64, reason: &FallbackReason) {
    if config().check == Switch::On && !matches!(reason, FallbackReason::OneRank) {
        log::warn!(
            "check: calls of communicator {serial} are not compared, which has no peer group: {reason}"
        );
    }
}

impl Checking {
    /// The comparison, if the negotiated config asks for it, over the peer group's shared page.
    pub(crate) fn new(
        negotiated: &NegotiatedConfig,
        page: &Arc<SharedPage>,
        rank: u32,
    ) -> Option<Arc<Checking>> {
        if !negotiated.checks() {
            return None;
        }
        let version = nccl::version();
        let has_policy =
            negotiated.capabilities & capability::UNBOUND == 0 || nccl::settings().has(Effect::Algorithms);
        Some(Arc::new(Checking {
            slot: CheckSlot::new(page.clone(), CHECKING_AT, rank, negotiated.members.len() as u32)?,
            rank,
            hash: negotiated.hash(),
            serial: AtomicU64::new(0),
            rules: Rules { takes_unlike: windows::Rules::of(version).takes_unlike, copies: has_policy },
            has_ended: AtomicBool::new(false),
            places: Mutex::default(),
            compared: Mutex::new(Compared { next: 1, lines: 0, waits_since: None, is_named: false }),
        }))
    }

    /// Sets the communicator's number in this process.
    pub(crate) fn is_known_as(&self, serial: u64) {
        self.serial.store(serial, Ordering::Relaxed);
    }

    /// Tells the other ranks of a collective. Messages, which are between two ranks, are not told.
    pub fn tell(&self, call: &Call) {
        let (send, receive) = {
            let places = self.places();
            (places.of(call.local.send as u64), places.of(call.local.receive as u64))
        };
        if let Some(called) = Called::of(&call.shared, send, receive) {
            self.post(&Entry::Called(called));
        }
    }

    /// Tells the other ranks of the registration of a window.
    pub fn tell_window(&self, range: Range, flags: u32) {
        let allocation = gpu::opened().and_then(|driver| driver.attributes(range.base));
        let allocation = allocation.map(|said| said.range);
        self.post(&Entry::Window(Window {
            bytes: range.bytes,
            flags,
            allocation: allocation.map_or(0, |all| all.bytes),
            offset: allocation.map_or(0, |all| range.base.wrapping_sub(all.base)),
        }));
    }

    /// Notes a window with NCCL's handle. None if the end of a group will make the window.
    pub fn window_is_made(&self, range: Range, flags: u32, handle: Option<usize>) {
        self.places().made(range, flags, handle);
    }

    /// Notes that the program has deregistered a window.
    pub fn window_ends(&self, handle: usize) {
        self.places().ended(handle);
    }

    /// Stops telling calls. Calls that all ranks have told by now are still compared.
    pub(crate) fn end(&self, gone: impl Fn() -> u64) {
        if self.has_ended.swap(true, Ordering::AcqRel) {
            return;
        }
        self.slot.leave();
        self.look(gone);
        if self.rank == COMPARES {
            let mut compared = self.compared.lock().unwrap_or_else(PoisonError::into_inner);
            let told = self.slot.latest(self.rank as usize).saturating_add(1);
            count::checked(Checked::NotCompared, told.saturating_sub(compared.next));
            compared.next = compared.next.max(told);
        }
    }

    /// Compares what is there, and names ranks that are missing for too long. Does nothing except on rank 0. `gone` gives the ranks whose
    /// process has ended, one bit each.
    pub(crate) fn look(&self, gone: impl Fn() -> u64) {
        if self.rank == COMPARES
            && let Some(mut compared) = self.try_compared()
        {
            self.compare(&mut compared, AT_A_LOOK, Some(&gone));
        }
    }

    fn post(&self, entry: &Entry) {
        if self.has_ended.load(Ordering::Acquire) {
            return;
        }
        self.slot.post(entry);
        if self.rank == COMPARES
            && let Some(mut compared) = self.try_compared()
        {
            self.compare(&mut compared, AT_ONCE, None);
        }
    }

    fn compare(&self, compared: &mut Compared, most: u32, gone: Option<&dyn Fn() -> u64>) {
        for _ in 0..most {
            let number = compared.next;
            let found = self.slot.look(number);
            if found.contains(&Found::Gone) {
                let left = self.slot.first_left().max(number.saturating_add(1));
                count::checked(Checked::NotCompared, left - number);
                compared.go_on(left);
                continue;
            }
            let here: Vec<(usize, Entry)> = found.iter().enumerate().filter_map(entry_of).collect();
            if here.is_empty() {
                return;
            }
            if here.len() == found.len() {
                let all: Vec<Entry> = here.into_iter().map(|(_, entry)| entry).collect();
                count::checked(Checked::Compared, 1);
                if let Some(divergence) = compare(&all, self.rules) {
                    count::checked(Checked::Divergences, 1);
                    self.say(compared, || check::text::divergence(number, &all, divergence));
                }
                compared.go_on(number.saturating_add(1));
                continue;
            }
            let missing = |rank: &usize| matches!(found[*rank], Found::Missing);
            let missing: Vec<usize> = (0..found.len()).filter(missing).collect();
            if missing.len() + here.len() < found.len() {
                // A rank has ended. What the others call there is not compared.
                count::checked(Checked::NotCompared, 1);
                compared.go_on(number.saturating_add(1));
                continue;
            }
            let since = *compared.waits_since.get_or_insert_with(Instant::now);
            let Some(gone) = gone.filter(|_| !compared.is_named && since.elapsed() >= NAMED_AFTER) else {
                return;
            };
            let gone = gone();
            let alive: Vec<usize> = missing.into_iter().filter(|rank| gone >> rank & 1 == 0).collect();
            compared.is_named = true;
            if !alive.is_empty() {
                count::checked(Checked::Absent, 1);
                self.say(compared, || check::text::absent(number, &alive, &here, since.elapsed().as_secs()));
            }
            return;
        }
    }

    /// Logs a line, up to a limit: a log that is full of one fault hides the first.
    fn say(&self, compared: &mut Compared, words: impl FnOnce() -> String) {
        compared.lines = compared.lines.saturating_add(1);
        let (hash, serial) = (self.hash, self.serial.load(Ordering::Relaxed));
        let ranks = self.slot.ranks();
        let name = format_args!("check: communicator {serial} of {ranks} ranks (peer group {hash:016x})");
        match compared.lines {
            lines if lines <= LINES_MAX => log::warn!("{name} {}", words()),
            lines if lines == LINES_MAX + 1 => {
                log::warn!("{name}: more is only counted, as divergences of the report at exit");
            }
            _ => {}
        }
    }

    fn try_compared(&self) -> Option<MutexGuard<'_, Compared>> {
        match self.compared.try_lock() {
            Ok(compared) => Some(compared),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Compared {
    fn go_on(&mut self, next: u64) {
        self.next = next;
        self.waits_since = None;
        self.is_named = false;
    }
}

fn entry_of((rank, found): (usize, &Found)) -> Option<(usize, Entry)> {
    match found {
        Found::Here(entry) => Some((rank, *entry)),
        Found::Missing | Found::Never | Found::Gone => None,
    }
}

#[cfg(test)]
mod tests {
    use windlass_bootstrap::negotiated::{Device, Member, Token, Version};

    use super::*;
    use crate::features::page_layout;
    use windlass_base::stats::segment;

    fn negotiated(ranks: u32) -> NegotiatedConfig {
        let token = Token([0; 16]);
        let device = Device { uuid: [0; 16], pci: (0, 0, 0), capability: 90, multiprocessors: 132 };
        let member = |rank| Member {
            rank,
            process: token,
            process_id: 1,
            device,
            descriptor_socket: token,
            process_listener: token,
            cells: Vec::new(),
            checks: true,
            attachment: Vec::new(),
        };
        NegotiatedConfig {
            comm: token,
            version: Version::THIS,
            host: token,
            capabilities: 0,
            options: 0,
            ctas_max: 0,
            members: (0..ranks).map(member).collect(),
        }
    }

    fn all(ranks: u32) -> Vec<Arc<Checking>> {
        let negotiated = negotiated(ranks);
        let page = Arc::new(SharedPage::create(page_layout::bytes(&negotiated)).unwrap().0);
        (0..ranks).map(|rank| Checking::new(&negotiated, &page, rank).unwrap()).collect()
    }

    fn entry(bytes: u64) -> Entry {
        Entry::Window(Window { bytes, flags: 0, allocation: 0, offset: 0 })
    }

    fn counted(what: Checked) -> u64 {
        segment::current().checked[what as usize].load(Ordering::Relaxed)
    }

    /// One test, because the counters are the process's.
    #[test]
    fn compares() {
        // More divergences than lines: all are counted.
        let ranks = all(2);
        for call in 0..20 {
            ranks[0].post(&entry(call));
            ranks[1].post(&entry(call + 1));
        }
        ranks[0].look(|| 0);
        assert_eq!((counted(Checked::Compared), counted(Checked::Divergences)), (20, 20));
        assert_eq!(ranks[0].try_compared().unwrap().lines, 20);

        // A rank that is far ahead: entries that it overwrote are not compared, and never count as different.
        let ranks = all(2);
        (0..600).for_each(|call| ranks[1].post(&entry(call)));
        (0..600).for_each(|call| ranks[0].post(&entry(call)));
        ranks[0].look(|| 0);
        assert_eq!((counted(Checked::Compared), counted(Checked::NotCompared)), (20 + 255, 345));
        assert_eq!(counted(Checked::Divergences), 20);

        // A missing rank is named once, if its process lives.
        for (gone, absent) in [(0b10, 0), (0, 1)] {
            let ranks = all(2);
            ranks[0].post(&entry(1));
            ranks[0].look(|| gone);
            let long_ago = Instant::now().checked_sub(NAMED_AFTER);
            ranks[0].try_compared().unwrap().waits_since = long_ago;
            ranks[0].look(|| gone);
            ranks[0].look(|| gone);
            assert_eq!(counted(Checked::Absent), absent);
        }

        // A rank that has ended is not waited for.
        let ranks = all(2);
        (0..3).for_each(|call| ranks[0].post(&entry(call)));
        ranks[1].post(&entry(0));
        ranks[1].end(|| 0);
        ranks[1].post(&entry(9));
        ranks[0].look(|| 0);
        assert_eq!((counted(Checked::Compared), counted(Checked::NotCompared)), (20 + 256, 347));
        ranks[0].post(&entry(4));
        ranks[0].end(|| 0);
        assert_eq!((counted(Checked::Divergences), counted(Checked::NotCompared)), (20, 348));
    }
}
