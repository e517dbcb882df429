//! The device that NCCL takes from a thread.
//!
//! NCCL asks its own copy of CUDA's runtime (`cudaGetDevice`), which answers with the device of the current context. Without a context it
//! answers with the device that NCCL last set on this thread (`cudaSetDevice`), and 0 if NCCL set none. An init then makes a primary
//! context current (`cudaFree(NULL)`): device 0's, also where NCCL has set another (`docs/measurements/2026-11-27-no-context`).

use nccl_sys::open;

use windlass_base::gpu::{self, Driver, Home, Ordinal};

/// What NCCL has done on a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Past {
    /// It set no device.
    #[default]
    Unused,
    /// It may have set a device: a communicator was made, used or ended there, or memory freed.
    Used,
}

/// `CU_COMPUTEMODE_DEFAULT`. In exclusive mode CUDA's runtime goes on to a device that no other process has.
const COMPUTE_MODE_DEFAULT: i32 = 0;

/// The device of an init on this thread. Its context is current from now on, as NCCL leaves it: a lazy communicator does not reach NCCL, and
/// NCCL finds the device by it. The error is why the device is not known, in words.
pub fn of_init(past: Past) -> Result<Ordinal, String> {
    let driver = driver()?;
    if let Some(device) = current_on(driver)? {
        return Ok(device);
    }
    let device = without_context(driver, past)?;
    let stays = Home::of(driver, device).and_then(|home| home.stay_current());
    stays.map(|()| device).map_err(|failure| failure.to_string())
}

/// The device of an allocation, or of an init in a group, on this thread. Makes nothing current. The error is why the device is not known, in
/// words.
pub fn of_thread(past: Past) -> Result<Ordinal, String> {
    let driver = driver()?;
    current_on(driver)?.map_or_else(|| without_context(driver, past), Ok)
}

/// The device of the current context.
pub fn current() -> Result<Ordinal, String> {
    current_on(driver()?)?.ok_or_else(|| "no context is current on its thread".into())
}

fn driver() -> Result<&'static Driver, String> {
    gpu::driver().map_err(|failure| failure.to_string())
}

fn current_on(driver: &Driver) -> Result<Option<Ordinal>, String> {
    driver.current_device().map_err(|failure| failure.to_string())
}

fn without_context(driver: &Driver, past: Past) -> Result<Ordinal, String> {
    match open::device_of_runtime() {
        Some(Ok(device)) => return Ok(device),
        Some(Err(code)) => {
            return Err(format!(
                "no context is current on its thread, and cudaGetDevice of NCCL's runtime answers {code}"
            ));
        }
        None => {}
    }
    let facts = driver.device_count().and_then(|count| Ok((count, driver.compute_mode(0)?)));
    let (devices, compute_mode) = facts.map_err(|failure| failure.to_string())?;
    decide(past, devices, compute_mode).map_err(Into::into)
}

/// The device that NCCL's own copy of the runtime answers without a context.
fn decide(past: Past, devices: i32, compute_mode: i32) -> Result<Ordinal, &'static str> {
    match (past, devices, compute_mode) {
        (Past::Used, 2.., _) => Err(
            "its thread has no current context, and NCCL may have set a device there before; call cudaSetDevice before the init",
        ),
        (_, _, COMPUTE_MODE_DEFAULT) => Ok(0),
        _ => Err(
            "its thread has no current context, and GPU 0 is not in default compute mode; call cudaSetDevice before the init",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Device 0 is taken only where NCCL can take no other.
    #[test]
    fn first_device() {
        assert_eq!(decide(Past::Unused, 8, 0), Ok(0));
        assert_eq!(decide(Past::Used, 1, 0), Ok(0));
        assert!(decide(Past::Used, 2, 0).is_err_and(|words| words.contains("NCCL may have set")));
        assert!(decide(Past::Unused, 8, 3).is_err_and(|words| words.contains("compute mode")));
    }
}
