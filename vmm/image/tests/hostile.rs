//! Damaged and hostile disks: an error or an entry, never a panic, and in bounded time.

mod common;

use std::sync::Arc;
use std::sync::LazyLock;
use std::time::Duration;

use common::*;
use proptest::prelude::*;
use rustix::time::{ClockId, clock_gettime};

/// CPU time that one image may cost, which is independent of the machine's load.
const CPU_LIMIT: Duration = Duration::from_secs(20);

/// CPU time of the calling thread.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

/// `PROPTEST_CASES` overrides the number, for a longer hunt.
fn cases(default: u32) -> ProptestConfig {
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default(),
        None => ProptestConfig::with_cases(default),
    }
}

/// Finds and reads everything found. Panics of this crate surface; those of filesystem crates are its errors.
fn digest(disk: Vec<u8>) {
    let start = cpu_time();
    match husk_image::find(Arc::new(disk)) {
        Ok(entry) => {
            let mut total = 0;
            for files in std::iter::once(entry.kernel()).chain(entry.initrd()) {
                let _ = files.read_into(&mut |piece| {
                    total += piece.len();
                    Ok(())
                });
            }
        }
        Err(error) => assert!(error.to_string().len() < 1 << 20),
    }
    let used = cpu_time() - start;
    assert!(used < CPU_LIMIT, "used {used:?}");
}

const TREE: Tree<'_> = &[
    ("/boot/kernel", &[1; 30_000]),
    ("/boot/initrd", &[2; 50_000]),
    (
        "/boot/grub/grub.cfg",
        b"load_env\nset default=0\nmenuentry a --id b {\nlinux /boot/kernel root=x\ninitrd /boot/initrd\n}\n",
    ),
    ("/boot/grub/grubenv", b"# GRUB Environment Block\nsaved_entry=b\n"),
    (
        "/loader/entries/e.conf",
        b"title t\nlinux /boot/kernel\ninitrd /boot/initrd\noptions a\n",
    ),
];

static IMAGES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let linked: Vec<_> = [TREE, &[("/vmlinuz", b"->boot/kernel" as &[u8])]].concat();
    vec![
        ext(2, ROOT_UUID, &["-t", "ext4", "-O", "^metadata_csum"], &linked),
        ext(2, ROOT_UUID, &["-t", "ext4"], &linked),
        ext(2, ROOT_UUID, &["-t", "ext2"], &linked),
        fat(2, TREE),
        fat(40, TREE),
        gpt(&[
            (ESP, fat(1, TREE)),
            (
                LINUX,
                ext(2, ROOT_UUID, &["-t", "ext4", "-O", "^metadata_csum"], TREE),
            ),
        ]),
        mbr(&fat(1, TREE)),
    ]
});

/// Sectors of each image that are not empty, to be damaged.
static SECTORS: LazyLock<Vec<Vec<usize>>> = LazyLock::new(|| {
    let used = |image: &Vec<u8>| {
        let sectors = image.chunks(512).enumerate();
        sectors
            .filter(|(_, s)| s.iter().any(|b| *b > 2))
            .map(|(i, _)| i)
            .collect()
    };
    IMAGES.iter().map(used).collect()
});

fn damage() -> impl Strategy<Value = (prop::sample::Index, usize, Vec<u8>)> {
    let value = prop_oneof![
        prop::collection::vec(any::<u8>(), 1..8),
        Just(vec![0xff; 4]),
        Just(vec![0; 4]),
        Just(vec![0xff, 0xff, 0xff, 0x7f]),
        any::<u8>().prop_map(|b| vec![b]),
    ];
    (any::<prop::sample::Index>(), 0..512usize, value)
}

proptest! {
    #![proptest_config(cases(96))]

    #[test]
    fn damaged_images(which in any::<prop::sample::Index>(), hits in prop::collection::vec(damage(), 1..12), cut in any::<Option<u16>>()) {
        let which = which.index(IMAGES.len());
        let mut disk = IMAGES[which].clone();
        for (sector, offset, bytes) in hits {
            let at = SECTORS[which][sector.index(SECTORS[which].len())] * 512 + offset;
            let end = (at + bytes.len()).min(disk.len());
            disk[at..end].copy_from_slice(&bytes[..end - at]);
        }
        if let Some(cut) = cut.filter(|c| c % 8 == 0) {
            disk.truncate(usize::from(cut) * 64);
        }
        digest(disk);
    }

    #[test]
    fn random_bytes_with_magic_numbers(mut disk in prop::collection::vec(any::<u8>(), 0..70_000), magics in any::<u16>()) {
        let plants: [(usize, &[u8]); 9] = [
            (0x438, &[0x53, 0xef]),
            (510, &[0x55, 0xaa]),
            (450, &[0xee]),
            (512, b"EFI PART\0\0\x01\0\x5c\0\0\0"),
            (0x36, b"FAT16   "),
            (0x52, b"FAT32   "),
            (0, &[0xeb, 0x3c, 0x90]),
            (11, &[0, 2, 1, 1, 0, 2]),
            (0x418, &[0; 4]),
        ];
        for (bit, (at, bytes)) in plants.into_iter().enumerate() {
            if magics & 1 << bit != 0 && disk.len() > at + bytes.len() {
                disk[at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
        digest(disk);
    }

    #[test]
    fn hostile_scripts(words in prop::collection::vec(prop::sample::select(WORDS), 0..200)) {
        digest(fat(1, &[
            ("/boot/grub/grub.cfg", words.concat().as_bytes()),
            ("/boot/grub/grubenv", b"# GRUB Environment Block\nx=$x\nsaved_entry=0>0\n"),
            ("/loader/entries/a.conf", b"linux /k\noptions $x ${y\n"),
            ("/k", b"k"),
        ]));
    }

    #[test]
    fn arbitrary_text(config in "(?s).{0,300}", env in "(?s).{0,100}", entry in "(?s).{0,200}", loader in "(?s).{0,60}") {
        digest(fat(1, &[
            ("/boot/grub/grub.cfg", config.as_bytes()),
            ("/boot/grub/grubenv", format!("# GRUB Environment Block\n{env}").as_bytes()),
            ("/loader/entries/a.conf", format!("linux /k\n{entry}").as_bytes()),
            ("/loader/loader.conf", format!("default {loader}").as_bytes()),
            ("/k", b"k"),
        ]));
    }

    #[test]
    fn extended_partitions(links in prop::collection::vec((0u32..40, 0usize..4, prop::sample::select(&[0x05u8, 0x0f, 0x83, 0x00][..]), any::<u32>(), any::<u32>()), 0..60)) {
        let mut disk = vec![0; 40 * 512];
        mbr_entry(&mut disk, 0, 0, 0x05, 1, 30);
        for (sector, slot, kind, first, sectors) in links {
            mbr_entry(&mut disk, sector as usize, slot, kind, if sectors % 3 == 0 { first } else { first % 40 }, sectors);
        }
        digest(disk);
    }
}

const WORDS: &[&str] = &[
    "if ",
    "then ",
    "else ",
    "elif ",
    "fi ",
    "for ",
    "in ",
    "do ",
    "done ",
    "while ",
    "function ",
    "f ",
    "{ ",
    "} ",
    "\n",
    "; ",
    "[ ",
    "] ",
    "! ",
    "-a ",
    "-f ",
    "( ",
    ") ",
    "= ",
    "menuentry ",
    "submenu ",
    "'t' ",
    "--id ",
    "set ",
    "x=$x$x$x ",
    "$x ",
    "${x} ",
    "\"",
    "'",
    "$",
    "\\",
    "#",
    "linux /k ",
    "initrd /k ",
    "source /boot/grub/grub.cfg ",
    "configfile $config_file ",
    "blscfg ",
    "load_env ",
    "search --set=root --file /k ",
    "search.fs_uuid ABCD-1234 root ",
    "set default=0>0 ",
    "set root=hd0,gpt99 ",
    "unset root ",
    "1 ",
    "x ",
];

/// Scripts that run or grow without end.
#[test]
fn bombs_end() {
    let calls = (0..14)
        .map(|i| format!("function f{} {{ f{i}; f{i}; f{i}; f{i} }}\n", i + 1))
        .collect::<String>();
    let nested = format!(
        "{} x {}",
        "for a in 1 2 3 4 5 6 7 8; do ".repeat(30),
        "; done".repeat(30)
    );
    for script in [
        "function f { f }\nf\n".to_owned(),
        "source /boot/grub/grub.cfg\nsource /boot/grub/grub.cfg\n".to_owned(),
        "configfile /boot/grub/grub.cfg\n".to_owned(),
        format!("function f0 {{ set x=1 }}\n{calls}f14\n"),
        format!("set x=aaaaaaaa\n{}linux /k $x\n", "set x=$x$x$x$x\n".repeat(500)),
        format!(
            "set x=\"{}\"\n{}",
            "a ".repeat(30_000),
            "for a in $x; do for b in $x; do true; done; done\n".repeat(100)
        ),
        nested,
        "menuentry a {\n".repeat(50_000),
        "menuentry a { true }\n".repeat(20_000),
        "blscfg\n".repeat(20_000),
        "[ -f /boot/grub/grub.cfg ]\n".repeat(20_000),
        "submenu a {\n".repeat(20) + &"}\n".repeat(20),
        "if true; then ".repeat(30) + "linux /k" + &"; fi".repeat(30),
        "$".repeat(1 << 19),
        "[ ".repeat(1 << 18),
        "\"$x\"".repeat(200_000),
    ] {
        digest(fat(
            4,
            &[
                ("/boot/grub/grub.cfg", script.as_bytes()),
                ("/loader/entries/a.conf", b"linux /k"),
                ("/k", b"k"),
            ],
        ));
    }
}

/// A directory without an end, on a cluster chain that is a loop.
#[test]
fn a_cluster_chain_that_loops_ends() {
    let mut disk = fat(40, &[("/EFI/a/b", b"x")]);
    let word = |at: usize| u16::from_le_bytes([disk[at], disk[at + 1]]) as usize;
    let (reserved, sectors, per_cluster) = (word(14), word(36), disk[13] as usize);
    assert_eq!(&disk[0x52..0x57], b"FAT32");
    // Cluster 3 is /EFI, after the root directory: filled with a name that is not looked for, followed by itself.
    for table in [reserved, reserved + sectors] {
        disk[table * 512 + 12..][..4].copy_from_slice(&3u32.to_le_bytes());
    }
    let cluster = (reserved + 2 * sectors + per_cluster) * 512;
    let mut entry = *b"ZZZ        \x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    entry[11] = 0x10;
    for slot in disk[cluster..cluster + per_cluster * 512].chunks_mut(32) {
        slot.copy_from_slice(&entry);
    }
    let start = cpu_time();
    let error = find(disk).unwrap_err().to_string();
    assert!(error.contains("exhausts the read budget"), "{error}");
    assert!(cpu_time() - start < CPU_LIMIT);
}

/// Sizes the ext reader would allocate by.
#[test]
fn inodes_of_absurd_size_are_refused_cheaply() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let long = format!("->/{}boot/kernel", "./".repeat(60));
    for (path, size) in [
        ("/link", 1u64 << 40),
        ("/boot", 1 << 30),
        ("/boot/kernel", 1 << 42),
        ("/boot/grub/grub.cfg", 1 << 43),
    ] {
        let tree: Tree<'_> = &[
            ("/link", long.as_bytes()),
            ("/boot/kernel", b"k"),
            ("/boot/grub/grub.cfg", b"linux /link"),
        ];
        std::fs::write(&image, ext4(tree)).unwrap();
        run(
            "/sbin/debugfs",
            &[
                "-w",
                "-R",
                &format!("set_inode_field {path} size {size}"),
                image.to_str().unwrap(),
            ],
        );
        let disk = std::fs::read(&image).unwrap();
        assert!(find(disk.clone()).is_err(), "{path}");
        digest(disk);
    }
}

/// The filesystem crates' own panics are caught, so that one bad partition costs that partition.
#[test]
fn a_bad_filesystem_does_not_hide_a_good_one() {
    let mut bad = IMAGES[0].clone();
    // The block group size: zero divides by zero in the reader.
    bad[1024 + 0x20..1024 + 0x24].fill(0);
    let entry = find(gpt(&[(LINUX, bad), (LINUX, IMAGES[1].clone())])).unwrap();
    assert_eq!(entry.source, "partition 2 (ext4), /boot/grub/grub.cfg, entry 'a'");
}

#[test]
fn scripts_are_bounded_before_they_are_parsed() {
    // A function keeps its body, which takes a hundred times its text.
    let function = |name: &str| format!("function {name} {{\n{}}}\n", "a\n".repeat(500_000));
    let names = ["f", "g", "h"];
    let files = names.map(|name| (format!("/boot/grub/{name}"), function(name)));
    let config = names.map(|name| format!("source /boot/grub/{name}\n")).concat();
    let mut tree = vec![("/boot/grub/grub.cfg", config.as_bytes())];
    tree.extend(files.iter().map(|(path, text)| (path.as_str(), text.as_bytes())));
    let error = find(fat(8, &tree)).unwrap_err().to_string();
    assert!(error.contains("the script exceeds the work limit"), "{error}");
}
