//! `/proc/self/pagemap`: which pages this process has touched (Documentation/admin-guide/mm/pagemap.rst).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

/// Bytes of a page.
pub(super) const PAGE: usize = 4096;
/// Bytes of an entry.
const ENTRY: usize = 8;
/// Bits of an entry: the page is in memory, or swapped out.
const TOUCHED: u64 = 1 << 63 | 1 << 62;

/// The page map of this process.
#[derive(Debug)]
pub struct PageMap(File);

impl PageMap {
    /// Opens the page map, while the process still has `/proc`.
    ///
    /// # Errors
    /// There is no `/proc`, or the process may not read its page map.
    pub fn open() -> io::Result<Self> {
        // With CAP_SYS_ADMIN at this moment the file would have the host's page frame numbers, which help attacks.
        let sets = capabilities(None)?;
        let mut without = sets;
        without.effective -= CapabilitySet::SYS_ADMIN;
        set_capabilities(None, without)?;
        let file = File::open("/proc/self/pagemap");
        set_capabilities(None, sets)?;
        file.map(Self)
    }

    /// Sets `touched[i]` to true if page `i` from `address` on has memory of its own. A page of anonymous memory
    /// without is zero. A page of a file may be anything. `address` is a multiple of [`PAGE`].
    pub(super) fn mark(&self, address: usize, touched: &mut [bool]) -> io::Result<()> {
        let mut entries = vec![0; touched.len() * ENTRY];
        self.0
            .read_exact_at(&mut entries, (address / PAGE * ENTRY) as u64)?;
        for (touched, entry) in touched.iter_mut().zip(entries.as_chunks::<ENTRY>().0) {
            *touched |= u64::from_ne_bytes(*entry) & TOUCHED != 0;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ram::mapping;

    #[test]
    fn only_touched_pages_are_marked() {
        let mapping = mapping::anonymous(8 << 20).unwrap();
        // SAFETY: inside the mapping, whose memory nothing else uses.
        unsafe { mapping.as_ptr().add(5 << 20).write_volatile(1) };
        let mut touched = vec![false; (8 << 20) / PAGE];
        let pagemap = PageMap::open().unwrap();
        pagemap.mark(mapping.as_ptr() as usize, &mut touched).unwrap();
        assert!(touched[(5 << 20) / PAGE]);
        // A huge page may have been used.
        assert!(touched.iter().filter(|touched| **touched).count() <= 512);
    }

    #[test]
    fn it_has_no_page_frame_numbers() {
        let on_stack = 1_u64;
        let address = &raw const on_stack as usize;
        let mut entry = [0; ENTRY];
        let PageMap(file) = PageMap::open().unwrap();
        file.read_exact_at(&mut entry, (address / PAGE * ENTRY) as u64)
            .unwrap();
        let frame = u64::from_ne_bytes(entry) & ((1 << 55) - 1);
        assert_eq!(frame, 0);
        assert_ne!(u64::from_ne_bytes(entry) & TOUCHED, 0);
    }
}
