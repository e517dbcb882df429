//! Inits by unique id, and the ends of communicators: finalize, destroy, abort, revoke.

use crate::communicator::{self, Communicator, Config, Init, find};
use crate::driver::driver;
use crate::group::{self, Blocking, Task};
use crate::order::Order;
use crate::refusal::{Outcome, lock, outcome, refuse};
use crate::rendezvous::{self, Member, Token};
use crate::segment::standing;
use crate::{leaks, profiler, reentry, strict};
use nccl_sys::*;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// Joins the communicator of `ids` as `rank` of `ranks`, with the thread's current device.
///
/// # Safety
/// `out` must be null or writable until the outermost group has ended.
pub unsafe fn init_rank(
    out: *mut ncclComm_t,
    ranks: i32,
    ids: &[ncclUniqueId],
    rank: i32,
    config: Config,
) -> Outcome {
    group::start();
    // SAFETY: by contract.
    let result = unsafe { hold_init(out, ranks, ids, rank, config) };
    let result = group::note(result);
    result.and(group::end())
}

/// # Safety
/// As `init_rank`.
unsafe fn hold_init(
    out: *mut ncclComm_t,
    ranks: i32,
    ids: &[ncclUniqueId],
    rank: i32,
    config: Config,
) -> Outcome {
    let driver = driver()?;
    let (context, device) = driver.current()?;
    if out.is_null() {
        return refuse(ncclInvalidArgument, "CommInitRank : newcomm argument is NULL");
    }
    // SAFETY: by contract.
    unsafe { *out = std::ptr::null_mut() };
    if ranks < 1 || rank < 0 || rank >= ranks {
        return refuse(ncclInvalidArgument, format!("Invalid rank requested : {rank}/{ranks}"));
    }
    let bus_id = driver.bus_id(device)?;
    let (rank, ranks, token, ids) = (rank as usize, ranks as usize, Token::of_ids(ids), ids.to_vec());
    let order = Arc::new(Order::default());
    let communicator = Communicator::new(Init { rank, ranks, device, context, config, token, order });
    // SAFETY: by contract. NCCL writes the handle before the init, too.
    unsafe { *out = communicator::publish(&communicator) };
    let made = communicator.clone();
    let place = out as usize;
    let work = Box::new(move || {
        let member = Member { ids, rank, ranks, device, bus_id };
        made.is_being_made.store(true, SeqCst);
        let joined = rendezvous::join(token, &member, &made.leave).map(|segment| {
            made.set_segment(segment);
            profiler::init(&made, nccl_sys::profiler::hash(&member.ids[0].internal.map(|byte| byte as u8)));
        });
        let joined = joined.and_then(|()| driver.init_joined());
        made.is_being_made.store(false, SeqCst);
        if matches!(joined, Err(code) if code != rendezvous::LOST) && config.blocking {
            let place = place as *mut ncclComm_t;
            // SAFETY: by contract. A nonblocking caller keeps the handle, to learn the error and to abort.
            unsafe {
                communicator::withdraw(*place, "never made");
                *place = std::ptr::null_mut();
            }
        }
        joined
    });
    group::run(Task { communicator, work, blocking: Blocking::AsConfigured })
}

/// `ncclCommInitAll`: makes one communicator for each device, as one group of this thread.
///
/// # Safety
/// `out` must have room for `devices.len()` handles.
pub unsafe fn init_all(out: *mut ncclComm_t, devices: &[i32]) -> Outcome {
    let driver = driver()?;
    let known = driver.devices()?;
    for (index, device) in devices.iter().enumerate() {
        if *device < 0 || *device >= known {
            return refuse(ncclInvalidArgument, format!("Invalid device {device} (totalnDev={known})"));
        }
        if devices[..index].contains(device) {
            return refuse(ncclInvalidUsage, format!("ncclCommInitAll: device {device} is named twice"));
        }
    }
    let id = [public_unique_id()?];
    let config = Config { blocking: true, split_share: false, shrink_share: false };
    let (before, device) = driver.current()?;
    driver.within(before, device, || {
        group::start();
        let result = devices.iter().enumerate().try_for_each(|(rank, device)| {
            driver.set_device(*device)?;
            // SAFETY: by contract.
            unsafe { init_rank(out.add(rank), devices.len() as i32, &id, rank as i32, config) }
        });
        result.and(group::end())
    })
}

fn public_unique_id() -> Outcome<ncclUniqueId> {
    let Some(get_unique_id) = reentry::get_unique_id() else { return rendezvous::unique_id() };
    let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
    // SAFETY: the place is writable.
    outcome(unsafe { get_unique_id(&mut id) })?;
    Ok(id)
}

/// `ncclCommFinalize`: waits for all launched operations.
pub fn finalize(handle: ncclComm_t) -> Outcome {
    let communicator = find(handle, "CommFinalize")?;
    communicator.ensure_ready()?;
    if communicator.finalized.swap(true, SeqCst) {
        return refuse(ncclInvalidArgument, "ncclCommFinalize: already finalized");
    }
    let _inside = communicator.enter("ncclCommFinalize");
    let flushed = communicator.clone();
    let work = Box::new(move || {
        flushed.wait_idle("ncclCommFinalize");
        Ok(())
    });
    group::note(group::run(Task {
        communicator: communicator.clone(),
        work,
        blocking: Blocking::AsConfigured,
    }))
}

/// `ncclCommDestroy`: waits for all launched operations, then ends the handle. It does not wait for peers.
pub fn destroy(handle: ncclComm_t) -> Outcome {
    let communicator = find(handle, "CommDestroy")?;
    communicator.wait_settled();
    let inside = communicator.enter("ncclCommDestroy");
    let ending = communicator.clone();
    let address = handle as usize;
    let end = move || {
        ending.wait_idle("ncclCommDestroy");
        ending.finalized.store(true, SeqCst);
        note_leftovers(&ending);
        if let Some(segment) = ending.segment_if_made() {
            segment.rank(ending.rank).standing.store(standing::DESTROYED, SeqCst);
        }
        communicator::withdraw(address as ncclComm_t, "destroyed");
        Ok(())
    };
    drop(inside);
    // Always blocking: the handle, through which the result could be asked, is gone afterwards.
    group::run_last(communicator, end)
}

/// Keeps lines about registrations, windows and operators that the program never ended, and NCCL would clean up silently.
fn note_leftovers(communicator: &Communicator) {
    if communicator.leave.load(SeqCst) || !strict::enabled() {
        return;
    }
    leftovers(communicator).into_iter().for_each(leaks::remember);
}

/// Lines about the registrations, windows and operators of a communicator that were not ended.
pub fn leftovers(communicator: &Communicator) -> Vec<String> {
    let name = communicator.name();
    let mut lines = Vec::new();
    for range in lock(&communicator.registrations).live() {
        lines.push(format!("{name}: leak: registration of {} bytes at {:#x}", range.bytes, range.address));
    }
    for range in lock(&communicator.windows).live() {
        lines.push(format!("{name}: leak: window of {} bytes at {:#x}", range.bytes, range.address));
    }
    let operators = lock(&communicator.operators).live();
    if operators > 0 {
        lines.push(format!("{name}: leak: {operators} reduction operators never destroyed"));
    }
    lines
}

/// `ncclCommAbort`: any thread may call it at any time; inside a group it takes effect at once.
pub fn abort(handle: ncclComm_t) -> Outcome {
    let communicator = find(handle, "CommAbort")?;
    // NCCL 2.28.9 uses memory here that the failing init has freed: this has corrupted heaps on H200.
    if communicator.config.blocking
        && communicator.is_being_made.load(SeqCst)
        && !group::is_open()
        && strict::enabled()
    {
        leaks::remember(format!(
            "{}: aborted outside a group while its init was under way",
            communicator.name()
        ));
    }
    if communicator.has_refused_child.load(SeqCst) && strict::enabled() {
        leaks::remember(format!(
            "{}: aborted after a refused configuration of a split or shrink: NCCL 2.28.9 writes to what it has freed",
            communicator.name()
        ));
    }
    communicator.make_leave(standing::ABORTED);
    communicator.wait_settled();
    // Again, for the segment that an init may have made meanwhile.
    communicator.make_leave(standing::ABORTED);
    communicator::withdraw(handle, "aborted");
    Ok(())
}

/// `ncclCommRevoke`: stops operations; splits and shrinks stay possible.
pub fn revoke(handle: ncclComm_t, flags: i32) -> Outcome {
    let communicator = find(handle, "CommRevoke")?;
    if flags != 0 || communicator.finalized.load(SeqCst) || communicator.revoked.swap(true, SeqCst) {
        return refuse(ncclInvalidArgument, "ncclCommRevoke: bad flags, or finalized or revoked before");
    }
    communicator.make_leave(standing::REVOKED);
    communicator.wait_settled();
    communicator.finalized.store(true, SeqCst);
    Ok(())
}
