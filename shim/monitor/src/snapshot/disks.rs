//! The disks of a VM that is saved: which of them the snapshot includes, and the copies of these.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use husk_vmi::{DeviceType, DiskPlan, DiskSource, VmPlan};
use husk_volumes::{BlockSizes, ImageFormat, copy_image, reflink};

use super::directory::NewSnapshot;
use super::error::SnapshotError;
use super::format::{BaseContent, DiskContent, SavedDisk, SnapshotImage};
use super::open_disk_refs::{OpenDiskRefs, OpenImageRef};

/// The disks of a VM.
#[derive(Debug)]
pub(crate) struct DiskSet {
    /// With the disks that were plugged.
    pub(crate) plan: VmPlan,
    /// Disks that were plugged, and drives whose disc was inserted.
    pub(crate) plugged: HashSet<String>,
    /// By name. A disk that could not be referred to is missing.
    pub(crate) kept: HashMap<String, Arc<OpenDiskRefs>>,
}

/// The disks of a snapshot that is being made.
#[derive(Debug)]
pub(crate) struct DiskCopies {
    /// Images that the guest writes are copied also where that takes time.
    full: bool,
    disks: Vec<PlannedDisk>,
    copies: Vec<ImageCopy>,
}

/// A writable volume that the snapshot does not include: it stays at its path.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct UnsavedVolume {
    pub(crate) volume: String,
    pub(crate) path: String,
    /// Other VMs may write to it.
    pub(crate) shareable: bool,
}

#[derive(Debug)]
struct PlannedDisk {
    name: String,
    plugged: bool,
    kept: Option<Arc<OpenDiskRefs>>,
    content: Planned,
}

#[derive(Debug)]
enum Planned {
    Remade,
    Held {
        image: SnapshotImage,
        base: Option<PlannedBase>,
        block_sizes: Option<BlockSizes>,
    },
    Outside {
        written: bool,
        shareable: bool,
    },
}

#[derive(Debug)]
enum PlannedBase {
    Held(SnapshotImage),
    Outside,
}

/// An image to copy.
#[derive(Debug)]
struct ImageCopy {
    volume: String,
    from: File,
    to: File,
    /// The copy shares the extents of the image, or fails.
    shared: bool,
}

impl DiskCopies {
    /// Decides for each disk whether it is included, and creates the files of those that do. With `full`, images that
    /// the guest writes are included also where they cannot be copied in an instant. Blocks.
    pub(crate) fn prepare(
        set: &DiskSet,
        new: &mut NewSnapshot,
        full: bool,
    ) -> Result<DiskCopies, SnapshotError> {
        let mut planned = DiskCopies {
            full,
            disks: Vec::new(),
            copies: Vec::new(),
        };
        for disk in &set.plan.disks {
            let kept = set.kept.get(&disk.name).cloned();
            let content = planned.plan(disk, kept.as_deref(), new)?;
            planned.disks.push(PlannedDisk {
                name: disk.name.clone(),
                plugged: set.plugged.contains(&disk.name),
                kept,
                content,
            });
        }
        Ok(planned)
    }

    fn plan(
        &mut self,
        disk: &DiskPlan,
        kept: Option<&OpenDiskRefs>,
        new: &mut NewSnapshot,
    ) -> Result<Planned, SnapshotError> {
        let refused = |reason: &str| Err(SnapshotError::volume(&disk.name, reason));
        match &disk.source {
            _ if matches!(disk.device, DeviceType::Lun { .. }) => {
                return refused(
                    "a `lun`, which is a SCSI device of the host, cannot be saved: use `disk` instead",
                );
            }
            DiskSource::Empty | DiskSource::DownwardMetrics => return Ok(Planned::Remade),
            DiskSource::Descriptor(_) => {
                return refused("it was plugged as an open file, whose path is unknown: unplug it first");
            }
            _ => {}
        }
        let Some((kept, image)) = kept.and_then(|kept| Some((kept, kept.image.as_ref()?))) else {
            return refused("its image could not be opened again; `husk logs VM --monitor` says why");
        };
        let io = |error: io::Error| SnapshotError::volume(&disk.name, error.to_string());
        if let Some(base) = &kept.base {
            let image = self.held("disk", disk, image, new)?;
            let base = match base.is_private().map_err(io)? {
                true => PlannedBase::Held(self.held("base", disk, base, new)?),
                false => PlannedBase::Outside,
            };
            return Ok(Planned::Held {
                image,
                base: Some(base),
                block_sizes: kept.block_sizes,
            });
        }
        let is_included = if image.is_private().map_err(io)? {
            Some(self.held("disk", disk, image, new)?)
        } else if disk.read_only || disk.shareable {
            // The writes of other VMs are not in a copy.
            None
        } else {
            self.written(disk, image, new)?
        };
        Ok(match is_included {
            Some(image) => Planned::Held {
                image,
                base: None,
                block_sizes: kept.block_sizes,
            },
            None => Planned::Outside {
                written: !disk.read_only,
                shareable: disk.shareable,
            },
        })
    }

    /// Plans the copy of an image that no path leads to.
    fn held(
        &mut self,
        prefix: &str,
        disk: &DiskPlan,
        image: &OpenImageRef,
        new: &mut NewSnapshot,
    ) -> Result<SnapshotImage, SnapshotError> {
        let (held, to) = create(prefix, disk, image, new)?;
        self.copies.push(ImageCopy {
            volume: disk.name.clone(),
            from: open(disk, image)?,
            to,
            shared: false,
        });
        Ok(held)
    }

    /// Plans the copy of an image that the guest writes, if the file system can share its extents: the copy takes no
    /// time then. Otherwise only if images are copied in full.
    fn written(
        &mut self,
        disk: &DiskPlan,
        image: &OpenImageRef,
        new: &mut NewSnapshot,
    ) -> Result<Option<SnapshotImage>, SnapshotError> {
        let (held, to) = create("disk", disk, image, new)?;
        let from = open(disk, image)?;
        let shared = can_share(&from, &to, reflink).map_err(not_copied(&disk.name))?;
        if !shared && !self.full {
            new.remove(&held.file);
            return Ok(None);
        }
        self.copies.push(ImageCopy {
            volume: disk.name.clone(),
            from,
            to,
            shared,
        });
        Ok(Some(held))
    }

    /// The volumes that are written to and are not included.
    pub(crate) fn unsaved_volumes(&self) -> Vec<UnsavedVolume> {
        let path = |disk: &PlannedDisk| disk.kept.as_ref().map(|kept| kept.path.display().to_string());
        let outside = self.disks.iter().filter_map(|disk| match disk.content {
            Planned::Outside {
                written: true,
                shareable,
            } => Some(UnsavedVolume {
                volume: disk.name.clone(),
                path: path(disk).unwrap_or_default(),
                shareable,
            }),
            _ => None,
        });
        outside.collect()
    }

    /// Copies the images, which nobody writes meanwhile. `progress` is called with the volume and the bytes copied so far
    /// and of all. Ends soon after `cancelled` is set. Blocks.
    pub(crate) fn copy(
        &self,
        cancelled: &AtomicBool,
        progress: impl Fn(&str, u64, u64),
    ) -> Result<(), SnapshotError> {
        for ImageCopy {
            volume,
            from,
            to,
            shared,
        } in &self.copies
        {
            let copied = match shared {
                true => reflink(from, to),
                false => copy_image(from, to, &mut |done, total| {
                    if cancelled.load(Ordering::Relaxed) {
                        return Err(io::ErrorKind::Interrupted.into());
                    }
                    progress(volume, done, total);
                    Ok(())
                }),
            };
            copied.map_err(not_copied(volume))?;
        }
        Ok(())
    }

    /// Syncs the copies, and the images outside that the guest wrote: for its saved memory, all of its writes are in
    /// them. Blocks.
    pub(crate) fn sync(&self) -> Result<(), SnapshotError> {
        for copy in &self.copies {
            copy.to.sync_all().map_err(not_copied(&copy.volume))?;
        }
        for disk in &self.disks {
            if let Planned::Outside { written: true, .. } = disk.content {
                disk.sync().map_err(|error| {
                    SnapshotError::volume(&disk.name, format!("its image was not synced: {error}"))
                })?;
            }
        }
        Ok(())
    }

    /// The disks for the description, while nobody writes to them. Blocks.
    pub(crate) fn describe(&self) -> Result<Vec<SavedDisk>, SnapshotError> {
        let disks = self.disks.iter().map(|disk| {
            let content = match &disk.content {
                Planned::Remade => Ok(DiskContent::Remade),
                Planned::Outside { .. } => disk
                    .identity(|kept| kept.image.as_ref())
                    .map(DiskContent::Outside),
                Planned::Held {
                    image,
                    base,
                    block_sizes,
                } => {
                    let base = base.as_ref().map(|base| match base {
                        PlannedBase::Held(image) => Ok(BaseContent::Held(image.clone())),
                        PlannedBase::Outside => {
                            disk.identity(|kept| kept.base.as_ref()).map(BaseContent::Outside)
                        }
                    });
                    base.transpose().map(|base| DiskContent::Held {
                        image: image.clone(),
                        base,
                        block_sizes: *block_sizes,
                    })
                }
            };
            let content = content.map_err(|error| SnapshotError::volume(&disk.name, error.to_string()))?;
            Ok(SavedDisk {
                name: disk.name.clone(),
                plugged: disk.plugged,
                content,
            })
        });
        disks.collect()
    }
}

impl PlannedDisk {
    fn identity(
        &self,
        image: impl Fn(&OpenDiskRefs) -> Option<&OpenImageRef>,
    ) -> io::Result<husk_volumes::FileIdentity> {
        let image = self.kept.as_deref().and_then(image);
        image.ok_or(io::ErrorKind::NotFound)?.handle.identity()
    }

    fn sync(&self) -> io::Result<()> {
        let image = self.kept.as_deref().and_then(|kept| kept.image.as_ref());
        image.ok_or(io::ErrorKind::NotFound)?.handle.open()?.sync_all()
    }
}

fn create(
    prefix: &str,
    disk: &DiskPlan,
    image: &OpenImageRef,
    new: &mut NewSnapshot,
) -> Result<(SnapshotImage, File), SnapshotError> {
    let extension = match image.format {
        ImageFormat::Raw => "img",
        ImageFormat::Qcow2 => "qcow2",
    };
    let held = SnapshotImage {
        file: format!("{prefix}-{}.{extension}", disk.name),
        format: image.format,
    };
    let file = new.file(&held.file)?;
    Ok((held, file))
}

/// True if `clone` makes the empty file `to` share the extents of an image. It is empty afterwards.
pub(super) fn can_share(
    from: &File,
    to: &File,
    clone: impl FnOnce(&File, &File) -> io::Result<()>,
) -> io::Result<bool> {
    if clone(from, to).is_err() {
        return Ok(false);
    }
    // While extents are shared, each write of the guest allocates a new block.
    to.set_len(0)?;
    Ok(true)
}

/// The error of the copy of a volume's image.
pub(super) fn not_copied(volume: &str) -> impl FnOnce(io::Error) -> SnapshotError {
    move |error| {
        let reason = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => format!(
                "its image does not fit into the snapshot: {error}: make room, or name a directory on another file system"
            ),
            _ => format!("its image was not copied: {error}"),
        };
        SnapshotError::volume(volume, reason)
    }
}

fn open(disk: &DiskPlan, image: &OpenImageRef) -> Result<File, SnapshotError> {
    let opened = image.handle.open();
    opened.map_err(|error| SnapshotError::volume(&disk.name, format!("its image cannot be read: {error}")))
}
