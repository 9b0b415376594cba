//! Warnings about a plan on this host that do not keep the VM from starting.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use husk_vmi::{DiskSource, VmPlan, Vmi};

use crate::output;

/// Returns the warnings, one line each.
pub(crate) fn warnings(vmi: &Vmi, plan: &VmPlan) -> Vec<String> {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let mut warnings = Vec::from_iter(memory(vmi, plan, total(&meminfo)));
    for disk in &plan.disks {
        let (DiskSource::File(path) | DiskSource::HostDisk { path, .. }) = &disk.source else {
            continue;
        };
        warnings.extend(raw_qcow2(path).map(|text| format!("volume {:?}: {text}", disk.name)));
    }
    warnings
}

/// Warns about more guest memory than the host has. Memory is allocated on use, so the shortage would show late.
fn memory(vmi: &Vmi, plan: &VmPlan, total: Option<u64>) -> Option<String> {
    let (guest, total) = (plan.memory.guest_bytes, total?);
    (guest > total).then(|| {
        format!(
            "{}: {} exceeds the memory of this host, {:.1} GiB: the kernel may kill the VM when the guest uses it",
            vmi.memory_field(),
            output::bytes(guest),
            total as f64 / f64::from(1 << 30)
        )
    })
}

/// Memory of the host in bytes.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Warns about a qcow2 header in an image that is served raw. It is only a warning, since a guest may have written it.
pub(crate) fn raw_qcow2(path: &Path) -> Option<String> {
    let image = match path.is_dir() {
        true => path.join("disk.img"),
        false => PathBuf::from(path),
    };
    let mut head = [0; 4];
    // Opening anything but a regular file may block or start a device.
    if !image.is_file() || File::open(&image).ok()?.read_exact(&mut head).is_err() || head != *b"QFI\xfb" {
        return None;
    }
    let image = image.display();
    Some(format!(
        "{image} starts with a qcow2 header but is served raw; convert it with `qemu-img convert -O raw`"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes() {
        assert_eq!(total("MemTotal:       16384 kB\nMemFree: 1 kB\n"), Some(16 << 20));
        assert_eq!(total("MemFree: 1 kB"), None);
        assert_eq!(total("MemTotal: 99999999999999999999 kB"), None);
    }

    #[test]
    fn a_header_is_seen_in_a_file_and_in_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk.img");
        assert_eq!(raw_qcow2(dir.path()), None);
        fs::write(&image, b"QFI").unwrap();
        assert_eq!(raw_qcow2(&image), None);
        fs::write(&image, b"QFI\xfb\0\0\0\x03").unwrap();
        let text = raw_qcow2(&image).unwrap();
        assert!(text.contains("served raw"), "{text}");
        assert_eq!(raw_qcow2(dir.path()), Some(text));
        assert_eq!(raw_qcow2(Path::new("/dev/null")), None);
    }
}
