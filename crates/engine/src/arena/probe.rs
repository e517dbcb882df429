//! Loads and stores through a mapping: that a call to map succeeded does not prove that memory is there.

use crate::arena::Arena;
use crate::arena::refusal::Refusal;
use crate::gpu::Address;

impl Arena {
    /// Loads a word by this arena's device: of a slice of its own, or of a peer's in our mapping. Waits for the stream
    /// that zeroes slices, and for no other.
    pub fn load(&self, address: Address) -> Result<u32, Refusal> {
        self.refuse_child()?;
        let _entered = self.home.enter()?;
        Ok(self.stream.load(address)?)
    }

    /// Stores a word by this arena's device, and loads it back, so that it is there when this returns.
    pub fn store(&self, address: Address, word: u32) -> Result<(), Refusal> {
        self.refuse_child()?;
        let _entered = self.home.enter()?;
        self.stream.store(address, word)?;
        match self.stream.load(address)? {
            loaded if loaded == word => Ok(()),
            loaded => Err(Refusal::Deaf { address, expected: word, loaded }),
        }
    }

    /// What birth demands of every mapping: the word that its owner stored is there, and ours can be stored beside it.
    pub fn probe(&self, read: Address, expected: u32, write: Address, word: u32) -> Result<(), Refusal> {
        let loaded = self.load(read).map_err(Refusal::told)?;
        if loaded != expected {
            return Err(Refusal::Deaf { address: read, expected, loaded }.told());
        }
        self.store(write, word).map_err(Refusal::told)
    }
}
