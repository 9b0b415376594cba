//! A log of guest pages, in the form in which vhost writes it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a page.
const PAGE: u64 = 4096;
/// Pages of a word.
const BITS: u64 = u64::BITS as u64;

/// One bit for each page of 4 KiB of guest physical memory, from address 0: bit `p % 8` of byte `p / 8` is page `p`
/// (`VHOST_SET_LOG_BASE` in linux/vhost.h). The kernel sets bits while it has the address.
#[derive(Debug)]
pub struct PageLog(Box<[AtomicU64]>);

impl PageLog {
    /// A log of the pages below the guest physical address `end`, none of which is set.
    pub fn new(end: u64) -> Self {
        let words = end.div_ceil(PAGE * BITS);
        Self((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    /// The address of its first byte. The log does not move.
    pub fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    /// Adds the pages from the guest physical address `start` on to `pages`, 64 to a word, and clears them. `start` is a
    /// multiple of 256 KiB. Pages beyond the end of the log are not set.
    pub fn take(&self, start: u64, pages: &mut [u64]) {
        debug_assert!(start.is_multiple_of(PAGE * BITS));
        let first = usize::try_from(start / (PAGE * BITS)).unwrap_or(usize::MAX);
        let log = self.0.get(first..).unwrap_or_default();
        for (pages, logged) in pages.iter_mut().zip(log) {
            // Most words are clear, and a read leaves their cache lines as they are.
            if logged.load(Ordering::Relaxed) != 0 {
                *pages |= u64::from_le(logged.swap(0, Ordering::AcqRel));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sets the bit of a page as the kernel does.
    fn set(log: &PageLog, page: usize) {
        let byte = log.address() as usize + page / 8;
        // SAFETY: the byte is in the log, which has no other user.
        unsafe { *(byte as *mut u8) |= 1 << (page % 8) };
    }

    #[test]
    fn pages_are_taken_once() {
        let log = PageLog::new(4 << 20);
        for page in [0, 63, 64, 130, 1023] {
            set(&log, page);
        }
        let mut pages = [1 << 5; 2];
        log.take(0, &mut pages);
        assert_eq!(pages, [1 << 63 | 1 << 5 | 1, 1 << 5 | 1]);
        let mut pages = [0; 20];
        log.take(512 << 10, &mut pages);
        let mut expected = [0; 20];
        (expected[0], expected[13]) = (1 << 2, 1 << 63);
        assert_eq!(pages, expected);
        let mut again = [0; 16];
        log.take(0, &mut again);
        assert_eq!(again, [0; 16]);
        log.take(1 << 50, &mut again);
    }
}
