//! Communicators made from others. NCCL makes every one of them; where the other has a fabric the ranks of the new one
//! meet then: at the call, or at the end of the outermost group.

use std::cell::Cell;
use std::sync::Arc;

use nccl_sys::{
    Entry, NCCL_SPLIT_NOCOLOR, ncclComm_t, ncclInProgress, ncclInternalError, ncclInvalidArgument,
    ncclInvalidUsage, ncclResult_t, ncclSuccess,
};

use crate::communicator::{self, Communicator, Kept};
use crate::error::refuse;
use crate::fabric::{
    self, Asked, Configured, Course, Derivation, Deriving, Fate, Newborn, Others, Patience, Waiting, Wanted,
};
use crate::forward::birth::{Birth, FromParent, Handle, Which};
use crate::forward::configuration::{Configuration, Given};
use crate::forward::known;
use crate::group::{self, Awaited};
use crate::guard;
use crate::process;
use crate::promise::{Promise, Unfit};
use crate::rendezvous::verdict::Reason;
use crate::stats::count;

use super::meeting::{self, settle};
use super::{UNKNOWN, note, questions};

/// A call before NCCL is asked: what there is to do after it, if anything.
struct Before {
    deriving: Deriving,
    configured: Configured,
}

/// Whether a birth is one of these.
pub fn is_one(birth: &Birth) -> bool {
    matches!(birth, Birth::Split { .. } | Birth::Shrink { .. })
}

/// Makes a communicator as asked, and lets its ranks meet.
pub fn birth(entry: Entry, birth: &Birth) -> ncclResult_t {
    let met = Cell::new(ncclSuccess);
    let result = guard::around(
        || {
            process::first_communicator();
            count::function(entry);
            if let Some(parent) = birth.aborted_parent() {
                communicator::find(parent)
                    .and_then(|communicator| communicator.fabric(parent))
                    .iter()
                    .for_each(|fabric| fabric.abort());
            }
            step(birth, birth.from_parent().and_then(before))
        },
        |step| match step {
            Step::Nccl(_) | Step::Begun(..) => run(birth),
            Step::Met(promise) => questions::with_real(promise, |_| ncclSuccess),
            Step::Failed(code) => *code,
            Step::Promise(promised) if promised.others == Others::Nccl => run(&birth.without_color()),
            Step::Promise(_) => ncclSuccess,
            Step::Nothing => ncclSuccess,
        },
        |step, result| {
            if let Some((handle, _)) = birth.newborns().next() {
                met.set(finish(step, handle, result));
            }
        },
    );
    if result == ncclSuccess { met.get() } else { result }
}

enum Step {
    Nccl(Option<Before>),
    Begun(Derivation, Configured),
    Promise(Box<PromisedChild>),
    /// Survivors of a parent that is not built have met: theirs is built at once.
    Met(Arc<Promise>),
    Nothing,
    Failed(ncclResult_t),
}

struct PromisedChild {
    derivation: Derivation,
    others: Others,
    newborn: Newborn,
    configured: Configured,
    configuration: Option<Configuration>,
}

fn is_unbuilt(parent: ncclComm_t) -> bool {
    questions::promise_of(parent).is_some_and(|promise| promise.real().is_none())
}

fn step(birth: &Birth, before: Option<Before>) -> Step {
    let Some(Before { deriving, configured }) = before else { return Step::Nccl(None) };
    let Some((given, key)) =
        birth.given_to_child().filter(|_| deriving.has_round() || matches!(birth, Birth::Shrink { .. }))
    else {
        return Step::Nccl(Some(Before { deriving, configured }));
    };
    let configuration = match given {
        Given::Doubtful | Given::Wrong => None,
        Given::Nothing => Some(None),
        Given::Sound(configuration) => Some(Some(configuration)),
    };
    let parent = birth.parent().unwrap_or(std::ptr::null_mut());
    let device = match questions::promise_of(parent) {
        Some(promise) => Some(promise.device()),
        None => known::identity(parent).map(|identity| identity.device),
    };
    let (Some(configuration), Some(device), false) = (configuration, device, group::is_open()) else {
        deriving.go_to_nccl();
        return Step::Nccl(Some(Before { deriving, configured }));
    };
    let mut derivation = deriving.begun();
    match derivation.round(key, Patience::AsConfigured.willing()) {
        Err(failure) => {
            derivation.fail();
            Step::Failed(refuse(failure.code(), format_args!("no split: {failure}")))
        }
        // Its other ranks may be dead: NCCL's communicator of the survivors is made without the parent's.
        Ok(Course::Nccl) if matches!(birth, Birth::Shrink { .. }) && is_unbuilt(parent) => {
            let (rank, ranks) = derivation.place();
            let newborn = Newborn { device, rank, ranks };
            let fate = match derivation.ask(newborn, configured) {
                Ok(asked) => fabric::join(vec![asked]).pop().unwrap_or(Fate::Plain(fabric::derived())),
                Err(reason) => Fate::Plain(reason),
            };
            match fate {
                Fate::Fabric(fabric) => Step::Met(Promise::new(fabric, device, configuration, None)),
                fate => Step::Failed(refuse(ncclInternalError, format_args!("no communicator: {fate:?}"))),
            }
        }
        Ok(Course::Nccl) => Step::Begun(derivation, configured),
        Ok(Course::Nothing) => {
            derivation.pass_by();
            Step::Nothing
        }
        Ok(Course::Promise { rank, ranks, others }) => {
            let newborn = Newborn { device, rank, ranks: ranks.len() as u32 };
            Step::Promise(Box::new(PromisedChild { derivation, others, newborn, configured, configuration }))
        }
    }
}

fn finish(step: Step, handle: Handle, result: ncclResult_t) -> ncclResult_t {
    match step {
        Step::Nccl(before) => return after(before, handle, result),
        Step::Begun(derivation, _) if result != ncclSuccess => derivation.fail(),
        Step::Begun(derivation, configured) => return meet(vec![(handle, configured, derivation)]),
        Step::Promise(promised) if result != ncclSuccess => promised.derivation.fail(),
        Step::Promise(promised) => {
            let PromisedChild { derivation, newborn, configured, configuration, .. } = *promised;
            let fate = match derivation.ask_promise(newborn, configured) {
                Ok(asked) => fabric::join(vec![asked]).pop(),
                Err(reason) => Some(Fate::Plain(reason)),
            };
            match fate {
                Some(Fate::Fabric(fabric)) => {
                    meeting::hand_out(handle, Promise::new(fabric, newborn.device, configuration, None));
                }
                Some(Fate::Failed(failure)) => {
                    return refuse(failure.code(), format_args!("no communicator: {failure}"));
                }
                other => {
                    return refuse(
                        ncclInternalError,
                        format_args!("the ranks of a promise got no fabric: {other:?}"),
                    );
                }
            }
        }
        Step::Met(promise) if result == ncclSuccess => meeting::hand_out(handle, promise),
        Step::Met(_) => {}
        Step::Nothing => crate::forward::birth::hand_out(handle, std::ptr::null_mut()),
        Step::Failed(_) => {}
    }
    ncclSuccess
}

/// NCCL makes it; a parent that is a promise is honoured first, by all its ranks.
fn run(birth: &Birth) -> ncclResult_t {
    match birth.parent().and_then(questions::promise_of) {
        None => birth.run(),
        Some(promise) => {
            let refused = birth.refusal(promise.fabric().rank());
            if let Some(why) = refused
                && promise.real().is_none()
            {
                return refuse(ncclInvalidArgument, format_args!("a communicator from another: {why}"));
            }
            if refused.is_none() {
                // They may share what it has.
                promise.mark(Unfit::Everywhere);
            }
            let birth = *birth;
            questions::with_real(&promise, move |real| birth.of_parent(real).run())
        }
    }
}

fn before(from: FromParent) -> Option<Before> {
    let FromParent { parent, which, configured } = from;
    let wanted = match which {
        Which::Color(NCCL_SPLIT_NOCOLOR) => Wanted::Split(None),
        Which::Color(color) => Wanted::Split(Some(color)),
        Which::AllBut(excluded) => Wanted::Shrink(excluded),
    };
    let derive = |kept: &Kept| kept.fabric()?.derive(&wanted);
    let deriving = communicator::find(parent)?.look_at_kept(parent, derive)??;
    let configured = match configured {
        // A parent with a fabric is one that waits.
        None => Configured { waiting: Some(Waiting::Blocking), ctas_max: None },
        Some((blocking, ctas_max)) => Configured {
            waiting: blocking
                .map(|blocking| if blocking == 0 { Waiting::NonBlocking } else { Waiting::Blocking }),
            ctas_max: Some(ctas_max.unwrap_or(0).max(0) as u32),
        },
    };
    Some(Before { deriving, configured })
}

/// NCCL has answered.
fn after(before: Option<Before>, handle: Handle, result: ncclResult_t) -> ncclResult_t {
    // NCCL counts a call once it has looked at the arguments, and so do we.
    let begun = result != ncclInvalidArgument && result != ncclInvalidUsage;
    let Some(Before { deriving, configured }) = before.filter(|_| begun) else {
        if result == ncclSuccess || result == ncclInProgress {
            note_plain(handle);
        } else {
            meeting::refused(result);
        }
        return ncclSuccess;
    };
    let derivation = deriving.begun();
    if result != ncclSuccess {
        meeting::refused(result);
        derivation.fail();
    } else if group::is_open() {
        group::wait_for(Awaited::Derived(handle, configured, Box::new(derivation)));
    } else {
        return meet(vec![(handle, configured, derivation)]);
    }
    ncclSuccess
}

/// One whose parent has no fabric.
fn note_plain(handle: Handle) {
    if let Some((_, communicator)) = note(handle, UNKNOWN) {
        super::unasked(communicator);
    }
}

/// Before NCCL runs a group. A rank that makes its part of a group one after the other waits for this rank's word between
/// them, while NCCL here waits for all: so what is derived in a group has a meeting only if one thread brings several ranks
/// of one call, which it cannot do without.
pub fn before_group(awaited: Vec<Awaited>) -> Vec<Awaited> {
    let is_derived = |waited: &&Awaited| matches!(waited, Awaited::Derived(..));
    let calls: Vec<_> = awaited
        .iter()
        .filter_map(|waited| match waited {
            Awaited::Derived(_, _, derivation) => Some(derivation.call()),
            _ => None,
        })
        .collect();
    let together = calls.len() > 1 && calls.iter().all(|call| *call == calls[0]);
    if together || awaited.iter().find(is_derived).is_none() {
        return awaited;
    }
    let plain = |waited| match waited {
        Awaited::Derived(handle, _, derivation) => {
            derivation.refuse(fabric::grouped());
            Awaited::Grouped(handle)
        }
        other => other,
    };
    awaited.into_iter().map(plain).collect()
}

/// NCCL has run a group. Gives the rest of what waited for its end, and the first failure.
pub fn after_group(awaited: Vec<Awaited>, result: ncclResult_t) -> (Vec<Awaited>, ncclResult_t) {
    let (mut rest, mut derived) = (Vec::new(), Vec::new());
    for waited in awaited {
        match waited {
            Awaited::Derived(handle, configured, derivation) => {
                derived.push((handle, configured, *derivation))
            }
            other => rest.push(other),
        }
    }
    if result != ncclSuccess {
        derived.into_iter().for_each(|(_, _, derivation)| derivation.fail());
        return (rest, result);
    }
    let met = if derived.is_empty() { ncclSuccess } else { meet(derived) };
    (rest, met)
}

/// A communicator that NCCL has made, while its ranks meet.
type Meeting = (Handle, ncclComm_t, &'static Communicator);

/// Lets the ranks of communicators meet that NCCL has made, beside each other.
fn meet(made: Vec<(Handle, Configured, Derivation)>) -> ncclResult_t {
    let (mut meetings, mut asked): (Vec<Meeting>, Vec<Asked>) = (Vec::new(), Vec::new());
    for (place, configured, derivation) in made {
        let Some((handle, communicator)) = note(place, UNKNOWN) else {
            derivation.pass_by();
            continue;
        };
        match ask(handle, configured, derivation) {
            Ok(one) => {
                let waiting = one.canceller().map(Kept::Waiting);
                waiting.into_iter().for_each(|waiting| drop(communicator.keep(handle, waiting)));
                meetings.push((place, handle, communicator));
                asked.push(one);
            }
            Err(reason) => settle(handle, communicator, Fate::Plain(reason)),
        }
    }
    let mut first = ncclSuccess;
    for ((place, handle, communicator), fate) in meetings.into_iter().zip(fabric::join(asked)) {
        let failed = match &fate {
            Fate::Failed(failure) => refuse(failure.code(), format_args!("no communicator: {failure}")),
            _ => ncclSuccess,
        };
        if failed == ncclSuccess {
            settle(handle, communicator, fate);
            continue;
        }
        // Unless it was aborted meanwhile, which has ended it.
        if communicator::remove(handle).is_some() {
            known::take_back(place, handle);
        }
        if first == ncclSuccess {
            first = failed;
        }
    }
    first
}

fn ask(handle: ncclComm_t, configured: Configured, derivation: Derivation) -> Result<Asked, Reason> {
    match known::identity(handle) {
        Some(identity) if identity.rank >= 0 && identity.ranks > identity.rank => {
            let (rank, ranks) = (identity.rank as u32, identity.ranks as u32);
            derivation.ask(Newborn { device: identity.device, rank, ranks }, configured)
        }
        _ => {
            let reason = Reason::NoIdentity { words: "NCCL does not say which rank this is".into() };
            derivation.refuse(reason.clone());
            Err(reason)
        }
    }
}
