//! Copies guest memory to a file with holes, and back.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use husk_devices::GuestMem;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};

use super::dirty::DirtyPages;
use super::gate::CopyGate;
use super::pagemap::{PAGE, PageMap};

/// Bytes that a thread copies at a time.
const CHUNK: u64 = 2 << 20;
/// Granularity of holes, in bytes.
const BLOCK: usize = 16 << 10;

/// A chunk of guest memory, and its place in the file.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    address: GuestAddress,
    /// In the file.
    offset: u64,
    len: usize,
    /// Index of its region, and where it is in it.
    region: usize,
    at: u64,
}

/// The chunks of guest memory. In the file, the regions follow each other in the order of their addresses.
fn chunks(memory: &GuestMem) -> Vec<Chunk> {
    let (mut chunks, mut offset) = (Vec::new(), 0);
    for (index, region) in memory.memory().iter().enumerate() {
        let (start, size) = (region.start_addr().0, region.len());
        for at in (0..size).step_by(CHUNK as usize) {
            chunks.push(Chunk {
                address: GuestAddress(start + at),
                offset: offset + at,
                len: CHUNK.min(size - at) as usize,
                region: index,
                at,
            });
        }
        offset += size;
    }
    chunks
}

/// The pages that are copied.
#[derive(Debug)]
enum Pages {
    /// Those that may not be zero, to a file of zeros. Without the page map, all of memory is read.
    NotZero(Option<Arc<PageMap>>),
    /// Only these, to a file that an earlier copy has filled.
    Written(DirtyPages),
}

/// A copy of guest memory to a file. Any number of threads may work on it at the same time.
///
/// A page that the guest or a device writes meanwhile may have its old or its new content in the file, or parts of both.
#[derive(Debug)]
pub struct MemoryCopy {
    memory: GuestMem,
    file: File,
    pages: Pages,
    gate: Arc<CopyGate>,
    chunks: Vec<Chunk>,
    next: AtomicU64,
    bytes: u64,
}

impl MemoryCopy {
    /// Prepares a copy to an empty file, which gets its size. With the page map of this process, memory that nobody
    /// touched is not read.
    ///
    /// # Errors
    /// The file system has no files of this size.
    pub fn new(memory: GuestMem, file: File, pagemap: Option<Arc<PageMap>>) -> io::Result<Self> {
        let chunks = chunks(&memory);
        let bytes = chunks.iter().map(|chunk| chunk.len as u64).sum();
        file.set_len(bytes)?;
        Ok(Self {
            memory,
            file,
            pages: Pages::NotZero(pagemap),
            gate: Arc::default(),
            chunks,
            next: AtomicU64::new(0),
            bytes,
        })
    }

    /// Prepares a second copy to a file that has an earlier one: of the pages in `written` only.
    ///
    /// # Errors
    /// The file is not of an earlier copy of this memory.
    pub fn incremental(memory: GuestMem, file: File, written: DirtyPages) -> io::Result<Self> {
        let chunks = chunks(&memory);
        let expected: u64 = chunks.iter().map(|chunk| chunk.len as u64).sum();
        let size = file.metadata()?.len();
        if size != expected {
            return Err(io::Error::other(format!(
                "has {size} bytes, but guest memory has {expected}"
            )));
        }
        Ok(Self {
            memory,
            file,
            bytes: written.bytes(),
            pages: Pages::Written(written),
            gate: Arc::default(),
            chunks,
            next: AtomicU64::new(0),
        })
    }

    /// The same copy, which ends when `gate` is closed.
    #[must_use]
    pub fn with_gate(self, gate: Arc<CopyGate>) -> Self {
        Self { gate, ..self }
    }

    /// Bytes to copy: guest memory, or the pages that were written.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Copies chunks until no chunk is left, the gate is closed, or `go_on` returns false. It is called with the bytes
    /// of each chunk that was copied.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn copy_pages(&self, go_on: impl Fn(u64) -> bool) -> io::Result<()> {
        let memory = self.memory.memory();
        let mut buffer = vec![0; CHUNK as usize];
        loop {
            let next = usize::try_from(self.next.fetch_add(1, Ordering::Relaxed));
            let Some(chunk) = next.ok().and_then(|next| self.chunks.get(next)) else {
                return Ok(());
            };
            let (pages, written) = match &self.pages {
                Pages::NotZero(pagemap) => (self.touched(chunk, pagemap.as_deref())?, false),
                Pages::Written(written) => {
                    let pages = chunk.len.div_ceil(PAGE);
                    (written.of(chunk.region, chunk.at, pages), true)
                }
            };
            let mut copied = 0;
            for part in runs(&pages) {
                let bytes = &mut buffer[..part.len().min(chunk.len - part.start)];
                let address = GuestAddress(chunk.address.0 + part.start as u64);
                match self.gate.enter() {
                    Some(_reading) => memory.read_slice(bytes, address).map_err(io::Error::other)?,
                    None => return Ok(()),
                }
                let zeros = if written { Zeros::Clear } else { Zeros::Skip };
                write_sparse(&self.file, bytes, chunk.offset + part.start as u64, zeros)?;
                copied += bytes.len();
            }
            if !go_on(if written { copied } else { chunk.len } as u64) {
                return Ok(());
            }
        }
    }

    /// The pages of a chunk that may not be zero.
    fn touched(&self, chunk: &Chunk, pagemap: Option<&PageMap>) -> io::Result<Vec<bool>> {
        let pages = chunk.len.div_ceil(PAGE);
        let all = || Ok(vec![true; pages]);
        let memory = self.memory.memory();
        let (Some(pagemap), Some((region, at))) = (pagemap, memory.to_region_addr(chunk.address)) else {
            return all();
        };
        // Reserved pages do not all show.
        if region.is_hugetlbfs() == Some(true) {
            return all();
        }
        let mut touched = vec![false; pages];
        pagemap.mark(region.as_ptr() as usize + at.0 as usize, &mut touched)?;
        if let Some(file) = region.file_offset() {
            mark_data(file, at.0, &mut touched)?;
        }
        Ok(touched)
    }
}

/// Runs of pages that are marked, as offsets in bytes.
fn runs(pages: &[bool]) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    pages.chunk_by(|a, b| a == b).filter_map(move |run| {
        let start = at;
        at += run.len() * PAGE;
        run[0].then_some(start..at)
    })
}

/// Marks the pages that have data in their file. `pages` starts at `offset` of it.
fn mark_data(file: &FileOffset, offset: u64, pages: &mut [bool]) -> io::Result<()> {
    let (start, len) = (file.start() + offset, (pages.len() * PAGE) as u64);
    let mut at = start;
    while let Some(data) = next_data(file.file(), at)?.filter(|data| *data < start + len) {
        at = seek(file.file(), SeekFrom::Hole(data))?.min(start + len);
        pages[(data - start) as usize / PAGE..((at - start) as usize).div_ceil(PAGE)].fill(true);
    }
    Ok(())
}

fn is_zero(block: &[u8]) -> bool {
    // Without a branch for each byte, so that the compiler uses wide registers.
    let mut lines = block.chunks(256);
    lines.all(|line| line.iter().fold(0, |all, byte| all | byte) == 0)
}

/// How [`write_sparse`] treats blocks of zeros.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Zeros {
    /// Nothing: the file has only zeros.
    Skip,
    /// They become holes.
    Clear,
}

/// Writes `bytes` at `offset` of a file, except for blocks of zeros.
fn write_sparse(file: &File, bytes: &[u8], offset: u64, zeros: Zeros) -> io::Result<()> {
    let blocks: Vec<bool> = bytes.chunks(BLOCK).map(is_zero).collect();
    let mut start = 0;
    for run in blocks.chunk_by(|a, b| a == b) {
        let end = (start + run.len() * BLOCK).min(bytes.len());
        let (part, at) = (&bytes[start..end], offset + start as u64);
        match (run[0], zeros) {
            (false, _) => file.write_all_at(part, at)?,
            (true, Zeros::Skip) => {}
            (true, Zeros::Clear) => clear(file, at, part)?,
        }
        start = end;
    }
    Ok(())
}

/// Makes a hole in the place of `zeros`, or writes them where there are no holes.
fn clear(file: &File, offset: u64, zeros: &[u8]) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match fallocate(file, flags, offset, zeros.len() as u64) {
        Err(Errno::OPNOTSUPP) => file.write_all_at(zeros, offset),
        other => Ok(other?),
    }
}

/// Offset of the next data in a file from `offset`, `None` if only a hole follows.
fn next_data(file: &File, offset: u64) -> io::Result<Option<u64>> {
    match seek(file, SeekFrom::Data(offset)) {
        Ok(at) => Ok(Some(at)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Fills guest memory, which is zero, from a file that [`MemoryCopy`] wrote.
pub(super) fn fill(memory: &GuestMem, file: &File) -> io::Result<()> {
    let guard = memory.memory();
    let mut buffer = vec![0; CHUNK as usize];
    let mut data = Some(0);
    for chunk in chunks(memory) {
        let end = chunk.offset + chunk.len as u64;
        if data.is_some_and(|data| data < chunk.offset) {
            data = next_data(file, chunk.offset)?;
        }
        if data.is_none_or(|data| data >= end) {
            continue;
        }
        let bytes = &mut buffer[..chunk.len];
        file.read_exact_at(bytes, chunk.offset)?;
        guard
            .write_slice(bytes, chunk.address)
            .map_err(io::Error::other)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::layout::{HIGH_RAM, Layout};
    use crate::ram::{GuestRam, MemoryBacking, MemoryFile};

    const LOW: u64 = 7 << 20;

    fn layout() -> Layout {
        Layout {
            ram: vec![0..LOW, HIGH_RAM..HIGH_RAM + (3 << 20)],
            pci_mmio64: 1 << 40..1 << 41,
        }
    }

    fn ram() -> GuestRam {
        GuestRam::new(&layout(), MemoryBacking::Anonymous).unwrap()
    }

    /// Addresses with content: around the borders of blocks, chunks and regions.
    const MARKED: [u64; 6] = [0, 16 << 10, (2 << 20) - 1, 5 << 20, LOW - 1, HIGH_RAM + 4097];

    fn marked() -> GuestRam {
        marked_on(MemoryBacking::Anonymous)
    }

    fn marked_on(backing: MemoryBacking) -> GuestRam {
        let ram = GuestRam::new(&layout(), backing).unwrap();
        let memory = ram.memory().memory();
        for at in MARKED {
            memory.write_obj(0xa5_u8, GuestAddress(at)).unwrap();
        }
        ram
    }

    #[test]
    fn memory_goes_to_a_file_with_holes_and_back() {
        let old = marked();
        let file = tempfile::tempfile().unwrap();
        let copy = MemoryCopy::new(old.memory().clone(), file.try_clone().unwrap(), None).unwrap();
        let done = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    copy.copy_pages(|bytes| done.fetch_add(bytes, Ordering::Relaxed) < u64::MAX)
                        .unwrap()
                });
            }
        });
        assert_eq!(done.into_inner(), old.bytes());
        let metadata = file.metadata().unwrap();
        assert_eq!(metadata.len(), old.bytes());
        assert!(metadata.blocks() * 512 <= MARKED.len() as u64 * BLOCK as u64);

        let new = ram();
        fill(new.memory(), &file).unwrap();
        let (old, new) = (old.memory().memory(), new.memory().memory());
        for at in MARKED {
            assert_eq!(new.read_obj::<u8>(GuestAddress(at)).unwrap(), 0xa5, "{at:#x}");
            let beside = GuestAddress(at ^ 1);
            let bytes = [&old, &new].map(|memory| memory.read_obj::<u8>(beside).unwrap());
            assert_eq!(bytes, [0, 0]);
        }
    }

    fn saved(ram: &GuestRam, pagemap: Option<Arc<PageMap>>) -> File {
        let file = tempfile::tempfile().unwrap();
        let copy = MemoryCopy::new(ram.memory().clone(), file.try_clone().unwrap(), pagemap).unwrap();
        copy.copy_pages(|_| true).unwrap();
        file
    }

    fn content(file: &File) -> Vec<u8> {
        let mut content = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut content, 0).unwrap();
        content
    }

    /// Maps zero pages over a page, as the balloon does.
    fn drop_page(ram: &GuestRam, at: u64) {
        let page = ram.memory().memory().get_host_address(GuestAddress(at)).unwrap();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: it replaces one page of guest memory, which nothing else uses.
        let mapped = unsafe { libc::mmap(page.cast(), PAGE, protection, flags, -1, 0) };
        assert_eq!(mapped, page.cast());
    }

    #[test]
    fn the_page_map_leaves_out_only_zeros() {
        let pagemap = || Some(Arc::new(PageMap::open().unwrap()));
        for backing in [MemoryBacking::Anonymous, MemoryBacking::Shared] {
            let old = marked_on(backing);
            let file = saved(&old, pagemap());
            assert_eq!(content(&file), content(&saved(&old, None)));

            // Some pages of the file were read, some written, some dropped, and most are untouched.
            let file = MemoryFile {
                name: "memory".into(),
                file: Arc::new(file),
            };
            let ram = GuestRam::new(&layout(), MemoryBacking::File(file)).unwrap();
            let memory = ram.memory().memory();
            memory.read_obj::<u8>(GuestAddress(MARKED[1])).unwrap();
            memory.write_obj(1_u8, GuestAddress(MARKED[2])).unwrap();
            memory.write_obj(2_u8, GuestAddress(4 << 20)).unwrap();
            drop_page(&ram, MARKED[3]);
            let with = content(&saved(&ram, pagemap()));
            assert!(with == content(&saved(&ram, None)));
            assert_eq!(
                with.iter().filter(|byte| **byte == 0xa5).count(),
                MARKED.len() - 2
            );
        }
    }

    #[test]
    fn a_copy_of_written_pages_replaces_their_content() {
        let ram = marked();
        let file = saved(&ram, None);
        let memory = ram.memory().memory();
        let layout = layout();
        let mut written = layout
            .ram
            .iter()
            .map(|range| vec![0_u64; ((range.end - range.start) as usize / PAGE).div_ceil(64)]);
        let mut written = [written.next().unwrap(), written.next().unwrap()];
        // One page changes, two become zero, and one is not among those written.
        memory.write_obj(1_u8, GuestAddress(3 * 4096)).unwrap();
        for at in [MARKED[3], MARKED[5]] {
            memory.write_obj(0_u8, GuestAddress(at)).unwrap();
        }
        memory.write_obj(7_u8, GuestAddress(6 << 20)).unwrap();
        let pages = [(0, 3), (0, MARKED[3] / 4096), (1, (MARKED[5] - HIGH_RAM) / 4096)];
        for (region, page) in pages {
            written[region][page as usize / 64] |= 1 << (page % 64);
        }
        let written = DirtyPages::of_regions(written.into());
        assert_eq!(written.bytes(), 3 * 4096);
        let before = file.metadata().unwrap().blocks();
        let incremental =
            MemoryCopy::incremental(ram.memory().clone(), file.try_clone().unwrap(), written).unwrap();
        let done = AtomicU64::new(0);
        incremental
            .copy_pages(|bytes| done.fetch_add(bytes, Ordering::Relaxed) < u64::MAX)
            .unwrap();
        assert_eq!((incremental.bytes(), done.into_inner()), (3 * 4096, 3 * 4096));
        memory.write_obj(0_u8, GuestAddress(6 << 20)).unwrap();
        assert!(content(&file) == content(&saved(&ram, None)));
        assert!(file.metadata().unwrap().blocks() < before);

        file.set_len(1 << 20).unwrap();
        let other = MemoryCopy::incremental(ram.memory().clone(), file, DirtyPages::of_regions(Vec::new()));
        assert!(other.unwrap_err().to_string().contains("has 1048576 bytes"));
    }

    #[test]
    fn nothing_is_read_once_the_gate_is_closed() {
        let file = tempfile::tempfile().unwrap();
        let gate = Arc::<CopyGate>::default();
        let copy = MemoryCopy::new(marked().memory().clone(), file.try_clone().unwrap(), None);
        let copy = copy.unwrap().with_gate(gate.clone());
        gate.close();
        copy.copy_pages(|_| true).unwrap();
        assert_eq!(next_data(&file, 0).unwrap(), None);
    }

    #[test]
    fn untouched_memory_is_not_read() {
        let ram = marked();
        let touched = || {
            let mut pages = vec![false; LOW as usize / PAGE];
            let memory = ram.memory().memory();
            let (region, _) = memory.to_region_addr(GuestAddress(0)).unwrap();
            let pagemap = PageMap::open().unwrap();
            pagemap.mark(region.as_ptr() as usize, &mut pages).unwrap();
            pages.iter().filter(|touched| **touched).count()
        };
        let before = touched();
        saved(&ram, Some(Arc::new(PageMap::open().unwrap())));
        assert_eq!(touched(), before);
        assert!(before < LOW as usize / PAGE, "huge pages hide all of it");
    }

    #[test]
    fn a_copy_that_is_to_stop_stops_after_the_piece() {
        let file = tempfile::tempfile().unwrap();
        let copy = MemoryCopy::new(marked().memory().clone(), file.try_clone().unwrap(), None).unwrap();
        copy.copy_pages(|_| false).unwrap();
        let written = next_data(&file, CHUNK).unwrap();
        assert_eq!(written, None, "only the first chunk");
        assert_eq!(next_data(&file, 0).unwrap(), Some(0));
    }
}
