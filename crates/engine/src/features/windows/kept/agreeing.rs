//! The round of a registration: this rank says what it registers, waits for all ranks, and acts on the result.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nccl_sys::{
    ncclComm_t, ncclInternalError, ncclInvalidArgument, ncclInvalidUsage, ncclRemoteError, ncclResult_t,
    ncclSuccess, ncclUnhandledCudaError,
};

use crate::features::memory::pool::{self, Block};
use crate::features::windows::decide::{Decided, Decision, Unlike, decide};
use crate::features::windows::list::Record;
use crate::features::windows::said::{Number, Said};
use crate::features::windows::slot::{Round, Seen};
use windlass_base::config::config;
use windlass_base::error::refuse;
use windlass_base::gpu;
use windlass_base::range::Range;
use windlass_base::stats::count;
use windlass_base::stats::resources::Kept;

use crate::features::windows::kept::{Windows, standing};

/// NCCL_WIN_REQUIRED_ALIGNMENT, from the start of the allocation.
const ALIGNMENT: u64 = 4096;
/// How long it spins, which is enough for ranks that come together.
const SPINS_FOR: Duration = Duration::from_micros(20);
/// How long it then looks often, before it looks seldom.
const LOOKS_FOR: Duration = Duration::from_millis(2);
const LOOK_EVERY: Duration = Duration::from_micros(20);
const LOOK_SELDOM: Duration = Duration::from_millis(1);
/// After how long a missing rank is named.
const NAMED_AFTER: Duration = Duration::from_secs(10);
/// How often it checks whether the peers' processes live.
const LIVES_EVERY: Duration = Duration::from_millis(100);

/// A registration that the program asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowRequest {
    /// The addresses.
    pub range: Range,
    /// The flags that the program gave.
    pub flags: u32,
}

/// A window that NCCL is to make.
#[derive(Clone, Copy, Debug)]
pub struct Making {
    request: WindowRequest,
    number: Number,
    block: Option<Block>,
}

/// The result of a registration on this rank.
#[derive(Clone, Copy, Debug)]
pub enum Course {
    /// The window with this NCCL handle.
    Hit(usize),
    /// NCCL makes a new window.
    Make(Making),
    /// Refused with this code, on this rank alone or on all.
    Refused(ncclResult_t),
    /// NCCL does all of it.
    Forward,
}

/// The state of the ranks, for waits.
pub trait Health {
    /// The communicator's asynchronous error. `ncclSuccess` if there is none.
    fn error(&self) -> ncclResult_t;
    /// Ranks that are dead or have said that they have failed, one bit each.
    fn gone(&self) -> u64;
    /// Notes that this rank has failed.
    fn fail(&self, error: ncclResult_t);
}

impl Windows {
    /// Agrees with the other ranks. Waits for them, as NCCL does.
    pub fn agree(&self, ranks: &dyn Health, real: ncclComm_t, request: WindowRequest) -> Course {
        let course = self.agreed(ranks, real, request);
        match course {
            Course::Hit(_) => count::windows(Kept::Hits, 1),
            Course::Refused(_) => count::windows(Kept::Refused, 1),
            // A made window is counted by `made`, and a forwarded call is NCCL's alone.
            Course::Make(_) | Course::Forward => {}
        }
        course
    }

    fn agreed(&self, ranks: &dyn Health, real: ncclComm_t, request: WindowRequest) -> Course {
        self.real.store(real as usize, Ordering::Release);
        if self.is_off.load(Ordering::Acquire) || self.is_aborted.load(Ordering::Acquire) {
            return Course::Forward;
        }
        self.drop_leaving();
        let block = pool::block_of(request.range.base).filter(|block| holds(block, request.range));
        if let Some((code, why)) = unfit(request.range, block.as_ref()) {
            // NCCL is not called: for a communicator's first symmetric window it waits for all ranks before it looks at the arguments
            // (2.28.9 to 2.30.7, ncclSymkInitOnce), while the others may wait here.
            self.slot.is_unfit(&self.said(request, None), code.0 as u32);
            return Course::Refused(refuse(code, format_args!("ncclCommWindowRegister: {why}")));
        }
        let said = self.said(request, block.as_ref());
        let round = self.slot.begin(&said);
        match self.wait(ranks, round) {
            Err(code) => Course::Refused(code),
            Ok(Seen::All(all)) => self.decided(&all, Making { request, number: round.number(), block }),
            Ok(Seen::Refused(unfit)) => Course::Refused(self.refused(round, &unfit)),
            Ok(_) => {
                self.stop_keeping("another rank keeps none");
                Course::Forward
            }
        }
    }

    /// Stops keeping windows because the program registers in groups. A rank could else wait here for a rank that is in no group, while that
    /// one waits for the window of the group.
    pub fn forward_grouped(&self, real: ncclComm_t) {
        self.real.store(real as usize, Ordering::Release);
        self.stop_keeping("they are registered in groups");
    }

    /// Tells the other ranks of a registration that NCCL has refused without asking them.
    pub fn was_refused(&self, request: WindowRequest, code: ncclResult_t) {
        if self.is_off.load(Ordering::Acquire) {
            return;
        }
        self.slot.is_unfit(&self.said(request, None), code.0 as u32);
    }

    /// Notes the window that NCCL has made.
    pub fn made(&self, making: &Making, handle: usize) {
        let Making { request: WindowRequest { range, flags }, number, block } = *making;
        let (block, life) = (block.map(|block| block.serial), block.map_or(0, |block| block.life));
        if handle == 0 {
            // Without a handle NCCL has not asked the other ranks either.
            self.stop_keeping("NCCL makes none");
        } else {
            let record = Record { number, handle, range, flags, block, life, users: 1, times: 1 };
            self.change(|ledger| ledger.made(record));
            count::windows(Kept::Made, 1);
        }
    }

    fn said(&self, request: WindowRequest, block: Option<&Block>) -> Said {
        let WindowRequest { range, flags } = request;
        let ledger = self.ledger.lock();
        let said =
            Said { address: range.base, bytes: range.bytes, flags, lost: ledger.lost(), ..Said::default() };
        let Some(block) = block else { return said };
        Said {
            claim: ledger.claim(range, flags, block.serial),
            allocation: block.bytes,
            offset: range.base - block.base,
            is_over: ledger.is_over(block.serial, standing),
            ..said
        }
    }

    fn decided(&self, all: &[Said], making: Making) -> Course {
        let Decided { decision, drop } = decide(all, self.rules);
        if !drop.is_empty() {
            self.drop_all(self.change(|ledger| ledger.forget_names(&drop, standing)));
        }
        match decision {
            Decision::Hit(number) => {
                let life = making.block.map_or(0, |block| block.life);
                let why = format_args!("window {number} of rank {} is gone", self.rank);
                let hit = self.change(|ledger| ledger.hit(number, life));
                hit.map_or_else(|| Course::Refused(refuse(ncclInternalError, why)), Course::Hit)
            }
            Decision::Make => {
                let taken = self.change(|ledger| {
                    let mut taken = ledger.meet(making.request.range, standing);
                    taken.extend(
                        making.block.iter().flat_map(|block| ledger.make_way(block.serial, standing)),
                    );
                    taken
                });
                self.drop_all(taken);
                Course::Make(making)
            }
            Decision::Refused { rank, why } => {
                let table: Vec<String> = all.iter().enumerate().map(line).collect();
                // NCCL's own code where it does not hang.
                let code = if why == Unlike::Over { ncclInvalidUsage } else { ncclUnhandledCudaError };
                let table = table.join("; ");
                let text = format_args!(
                    "ncclCommWindowRegister: rank {rank} differs {why}, where NCCL hangs: {table}"
                );
                Course::Refused(refuse(code, text))
            }
        }
    }

    fn refused(&self, round: Round, unfit: &[(usize, u32)]) -> ncclResult_t {
        let table: Vec<String> = unfit
            .iter()
            .map(|(rank, code)| format!("{}, answer {code}", line((*rank, &self.slot.said(*rank, round)))))
            .collect();
        let code = unfit.first().map_or(0, |(_, code)| *code as i32);
        let code = if code == ncclSuccess.0 { ncclInvalidUsage } else { ncclResult_t(code) };
        let why = "where NCCL hangs";
        refuse(
            code,
            format_args!("ncclCommWindowRegister: NCCL made no window for {}, {why}", table.join("; ")),
        )
    }

    fn wait(&self, ranks: &dyn Health, round: Round) -> Result<Seen, ncclResult_t> {
        let began = Instant::now();
        let (mut looked, mut dead_since, mut unfit_since, mut is_named) = (began, None, None, false);
        loop {
            let missing = match self.slot.look(round) {
                Seen::Missing(missing) => {
                    unfit_since = None;
                    missing
                }
                // That rank may still register something else, which NCCL would take for this window. Its refused call may also be long over.
                Seen::Unfit(_)
                    if unfit_since.get_or_insert_with(Instant::now).elapsed() >= config().hang_timeout =>
                {
                    self.slot.settle(round);
                    continue;
                }
                Seen::Unfit(unfit) => unfit,
                seen => return Ok(seen),
            };
            if self.is_aborted.load(Ordering::Acquire) {
                return Err(ncclInternalError);
            }
            if ranks.error() != ncclSuccess {
                return Err(refuse(ranks.error(), format_args!("the communicator has failed")));
            }
            let waited = began.elapsed();
            match waited {
                _ if waited < SPINS_FOR => std::hint::spin_loop(),
                _ if waited < LOOKS_FOR => std::thread::sleep(LOOK_EVERY),
                _ => std::thread::sleep(LOOK_SELDOM),
            }
            if waited > NAMED_AFTER && !is_named {
                is_named = true;
                let missing = ranks_of(missing);
                let why = if unfit_since.is_some() { ", where NCCL has made none" } else { "" };
                log::warn!("rank {} waits in ncclCommWindowRegister for rank {missing:?}{why}", self.rank);
            }
            if looked.elapsed() > LIVES_EVERY {
                looked = Instant::now();
                let dead = ranks.gone() & missing;
                if dead == 0 {
                    dead_since = None;
                } else if dead_since.get_or_insert(looked).elapsed() >= config().hang_timeout {
                    ranks.fail(ncclRemoteError);
                    let dead = ranks_of(dead);
                    let why = format_args!("ncclCommWindowRegister: rank {dead:?} is dead or has failed");
                    return Err(refuse(ncclRemoteError, why));
                }
            }
        }
    }
}

/// NCCL's answer and its cause, if NCCL refuses a window over this range by itself.
fn unfit(range: Range, block: Option<&Block>) -> Option<(ncclResult_t, &'static str)> {
    let misaligned = (ncclInvalidArgument, "the address is misaligned");
    if let Some(block) = block {
        return (!(range.base - block.base).is_multiple_of(ALIGNMENT)).then_some(misaligned);
    }
    let no_memory = (ncclUnhandledCudaError, "there is no memory for windows");
    let Some(driver) = gpu::opened() else { return Some(no_memory) };
    if driver.is_mapped_by_handle(range.base) {
        // The driver's own reservations begin at multiples of more than the alignment.
        return (!range.base.is_multiple_of(ALIGNMENT)).then_some(misaligned);
    }
    let offset = |base: u64| range.base.wrapping_sub(base);
    let is_misaligned =
        driver.attributes(range.base).is_some_and(|said| !offset(said.range.base).is_multiple_of(ALIGNMENT));
    Some(if is_misaligned { misaligned } else { no_memory })
}

fn ranks_of(bits: u64) -> Vec<u32> {
    (0..u64::BITS).filter(|rank| bits & (1 << rank) != 0).collect()
}

fn holds(block: &Block, range: Range) -> bool {
    block.held && Range { base: block.base, bytes: block.bytes }.contains(range)
}

fn line((rank, said): (usize, &Said)) -> String {
    let Said { address, bytes, allocation, offset, flags, is_over, .. } = said;
    let over = if *is_over { ", which has a window" } else { "" };
    let of = match allocation {
        0 => String::new(),
        _ => format!(" at {offset} of a block of {allocation}{over}"),
    };
    format!("rank {rank} {bytes} bytes at {address:#x}{of}, flags {flags}")
}
