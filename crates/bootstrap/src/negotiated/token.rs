//! A token: sixteen bytes that name or prove something.

/// 128 bits. Random where the token proves something, a name elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub [u8; 16]);

impl Token {
    /// The first half as a number, which is as random as the token.
    pub fn number(self) -> u64 {
        u128::from_le_bytes(self.0) as u64
    }

    /// The second half, likewise.
    pub fn other_number(self) -> u64 {
        (u128::from_le_bytes(self.0) >> 64) as u64
    }
}

impl std::fmt::Debug for Token {
    /// The first four bytes: enough to follow a token in a log, not enough to use it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:08x}..", u32::from_be_bytes([self.0[0], self.0[1], self.0[2], self.0[3]]))
    }
}
