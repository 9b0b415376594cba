//! Random access to the disk, with a read budget.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::rc::Rc;
use std::sync::Arc;

/// Random-access reads of a disk.
///
/// Implemented by the disk backend. The disk must not change while it is read.
pub trait ReadAt: Send + Sync {
    /// Fills `buf` from byte `offset` of the disk.
    ///
    /// # Errors
    /// Any I/O error; [`io::ErrorKind::UnexpectedEof`] when the range passes the end.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Size of the disk in bytes.
    fn size(&self) -> u64;
}

impl ReadAt for Vec<u8> {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let bytes = usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..start.checked_add(buf.len())?))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.copy_from_slice(bytes);
        Ok(())
    }

    fn size(&self) -> u64 {
        self.len() as u64
    }
}

impl ReadAt for std::fs::File {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, buf, offset)
    }

    fn size(&self) -> u64 {
        // Seeking to the end also gives the size of a block device.
        (&mut &*self).seek(SeekFrom::End(0)).unwrap_or(0)
    }
}

/// Cost of a request in addition to its bytes, so that tiny reads exhaust the budget too.
const REQUEST_COST: u64 = 512;

/// Remaining read budget. It stops a reader that a hostile filesystem makes read in a loop.
pub(crate) struct Budget(Cell<u64>);

impl Budget {
    /// A budget of `bytes`, where each request costs 512 bytes and what it makes the disk read.
    pub(crate) fn new(bytes: u64) -> Rc<Self> {
        Rc::new(Self(Cell::new(bytes)))
    }

    fn spend(&self, bytes: usize) -> io::Result<()> {
        let left = self
            .0
            .get()
            .checked_sub(REQUEST_COST.saturating_add(bytes as u64));
        // An overrun empties the budget, so that no smaller read succeeds afterwards.
        self.0.set(left.unwrap_or(0));
        left.map(|_| ())
            .ok_or_else(|| io::Error::other("the filesystem exhausts the read budget"))
    }
}

/// A contiguous range of the disk: the whole of it, or a partition.
#[derive(Clone)]
pub(crate) struct Extent {
    disk: Arc<dyn ReadAt>,
    start: u64,
    len: u64,
    budget: Rc<Budget>,
}

impl fmt::Debug for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extent")
            .field("start", &self.start)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl Extent {
    /// The whole of `disk`.
    pub(crate) fn whole(disk: Arc<dyn ReadAt>, budget: Rc<Budget>) -> Self {
        let len = disk.size();
        Self {
            disk,
            start: 0,
            len,
            budget,
        }
    }

    /// `len` bytes from `start` of this extent, or nothing if they are not all inside it.
    pub(crate) fn slice(&self, start: u64, len: u64) -> Option<Self> {
        if start.checked_add(len)? > self.len {
            return None;
        }
        let start = self.start.checked_add(start)?;
        Some(Self {
            start,
            len,
            ..self.clone()
        })
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// First byte on the disk.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// Fills `buf` from byte `offset` of the extent.
    pub(crate) fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.budget.spend(buf.len())?;
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let at = self
            .start
            .checked_add(offset)
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        self.disk.read_at(at, buf)
    }

    /// The `N` bytes at `offset`, or nothing if they cannot be read.
    pub(crate) fn bytes<const N: usize>(&self, offset: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.read_at(offset, &mut bytes).ok().map(|()| bytes)
    }
}

/// Size and alignment of a cached window in bytes.
const WINDOW: u64 = 64 << 10;
/// Windows kept: FAT or inode table, directory, extent tree, data.
const WINDOWS: usize = 4;

/// An extent behind a few read-ahead windows, for readers that ask for one sector or one entry at a time.
pub(crate) struct Cached {
    extent: Extent,
    /// Most recently used first.
    windows: RefCell<Vec<(u64, Vec<u8>)>>,
}

impl Cached {
    pub(crate) fn new(extent: Extent) -> Self {
        Self {
            extent,
            windows: RefCell::new(Vec::with_capacity(WINDOWS)),
        }
    }

    /// Fills `buf` from byte `offset` of the extent.
    pub(crate) fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if buf.len() as u64 >= WINDOW {
            return self.extent.read_at(offset, buf);
        }
        // What is in a window costs no read.
        self.extent.budget.spend(0)?;
        let mut windows = self.windows.borrow_mut();
        let (mut offset, mut buf) = (offset, buf);
        while !buf.is_empty() {
            let base = offset - offset % WINDOW;
            let window = self.window(&mut windows, base)?;
            let skip = (offset - base) as usize;
            let bytes = window.get(skip..).filter(|b| !b.is_empty());
            let bytes = bytes.ok_or(io::ErrorKind::UnexpectedEof)?;
            let n = bytes.len().min(buf.len());
            let (head, rest) = buf.split_at_mut(n);
            head.copy_from_slice(&bytes[..n]);
            buf = rest;
            offset += n as u64;
        }
        Ok(())
    }

    fn window<'a>(&self, windows: &'a mut Vec<(u64, Vec<u8>)>, base: u64) -> io::Result<&'a [u8]> {
        match windows.iter().position(|(at, _)| *at == base) {
            Some(i) => windows[..=i].rotate_right(1),
            None => {
                let left = self
                    .extent
                    .len()
                    .checked_sub(base)
                    .ok_or(io::ErrorKind::UnexpectedEof)?;
                let mut bytes = if windows.len() < WINDOWS {
                    Vec::new()
                } else {
                    windows.pop().map(|(_, bytes)| bytes).unwrap_or_default()
                };
                bytes.resize(left.min(WINDOW) as usize, 0);
                self.extent.read_at(base, &mut bytes)?;
                windows.insert(0, (base, bytes));
            }
        }
        Ok(&windows[0].1)
    }
}

/// The standard library's stream traits over [`Cached`]; writing always fails.
pub(crate) struct Cursor {
    source: Cached,
    position: u64,
}

impl Cursor {
    pub(crate) fn new(extent: Extent) -> Self {
        Self {
            source: Cached::new(extent),
            position: 0,
        }
    }
}

impl Read for Cursor {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = self.source.extent.len().saturating_sub(self.position);
        let n = left.min(buf.len() as u64) as usize;
        self.source.read_at(self.position, &mut buf[..n])?;
        self.position += n as u64;
        Ok(n)
    }
}

impl Seek for Cursor {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.source.extent.len().checked_add_signed(by),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

impl Write for Cursor {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(len: usize, budget: u64) -> Extent {
        let disk: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        Extent::whole(Arc::new(disk), Budget::new(budget))
    }

    #[test]
    fn a_slice_stays_inside_and_reads_its_own_bytes() {
        let whole = extent(1000, 1 << 20);
        let part = whole.slice(100, 50).unwrap();
        assert_eq!(part.bytes::<2>(0), Some([100, 101]));
        assert_eq!(part.bytes::<2>(49), None);
        assert!(part.slice(40, 11).is_none());
        assert!(part.slice(u64::MAX, 1).is_none());
        assert!(part.read_at(u64::MAX, &mut [0; 2]).is_err());
    }

    #[test]
    fn cached_reads_equal_direct_ones() {
        let whole = extent(300_000, 1 << 30);
        let cached = Cached::new(whole.clone());
        for (offset, len) in [
            (0, 10),
            (65_530, 20),
            (299_990, 10),
            (131_000, 65_000),
            (5, 65_536),
            (196_607, 2),
        ] {
            let (mut a, mut b) = (vec![0; len], vec![0; len]);
            whole.read_at(offset, &mut a).unwrap();
            cached.read_at(offset, &mut b).unwrap();
            assert_eq!(a, b, "{len} bytes at {offset}");
        }
        assert!(cached.read_at(299_990, &mut [0; 11]).is_err());
        assert!(cached.read_at(400_000, &mut [0; 1]).is_err());
        assert!(cached.read_at(u64::MAX, &mut [0; 2]).is_err());
    }

    /// Number of single bytes that can be read at these offsets, one after the other.
    fn reads(budget: u64, offsets: impl Iterator<Item = u64>) -> usize {
        let cached = Cached::new(extent(8 * WINDOW as usize, budget));
        offsets
            .take_while(|offset| cached.read_at(*offset, &mut [0]).is_ok())
            .count()
    }

    #[test]
    fn an_exhausted_budget_stops_even_cached_reads() {
        let window = REQUEST_COST + WINDOW;
        assert_eq!(reads(window + 10 * REQUEST_COST, std::iter::repeat(0)), 10);
    }

    #[test]
    fn a_read_costs_the_window_that_the_disk_reads_for_it() {
        let scattered = (0..).map(|n| n % 8 * WINDOW);
        assert_eq!(reads(10 * (2 * REQUEST_COST + WINDOW), scattered), 10);
    }
}
