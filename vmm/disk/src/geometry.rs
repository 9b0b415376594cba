//! What an image's descriptor tells about the disk it holds.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;

use crate::{Cache, Options, SECTOR};

/// A disk's size, block sizes and abilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes, a multiple of [`SECTOR`], not 0.
    pub size: u64,
    /// Smallest unit the disk is addressed in: 512.
    pub logical_block: u32,
    /// Unit that the disk writes without reading first: a power of two, at least `logical_block`.
    pub physical_block: u32,
    /// Nothing can be changed.
    pub read_only: bool,
    /// Completed writes are stable only after a flush.
    pub write_cache: bool,
    /// Requirements of direct I/O, 1 and 1 without it.
    pub(crate) align: Align,
}

/// What the kernel wants direct I/O aligned to. Powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Align {
    /// Addresses of buffers.
    pub memory: usize,
    /// Offsets and lengths.
    pub offset: u64,
}

impl Geometry {
    pub(crate) fn probe(file: &File, options: Options) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let kind = metadata.file_type();
        let (size, physical) = if kind.is_block_device() {
            // The end of a block device is where a seek to it lands; its metadata says 0.
            (device_size(file)?, device_block(file, libc::BLKPBSZGET)?)
        } else if kind.is_file() {
            (metadata.len(), PAGE)
        } else {
            return Err(invalid("not a regular file or a block device".into()));
        };
        if size == 0 || !size.is_multiple_of(SECTOR) {
            return Err(invalid(format!(
                "size {size} is not a multiple of {SECTOR}, or 0"
            )));
        }
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
        if options.cache == Cache::None && !direct {
            return Err(invalid(
                "cache mode none needs a file opened with O_DIRECT".into(),
            ));
        }
        let align = if direct {
            direct_alignment(file, kind.is_block_device())?
        } else {
            Align::NONE
        };
        if !size.is_multiple_of(align.offset) {
            return Err(invalid(format!(
                "size {size} is not a multiple of {}, which O_DIRECT needs on this file: use another cache mode",
                align.offset
            )));
        }
        Ok(Self {
            size,
            logical_block: SECTOR as u32,
            physical_block: physical.max(SECTOR as u32),
            read_only: options.read_only,
            write_cache: !options.read_only && options.cache != Cache::Writethrough,
            align,
        })
    }
}

impl Align {
    pub(crate) const NONE: Self = Self { memory: 1, offset: 1 };
}

/// Pages are what file systems write whole, and a safe guess at an unknown alignment.
const PAGE: u32 = 4096;

fn invalid(what: String) -> io::Error {
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

fn device_size(file: &File) -> io::Result<u64> {
    // SAFETY: lseek takes no pointer. Nobody uses the descriptor's position.
    let end = unsafe { libc::lseek(file.as_raw_fd(), 0, libc::SEEK_END) };
    u64::try_from(end).map_err(|_| io::Error::last_os_error())
}

/// A block size of a block device: a power of two between 512 and 1 MiB, or the error that it is not.
fn device_block(file: &File, request: libc::Ioctl) -> io::Result<u32> {
    let mut size: libc::c_int = 0;
    // SAFETY: both requests used write one int to the address given, which is `size`.
    if unsafe { libc::ioctl(file.as_raw_fd(), request, &raw mut size) } < 0 {
        return Err(io::Error::last_os_error());
    }
    block_size(size.try_into().unwrap_or(0))
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
    // Linux before 6.1, or a file system that does not tell.
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
