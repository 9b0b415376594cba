//! Accesses of a guest to registers.

use arbitrary::Arbitrary;

/// The bytes of an access: 1, 2, 4 or 8.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Data {
    width: u8,
    bytes: Bytes,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Bytes {
    Small(u8),
    Bit(u8),
    Ones,
    Any([u8; 8]),
}

impl Data {
    /// Number of bytes, at most `widest`.
    #[must_use]
    pub fn len(self, widest: usize) -> usize {
        (1 << (self.width % 4)).min(widest)
    }

    /// The bytes that are written, at most `widest`.
    #[must_use]
    pub fn bytes(self, widest: usize) -> Vec<u8> {
        let bytes = match self.bytes {
            Bytes::Small(byte) => u64::from(byte).to_le_bytes(),
            Bytes::Bit(bit) => (1_u64 << (bit % 64)).to_le_bytes(),
            Bytes::Ones => [0xff; 8],
            Bytes::Any(bytes) => bytes,
        };
        bytes[..self.len(widest)].to_vec()
    }
}
