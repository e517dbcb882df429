//! Reads and writes fixed binary forms: little-endian numbers and counted bytes, each with its limit in bytes. Bytes
//! that do not fit exactly are no message.

use super::token::Token;

/// Appends values to a buffer.
#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// All bytes written. The writer is empty then.
    pub fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0)
    }

    /// One byte.
    pub fn u8(&mut self, value: u8) -> &mut Writer {
        self.raw(&[value])
    }

    /// Two bytes.
    pub fn u16(&mut self, value: u16) -> &mut Writer {
        self.raw(&value.to_le_bytes())
    }

    /// Four bytes.
    pub fn u32(&mut self, value: u32) -> &mut Writer {
        self.raw(&value.to_le_bytes())
    }

    /// Eight bytes.
    pub fn u64(&mut self, value: u64) -> &mut Writer {
        self.raw(&value.to_le_bytes())
    }

    /// Sixteen bytes.
    pub fn token(&mut self, token: Token) -> &mut Writer {
        self.raw(&token.0)
    }

    /// Bytes without a count: the reader knows how many.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Writer {
        self.0.extend_from_slice(bytes);
        self
    }

    /// A count of four bytes, then at most `limit` bytes. The rest is cut off.
    pub fn counted(&mut self, bytes: &[u8], limit: usize) -> &mut Writer {
        let bytes = &bytes[..bytes.len().min(limit)];
        self.u32(bytes.len() as u32).raw(bytes)
    }
}

/// Reads values from the front. None where bytes are missing.
#[derive(Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads these bytes.
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader(bytes)
    }

    /// What `read` reads from these bytes, if it reads all of them.
    pub fn whole<T>(bytes: &'a [u8], read: impl FnOnce(&mut Reader<'a>) -> Option<T>) -> Option<T> {
        let mut reader = Reader(bytes);
        let value = read(&mut reader)?;
        reader.0.is_empty().then_some(value)
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    /// As many bytes as the caller's array holds.
    pub fn raw<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    /// One byte.
    pub fn u8(&mut self) -> Option<u8> {
        self.raw::<1>().map(|[byte]| byte)
    }

    /// Two bytes.
    pub fn u16(&mut self) -> Option<u16> {
        self.raw().map(u16::from_le_bytes)
    }

    /// Four bytes.
    pub fn u32(&mut self) -> Option<u32> {
        self.raw().map(u32::from_le_bytes)
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> Option<u64> {
        self.raw().map(u64::from_le_bytes)
    }

    /// Sixteen bytes.
    pub fn token(&mut self) -> Option<Token> {
        self.raw().map(Token)
    }

    /// Counted bytes. None if they are more than `limit`.
    pub fn counted(&mut self, limit: usize) -> Option<&'a [u8]> {
        let count = self.u32()? as usize;
        if count > limit { None } else { self.take(count) }
    }

    /// `Some` if all bytes have been read.
    pub fn finish(self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

/// FNV-1a over 64 bits: finds accidents, not attacks.
pub fn checksum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}
