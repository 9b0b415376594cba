//! The readable filesystems of a disk and their names in boot loaders.

use std::cell::RefCell;

use crate::filesystem;
use crate::partition::{Layout, Partition, Table, layout};
use crate::probe::{FsKind, is_fat, probe};
use crate::source::Extent;
use crate::volume::{self, Volume, VolumeError, normalise};

/// A partition and, if it could be opened, its filesystem.
pub(crate) struct OpenedPartition {
    pub partition: Partition,
    pub content: FsKind,
    /// The filesystem, or the reason why it could not be opened.
    pub volume: Result<Box<dyn Volume>, String>,
    /// First error of the filesystem itself; missing files do not count.
    pub first_damage: RefCell<Option<String>>,
}

/// A file by volume (index into [`PartitionedDisk::partitions`]) and normalised path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileRef {
    pub volume: usize,
    pub path: String,
}

/// A partitioned disk with its filesystems opened.
pub(crate) struct PartitionedDisk {
    pub table: Table,
    pub partitions: Vec<OpenedPartition>,
    pub notes: Vec<String>,
}

impl PartitionedDisk {
    /// Reads the partition table and opens every filesystem.
    pub(crate) fn open(disk: &Extent) -> Self {
        // A FAT boot sector looks like an MBR; it is told apart by the FAT type string.
        let Layout {
            table,
            partitions,
            notes,
        } = match is_fat(disk) {
            true => Layout {
                table: Table::None,
                partitions: vec![Partition {
                    number: 0,
                    kind: String::new(),
                    size: disk.len(),
                    extent: Some(disk.clone()),
                }],
                notes: Vec::new(),
            },
            false => layout(disk),
        };
        let partitions = partitions.into_iter().map(mount).collect();
        Self {
            table,
            partitions,
            notes,
        }
    }

    /// Indices of the volumes that could be opened, FAT ones first: firmware starts there.
    pub(crate) fn readable(&self) -> Vec<usize> {
        let mut indices: Vec<usize> = (0..self.partitions.len())
            .filter(|&i| self.partitions[i].volume.is_ok())
            .collect();
        indices.sort_by_key(|&i| self.partitions[i].content != FsKind::Fat);
        indices
    }

    /// The volume at `index`, if it could be opened.
    pub(crate) fn volume(&self, index: usize) -> Option<&dyn Volume> {
        self.partitions.get(index)?.volume.as_deref().ok()
    }

    /// GRUB's name for a volume.
    pub(crate) fn device(&self, index: usize) -> String {
        let number = self.partitions.get(index).map_or(0, |m| m.partition.number);
        match self.table {
            Table::Gpt => format!("hd0,gpt{number}"),
            Table::Mbr => format!("hd0,msdos{number}"),
            Table::None => "hd0".to_owned(),
        }
    }

    /// The volume with the GRUB name `name`, with or without parentheses. The disk number is ignored, since there is
    /// only one disk.
    pub(crate) fn by_device(&self, name: &str) -> Option<usize> {
        let name = name.trim().trim_start_matches('(').trim_end_matches(')');
        let number = match name.rsplit_once(',') {
            None if name.starts_with("hd") => 0,
            None => return None,
            Some((_, part)) => part
                .trim_start_matches(|c: char| c.is_ascii_alphabetic())
                .parse()
                .ok()?,
        };
        self.partitions.iter().position(|m| m.partition.number == number)
    }

    /// The volume whose UUID is `uuid`, ignoring case.
    pub(crate) fn by_uuid(&self, uuid: &str) -> Option<usize> {
        self.position(|v| v.uuid().eq_ignore_ascii_case(uuid))
    }

    /// The volume whose label is `label`.
    pub(crate) fn by_label(&self, label: &str) -> Option<usize> {
        self.position(|v| !label.is_empty() && v.label() == label)
    }

    /// The first volume with a file at `path`.
    pub(crate) fn by_file(&self, path: &str) -> Option<usize> {
        let path = normalise(path)?;
        self.position(|v| v.size(&path).is_ok())
    }

    fn position(&self, test: impl Fn(&dyn Volume) -> bool) -> Option<usize> {
        (0..self.partitions.len()).find(|&i| self.volume(i).is_some_and(&test))
    }

    /// Size of a file in bytes.
    pub(crate) fn size(&self, file: &FileRef) -> Result<u64, VolumeError> {
        self.query(file, |volume| volume.size(&file.path))
    }

    /// Runs a query on the volume of a file and records damage of the filesystem.
    fn query<T>(
        &self,
        file: &FileRef,
        question: impl FnOnce(&dyn Volume) -> Result<T, VolumeError>,
    ) -> Result<T, VolumeError> {
        let partition = self.partitions.get(file.volume).ok_or(VolumeError::NotFound)?;
        let volume = partition
            .volume
            .as_deref()
            .map_err(|why| VolumeError::Filesystem(why.clone()))?;
        let answer = question(volume);
        if let Err(e) = &answer
            && e.is_damage()
        {
            partition
                .first_damage
                .borrow_mut()
                .get_or_insert_with(|| format!("{}: {e}", file.path));
        }
        answer
    }

    /// True if the regular file exists.
    pub(crate) fn is_file(&self, file: &FileRef) -> bool {
        self.size(file).is_ok()
    }

    /// A configuration file's text; bytes that are not UTF-8 are replaced.
    pub(crate) fn text(&self, file: &FileRef) -> Result<String, VolumeError> {
        self.text_within(file, volume::MAX_CONFIG)
    }

    /// The text of a file of at most `limit` bytes.
    pub(crate) fn text_within(&self, file: &FileRef, limit: u64) -> Result<String, VolumeError> {
        let bytes = self.query(file, |volume| volume::read(volume, &file.path, limit))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Sorted names in a directory; empty if it does not exist.
    pub(crate) fn list(&self, dir: &FileRef) -> Vec<String> {
        let mut names = self
            .query(dir, |volume| volume.list(&dir.path))
            .unwrap_or_default();
        names.sort();
        names
    }

    /// Name of a volume for messages.
    pub(crate) fn describe(&self, index: usize) -> String {
        match self.partitions.get(index) {
            Some(m) if self.table != Table::None => {
                format!("partition {} ({})", m.partition.number, m.content.name())
            }
            Some(m) => format!("whole disk ({})", m.content.name()),
            None => "no partition".to_owned(),
        }
    }
}

fn mount(partition: Partition) -> OpenedPartition {
    let Some(extent) = partition.extent.clone() else {
        let why =
            "it reaches past the end of the disk: the image is truncated or its partition table damaged";
        return OpenedPartition {
            partition,
            content: FsKind::Unknown,
            volume: Err(why.to_owned()),
            first_damage: None.into(),
        };
    };
    let content = if partition.kind == "extended" {
        FsKind::Other("holds logical partitions")
    } else {
        probe(&extent)
    };
    let volume = match content {
        FsKind::Ext(_) | FsKind::Fat => filesystem::open(extent, content).map_err(|e| e.to_string()),
        FsKind::Unknown | FsKind::Other(_) => Err("not ext2, ext3, ext4 or FAT".to_owned()),
    };
    OpenedPartition {
        partition,
        content,
        volume,
        first_damage: None.into(),
    }
}
