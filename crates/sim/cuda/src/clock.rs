//! Modelled time: how long work would take on devices with the latencies and bandwidths of `WINDLASS_SIM_CLOCK`.
//!
//! Every thread has a modelled time of its own, in nanoseconds from zero. A stream's thread adds the cost of each operation. A thread that
//! waits for another one, or sees that it is done, goes on at the later of both times; so does a stream with work that was issued later.
//! No thread sleeps for this. Without the variable work costs nothing, and events give real times.

mod model;
mod noise;

pub use model::{RawWork, Work};

use crate::device::Ordinal;
use model::Model;
use noise::Noise;
use std::cell::Cell;
use std::sync::OnceLock;

pub const VARIABLE: &str = "WINDLASS_SIM_CLOCK";

struct Clock {
    model: Model,
    noise: Noise,
}

thread_local! {
    static NOW: Cell<u64> = const { Cell::new(0) };
}

/// The modelled time of this thread, in nanoseconds.
pub fn now() -> u64 {
    NOW.get()
}

pub fn set(time: u64) {
    NOW.set(time);
}

/// Moves this thread's time to at least `time`: the thread has waited for something that ended then.
pub fn not_before(time: u64) {
    NOW.set(NOW.get().max(time));
}

/// Whether events give modelled times.
pub fn is_modelled() -> bool {
    clock().is_some()
}

/// Adds the cost of `work` on a device to this thread's time.
pub fn pass(device: Ordinal, work: &Work) {
    if let Some(Clock { model, noise }) = clock() {
        let factor = 1.0 + model.noise * noise.draw(device, work);
        NOW.set(NOW.get() + (model.cost_ns(device, work) * factor).round() as u64);
    }
}

/// `None` without the variable. If it cannot be read, the process ends: all measurements would be wrong.
fn clock() -> Option<&'static Clock> {
    static CLOCK: OnceLock<Option<Clock>> = OnceLock::new();
    let read = || {
        let text = std::env::var_os(VARIABLE).filter(|text| !text.is_empty())?;
        let model = text.to_str().ok_or_else(|| "it is not UTF-8".to_owned()).and_then(Model::parse);
        match model {
            Ok(model) => Some(Clock { model, noise: Noise::default() }),
            Err(reason) => {
                crate::report::line(format_args!("{VARIABLE}={}: {reason}", text.display()));
                std::process::abort();
            }
        }
    };
    CLOCK.get_or_init(read).as_ref()
}
