//! Error texts when nothing boots.

mod common;

use common::*;

const LAST: &str = "use a disk with a kernel that GRUB or a Boot Loader Specification entry boots, or give a kernel with firmware.kernelBoot or --kernel";
const NOTHING: &str =
    "no /loader/entries/*.conf, no /EFI/*/grub.cfg, no grub.cfg in /boot/grub, /boot/grub2, /grub or /grub2";

fn error(disk: Vec<u8>) -> String {
    find(disk).unwrap_err().to_string()
}

#[test]
fn the_error_lists_what_each_partition_lacks() {
    let mut xfs = vec![0; 3 << 20];
    xfs[..4].copy_from_slice(b"XFSB");
    let mut lvm = vec![0; 1 << 20];
    lvm[512..520].copy_from_slice(b"LABELONE");
    let mut disk = gpt(&[
        (ESP, fat(4, &[("/EFI/Linux/fedora.efi", b"MZ")])),
        (LINUX, xfs),
        ([0x5a; 16], lvm),
        (LINUX, ext4(&[("/etc/hostname", b"x")])),
        (LINUX, vec![0; 1 << 20]),
    ]);
    let text = error(disk.clone());
    let want = format!(
        "no kernel found on the disk (28 MiB, GPT):\n\
         \x20 partition 1 (EFI system, 4 MiB): vfat: /EFI/Linux/fedora.efi: unified kernel images are not supported\n\
         \x20 partition 2 (Linux filesystem, 3 MiB): xfs: not ext2, ext3, ext4 or FAT\n\
         \x20 partition 3 (type 5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a5a, 1 MiB): LVM physical volume: not ext2, ext3, ext4 or FAT\n\
         \x20 partition 4 (Linux filesystem, 16 MiB): ext4: {NOTHING}\n\
         \x20 partition 5 (Linux filesystem, 1 MiB): no known filesystem: not ext2, ext3, ext4 or FAT\n{LAST}"
    );
    assert_eq!(text, want);
    // A truncated image: the backup table is gone, the last partitions reach past the end.
    disk.truncate(20 << 20);
    let text = error(disk);
    let cut = "it reaches past the end of the disk: the image is truncated or its partition table damaged";
    assert!(
        text.contains(&format!(
            "partition 4 (Linux filesystem, 16 MiB): no known filesystem: {cut}"
        )),
        "{text}"
    );
}

#[test]
fn the_error_names_an_empty_disk_and_an_empty_file() {
    assert_eq!(
        error(vec![0; 1536]),
        format!(
            "no kernel found on the disk (1.5 KiB, no partition table):\n  whole disk: no known filesystem: not ext2, ext3, ext4 or FAT\n{LAST}"
        )
    );
    assert!(error(Vec::new()).contains("(0 bytes, no partition table)"));
}

#[test]
fn the_error_names_a_lost_gpt() {
    let mut disk = gpt(&[(LINUX, ext4(&[]))]);
    let len = disk.len();
    disk[512..1024].fill(0);
    disk[len - 512..].fill(0);
    assert!(
        error(disk).contains("MBR; the MBR says GPT, but neither the GPT header nor its backup is there):")
    );
}

#[test]
fn the_error_gives_the_reason_for_a_rejected_configuration() {
    let long = "linux /k ".to_owned() + &"x".repeat(65_530);
    for (config, want) in [
        (
            "menuentry a {\n",
            "/boot/grub/grub.cfg: line 2: the file ends inside a block",
        ),
        ("set default=0\n", "/boot/grub/grub.cfg: it has no menu entries"),
        (
            "menuentry a { chainloader +1 }",
            "entry 'a': it loads no Linux kernel",
        ),
        (
            "menuentry a { linux /gone\n }",
            "entry 'a': kernel /gone on whole disk (ext4): not found",
        ),
        (
            "menuentry a { linux /k\ninitrd /gone\n }",
            "entry 'a': initrd /gone on whole disk (ext4): not found",
        ),
        (
            "menuentry a { linux /boot\n }",
            "entry 'a': kernel /boot on whole disk (ext4): not a regular file",
        ),
        (
            "menuentry a { linux /empty\n }",
            "entry 'a': kernel /empty on whole disk (ext4): is empty",
        ),
        (
            "search --set=root --fs-uuid dead-beef\nmenuentry a { linux /gone\n }",
            "not found; the configuration also looked for a filesystem with uuid dead-beef, which is not there",
        ),
        (
            "configfile /gone.cfg",
            "it looked for /gone.cfg on whole disk (ext4)",
        ),
        (
            "blscfg",
            "it looked for entries in /loader/entries on whole disk (ext4)",
        ),
        ("function f { f }\nf", "nested deeper than 16"),
        (long.as_str(), "a command or variable is longer than 65536 bytes"),
    ] {
        let text = error(ext4(&[
            ("/boot/grub/grub.cfg", config.as_bytes()),
            ("/k", b"k"),
            ("/empty", b""),
        ]));
        assert!(text.contains(want), "{config}:\n{text}");
    }
}

#[test]
fn the_error_is_short_whatever_a_script_looks_for() {
    let numbers: Vec<String> = (0..100).map(|number| number.to_string()).collect();
    let script = format!(
        "set x={}\nfor i in {}; do search -l $x; done\n",
        "x".repeat(60_000),
        numbers.join(" ")
    );
    let text = error(ext4(&[("/boot/grub/grub.cfg", script.as_bytes())]));
    assert!(
        text.contains("it looked for a filesystem with label xxx"),
        "{text}"
    );
    assert!(text.len() < 4096, "{} bytes", text.len());
}

#[test]
fn the_error_names_an_unsupported_filesystem() {
    let mut xfs = vec![0; 1 << 20];
    xfs[..4].copy_from_slice(b"XFSB");
    let config = b"set root='hd0,gpt2'\nmenuentry a { linux /boot/k\n }";
    let text = error(gpt(&[
        (LINUX, ext4(&[("/grub/grub.cfg", config), ("/boot/k", b"k")])),
        (LINUX, xfs),
    ]));
    let want =
        "/grub/grub.cfg: entry 'a': kernel /boot/k on partition 2 (xfs): not ext2, ext3, ext4 or FAT\n";
    assert!(text.contains(want), "{text}");
}

#[test]
fn the_error_names_a_damaged_filesystem() {
    let image = ext4(&[("/boot/grub/grub.cfg", b"linux /k"), ("/k", &pattern(0, 9000))]);
    let superblock = |at: usize, value: u32| {
        let mut image = image.clone();
        image[1024 + at..1028 + at].copy_from_slice(&value.to_le_bytes());
        error(image)
    };
    assert!(
        superblock(4, u32::MAX).contains("the filesystem is larger than its partition (4294967295 blocks")
    );
    assert!(superblock(0x20, 0).contains("the ext superblock is damaged: block groups"));
    assert!(superblock(0x18, 9).contains("the ext superblock is damaged: block size"));
    assert!(superblock(0xfc, 0x0020_0000).contains("group descriptor size"));
    assert!(superblock(0x60, 0x8000_0042).contains("unsupported features"));
    assert!(
        superblock(0x68, 0).contains("checksum"),
        "{}",
        superblock(0x68, 0)
    );
    // The directory entry of /boot, where the filesystem as such is sound.
    let mut damaged = image.clone();
    let at = damaged.windows(4).position(|w| w == b"boot").unwrap();
    damaged[at] = b'r';
    assert!(error(damaged).contains("directory block in inode 2 has an invalid checksum"));
}

#[test]
fn the_error_names_a_damaged_fat() {
    let image = fat(2, &[("/boot/grub/grub.cfg", b"linux /k"), ("/k", b"k")]);
    // Cluster size, number of tables, sectors of a table, root directory entries.
    for (at, bytes) in [
        (13, &[0][..]),
        (16, &[0xff]),
        (22, &[0xff, 0xff]),
        (17, &[0xff, 0xff]),
    ] {
        let mut image = image.clone();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        let text = error(image);
        assert!(
            text.contains("whole disk: vfat: the FAT boot sector is damaged: "),
            "{at}: {text}"
        );
    }
}

#[test]
fn a_file_that_ends_early_is_an_error_when_read() {
    let mut disk = fat(
        2,
        &[
            ("/boot/grub/grub.cfg", b"linux /kernel"),
            ("/kernel", &[7; 10_000]),
        ],
    );
    let at = disk.windows(11).position(|w| w == b"KERNEL     ").unwrap();
    disk[at + 28..at + 32].copy_from_slice(&1_000_000u32.to_le_bytes());
    let entry = find(disk).unwrap();
    let error = entry.kernel().read_into(&mut |_| Ok(())).unwrap_err();
    assert!(error.to_string().starts_with("/kernel: ends after "), "{error}");
    // A failure of the sink is another error.
    let disk = fat(
        2,
        &[
            ("/boot/grub/grub.cfg", b"linux /kernel"),
            ("/kernel", &[7; 10_000]),
        ],
    );
    let error = find(disk)
        .unwrap()
        .kernel()
        .read_into(&mut |_| Err(std::io::ErrorKind::StorageFull.into()));
    assert!(matches!(error, Err(husk_image::ReadError::Sink(_))));
}
