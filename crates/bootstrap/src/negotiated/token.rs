//! Sixteen bytes by which something is known.

/// 128 bits: random where they prove something, an identity elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub [u8; 16]);

impl Token {
    /// Half of it as a number, which is as random.
    pub fn number(self) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.0[..8]);
        u64::from_le_bytes(bytes)
    }

    /// The other half, likewise.
    pub fn other_number(self) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.0[8..]);
        u64::from_le_bytes(bytes)
    }
}

impl std::fmt::Debug for Token {
    /// The first four bytes: enough to follow one in a log, not enough to use it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:08x}..", u32::from_be_bytes([self.0[0], self.0[1], self.0[2], self.0[3]]))
    }
}
