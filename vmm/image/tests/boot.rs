//! Boot entries of real layouts: partition tables, filesystems and the configurations distributions write.

mod common;

use common::*;

const KERNEL: usize = 700_001;
const INITRD: usize = 1_000_003;

fn debian_config() -> Vec<u8> {
    include_str!("configs/debian.cfg")
        .replace("@UUID@", ROOT_UUID)
        .into_bytes()
}

fn debian_root(grubenv: &str) -> Vec<u8> {
    let env = format!("# GRUB Environment Block\n{grubenv}####");
    let env = if grubenv.is_empty() {
        Vec::new()
    } else {
        env.into_bytes()
    };
    ext4(&[
        ("/boot/vmlinuz-6.12.48+deb13-cloud-amd64", &pattern(1, KERNEL)),
        ("/boot/initrd.img-6.12.48+deb13-cloud-amd64", &pattern(2, INITRD)),
        ("/boot/vmlinuz-6.1.0-40-cloud-amd64", &pattern(3, KERNEL)),
        ("/boot/initrd.img-6.1.0-40-cloud-amd64", &pattern(4, INITRD)),
        ("/boot/grub/grub.cfg", &debian_config()),
        ("/boot/grub/grubenv", &env),
        ("/etc/hostname", b"guest\n"),
    ])
}

#[test]
fn a_debian_cloud_image_boots_its_default_entry() {
    let stub = format!(
        "search.fs_uuid {ROOT_UUID} root \nset prefix=($root)'/boot/grub'\nconfigfile $prefix/grub.cfg\n"
    );
    let disk = gpt(&[
        (LINUX, debian_root("")),
        (
            ESP,
            fat(
                4,
                &[
                    ("/EFI/debian/grub.cfg", stub.as_bytes()),
                    ("/EFI/BOOT/BOOTX64.EFI", b"MZ"),
                ],
            ),
        ),
    ]);
    let entry = find(disk).unwrap();
    assert_eq!(entry.title, "Debian GNU/Linux");
    assert_eq!(
        entry.source,
        "partition 1 (ext4), /boot/grub/grub.cfg, entry 'Debian GNU/Linux'"
    );
    assert_eq!(
        entry.command_line,
        "BOOT_IMAGE=/boot/vmlinuz-6.12.48+deb13-cloud-amd64 root=PARTUUID=b1c0 ro console=tty0 \
         console=ttyS0,115200 earlyprintk=ttyS0,115200 consoleblank=0"
    );
    assert_eq!(read(entry.kernel()), pattern(1, KERNEL));
    assert_eq!(read(entry.initrd().unwrap()), pattern(2, INITRD));
    assert_eq!(entry.notes, [""; 0]);
}

#[test]
fn grubenv_chooses_through_submenus_by_title_id_and_index() {
    let id = format!("gnulinux-advanced-{ROOT_UUID}>gnulinux-6.1.0-40-cloud-amd64-advanced-{ROOT_UUID}");
    for next in [
        "1>1",
        id.as_str(),
        "Advanced options for Debian GNU/Linux>Debian GNU/Linux, with Linux 6.1.0-40-cloud-amd64",
    ] {
        let entry = find(gpt(&[(LINUX, debian_root(&format!("next_entry={next}\n")))])).unwrap();
        assert_eq!(
            entry.title, "Debian GNU/Linux, with Linux 6.1.0-40-cloud-amd64",
            "{next}"
        );
        assert!(entry.command_line.ends_with(" ro old"), "{}", entry.command_line);
        assert_eq!(read(entry.kernel()), pattern(3, KERNEL));
    }
    // A missing entry means the first one, also within a submenu.
    let entry = find(gpt(&[(LINUX, debian_root("next_entry=gone\n"))])).unwrap();
    assert_eq!(entry.title, "Debian GNU/Linux");
    let entry = find(gpt(&[(LINUX, debian_root("next_entry=1>gone\n"))])).unwrap();
    assert_eq!(
        entry.title,
        "Debian GNU/Linux, with Linux 6.12.48+deb13-cloud-amd64"
    );
}

fn fedora(grubenv: &str, entries: &[(&str, &str)]) -> Vec<u8> {
    let config = include_str!("configs/fedora.cfg")
        .replace("@BOOT@", BOOT_UUID)
        .replace("@ROOT@", ROOT_UUID)
        .into_bytes();
    let stub = format!(
        "search --no-floppy --root-dev-only --fs-uuid --set=dev {BOOT_UUID}\nset prefix=($dev)/grub2\n\
         export $prefix\nconfigfile $prefix/grub.cfg\n"
    );
    let env = format!("# GRUB Environment Block\n{grubenv}###");
    let kernels: Vec<_> = entries
        .iter()
        .map(|(v, _)| (format!("/vmlinuz-{v}"), pattern(v.len() as u8, 5000)))
        .collect();
    let initrds: Vec<_> = entries
        .iter()
        .map(|(v, _)| (format!("/initramfs-{v}.img"), pattern(9, 6001)))
        .collect();
    let files: Vec<_> = entries
        .iter()
        .map(|(v, text)| (format!("/loader/entries/mid-{v}.conf"), *text))
        .collect();
    let mut tree: Vec<(&str, &[u8])> = vec![("/grub2/grub.cfg", &config), ("/grub2/grubenv", env.as_bytes())];
    tree.extend(
        kernels
            .iter()
            .chain(&initrds)
            .map(|(p, c)| (p.as_str(), c.as_slice())),
    );
    tree.extend(files.iter().map(|(p, c)| (p.as_str(), c.as_bytes())));
    gpt(&[
        (ESP, fat(4, &[("/EFI/fedora/grub.cfg", stub.as_bytes())])),
        (LINUX, ext(16, BOOT_UUID, &["-t", "ext4"], &tree)),
        (LINUX, b"XFSB".repeat(1024)),
    ])
}

#[test]
fn a_fedora_image_boots_the_newest_bls_entry_with_variables_from_grubenv() {
    let text = |v: &str| {
        format!(
            "title Fedora Linux ({v}) 42\nversion {v}\nlinux /vmlinuz-{v}\ninitrd /initramfs-{v}.img $tuned_initrd\n\
             options $kernelopts $tuned_params x\ngrub_users $grub_users\ngrub_class fedora\n"
        )
    };
    let (old, new) = (text("6.9.12"), text("6.14.0"));
    let entries = [("6.9.12", old.as_str()), ("6.14.0", new.as_str())];
    let entry = find(fedora(
        "kernelopts=root=UUID=abc ro  rhgb\ntuned_params=skew_tick=1\n",
        &entries,
    ))
    .unwrap();
    assert_eq!(entry.title, "Fedora Linux (6.14.0) 42");
    assert_eq!(
        entry.command_line,
        "BOOT_IMAGE=(hd0,gpt2)/vmlinuz-6.14.0 root=UUID=abc ro rhgb skew_tick=1 x"
    );
    assert_eq!(read(entry.initrd().unwrap()), pattern(9, 6001));

    let entry = find(fedora("saved_entry=mid-6.9.12\n", &entries)).unwrap();
    assert_eq!(entry.title, "Fedora Linux (6.9.12) 42");
    assert!(
        entry
            .command_line
            .ends_with(&format!("root=UUID={ROOT_UUID} ro fallback x")),
        "{}",
        entry.command_line
    );
}

#[test]
fn an_ubuntu_image_with_a_boot_partition_boots() {
    let config = include_str!("configs/ubuntu.cfg")
        .replace("@BOOT@", BOOT_UUID)
        .replace("@ROOT@", ROOT_UUID)
        .into_bytes();
    let boot = ext(
        8,
        BOOT_UUID,
        &["-t", "ext4", "-b", "1024"],
        &[
            ("/vmlinuz-6.8.0-40-generic", &pattern(1, KERNEL)),
            ("/initrd.img-6.8.0-40-generic", &pattern(2, 10)),
            ("/grub/grub.cfg", &config),
        ],
    );
    let entry = find(gpt(&[(LINUX, ext4(&[("/etc/os-release", b"")])), (LINUX, boot)])).unwrap();
    assert_eq!(
        entry.command_line,
        "BOOT_IMAGE=/vmlinuz-6.8.0-40-generic root=LABEL=cloudimg-rootfs ro quiet splash vt.handoff=7"
    );
    assert_eq!(read(entry.kernel()), pattern(1, KERNEL));
}

#[test]
fn a_configuration_finds_other_partitions_by_uuid_label_and_file() {
    for search in [
        format!(
            "search --no-floppy --fs-uuid --set=root --hint hd0,msdos1 {}",
            ROOT_UUID.to_uppercase()
        ),
        format!("search.fs_uuid {ROOT_UUID} root hd0,gpt3"),
        "search -l --set system".to_owned(),
        format!("search --fs-uuid {ROOT_UUID} --set dev --no-floppy\nset root=$dev"),
        format!("search --fs-uuid --set dev --hint-bios hd0 {ROOT_UUID}\nset root=$dev"),
        format!("search -u -s --no-floppy {ROOT_UUID}"),
        "search --file /etc/here --set=dev\nset root=$dev".to_owned(),
        "set root=(hd0,gpt3)".to_owned(),
    ] {
        let config = format!("{search}\nmenuentry a {{\nlinux /k x\n}}\n");
        let root = ext(
            16,
            ROOT_UUID,
            &["-t", "ext4", "-L", "system"],
            &[("/etc/here", b""), ("/k", b"right")],
        );
        let boot = ext(
            8,
            BOOT_UUID,
            &["-t", "ext4"],
            &[("/grub/grub.cfg", config.as_bytes()), ("/k", b"wrong")],
        );
        let entry = find(gpt(&[(ESP, fat(2, &[])), (LINUX, boot), (LINUX, root)])).unwrap();
        assert_eq!(read(entry.kernel()), b"right", "{search}");
        assert_eq!(entry.source, "partition 2 (ext4), /grub/grub.cfg, entry 'a'");
    }
}

#[test]
fn an_exclamation_mark_negates_a_command() {
    for (condition, holds) in [
        ("! true", false),
        ("! false", true),
        ("! ! true", true),
        ("! search --file /gone --set=x", true),
        ("! [ -f /k ]", false),
        ("! f", true),
        ("$not true", false),
        ("!", false),
    ] {
        let config = format!(
            "function f {{ false; }}\nset not=!\nif {condition}; then set word=yes; else set word=no; fi\nlinux /k $word"
        );
        let disk = fat(1, &[("/grub/grub.cfg", config.as_bytes()), ("/k", b"k")]);
        let word = if holds { "yes" } else { "no" };
        let entry = find(disk).unwrap();
        assert_eq!(entry.command_line, format!("BOOT_IMAGE=/k {word}"), "{condition}");
    }
}

#[test]
fn kernel_arguments_are_escaped_as_in_grub() {
    let config = br#"menuentry a { linux /k a\\x2db 'c\d' \\x2 'e f' }"#;
    let disk = fat(1, &[("/grub/grub.cfg", config), ("/k", b"k")]);
    assert_eq!(
        find(disk).unwrap().command_line,
        r#"BOOT_IMAGE=/k a\x2db c\\d \\x2 "e f""#
    );
}

#[test]
fn a_suse_image_on_an_mbr_disk_boots() {
    let config = include_str!("configs/suse.cfg")
        .replace("@UUID@", ROOT_UUID)
        .into_bytes();
    let root = ext4(&[
        ("/boot/vmlinuz-6.4.0-150600.23.7-default", &pattern(1, 100)),
        ("/boot/initrd-6.4.0-150600.23.7-default", &pattern(2, 100)),
        ("/boot/grub2/grub.cfg", &config),
    ]);
    let entry = find(mbr(&root)).unwrap();
    assert_eq!(
        entry.source,
        "partition 1 (ext4), /boot/grub2/grub.cfg, entry 'openSUSE Leap 15.6'"
    );
    assert!(entry.command_line.ends_with(&format!(
        "root=UUID={ROOT_UUID} splash=silent security=apparmor mitigations=auto"
    )));
}

#[test]
fn systemd_boot_entries_on_the_esp_win_over_a_left_over_grub() {
    let entry = |v: &str| {
        format!(
            "title Debian\nversion {v}\nsort-key debian\noptions root=UUID=1 quiet\nlinux /debian/{v}/linux\ninitrd /debian/{v}/microcode\ninitrd /debian/{v}/initrd.img\n"
        )
    };
    let esp = fat(
        40,
        &[
            ("/EFI/systemd/systemd-bootx64.efi", b"MZ"),
            (
                "/loader/loader.conf",
                b"timeout 3\n#default x\nconsole-mode keep\n",
            ),
            ("/loader/entries/a-6.1.0-9.conf", entry("6.1.0-9").as_bytes()),
            ("/loader/entries/a-6.1.0-10.conf", entry("6.1.0-10").as_bytes()),
            (
                "/loader/entries/arm.conf",
                b"linux /x\nsort-key a\narchitecture aa64\n",
            ),
            ("/debian/6.1.0-10/linux", &pattern(1, KERNEL)),
            ("/debian/6.1.0-10/microcode", &pattern(2, 1001)),
            ("/debian/6.1.0-10/initrd.img", &pattern(3, INITRD)),
        ],
    );
    let found = find(gpt(&[(ESP, esp), (LINUX, debian_root(""))])).unwrap();
    assert_eq!(
        found.source,
        "partition 1 (vfat), /loader/entries/a-6.1.0-10.conf, entry 'Debian'"
    );
    assert_eq!(found.command_line, "root=UUID=1 quiet");
    assert_eq!(read(found.kernel()), pattern(1, KERNEL));
    // Each padded to four bytes.
    let mut initrds = pattern(2, 1001);
    initrds.extend([0; 3]);
    initrds.extend(pattern(3, INITRD));
    initrds.push(0);
    assert_eq!(read(found.initrd().unwrap()), initrds);
}

#[test]
fn a_boot_loader_entry_without_its_kernel_does_not_hide_others() {
    let disk = |kernels: &[&str]| {
        let mut tree: Vec<(&str, &[u8])> = vec![
            ("/loader/loader.conf", b"default b*\n"),
            ("/loader/entries/a.conf", b"title a\nlinux /a\n"),
            ("/loader/entries/b-1.conf", b"title b-1\nlinux /b-1\n"),
            ("/loader/entries/b-2.conf", b"title b-2\nlinux /b-2\n"),
        ];
        tree.extend(kernels.iter().map(|path| (*path, b"kernel" as &[u8])));
        fat(4, &tree)
    };
    for (kernels, title) in [
        (&["/a", "/b-1", "/b-2"][..], "b-2"),
        (&["/a", "/b-1"], "b-1"),
        (&["/a"], "a"),
    ] {
        assert_eq!(find(disk(kernels)).unwrap().title, title);
    }
    let error = find(disk(&[])).unwrap_err().to_string();
    assert!(
        error.contains("entry 'b-2': kernel /b-2 on whole disk (vfat): not found"),
        "{error}"
    );
}

#[test]
fn every_ext_and_fat_flavour_is_read() {
    let config = b"set default=0\nmenuentry one {\nlinux /boot/k a\ninitrd /boot/i\n}\n";
    let tree: Tree<'_> = &[
        ("/boot/k", &pattern(5, KERNEL)),
        ("/boot/i", &pattern(6, INITRD)),
        ("/boot/grub/grub.cfg", config),
    ];
    let images = [
        ext(16, ROOT_UUID, &["-t", "ext2"], tree),
        ext(16, ROOT_UUID, &["-t", "ext3", "-b", "1024"], tree),
        ext(16, ROOT_UUID, &["-t", "ext4", "-b", "1024"], tree),
        ext(
            16,
            ROOT_UUID,
            &["-t", "ext4", "-O", "^has_journal,^metadata_csum,^64bit"],
            tree,
        ),
        ext(
            16,
            ROOT_UUID,
            &["-t", "ext4", "-O", "mmp,ea_inode,metadata_csum_seed"],
            tree,
        ),
        ext(64, ROOT_UUID, &["-t", "ext4", "-I", "128", "-b", "4096"], tree),
        fat(3, tree),
        fat(20, tree),
        fat(40, tree),
    ];
    for (i, image) in images.into_iter().enumerate() {
        for disk in [image.clone(), mbr(&image), gpt(&[(LINUX, image.clone())])] {
            let entry = find(disk).unwrap_or_else(|e| panic!("image {i}: {e}"));
            assert_eq!(entry.command_line, "BOOT_IMAGE=/boot/k a");
            assert!(read(entry.kernel()) == pattern(5, KERNEL), "kernel of image {i}");
            assert!(
                read(entry.initrd().unwrap()) == pattern(6, INITRD),
                "initrd of image {i}"
            );
        }
    }
}

#[test]
fn symbolic_links_are_followed_and_loops_are_not() {
    let long = format!("->/boot/{}../../deep/kernel", "./".repeat(40));
    let root = |default: &str| {
        let env = format!("# GRUB Environment Block\ndefault={default}\n");
        ext4(&[
            ("/deep/kernel", b"kernel"),
            ("/boot/long", long.as_bytes()),
            ("/boot/dir", b"->../boot"),
            ("/vmlinuz", b"->boot/dir/dir/long"),
            ("/loop", b"->loop2/x"),
            ("/loop2", b"->/loop"),
            (
                "/boot/grub/grub.cfg",
                b"menuentry a { linux $k }\nmenuentry b { linux /loop }\nload_env\nset k=/vmlinuz",
            ),
            ("/boot/grub/grubenv", env.as_bytes()),
        ])
    };
    assert_eq!(read(find(root("a")).unwrap().kernel()), b"kernel");
    let error = find(root("b")).unwrap_err().to_string();
    assert!(
        error.contains("entry 'b': kernel /loop on whole disk (ext4): not found"),
        "{error}"
    );
}

#[test]
fn logical_partitions_are_followed() {
    let root = ext4(&[("/k", b"kernel"), ("/boot/grub/grub.cfg", b"linux /k x")]);
    let sectors = (root.len() / 512) as u32;
    let mut disk = vec![0; root.len() + (4 << 20)];
    mbr_entry(&mut disk, 0, 1, 0x05, 2048, sectors + 6144);
    mbr_entry(&mut disk, 2048, 0, 0x82, 63, 100);
    mbr_entry(&mut disk, 2048, 1, 0x05, 2048, sectors + 100);
    mbr_entry(&mut disk, 4096, 0, 0x83, 100, sectors);
    disk[4196 * 512..][..root.len()].copy_from_slice(&root);
    let entry = find(disk).unwrap();
    assert_eq!(
        entry.source,
        "partition 6 (ext4), /boot/grub/grub.cfg, its commands"
    );
    assert_eq!(read(entry.kernel()), b"kernel");
    assert!(entry.initrd().is_none());
}

#[test]
fn the_backup_gpt_is_used_with_a_note() {
    let mut disk = gpt(&[(LINUX, debian_root(""))]);
    disk[512 + 60] ^= 1;
    let entry = find(disk.clone()).unwrap();
    assert_eq!(entry.notes.len(), 2, "{:?}", entry.notes);
    assert_eq!(entry.notes[1], "the backup GPT was used");
    // A bad entry array counts as well.
    disk[512 + 60] ^= 1;
    disk[1024 + 40] ^= 1;
    assert_eq!(find(disk).unwrap().notes.len(), 2);
}

#[test]
fn a_gpt_has_the_sectors_of_its_disk() {
    for sector in [512, 1024, 2048, 4096] {
        let mut disk = gpt_of_sectors(sector, &[(LINUX, debian_root(""))]);
        assert_eq!(find(disk.clone()).unwrap().notes, [""; 0], "{sector}");
        disk[sector as usize..][..8].fill(0);
        let notes = find(disk).unwrap().notes;
        assert_eq!(notes, ["the backup GPT was used"], "{sector}");
    }
}

#[test]
fn a_gpt_without_a_protective_mbr_is_ignored() {
    let tree = |kernel| ext4(&[("/k", kernel), ("/boot/grub/grub.cfg", b"linux /k x")]);
    // The backup GPT stays at the end when another image is written over the start of the disk.
    let mut old = gpt(&[(LINUX, tree(b"old")), (LINUX, vec![0; 16 << 20])]);
    old[..34 * 512].fill(0);
    let new = tree(b"new");
    let mut mbr = old.clone();
    mbr_entry(&mut mbr, 0, 0, 0x83, 36_864, (new.len() / 512) as u32);
    mbr[36_864 * 512..][..new.len()].copy_from_slice(&new);
    let mut whole = old;
    whole[..new.len()].copy_from_slice(&new);
    for (disk, source) in [(mbr, "partition 1 (ext4)"), (whole, "whole disk (ext4)")] {
        let entry = find(disk).unwrap();
        assert_eq!(read(entry.kernel()), b"new", "{source}");
        assert_eq!(
            entry.source,
            format!("{source}, /boot/grub/grub.cfg, its commands")
        );
        assert_eq!(entry.notes, [""; 0]);
    }
}
