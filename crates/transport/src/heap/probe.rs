//! Tests mappings by loads and stores: a successful call to map does not prove that memory is there.

use std::time::Duration;

use crate::heap::Heap;
use crate::heap::error::HeapError;
use windlass_base::gpu::Address;
use windlass_base::gpu::stream::{Event, Ordering};
use windlass_base::thread;

/// A device that has done none of our work for so long never will.
const AT_MOST: Duration = Duration::from_secs(300);
const LOOK_EVERY: Duration = Duration::from_micros(50);

impl Heap {
    /// Loads a word by this symmetric heap's device, from a region of its own or from a peer's in our mapping. Waits for the stream that zeroes
    /// regions, and for no other.
    pub fn load(&self, address: Address) -> Result<u32, HeapError> {
        let _entered = self.enter()?;
        self.load_after_stream(address)
    }

    /// Stores a word by this symmetric heap's device, and loads it back, so that it has arrived when this returns.
    pub fn store(&self, address: Address, word: u32) -> Result<(), HeapError> {
        let _entered = self.enter()?;
        self.stream.store(address, word)?;
        match self.load_after_stream(address)? {
            loaded if loaded == word => Ok(()),
            loaded => Err(HeapError::Deaf { address, expected: word, loaded }),
        }
    }

    /// Loads once the stream is empty. The copy to the host waits inside the driver, perhaps with locks of the driver held. A fill before it may
    /// stand behind long kernels, and these behind launches that need the same locks.
    fn load_after_stream(&self, address: Address) -> Result<u32, HeapError> {
        let done = Event::new(self.home.driver)?;
        done.record(self.stream.handle, Ordering::Inside)?;
        let is_done = || done.is_done().map(|is_done| is_done.then_some(())).transpose();
        let late = HeapError::Late { device: self.home.device, waited_ms: AT_MOST.as_millis() as u64 };
        thread::look_until(AT_MOST, LOOK_EVERY, is_done).ok_or(late)??;
        Ok(self.stream.load(address)?)
    }

    /// Tests a mapping at init: the word that its owner stored must be at `read`, and a word stored at `write` must arrive.
    pub fn probe(&self, read: Address, expected: u32, write: Address, word: u32) -> Result<(), HeapError> {
        let loaded = self.load(read).map_err(HeapError::told)?;
        if loaded != expected {
            return Err(HeapError::Deaf { address: read, expected, loaded }.told());
        }
        self.store(write, word).map_err(HeapError::told)
    }
}
