//! Kernels of disk images.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use husk_disk::{Disk, DiskOptions};

use super::*;

const GRUB: &str =
    "menuentry 'Test' {\n\tlinux /boot/vmlinuz root=/dev/vda ro quiet\n\tinitrd /boot/initrd\n}\n";

/// A disk that is one ext4 filesystem with `tree` in it.
fn filesystem(at: &Path, tree: &[(&str, &[u8])]) {
    let root = at.with_extension("root");
    for (path, contents) in tree {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    }
    let _ = fs::remove_file(at);
    let output = Command::new("/sbin/mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-d"])
        .args([&root, at])
        .arg("16M")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn image(at: &Path, kernel: &[u8], initrd: &[u8]) {
    let files = [
        ("boot/vmlinuz", kernel),
        ("boot/initrd", initrd),
        ("boot/grub/grub.cfg", GRUB.as_bytes()),
    ];
    filesystem(at, &files);
}

fn reader(file: File) -> DiskReader {
    let options = DiskOptions {
        read_only: true,
        ..Default::default()
    };
    Disk::open_raw(OwnedFd::from(file), options).unwrap().reader()
}

fn disks(disks: Vec<(&str, File)>, append: &str) -> KernelSource {
    let disks = disks
        .into_iter()
        .map(|(id, file)| (id.to_owned(), reader(file)))
        .collect();
    KernelSource::Disks {
        disks,
        append: append.into(),
    }
}

fn blank() -> File {
    let file = file(b"");
    file.set_len(1 << 20).unwrap();
    file
}

#[test]
fn a_disks_own_kernel_boots_from_the_first_disk_that_has_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let initrd = pattern(4, 300_001);
    image(&path, &bzimage(|_| ()), &initrd);
    let open = || File::open(&path).unwrap();
    for list in [
        vec![("root", open())],
        vec![("data", blank()), ("root", open()), ("more", blank())],
    ] {
        let machine = Machine::new(64 * MIB);
        let loaded = machine.load_source(&disks(list, "")).unwrap();
        assert_eq!(loaded.entry, CpuEntry::Linux64 { rip: 0x10_0200 });
        assert_eq!(machine.bytes(0x10_0000, 64 << 10), pattern(7, 64 << 10));
        assert!(
            loaded.description.starts_with("disk \"root\", "),
            "{}",
            loaded.description
        );
        assert!(
            loaded.description.contains("/boot/grub/grub.cfg"),
            "{}",
            loaded.description
        );
        // The VMM adds no panic=: the image's command line or the guest's sysctl decides.
        assert_eq!(
            machine.command_line(),
            "BOOT_IMAGE=/boot/vmlinuz root=/dev/vda ro quiet"
        );
        let params: linux_loader::loader::bootparam::boot_params = machine.object(layout::ZERO_PAGE);
        let (at, size) = (params.hdr.ramdisk_image, params.hdr.ramdisk_size);
        assert_eq!(size, 300_001);
        assert!(machine.bytes(u64::from(at), 300_001) == initrd);
    }
    let machine = Machine::new(64 * MIB);
    machine
        .load_source(&disks(vec![("root", open())], "console=ttyS0"))
        .unwrap();
    assert!(machine.command_line().ends_with(" ro quiet console=ttyS0"));
}

#[test]
fn an_upgraded_kernel_boots_the_next_time() {
    let dir = tempfile::tempdir().unwrap();
    let (path, next) = (dir.path().join("disk"), dir.path().join("next"));
    image(&path, &bzimage(|_| ()), b"initrd");
    image(&next, &bzimage(|h| h.code32_start = 0x20_0000), b"initrd");
    let source = disks(vec![("root", File::open(&path).unwrap())], "");
    assert_eq!(
        Machine::new(64 * MIB).load_source(&source).unwrap().entry,
        CpuEntry::Linux64 { rip: 0x10_0200 }
    );
    let disk = File::options().write(true).open(&path).unwrap();
    disk.write_all_at(&fs::read(&next).unwrap(), 0).unwrap();
    assert_eq!(
        Machine::new(64 * MIB).load_source(&source).unwrap().entry,
        CpuEntry::Linux64 { rip: 0x20_0200 }
    );
}

#[test]
fn the_error_names_every_disk_and_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    filesystem(&path, &[("etc/hostname", b"guest\n")]);
    let list = vec![("data", blank()), ("os", File::open(&path).unwrap())];
    let error = Machine::new(64 * MIB).load_source(&disks(list, "")).unwrap_err();
    assert!(matches!(error, BootError::NoBootableDisk(_)));
    let text = error.to_string();
    assert!(
        text.starts_with("no disk can be booted: disk \"data\": "),
        "{text}"
    );
    assert!(text.contains("; disk \"os\": "), "{text}");
    assert!(text.contains("grub.cfg"), "{text}");

    let text = Machine::new(64 * MIB)
        .load_source(&disks(vec![], ""))
        .unwrap_err()
        .to_string();
    assert!(text.contains("firmware.kernelBoot or --kernel"), "{text}");
}

#[test]
fn a_disk_with_an_invalid_kernel_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    image(&path, b"not a kernel", b"initrd");
    let list = vec![("os", File::open(&path).unwrap())];
    let error = Machine::new(64 * MIB).load_source(&disks(list, "")).unwrap_err();
    assert!(matches!(error, BootError::NotAKernel(_)));
    assert!(error.to_string().starts_with("disk \"os\", "), "{error}");

    image(&path, &bzimage(|_| ()), &vec![1; 8 << 20]);
    let list = vec![("os", File::open(&path).unwrap())];
    let error = Machine::new(16 * MIB).load_source(&disks(list, "")).unwrap_err();
    assert!(
        matches!(
            error,
            BootError::NoRoom {
                what: "the kernel",
                ..
            }
        ),
        "{error}"
    );
    let list = vec![("os", File::open(&path).unwrap())];
    let error = Machine::new(20 * MIB).load_source(&disks(list, "")).unwrap_err();
    assert!(
        matches!(
            error,
            BootError::NoRoom {
                what: "the initrd",
                ..
            }
        ),
        "{error}"
    );
}
