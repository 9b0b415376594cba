//! Kernels of disk images, found by husk-image through the disk backend.

use std::io;
use std::sync::Arc;

use husk_devices::GuestMemMmap;
use husk_disk::DiskReader;
use husk_image::{BootFiles, ReadAt};
use vm_memory::{Bytes, GuestAddress};

use super::error::BootError;
use super::payload::{BootPayload, Initrd, KERNEL_MAX, Kernel};

struct Image(DiskReader);

impl ReadAt for Image {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buf)
    }

    fn size(&self) -> u64 {
        self.0.size()
    }
}

/// The kernel of the first of `disks` that has one.
pub(super) fn find(disks: &[(String, DiskReader)], append: &str) -> Result<BootPayload<'static>, BootError> {
    let mut reasons = Vec::new();
    for (id, reader) in disks {
        match husk_image::find(Arc::new(Image(reader.clone()))) {
            Ok(entry) => {
                let description = format!("disk {id:?}, {}", entry.source);
                for note in &entry.notes {
                    tracing::warn!(disk = id, note, "boot image");
                }
                let kernel = read_kernel(entry.kernel(), &description)?;
                let initrd = entry.initrd().cloned().map(initrd);
                let command_line = format!("{} {append}", entry.command_line).trim().to_owned();
                return Ok(BootPayload {
                    kernel,
                    initrd,
                    command_line,
                    description,
                });
            }
            Err(error) => reasons.push(format!("disk {id:?}: {error}")),
        }
    }
    if disks.is_empty() {
        reasons.push("the VM has no disk; give a kernel with firmware.kernelBoot or --kernel".into());
    }
    Err(BootError::NoBootableDisk(reasons.join("; ")))
}

fn read_error(what: &str, error: &husk_image::ReadError) -> BootError {
    BootError::Read {
        what: what.to_owned(),
        source: io::Error::other(error.to_string()),
    }
}

fn read_kernel(files: &BootFiles, what: &str) -> Result<Kernel<'static>, BootError> {
    let size = files.size();
    if size > KERNEL_MAX {
        return Err(BootError::KernelSize {
            what: format!("{what}: the kernel"),
            size,
        });
    }
    let mut bytes = Vec::with_capacity(size as usize);
    files
        .read_into(&mut |chunk| {
            if bytes.len() + chunk.len() > size as usize {
                return Err(io::Error::other("the file grew while it was read"));
            }
            bytes.extend_from_slice(chunk);
            Ok(())
        })
        .map_err(|e| read_error(what, &e))?;
    Ok(Kernel::Bytes(bytes))
}

/// Streams the file from the image to guest memory, without a copy of the whole in this process.
fn initrd(files: BootFiles) -> Initrd<'static> {
    let size = files.size();
    let read = move |mem: &GuestMemMmap, start: GuestAddress| {
        let mut at = start.0;
        let end = start.0 + size;
        files
            .read_into(&mut |chunk| {
                let next = at + chunk.len() as u64;
                if next > end {
                    return Err(io::Error::other("the file grew while it was read"));
                }
                mem.write_slice(chunk, GuestAddress(at))
                    .map_err(io::Error::other)?;
                at = next;
                Ok(())
            })
            .map_err(|e| io::Error::other(e.to_string()))
    };
    Initrd {
        size,
        read: Box::new(read),
    }
}
