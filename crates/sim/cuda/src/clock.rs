//! Modelled time: what work would take on devices of which `WINDLASS_SIM_CLOCK` tells latencies and bandwidths.
//!
//! Every thread has a time of its own, in nanoseconds from zero. A stream's thread lets the cost of its work pass. Whoever waits for
//! another thread, or sees that it is done, goes on at the later of both times; so does a stream with work that was issued later.
//! Nobody sleeps. Without the variable nothing costs anything, and events tell real times.

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

/// Nanoseconds that have passed for this thread.
pub fn now() -> u64 {
    NOW.get()
}

pub fn set(time: u64) {
    NOW.set(time);
}

/// This thread has waited for what was done then.
pub fn not_before(time: u64) {
    NOW.set(NOW.get().max(time));
}

/// Whether events tell modelled times.
pub fn is_modelled() -> bool {
    clock().is_some()
}

/// Lets pass on this thread what work takes on a device.
pub fn pass(device: Ordinal, work: &Work) {
    if let Some(Clock { model, noise }) = clock() {
        let factor = 1.0 + model.noise * noise.draw(device, work);
        NOW.set(NOW.get() + (model.cost_ns(device, work) * factor).round() as u64);
    }
}

/// None without the variable. One that cannot be read ends the process: what it measures would be something else.
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
