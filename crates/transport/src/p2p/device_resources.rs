//! Keeps what the p2p transports of one device share: the loaded kernel, and host memory for lists of graphs.

use std::ffi::CString;
use std::sync::Arc;

use windlass_kernels::arrange::{BulkSend, RECOMMENDED_STAGES};
use windlass_kernels::images::{Image, P2P_KERNEL, images_for};

use crate::error::TransportError;
use crate::p2p::calls;
use crate::p2p::lists::Slabs;
use crate::sequencer;
use windlass_base::gpu::module::{Function, Module, load_first};

/// The kernel of one device, and its graphs' lists. Keep it as long as the process uses the device: dropping it unloads code and frees memory, which may wait for work on
/// the GPU.
/// Graphs that captured the kernel must be gone before ([`sequencer::DeviceResources::is_unused`]).
#[derive(Debug)]
pub struct P2pDeviceResources {
    module: Option<Module>,
    pub(super) function: Function,
    pub(super) bulk: BulkSend,
    pub(super) shared_bytes_max: u32,
    /// Host memory for lists of graphs.
    pub(super) lists: Slabs,
    sequencer: Arc<sequencer::DeviceResources>,
}

impl P2pDeviceResources {
    /// Loads the kernel for a device, whole.
    pub fn new(
        sequencer: Arc<sequencer::DeviceResources>,
    ) -> Result<Arc<P2pDeviceResources>, TransportError> {
        let images = images_for((sequencer.capability / 10).max(0) as u32);
        P2pDeviceResources::with_images(sequencer, images)
    }

    /// Loads the kernel from images of the caller, best first: for tests.
    pub fn with_images(
        sequencer: Arc<sequencer::DeviceResources>,
        images: &[Image],
    ) -> Result<Arc<P2pDeviceResources>, TransportError> {
        let home = sequencer.home;
        let entered = home.enter()?;
        let shared_bytes_max = calls::shared_bytes_max(&home)?;
        let no_image = TransportError::NoImage {
            of: "the p2p transport",
            device: home.device,
            capability: sequencer.capability,
        };
        let name = CString::new(P2P_KERNEL).unwrap_or_default();
        let take =
            |module: Module| module.function(&name, shared_bytes_max).map(|function| (module, function));
        let loaded = load_first(home.driver, images, "p2p transport kernel", take)?;
        let (image, (module, function)) = loaded.ok_or(no_image)?;
        drop(entered);
        ::log::debug!(
            "device {}: p2p transport kernel {}, {shared_bytes_max} bytes shared",
            home.device,
            image.name
        );
        let bulk = match image.has_bulk_copies {
            true => BulkSend::Copies { stages: RECOMMENDED_STAGES },
            false => BulkSend::OrdinaryStores,
        };
        let (module, lists) = (Some(module), Slabs::default());
        Ok(Arc::new(P2pDeviceResources { module, function, bulk, shared_bytes_max, lists, sequencer }))
    }
}

impl Drop for P2pDeviceResources {
    fn drop(&mut self) {
        let home = self.sequencer.home;
        if let Err(failure) = home.give_back((self.module.take(), std::mem::take(&mut self.lists))) {
            ::log::warn!("the p2p transport's kernel and lists of device {} stay: {failure}", home.device);
        }
    }
}
