//! Size, block sizes and alignment of a disk, from its image's descriptor.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use crate::{BlockSize, CacheMode, DiskOptions, SECTOR};

/// A disk's size, block sizes and capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes, a multiple of `logical_block`, not 0.
    pub size: u64,
    /// Smallest addressable unit in bytes: a power of two from 512 to 4096. Other requests are refused.
    pub logical_block: u32,
    /// Unit in bytes that the disk writes without reading first: a power of two, at least `logical_block`.
    pub physical_block: u32,
    /// Bytes from the start of the disk to the first whole physical block; less than `physical_block`.
    pub alignment_offset: u32,
    /// Smallest efficient transfer in bytes: at least `physical_block`.
    pub minimum_io: u32,
    /// Optimal transfer in bytes; 0 if unknown.
    pub optimal_io: u32,
    /// Unit in bytes in which a discard frees storage; smaller ranges are not freed.
    pub discard_granularity: u32,
    /// Maximum bytes to discard or zero in one request, which bounds the time that it takes.
    pub max_discard: u64,
    /// The disk cannot be written.
    pub read_only: bool,
    /// Discards are ignored, and zeroed blocks stay allocated.
    pub preallocated: bool,
    /// Completed writes are stable only after a flush.
    pub write_cache: bool,
    /// Alignment of direct I/O; 1 and 1 without direct I/O.
    pub(crate) align: Align,
    /// A write through the page cache can take the error of earlier writes, which no sync reports then.
    pub(crate) late_errors: bool,
}

/// See [`Geometry::max_discard`].
const MAX_DISCARD: u64 = 1 << 30;

/// Largest logical block: guests accept no more than a page.
const MAX_LOGICAL: u32 = 4096;

/// Alignment that the kernel requires for direct I/O. Powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Align {
    /// Addresses of buffers.
    pub memory: usize,
    /// Offsets and lengths.
    pub offset: u64,
}

/// Size and block sizes of the file or device.
struct FileGeometry {
    size: u64,
    logical: u32,
    physical: u32,
    alignment_offset: u32,
    minimum_io: u32,
    optimal_io: u32,
}

impl FileGeometry {
    fn probe(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let kind = metadata.file_type();
        if kind.is_block_device() {
            Self::of_device(file)
        } else if kind.is_file() {
            // The file system's block size. Some file systems report their preferred transfer instead.
            let block = u32::try_from(metadata.blksize()).unwrap_or(PAGE);
            Ok(Self {
                size: metadata.len(),
                logical: if block.is_power_of_two() { block } else { PAGE }.clamp(SECTOR as u32, MAX_LOGICAL),
                physical: PAGE,
                alignment_offset: 0,
                minimum_io: 0,
                optimal_io: 0,
            })
        } else {
            Err(invalid(NO_VOLUME.into()))
        }
    }

    fn of_device(file: &File) -> io::Result<Self> {
        let hint = |request| device_int(file, request).map_or(0, |value| value.try_into().unwrap_or(0));
        Ok(Self {
            size: device_size(file)?,
            logical: device_block(file, libc::BLKSSZGET)?,
            physical: device_block(file, libc::BLKPBSZGET)?,
            alignment_offset: hint(BLKALIGNOFF),
            minimum_io: hint(libc::BLKIOMIN),
            optimal_io: hint(libc::BLKIOOPT),
        })
    }

    /// The geometry of an image of `size` bytes in files.
    fn of_image(size: u64) -> Self {
        Self {
            size,
            logical: SECTOR as u32,
            physical: PAGE,
            alignment_offset: 0,
            minimum_io: 0,
            optimal_io: 0,
        }
    }

    /// Logical and physical block to present to the guest.
    fn blocks(&self, wanted: BlockSize) -> io::Result<(u32, u32)> {
        let (logical, physical) = match wanted {
            BlockSize::Auto => (SECTOR as u32, self.physical.max(SECTOR as u32)),
            BlockSize::MatchVolume => (self.logical, self.physical.max(self.logical)),
            BlockSize::Custom { logical, physical } => (logical, physical),
        };
        let fits = |size: u32, range: RangeInclusive<u32>| size.is_power_of_two() && range.contains(&size);
        if !fits(logical, SECTOR as u32..=MAX_LOGICAL) || !fits(physical, logical..=2 << 20) {
            return Err(invalid(format!(
                "block sizes {logical} / {physical} are not supported"
            )));
        }
        Ok((logical, physical))
    }
}

impl Geometry {
    pub(crate) fn probe(file: &File, options: DiskOptions) -> io::Result<Self> {
        let file_geometry = FileGeometry::probe(file)?;
        let size = file_geometry.size;
        let direct = check_access(file, options)?;
        let align = if direct {
            direct_alignment(file, file.metadata()?.file_type().is_block_device())?
        } else {
            Align::NONE
        };
        let geometry = Self {
            late_errors: has_late_errors(file),
            ..Self::of(&file_geometry, options, align)?
        };
        if !size.is_multiple_of(align.offset) {
            return Err(invalid(format!(
                "size {size} is not a multiple of {}, which O_DIRECT needs on this file: use another cache mode",
                align.offset
            )));
        }
        Ok(geometry)
    }

    /// The geometry of an image of `size` bytes that allocates clusters.
    pub(crate) fn of_image(file: &File, size: u64, cluster: u64, options: DiskOptions) -> io::Result<Self> {
        let geometry = Self::of(&FileGeometry::of_image(size), options, Align::NONE)?;
        // A discard looks at each of its clusters while the image serves nothing else.
        let max_discard = geometry.max_discard.min(cluster * 8192);
        Ok(Self {
            discard_granularity: geometry.physical_block.max(cluster as u32),
            max_discard,
            late_errors: has_late_errors(file),
            ..geometry
        })
    }

    fn of(file_geometry: &FileGeometry, options: DiskOptions, align: Align) -> io::Result<Self> {
        let size = file_geometry.size;
        let (logical_block, physical_block) = file_geometry.blocks(options.block_size)?;
        if size == 0 || !size.is_multiple_of(logical_block.into()) {
            return Err(invalid(format!(
                "size {size} must be a non-zero multiple of {logical_block}"
            )));
        }
        Ok(Self {
            size,
            logical_block,
            physical_block,
            alignment_offset: file_geometry.alignment_offset % physical_block / logical_block * logical_block,
            minimum_io: file_geometry.minimum_io.max(physical_block),
            optimal_io: file_geometry.optimal_io / logical_block * logical_block,
            discard_granularity: file_geometry.physical.max(physical_block),
            max_discard: MAX_DISCARD,
            read_only: options.read_only,
            preallocated: options.preallocated,
            write_cache: !options.read_only && options.cache != CacheMode::Writethrough,
            align,
            late_errors: false,
        })
    }
}

/// True if writes report errors of writeback: NFS does so if the volume is full.
fn has_late_errors(file: &File) -> bool {
    file_system(file.as_fd()) == Some(libc::NFS_SUPER_MAGIC)
}

/// `f_type` of the file system of a regular file; `None` for a device, whose node is elsewhere than its data.
pub(crate) fn file_system(file: BorrowedFd<'_>) -> Option<libc::c_long> {
    if !is_regular(file) {
        return None;
    }
    // SAFETY: all-zero bytes are a valid statfs.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one statfs, for which there is room.
    let failed = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut found) } < 0;
    (!failed).then_some(found.f_type)
}

fn is_regular(file: BorrowedFd<'_>) -> bool {
    // SAFETY: all-zero bytes are a valid stat.
    let mut found: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one stat, for which there is room.
    let status = unsafe { libc::fstat(file.as_raw_fd(), &raw mut found) };
    status == 0 && found.st_mode & libc::S_IFMT == libc::S_IFREG
}

/// The current size of `file`, rounded down to whole blocks of the disk.
pub(crate) fn refreshed_size(file: &File, geometry: &Geometry) -> io::Result<u64> {
    let size = volume_size(file)?;
    let unit = geometry.align.offset.max(geometry.logical_block.into());
    match size - size % unit {
        0 => Err(invalid(format!(
            "size {size} is less than a block of {unit} bytes"
        ))),
        size => Ok(size),
    }
}

/// Unit in bytes of the discards of a block device; `None` for a file.
pub(crate) fn discard_block(file: &File) -> io::Result<Option<u64>> {
    match file.metadata()?.file_type().is_block_device() {
        true => device_block(file, libc::BLKSSZGET).map(|block| Some(block.into())),
        false => Ok(None),
    }
}

/// Size of a file or block device in bytes.
pub(crate) fn volume_size(file: &File) -> io::Result<u64> {
    let metadata = file.metadata()?;
    if metadata.file_type().is_block_device() {
        device_size(file)
    } else if metadata.file_type().is_file() {
        Ok(metadata.len())
    } else {
        Err(invalid(NO_VOLUME.into()))
    }
}

/// Checks the descriptor's access mode against the options. Returns true if it is open for direct I/O.
pub(crate) fn check_access(file: &File, options: DiskOptions) -> io::Result<bool> {
    let flags = status_flags(file)?;
    if flags & libc::O_ACCMODE == libc::O_WRONLY {
        return Err(invalid("opened for writing only".into()));
    }
    if !options.read_only && flags & libc::O_ACCMODE != libc::O_RDWR {
        return Err(invalid(
            "opened for reading only, but the disk is not read-only".into(),
        ));
    }
    let direct = flags & libc::O_DIRECT != 0;
    if options.cache == CacheMode::None && !direct {
        return Err(invalid(
            "cache mode none needs a file opened with O_DIRECT".into(),
        ));
    }
    Ok(direct)
}

impl Align {
    pub(crate) const NONE: Self = Self { memory: 1, offset: 1 };
}

const NO_VOLUME: &str = "not a regular file or a block device";

/// File systems write whole pages, so a page is a safe alignment if the real one is unknown.
const PAGE: u32 = 4096;

/// `_IO(0x12, 122)`
const BLKALIGNOFF: libc::Ioctl = 0x127a;

pub(crate) fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

fn status_flags(file: &File) -> io::Result<i32> {
    // SAFETY: fcntl(F_GETFL) takes no pointer.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(flags)
    }
}

/// Ends direct I/O through every copy of this descriptor.
pub(crate) fn end_direct_io(file: &File) -> io::Result<()> {
    let flags = status_flags(file)? & !libc::O_DIRECT;
    // SAFETY: fcntl(F_SETFL) takes an integer.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn device_size(file: &File) -> io::Result<u64> {
    // SAFETY: lseek takes no pointer. Nothing else uses the descriptor's position.
    let end = unsafe { libc::lseek(file.as_raw_fd(), 0, libc::SEEK_END) };
    u64::try_from(end).map_err(|_| io::Error::last_os_error())
}

/// Result of a block device ioctl that returns an int.
fn device_int(file: &File, request: libc::Ioctl) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    // SAFETY: every request used writes one int to the address given, which is `value`.
    if unsafe { libc::ioctl(file.as_raw_fd(), request, &raw mut value) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(value)
}

/// A block size of a block device: a power of two from 512 to 1 MiB.
///
/// # Errors
/// It is not.
fn device_block(file: &File, request: libc::Ioctl) -> io::Result<u32> {
    block_size(device_int(file, request)?.try_into().unwrap_or(0))
}

fn block_size(size: u32) -> io::Result<u32> {
    if size.is_power_of_two() && (SECTOR as u32..=1 << 20).contains(&size) {
        Ok(size)
    } else {
        Err(invalid(format!("unusable block size {size}")))
    }
}

fn direct_alignment(file: &File, block_device: bool) -> io::Result<Align> {
    let mut stat = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path is an empty C string, which AT_EMPTY_PATH turns into the descriptor itself; the
    // kernel writes one statx, for which there is room.
    let failed = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            stat.as_mut_ptr(),
        )
    } < 0;
    // SAFETY: every bit pattern, zeroes included, is a statx.
    let stat = unsafe { stat.assume_init() };
    if !failed && stat.stx_mask & libc::STATX_DIOALIGN != 0 && stat.stx_dio_offset_align != 0 {
        // Memory may need less than a sector (4 bytes on many disks).
        let memory = stat.stx_dio_mem_align.max(1);
        if !memory.is_power_of_two() || memory > 1 << 20 {
            return Err(invalid(format!("unusable direct I/O memory alignment {memory}")));
        }
        let offset = block_size(stat.stx_dio_offset_align.max(SECTOR as u32))?;
        return Ok(Align {
            memory: memory as usize,
            offset: offset.into(),
        });
    }
    // Linux before 6.1, or a file system without STATX_DIOALIGN.
    let block = if block_device {
        device_block(file, libc::BLKSSZGET)?
    } else {
        PAGE
    };
    Ok(Align {
        memory: block as usize,
        offset: block.into(),
    })
}
