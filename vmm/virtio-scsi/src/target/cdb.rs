//! Command descriptor blocks (SPC-4, section 4.2.5).

use super::sense::Sense;

/// Length of the longest CDB that is served.
pub(crate) const MAX: usize = 16;

/// A CDB of its command's length. Methods name a field by its first byte; numbers are big-endian.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cdb {
    bytes: [u8; MAX],
    len: usize,
}

impl Cdb {
    /// The first `len` bytes as a CDB; `len` is from 6 to [`MAX`].
    pub fn of_len(bytes: &[u8], len: usize) -> Result<Self, Sense> {
        let Some(bytes) = bytes.get(..len) else {
            return Err(Sense::invalid_cdb(bytes.len() as u16, None));
        };
        let mut cdb = [0; MAX];
        cdb[..len].copy_from_slice(bytes);
        // CONTROL is the last byte. NACA asks for auto contingent allegiance, which is not supported.
        if cdb[len - 1] & 0x04 != 0 {
            return Err(Sense::invalid_cdb(len as u16 - 1, Some(2)));
        }
        Ok(Self { bytes: cdb, len })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// The number in `len` bytes from `at` on; at most 8 bytes.
    pub fn number(&self, at: usize, len: usize) -> u64 {
        let bytes = self.bytes[at..][..len].iter();
        bytes.fold(0, |number, &byte| number << 8 | u64::from(byte))
    }

    pub fn set_number(&mut self, at: usize, len: usize, number: u64) {
        self.bytes[at..][..len].copy_from_slice(&number.to_be_bytes()[8 - len..]);
    }

    pub fn opcode(&self) -> u8 {
        self.bytes[0]
    }

    pub fn u8(&self, at: usize) -> u8 {
        self.bytes[at]
    }

    pub fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    pub fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(std::array::from_fn(|i| self.bytes[at + i]))
    }

    pub fn u64(&self, at: usize) -> u64 {
        u64::from_be_bytes(std::array::from_fn(|i| self.bytes[at + i]))
    }

    pub fn bit(&self, at: usize, bit: u8) -> bool {
        self.bytes[at] >> bit & 1 != 0
    }

    /// Fails with INVALID FIELD IN CDB if the bit is set.
    pub fn require_clear(&self, at: u8, bit: u8) -> Result<(), Sense> {
        if self.bit(at.into(), bit) {
            Err(Sense::invalid_cdb(at.into(), Some(bit)))
        } else {
            Ok(())
        }
    }
}
