//! Loads the kernels of native collectives, once for all communicators of a device. The first init of a communicator of so many ranks finds
//! the kernels for that number, with their code on the device; nothing loads later.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::Arc;

use windlass_kernels::collectives::Kernel;
use windlass_kernels::images::{Image, collective_images_for};

use crate::error::TransportError;
use crate::sequencer;
use windlass_base::gpu::module::{Function, Module, load_first};
use windlass_base::lock::Mutex;

/// The kernels of one device. Keep it as long as the process uses the device: dropping it unloads code, which may wait for work on the GPU.
/// Graphs that captured its kernels must be gone before ([`sequencer::DeviceResources::is_unused`]).
#[derive(Debug)]
pub struct NativeDeviceResources {
    module: Option<Module>,
    /// By the number of ranks. Locked by inits alone, while they find kernels.
    found: Mutex<BTreeMap<u32, Arc<Kernels>>>,
    sequencer: Arc<sequencer::DeviceResources>,
    /// See [`Kernels::may_be_early`].
    may_be_early: bool,
}

/// The kernels for communicators of some number of ranks.
#[derive(Debug)]
pub struct Kernels {
    by_index: [Option<Function>; Kernel::INDICES],
    /// Whether a kernel may be set up while the one before it runs, and lets the next one be. The next kernel, whoever launches it, must then
    /// wait for the end of this one, as ours do.
    pub(super) may_be_early: bool,
}

impl NativeDeviceResources {
    /// Loads the code for a device. `others_wait`: kernels of others that begin early wait for the kernel before.
    pub fn new(
        sequencer: Arc<sequencer::DeviceResources>,
        others_wait: bool,
    ) -> Result<Arc<NativeDeviceResources>, TransportError> {
        let images = collective_images_for((sequencer.capability / 10).max(0) as u32);
        NativeDeviceResources::with_images(sequencer, images, others_wait)
    }

    /// Loads the code from images of the caller, best first: for tests.
    pub fn with_images(
        sequencer: Arc<sequencer::DeviceResources>,
        images: &[Image],
        others_wait: bool,
    ) -> Result<Arc<NativeDeviceResources>, TransportError> {
        let home = sequencer.home;
        let no_image = TransportError::NoImage {
            of: "collectives",
            device: home.device,
            capability: sequencer.capability,
        };
        let entered = home.enter()?;
        let (image, module) =
            load_first(home.driver, images, "kernels of collectives", Ok)?.ok_or(no_image)?;
        drop(entered);
        ::log::debug!("device {}: kernels of collectives {}", home.device, image.name);
        // Code for older devices has no instruction by which to wait for the kernel before.
        let may_be_early = others_wait && sequencer.is_since_hopper() && image.has_bulk_copies;
        Ok(Arc::new(NativeDeviceResources {
            module: Some(module),
            found: Mutex::default(),
            sequencer,
            may_be_early,
        }))
    }

    /// The kernels for communicators of `ranks` ranks. At init only: the first call for a number may load code.
    pub fn kernels(&self, ranks: u32) -> Result<Arc<Kernels>, TransportError> {
        let mut found = self.found.lock();
        if let Some(kernels) = found.get(&ranks) {
            return Ok(kernels.clone());
        }
        let _entered = self.sequencer.home.enter()?;
        let mut by_index = [None; Kernel::INDICES];
        for kernel in Kernel::all_for(ranks) {
            let name = CString::new(kernel.name()).unwrap_or_default();
            let function = self.module.as_ref().map(|module| module.function(&name, 0)).transpose()?;
            by_index[kernel.index()] = function;
        }
        let kernels = Arc::new(Kernels { by_index, may_be_early: self.may_be_early });
        found.insert(ranks, kernels.clone());
        Ok(kernels)
    }
}

impl Kernels {
    pub(super) fn function(&self, kernel: Kernel) -> Result<Function, TransportError> {
        let function = self.by_index.get(kernel.index()).copied().flatten();
        function.ok_or(TransportError::NoKernel { name: kernel.name() })
    }
}

impl Drop for NativeDeviceResources {
    fn drop(&mut self) {
        let home = self.sequencer.home;
        if let Err(failure) = home.give_back(self.module.take()) {
            ::log::warn!("the kernels of collectives of device {} stay: {failure}", home.device);
        }
    }
}
