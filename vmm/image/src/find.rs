//! Searches a disk for a boot entry.

use std::sync::Arc;

use crate::bls;
use crate::disk::{FileRef, PartitionedDisk};
use crate::entry::BootEntry;
use crate::error::{FindError, shortened};
use crate::grub;
use crate::selected_entry::{MAX_COMMAND_LINE, MAX_INITRDS, SelectedEntry};
use crate::source::{Budget, Extent, ReadAt};

/// Read budget of the search; at 512 bytes per request, about two million requests.
const BUDGET: u64 = 1 << 30;
/// Boot configurations tried.
const MAX_CONFIGS: usize = 64;
/// Longest text of a disk in a message, in bytes.
const MAX_TEXT: usize = 1024;
/// Paths of GRUB's configuration, on the root filesystem or a separate /boot.
const GRUB_CONFIGS: [&str; 4] = [
    "/boot/grub/grub.cfg",
    "/boot/grub2/grub.cfg",
    "/grub/grub.cfg",
    "/grub2/grub.cfg",
];
/// Directories of Boot Loader Specification entries, on the root filesystem or a separate /boot.
const BLS_DIRECTORIES: [&str; 2] = ["/loader/entries", "/boot/loader/entries"];

/// Finds the default boot entry of `disk`, which must not change meanwhile.
///
/// Time and memory are bounded, except for a malicious disk that keeps the ext4 reader inside its block cache: run this
/// on a separate thread with a time limit.
///
/// # Errors
/// [`FindError`] lists the content of each partition and what was missing.
pub fn find(disk: Arc<dyn ReadAt>) -> Result<BootEntry, FindError> {
    find_within(disk, BUDGET)
}

pub(crate) fn find_within(disk: Arc<dyn ReadAt>, budget: u64) -> Result<BootEntry, FindError> {
    let whole = Extent::whole(Arc::clone(&disk), Budget::new(budget));
    let opened = PartitionedDisk::open(&whole);
    let mut attempts = Vec::new();
    let found = candidates(&opened)
        .into_iter()
        .take(MAX_CONFIGS)
        .find_map(|candidate| {
            let plan = candidate.select(&opened).and_then(check);
            let entry = plan.and_then(|plan| {
                BootEntry::new(&opened, &disk, plan).ok_or_else(|| "its files cannot be read".to_owned())
            });
            match entry {
                Ok(entry) => Some(entry),
                Err(why) => {
                    tracing::debug!(candidate = candidate.name(), %why, "boot configuration rejected");
                    let why = format!("{}: {}", candidate.name(), shortened(why, MAX_TEXT));
                    attempts.push((candidate.volume(), why));
                    None
                }
            }
        });
    found.ok_or_else(|| FindError::new(&opened, whole.len(), &attempts))
}

/// A boot configuration to try.
enum Candidate {
    Grub(FileRef),
    /// All Boot Loader Specification directories together, as systemd-boot merges them.
    Bls(Vec<FileRef>),
    /// Boot Loader Specification type 2.
    UnifiedImage(FileRef),
}

impl Candidate {
    fn volume(&self) -> usize {
        match self {
            Self::Grub(file) | Self::UnifiedImage(file) => file.volume,
            Self::Bls(dirs) => dirs.first().map_or(0, |dir| dir.volume),
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Grub(file) | Self::UnifiedImage(file) => &file.path,
            Self::Bls(dirs) => dirs.first().map_or("", |dir| &dir.path),
        }
    }

    fn select(&self, disk: &PartitionedDisk) -> Result<SelectedEntry, String> {
        match self {
            Self::Grub(file) => grub::select_entry(disk, file),
            Self::Bls(dirs) => select_bls_entry(disk, dirs),
            Self::UnifiedImage(_) => Err("unified kernel images are not supported".to_owned()),
        }
    }
}

/// Candidates in order: first those on the ESP, like firmware, then the usual paths of distributions.
fn candidates(disk: &PartitionedDisk) -> Vec<Candidate> {
    let volumes = disk.readable();
    let mut grub = Vec::new();
    for &volume in &volumes {
        let vendors = disk.list(&FileRef {
            volume,
            path: "/EFI".to_owned(),
        });
        // The removable-media path comes last: it is the fallback.
        let (fallback, vendors): (Vec<_>, Vec<_>) =
            vendors.into_iter().partition(|v| v.eq_ignore_ascii_case("boot"));
        for vendor in vendors.into_iter().chain(fallback) {
            grub.push(FileRef {
                volume,
                path: format!("/EFI/{vendor}/grub.cfg"),
            });
        }
    }
    for &volume in &volumes {
        grub.extend(GRUB_CONFIGS.map(|path| FileRef {
            volume,
            path: path.to_owned(),
        }));
    }
    grub.retain(|file| disk.is_file(file));

    let dirs = volumes.iter().flat_map(|&volume| {
        BLS_DIRECTORIES.map(|path| FileRef {
            volume,
            path: path.to_owned(),
        })
    });
    let dirs: Vec<_> = dirs
        .filter(|dir| disk.list(dir).iter().any(|name| name.ends_with(".conf")))
        .collect();
    let bls = (!dirs.is_empty()).then_some(Candidate::Bls(dirs));

    // Both exist on Fedora, where GRUB reads the entries, and after a switch to systemd-boot, which leaves GRUB's files
    // behind. They are told apart by an installed systemd-boot.
    let systemd_boot = volumes.iter().any(|&volume| {
        let path = "/EFI/systemd/systemd-bootx64.efi".to_owned();
        disk.is_file(&FileRef { volume, path })
    });
    let grub = grub.into_iter().map(Candidate::Grub);
    let mut all: Vec<Candidate> = match systemd_boot {
        true => bls.into_iter().chain(grub).collect(),
        false => grub.chain(bls).collect(),
    };
    for &volume in &volumes {
        let dir = FileRef {
            volume,
            path: "/EFI/Linux".to_owned(),
        };
        let images = disk
            .list(&dir)
            .into_iter()
            .filter(|name| name.to_ascii_lowercase().ends_with(".efi"));
        all.extend(images.map(|n| {
            Candidate::UnifiedImage(FileRef {
                volume,
                path: format!("/EFI/Linux/{n}"),
            })
        }));
    }
    all
}

fn select_bls_entry(disk: &PartitionedDisk, dirs: &[FileRef]) -> Result<SelectedEntry, String> {
    let mut entries = Vec::new();
    for dir in dirs {
        entries.extend(bls::entries(disk, dir).into_iter().map(|e| (e, dir.clone())));
        if entries.len() >= bls::MAX_ENTRIES {
            break;
        }
    }
    // Stable, and each directory's are sorted already.
    entries.sort_by(|(a, _), (b, _)| bls::order(a, b));
    // systemd-boot drops entries without a kernel, such as those that an interrupted upgrade leaves.
    let (bootable, rest): (Vec<_>, Vec<_>) = entries.into_iter().partition(|(entry, dir)| {
        grub::bls_path(disk, dir.volume, &entry.linux).is_some_and(|file| disk.is_file(&file))
    });
    let entries = if bootable.is_empty() { rest } else { bootable };
    let loader = (0..disk.partitions.len()).find_map(|volume| {
        disk.text(&FileRef {
            volume,
            path: "/loader/loader.conf".to_owned(),
        })
        .ok()
    });
    let plain: Vec<&bls::Entry> = entries.iter().map(|(e, _)| e).collect();
    let index = bls::default(&plain, &loader.unwrap_or_default()).ok_or("no entry boots Linux on x86-64")?;
    let (entry, dir) = &entries[index];
    let what = format!("entry '{}'", entry.name());
    let file =
        |path: &str, kind| grub::bls_file(disk, dir.volume, path, kind).map_err(|e| format!("{what}: {e}"));
    Ok(SelectedEntry {
        title: entry.name().to_owned(),
        source: format!(
            "{}, {}/{}.conf, {what}",
            disk.describe(dir.volume),
            dir.path,
            entry.id
        ),
        command_line: entry.options.clone(),
        kernel: file(&entry.linux, "kernel")?,
        initrds: entry
            .initrds
            .iter()
            .map(|path| file(path, "initrd"))
            .collect::<Result<_, _>>()?,
    })
}

/// Rejects entries beyond the limits of the kernel, and shortens texts for people.
fn check(mut plan: SelectedEntry) -> Result<SelectedEntry, String> {
    plan.title = shortened(plan.title, MAX_TEXT);
    plan.source = shortened(plan.source, MAX_TEXT);
    if plan.initrds.len() > MAX_INITRDS {
        return Err(format!("it has more than {MAX_INITRDS} initrds"));
    }
    if plan.command_line.len() > MAX_COMMAND_LINE || plan.command_line.contains('\0') {
        return Err(format!(
            "its command line has a NUL or more than {MAX_COMMAND_LINE} bytes"
        ));
    }
    plan.command_line = plan.command_line.replace(['\n', '\r'], " ");
    Ok(plan)
}
