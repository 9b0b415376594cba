//! Command descriptor blocks (SPC-4, section 4).

use super::opcode::Op;
use super::sense::Sense;
use super::task::{Fault, Work};

/// Longest CDB of the commands served.
pub(crate) const MAX: usize = 16;

/// A CDB that is as long as its command wants it. Fields are named by their first byte; numbers are big-endian.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cdb([u8; MAX]);

impl Cdb {
    /// `bytes` as a CDB of `op`, whose opcode they have.
    pub fn new(bytes: &[u8], op: &Op) -> Result<Self, Sense> {
        let len = op.usage.len();
        let Some(bytes) = bytes.get(..len) else {
            return Err(Sense::invalid_cdb(bytes.len() as u16, None));
        };
        let mut cdb = [0; MAX];
        cdb[..len].copy_from_slice(bytes);
        // CONTROL is the last byte. NACA asks for an auto contingent allegiance, which there is not.
        if cdb[len - 1] & 0x04 != 0 {
            return Err(Sense::invalid_cdb(len as u16 - 1, Some(2)));
        }
        Ok(Self(cdb))
    }

    pub fn opcode(&self) -> u8 {
        self.0[0]
    }

    pub fn u8(&self, at: usize) -> u8 {
        self.0[at]
    }

    pub fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes([self.0[at], self.0[at + 1]])
    }

    pub fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(std::array::from_fn(|i| self.0[at + i]))
    }

    pub fn u64(&self, at: usize) -> u64 {
        u64::from_be_bytes(std::array::from_fn(|i| self.0[at + i]))
    }

    pub fn bit(&self, at: usize, bit: u8) -> bool {
        self.0[at] >> bit & 1 != 0
    }

    /// Refuses a bit that is set.
    pub fn clear(&self, at: u8, bit: u8) -> Result<(), Sense> {
        if self.bit(at.into(), bit) {
            Err(Sense::invalid_cdb(at.into(), Some(bit)))
        } else {
            Ok(())
        }
    }
}

/// An answer of `data`, as much of it as the ALLOCATION LENGTH asks for.
pub(crate) fn answer(mut data: Vec<u8>, allocation: impl Into<u64>) -> Result<Work, Fault> {
    data.truncate(usize::try_from(allocation.into()).unwrap_or(usize::MAX));
    Ok(Work::Data(data))
}
