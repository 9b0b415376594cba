//! Error report if no kernel was found.

use std::fmt;

use crate::disk::PartitionedDisk;
use crate::partition::Table;

/// No kernel could be found on the disk.
///
/// The text says for each partition what it holds and what was missing, over several lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FindError {
    /// Type of the partition table.
    pub table: Table,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Damage found in the partition table.
    pub notes: Vec<String>,
    /// Findings for each partition.
    pub partitions: Vec<PartitionReport>,
}

/// One partition of a disk on which no kernel was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionReport {
    /// Number as Linux counts it, from 1; 0 is the whole disk.
    pub number: u32,
    /// Name of its type in the partition table; empty for the whole disk.
    pub kind: String,
    /// Size in bytes, as the partition table says.
    pub size: u64,
    /// Filesystem by its magic number.
    pub filesystem: &'static str,
    /// Reasons why nothing boots from it.
    pub reasons: Vec<String>,
}

impl FindError {
    /// A report on `disk`, where `attempts` lists the rejected boot configurations by volume.
    pub(crate) fn new(disk: &PartitionedDisk, size: u64, attempts: &[(usize, String)]) -> Self {
        let partitions = disk.partitions.iter().enumerate().map(|(index, m)| {
            let tried = attempts.iter().filter(|(at, _)| *at == index).map(|(_, why)| why.clone());
            let mut reasons: Vec<String> = tried.collect();
            let first_damage = m.first_damage.borrow().clone();
            reasons.extend(first_damage.filter(|why| !reasons.iter().any(|r| r.contains(why.as_str()))));
            match &m.volume {
                Err(why) => reasons.push(why.clone()),
                Ok(_) if reasons.is_empty() => reasons.push(
                    "no /loader/entries/*.conf, no /EFI/*/grub.cfg, no grub.cfg in /boot/grub, /boot/grub2, /grub or /grub2"
                        .to_owned(),
                ),
                Ok(_) => {}
            }
            reasons.extend(m.volume.as_ref().ok().and_then(|v| v.note()).map(str::to_owned));
            PartitionReport {
                number: m.partition.number,
                kind: m.partition.kind.clone(),
                size: m.partition.size,
                filesystem: m.content.name(),
                reasons,
            }
        });
        Self {
            table: disk.table,
            size,
            notes: disk.notes.clone(),
            partitions: partitions.collect(),
        }
    }
}

impl fmt::Display for FindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "no kernel found on the disk ({}, {}",
            Size(self.size),
            self.table
        )?;
        for note in &self.notes {
            write!(f, "; {note}")?;
        }
        f.write_str("):")?;
        for p in &self.partitions {
            match p.number {
                0 => write!(f, "\n  whole disk: ")?,
                n => write!(f, "\n  partition {n} ({}, {}): ", p.kind, Size(p.size))?,
            }
            write!(f, "{}: {}", p.filesystem, p.reasons.join("; "))?;
        }
        f.write_str("\nuse a disk with a kernel that GRUB or a Boot Loader Specification entry boots, or give a kernel with firmware.kernelBoot or --kernel")
    }
}

impl std::error::Error for FindError {}

/// At most `most` bytes of a text that the disk chose, for a message.
pub(crate) fn shortened(mut text: String, most: usize) -> String {
    if text.len() > most {
        let end = (0..=most).rfind(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or(0));
        text.push('…');
    }
    text
}

/// Formats a size in binary units.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [
            (1 << 40, "TiB"),
            (1 << 30, "GiB"),
            (1 << 20, "MiB"),
            (1 << 10, "KiB"),
        ];
        match units.into_iter().find(|(unit, _)| self.0 >= *unit) {
            Some((unit, name)) => {
                let tenths = u128::from(self.0) * 10 / u128::from(unit);
                match tenths % 10 {
                    0 => write!(f, "{} {name}", tenths / 10),
                    tenth => write!(f, "{}.{tenth} {name}", tenths / 10),
                }
            }
            None => write!(f, "{} bytes", self.0),
        }
    }
}
