//! The device that NCCL takes from a thread.
//!
//! NCCL asks its own copy of CUDA's runtime (`cudaGetDevice`), which answers with the device of the current context. Without a context it
//! answers with the device that NCCL last set on this thread (`cudaSetDevice`), and 0 if NCCL set none. Nearly every call of NCCL sets a
//! device: at its end that which the thread had before. An init then makes a primary context current (`cudaFree(NULL)`): device 0's, also
//! where NCCL has set another (`docs/measurements/2026-11-27-no-context`).
//!
//! Calls that Windlass serves set nothing in NCCL's runtime, so the callers here note what NCCL alone would have set. What they
//! have noted becomes current before NCCL is asked: then NCCL takes the same device. Calls that NCCL runs are not noted, as that would cost
//! every one of them.

use nccl_sys::open;

use windlass_base::gpu::{self, Driver, Home, Ordinal};
use windlass_base::stats::count;

/// `CU_COMPUTEMODE_DEFAULT`. In exclusive mode CUDA's runtime goes on to a device that no other process has.
const COMPUTE_MODE_DEFAULT: i32 = 0;

/// The device of an init on this thread, where NCCL has set that one. Its context is current from now on, as NCCL leaves one: a lazy
/// communicator does not reach NCCL, and NCCL finds the device by it. The error is why the device is not known, in words.
pub fn of_init(set: Option<Ordinal>) -> Result<Ordinal, String> {
    let driver = driver()?;
    if let Some(device) = current_on(driver)? {
        return Ok(device);
    }
    let device = without_context(driver, set)?;
    let stays = Home::of(driver, device).and_then(|home| home.stay_current());
    stays.map(|()| device).map_err(|failure| failure.to_string())
}

/// The device of an allocation on this thread. Makes nothing current. The error is why the device is not known, in words.
pub fn of_allocation(set: Option<Ordinal>) -> Result<Ordinal, String> {
    let driver = driver()?;
    current_on(driver)?.map_or_else(|| without_context(driver, set), Ok)
}

/// The device of the current context.
pub fn current() -> Result<Ordinal, String> {
    current_on(driver()?)?.ok_or_else(|| "no context is current on its thread".into())
}

/// The same, if there is one. Does not open the driver: a program may fork before it uses CUDA.
pub fn if_current() -> Option<Ordinal> {
    gpu::opened()?.current_device().ok()?
}

fn driver() -> Result<&'static Driver, String> {
    gpu::driver().map_err(|failure| failure.to_string())
}

fn current_on(driver: &Driver) -> Result<Option<Ordinal>, String> {
    driver.current_device().map_err(|failure| failure.to_string())
}

fn without_context(driver: &Driver, set: Option<Ordinal>) -> Result<Ordinal, String> {
    match open::device_of_runtime() {
        Some(Ok(device)) => return Ok(device),
        Some(Err(code)) => {
            return Err(format!(
                "no context is current on its thread, and cudaGetDevice of NCCL's runtime answers {code}"
            ));
        }
        None => {}
    }
    let facts = driver.device_count().and_then(|devices| {
        Ok(WithoutContext {
            set,
            devices,
            compute_mode: driver.compute_mode(0)?,
            elsewhere: count::is_any_elsewhere(),
        })
    });
    decide(&facts.map_err(|failure| failure.to_string())?).map_err(Into::into)
}

/// What the device of a thread without a context depends on.
#[derive(Clone, Copy)]
struct WithoutContext {
    /// The device that was set there, as far as noted.
    set: Option<Ordinal>,
    /// How many devices the process sees.
    devices: i32,
    /// Who may have contexts on device 0.
    compute_mode: i32,
    /// Whether the process had a communicator on another device than 0.
    elsewhere: bool,
}

/// The device that NCCL's own copy of the runtime answers without a context.
fn decide(facts: &WithoutContext) -> Result<Ordinal, &'static str> {
    match *facts {
        WithoutContext { set: Some(device), .. } => Ok(device),
        WithoutContext { devices: 2.., elsewhere: true, .. } => Err(
            "its thread has no current context, and NCCL may have set a device there before; call cudaSetDevice before the init",
        ),
        WithoutContext { compute_mode: COMPUTE_MODE_DEFAULT, .. } => Ok(0),
        _ => Err(
            "its thread has no current context, and GPU 0 is not in default compute mode; call cudaSetDevice before the init",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Device 0 is taken only where NCCL can have set no other.
    #[test]
    fn without_context() {
        let fresh =
            WithoutContext { set: None, devices: 8, compute_mode: COMPUTE_MODE_DEFAULT, elsewhere: false };
        assert_eq!(decide(&fresh), Ok(0));
        assert_eq!(decide(&WithoutContext { set: Some(3), elsewhere: true, ..fresh }), Ok(3));
        assert_eq!(decide(&WithoutContext { devices: 1, elsewhere: true, ..fresh }), Ok(0));
        let words = |facts| decide(&facts).unwrap_err();
        assert!(words(WithoutContext { elsewhere: true, ..fresh }).contains("NCCL may have set"));
        assert!(words(WithoutContext { compute_mode: 3, ..fresh }).contains("compute mode"));
    }
}
