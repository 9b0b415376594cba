//! Loads a kernel into guest memory, ready for its first instruction.

use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom};

use husk_devices::GuestMemMmap;
use husk_disk::DiskReader;
use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use linux_loader::loader::{BzImage, KernelLoader, KernelLoaderResult};
use vm_memory::{Bytes, GuestAddress, ReadVolatile};

use crate::layout::{self, Layout};
use crate::ram;
use crate::vcpu::entry::CpuEntry;

mod command_line;
mod elf;
mod error;
mod image;
mod payload;
mod pvh;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod unpack;
mod vmlinux;
mod zero_page;

use payload::{BootPayload, Initrd, KERNEL_MAX, Kernel};

pub use error::BootError;

/// The origin of a guest's kernel, which is read again at every boot.
#[derive(Debug)]
pub enum KernelSource {
    /// Files from the monitor.
    Kernel {
        /// bzImage or ELF.
        kernel: File,
        /// Initial RAM disk.
        initrd: Option<File>,
        /// Command line from the manifest.
        command_line: String,
    },
    /// The kernel of a disk image.
    Disks {
        /// Disks to search, by id, in order.
        disks: Vec<(String, DiskReader)>,
        /// Appended to the command line found on the disk.
        append: String,
    },
}

/// A guest ready to start.
#[derive(Clone, Debug)]
pub struct LoadedKernel {
    /// Entry point of the boot processor.
    pub entry: CpuEntry,
    /// Name and origin of the kernel, for messages.
    pub description: String,
}

/// Loads the kernel of `source` into `mem`.
pub fn load(source: &KernelSource, mem: &GuestMemMmap, layout: &Layout) -> Result<LoadedKernel, BootError> {
    load_with(source, mem, layout, kaslr_seed)
}

fn load_with(
    source: &KernelSource,
    mem: &GuestMemMmap,
    layout: &Layout,
    seed: impl FnOnce() -> Result<vmlinux::KaslrSeed, BootError>,
) -> Result<LoadedKernel, BootError> {
    let payload = match source {
        KernelSource::Kernel {
            kernel,
            initrd,
            command_line,
        } => direct(kernel, initrd.as_ref(), command_line)?,
        KernelSource::Disks { disks, append } => image::find(disks, append)?,
    };
    place(payload, mem, layout, seed)
}

fn file_size(file: &File, what: &str) -> Result<u64, BootError> {
    let mut file = file;
    file.seek(SeekFrom::End(0))
        .and_then(|size| file.rewind().map(|()| size))
        .map_err(|source| BootError::Read {
            what: what.into(),
            source,
        })
}

fn direct<'a>(
    kernel: &'a File,
    initrd: Option<&'a File>,
    command_line: &str,
) -> Result<BootPayload<'a>, BootError> {
    let size = file_size(kernel, "kernel")?;
    if size > KERNEL_MAX {
        return Err(BootError::KernelSize {
            what: "the kernel".into(),
            size,
        });
    }
    let initrd = initrd
        .map(|file| {
            let size = file_size(file, "initrd")?;
            let read = move |mem: &GuestMemMmap, at| read_into(file, mem, at, size);
            Ok::<_, BootError>(Initrd {
                size,
                read: Box::new(read),
            })
        })
        .transpose()?;
    Ok(BootPayload {
        kernel: Kernel::File(kernel),
        initrd,
        command_line: command_line::with_panic_timeout(command_line),
        description: "given kernel".into(),
    })
}

/// Reads a whole file. One system call reads less than 2 GiB.
fn read_into(mut file: &File, mem: &GuestMemMmap, at: GuestAddress, size: u64) -> io::Result<()> {
    let size = usize::try_from(size).map_err(|_| io::ErrorKind::FileTooLarge)?;
    file.rewind()?;
    let mut done = 0;
    while done < size {
        let next = GuestAddress(at.0 + done as u64);
        match mem
            .read_volatile_from(next, &mut file, size - done)
            .map_err(io::Error::other)?
        {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => done += read,
        }
    }
    Ok(())
}

fn place(
    payload: BootPayload<'_>,
    mem: &GuestMemMmap,
    layout: &Layout,
    seed: impl FnOnce() -> Result<vmlinux::KaslrSeed, BootError>,
) -> Result<LoadedKernel, BootError> {
    let BootPayload {
        kernel,
        initrd,
        command_line,
        description,
    } = payload;
    let (loaded, kernel_end) = match &kernel {
        Kernel::File(file) => load_kernel(*file, mem, layout, &description)?,
        Kernel::Bytes(bytes) => load_kernel(Cursor::new(bytes), mem, layout, &description)?,
    };
    drop(kernel);
    let limit = loaded.setup_header.map_or(layout::COMMAND_LINE_MAX - 1, |h| {
        let own = if h.version >= 0x206 {
            h.cmdline_size as usize
        } else {
            255
        };
        own.min(layout::COMMAND_LINE_MAX - 1)
    });
    if command_line.len() > limit {
        return Err(BootError::CommandLine {
            length: command_line.len(),
            limit,
        });
    }
    if command_line.contains('\0') {
        return Err(BootError::CommandLineNul);
    }
    mem.write_slice(command_line.as_bytes(), GuestAddress(layout::COMMAND_LINE))?;
    mem.write_obj(
        0u8,
        GuestAddress(layout::COMMAND_LINE + command_line.len() as u64),
    )?;

    let initrd = initrd
        .map(|i| place_initrd(i, mem, layout, loaded.setup_header.as_ref(), kernel_end))
        .transpose()?;
    let entry = if let Some(mut header) = loaded.setup_header {
        let limit = initrd.map_or(layout.low_ram_end(), |(at, _)| at);
        let kaslr = command_line::kaslr(&command_line);
        let (load, seed) = (loaded.kernel_load.0, seed()?);
        // SAFETY: the machine is loading: no vCPU runs, every device is reset, and only this thread has the memory.
        let unpacked = unsafe { ram::exclusive(mem) }
            .and_then(|low| vmlinux::unpack(low, load, limit, kaslr, seed, &mut header));
        zero_page::write(mem, layout, header, initrd)?;
        if let Some(rip) = unpacked {
            return Ok(LoadedKernel {
                entry: CpuEntry::Linux64 { rip },
                description,
            });
        }
        CpuEntry::Linux64 { rip: load + 0x200 }
    } else if let PvhBootCapability::PvhEntryPresent(rip) = loaded.pvh_boot_cap {
        pvh::write(mem, layout, initrd)?;
        CpuEntry::Pvh { rip: rip.0 }
    } else {
        zero_page::write(mem, layout, zero_page::header_for_elf(), initrd)?;
        CpuEntry::Linux64 {
            rip: loaded.kernel_load.0,
        }
    };
    let (CpuEntry::Linux64 { rip } | CpuEntry::Pvh { rip }) = entry;
    if !(layout::HIMEM..loaded.kernel_end).contains(&rip) {
        let reason = format!("its entry point {rip:#x} is not in what was loaded");
        return Err(BootError::BadKernel {
            what: description,
            reason,
        });
    }
    Ok(LoadedKernel { entry, description })
}

/// Reads the seed by the system call: the confined process has no /dev.
fn kaslr_seed() -> Result<vmlinux::KaslrSeed, BootError> {
    let draw = || {
        let mut bytes = [0; 8];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        Ok::<_, io::Error>(u64::from_le_bytes(bytes))
    };
    let seed = draw().and_then(|physical| Ok([physical, draw()?]));
    seed.map_err(|source| BootError::Read {
        what: "random numbers".into(),
        source,
    })
}

/// Loads a kernel. Also returns the end of the memory that the kernel needs before it reads its memory map.
fn load_kernel<F: Read + ReadVolatile + Seek>(
    mut file: F,
    mem: &GuestMemMmap,
    layout: &Layout,
    what: &str,
) -> Result<(KernelLoaderResult, u64), BootError> {
    let read = |source| BootError::Read {
        what: what.to_owned(),
        source,
    };
    let size = file.seek(SeekFrom::End(0)).map_err(read)?;
    let memory = layout.low_ram_end();
    let mut magic = Vec::new();
    file.rewind()
        .and_then(|()| (&mut file).take(0x206).read_to_end(&mut magic))
        .map_err(read)?;
    file.rewind().map_err(read)?;
    let bad = |e: linux_loader::loader::Error| BootError::BadKernel {
        what: what.to_owned(),
        reason: e.to_string(),
    };
    let himem = Some(GuestAddress(layout::HIMEM));
    let loaded = if magic.starts_with(b"\x7fELF") {
        elf::check(&mut file, size, memory, what)?;
        Elf::load(mem, None, &mut file, himem).map_err(bad)?
    } else if magic.get(0x202..0x206) == Some(b"HdrS") {
        if size > memory.saturating_sub(layout::HIMEM) {
            return Err(BootError::NoRoom {
                what: "the kernel",
                size,
                memory,
            });
        }
        BzImage::load(mem, None, &mut file, himem).map_err(bad)?
    } else {
        return Err(BootError::NotAKernel(what.to_owned()));
    };
    let mut end = loaded.kernel_end;
    if let Some(header) = &loaded.setup_header {
        check_protocol(header, what)?;
        let (there, whole) = (
            loaded.kernel_end - loaded.kernel_load.0,
            u64::from(header.syssize) * 16,
        );
        if there < whole {
            let reason = format!("it is cut off after {there} of {whole} bytes");
            return Err(BootError::BadKernel {
                what: what.to_owned(),
                reason,
            });
        }
        let alignment = u64::from(header.kernel_alignment).max(1);
        let start = header
            .pref_address
            .max(loaded.kernel_load.0.next_multiple_of(alignment));
        end = end.max(start.saturating_add(u64::from(header.init_size)));
    }
    if end > memory {
        return Err(BootError::NoRoom {
            what: "the kernel",
            size: end - layout::HIMEM,
            memory,
        });
    }
    Ok((loaded, end))
}

fn check_protocol(header: &setup_header, what: &str) -> Result<(), BootError> {
    const XLF_KERNEL_64: u16 = 1;
    let (version, flags) = (header.version, header.xloadflags);
    if version < 0x20c || flags & XLF_KERNEL_64 == 0 {
        let reason = format!(
            "boot protocol {:#x} has no 64-bit entry point; Linux 3.8 or later is needed",
            version
        );
        return Err(BootError::BadKernel {
            what: what.to_owned(),
            reason,
        });
    }
    Ok(())
}

/// Puts the initrd as high as kernel and memory allow. Returns its address and size.
fn place_initrd(
    initrd: Initrd<'_>,
    mem: &GuestMemMmap,
    layout: &Layout,
    header: Option<&setup_header>,
    kernel_end: u64,
) -> Result<(u64, u64), BootError> {
    let top = header
        .map_or(u64::MAX, |h| u64::from(h.initrd_addr_max))
        .saturating_add(1)
        .min(layout.low_ram_end());
    let size = initrd.size;
    let no_room = BootError::NoRoom {
        what: "the initrd",
        size,
        memory: layout.low_ram_end(),
    };
    let Some(at) = top
        .checked_sub(size)
        .map(|at| at & !0xfff)
        .filter(|at| *at >= kernel_end)
    else {
        return Err(no_room);
    };
    (initrd.read)(mem, GuestAddress(at)).map_err(|source| BootError::Read {
        what: "initrd".into(),
        source,
    })?;
    Ok((at, size))
}

#[cfg(test)]
mod tests;
