use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use husk_vmi::{BlockSize, CacheMode, Controller, ErrorPolicy, FileRef, FormatPolicy, SeedData, SeedLayout};
use rustix::fs::{CWD, Mode, fcntl_getfl, mkfifoat};

use super::*;

mod overlays;

const SIZE: u64 = 4 << 20;

struct Home {
    dir: tempfile::TempDir,
}

impl Home {
    fn new() -> Home {
        Home {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn image(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }

    fn open(&self, disk: &DiskPlan) -> Result<OpenDisk, String> {
        open_disk(
            disk,
            &ScratchDir::at(self.dir.path()),
            &PathPolicy::Caller,
            &|_, _| {},
        )
        .map_err(|fault| VolumeFault::for_volume("data")(fault).to_string())
    }
}

fn fd(opened: &OpenDisk) -> &OwnedFd {
    opened.file.as_ref().unwrap()
}

fn disk(source: DiskSource) -> DiskPlan {
    DiskPlan {
        name: "data".into(),
        target: "vda".into(),
        controller: Controller::VirtioBlk,
        device: DeviceType::Disk,
        read_only: false,
        overlay: false,
        format: FormatPolicy::Raw,
        serial: None,
        cache: CacheMode::Auto,
        shareable: false,
        block_size: BlockSize::Default,
        error_policy: ErrorPolicy::Stop,
        preallocated: false,
        queues: 1,
        io_thread: None,
        boot_order: None,
        origin: None,
        source,
    }
}

fn file(path: &Path) -> DiskPlan {
    disk(DiskSource::File(path.to_owned()))
}

fn container(path: PathBuf, image_path: Option<&str>) -> DiskPlan {
    disk(DiskSource::ContainerDisk {
        path,
        image_path: image_path.map(PathBuf::from),
    })
}

#[test]
fn other_file_types_are_refused_without_blocking() {
    let home = Home::new();
    let fifo = home.path("fifo");
    mkfifoat(CWD, &fifo, Mode::RUSR | Mode::WUSR).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(home.path("socket")).unwrap();
    for (path, what) in [
        (fifo, "a FIFO"),
        (home.path("socket"), "a socket"),
        ("/dev/null".into(), "a character device"),
    ] {
        let error = home.open(&file(&path)).unwrap_err();
        let wanted = format!(
            "volume \"data\": {} is {what}, not an image file or a block device",
            path.display()
        );
        assert_eq!(error, wanted);
    }
    let missing = home.path("missing");
    let error = home.open(&file(&missing)).unwrap_err();
    assert!(
        error.contains(&format!("{}: No such file", missing.display())),
        "{error}"
    );
}

#[test]
fn sizes_that_are_no_whole_sectors_are_refused() {
    let home = Home::new();
    for bytes in [0, 1, 511, 513] {
        let path = home.image("odd", bytes);
        let error = home.open(&file(&path)).unwrap_err();
        assert!(error.contains(&format!("odd has {bytes} bytes")), "{error}");
    }
    home.open(&file(&home.image("even", 512))).unwrap();
}

#[test]
fn opening_waits_for_an_image_that_is_being_closed() {
    let home = Home::new();
    let path = home.image("disk.img", SIZE);
    let last = home.open(&file(&path)).unwrap();
    let end = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        drop(last);
    });
    home.open(&file(&path)).unwrap();
    end.join().unwrap();
}

#[test]
fn one_image_serves_one_writer_or_many_readers_or_shareable_disks() {
    let home = Home::new();
    let path = home.image("disk.img", SIZE);
    let read = DiskPlan {
        read_only: true,
        ..file(&path)
    };
    let share = DiskPlan {
        shareable: true,
        ..file(&path)
    };

    let writer = home.open(&file(&path)).unwrap();
    for other in [&file(&path), &read, &share] {
        let error = home.open(other).unwrap_err();
        assert_eq!(
            error,
            format!(
                "volume \"data\": {} is in use by another VM or program",
                path.display()
            )
        );
    }
    // The lock belongs to the open file: it outlives this process's own copy.
    let handed_on = fd(&writer).try_clone().unwrap();
    drop(writer);
    home.open(&file(&path)).unwrap_err();
    drop(handed_on);

    let readers = (home.open(&read).unwrap(), home.open(&read).unwrap());
    home.open(&file(&path)).unwrap_err();
    home.open(&share).unwrap_err();
    drop(readers);
    let both = DiskPlan {
        read_only: true,
        ..share.clone()
    };
    let shared = (
        home.open(&share).unwrap(),
        home.open(&share).unwrap(),
        home.open(&both).unwrap(),
    );
    home.open(&file(&path)).unwrap_err();
    home.open(&read).unwrap_err();
    drop(shared);
    home.open(&file(&path)).unwrap();
}

#[test]
fn a_read_only_disk_cannot_be_written_through_its_descriptor() {
    let home = Home::new();
    let path = home.image("disk.img", SIZE);
    let opened = home
        .open(&DiskPlan {
            read_only: true,
            cache: CacheMode::WriteBack,
            ..file(&path)
        })
        .unwrap();
    assert!(opened.read_only);
    assert!(File::from(opened.file.unwrap()).write_all_at(b"x", 0).is_err());
}

#[test]
fn the_cache_mode_is_the_descriptors() {
    let home = Home::new();
    let path = home.image("disk.img", SIZE);
    for (mode, allowed) in [
        (CacheMode::Auto, &[Cache::None, Cache::Writethrough][..]),
        (CacheMode::WriteThrough, &[Cache::Writethrough]),
        (CacheMode::WriteBack, &[Cache::Writeback]),
    ] {
        let opened = home
            .open(&DiskPlan {
                cache: mode,
                ..file(&path)
            })
            .unwrap();
        assert!(allowed.contains(&opened.cache), "{mode:?} {:?}", opened.cache);
        let flags = fcntl_getfl(fd(&opened)).unwrap();
        assert_eq!(flags.contains(OFlags::DIRECT), opened.cache == Cache::None);
        assert!(!flags.contains(OFlags::NONBLOCK));
    }
}

#[test]
fn a_claims_folder_holds_disk_img_and_no_link() {
    let home = Home::new();
    home.image("claim/disk.img", SIZE);
    home.open(&file(&home.path("claim"))).unwrap();
    fs::create_dir(home.path("empty")).unwrap();
    let error = home.open(&file(&home.path("empty"))).unwrap_err();
    assert!(error.contains("empty/disk.img: No such file"), "{error}");
    fs::create_dir(home.path("evil")).unwrap();
    symlink(home.path("claim/disk.img"), home.path("evil/disk.img")).unwrap();
    home.open(&file(&home.path("evil"))).unwrap_err();
    // The caller may use symbolic links.
    symlink(home.path("claim"), home.path("link")).unwrap();
    home.open(&file(&home.path("link"))).unwrap();
}

#[test]
fn an_empty_disk_is_zero_sparse_and_nameless() {
    let home = Home::new();
    let opened = home
        .open(&disk(DiskSource::EmptyDisk {
            capacity_bytes: SIZE + 7,
        }))
        .unwrap();
    let stat = rustix::fs::fstat(fd(&opened)).unwrap();
    assert_eq!((stat.st_size as u64, stat.st_blocks, stat.st_nlink), (SIZE, 0, 0));
    assert_eq!(fs::read_dir(home.dir.path()).unwrap().count(), 0);
    let error = home
        .open(&disk(DiskSource::EmptyDisk {
            capacity_bytes: MIB - 1,
        }))
        .unwrap_err();
    assert!(error.contains("must be at least 1MiB"), "{error}");
}

/// Label and files, with modes, of an ISO disk.
fn content(opened: OpenDisk) -> (String, Vec<(String, u32, String)>) {
    assert!(opened.read_only && opened.format == ImageFormat::Raw);
    let file = File::from(opened.file.unwrap());
    assert!(file.write_all_at(b"x", 0).is_err() && file.set_len(0).is_err());
    let mut image = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut image, 0).unwrap();
    assert_eq!(image.len() % 2048, 0);
    let (label, files) = iso::tests::read(&image);
    let text = |(name, (mode, content))| (name, mode & 0o777, String::from_utf8(content).unwrap());
    (label, files.into_iter().map(text).collect())
}

fn seed(layout: SeedLayout, user_data: SeedData, network_data: Option<SeedData>) -> DiskPlan {
    disk(DiskSource::CloudInit {
        layout,
        meta_data: "{}".into(),
        public_keys: Vec::new(),
        user_data,
        network_data,
    })
}

#[test]
fn a_seed_is_where_cloud_init_looks_for_it() {
    let home = Home::new();
    let inline = |text: &str| SeedData::Inline(text.into());
    let no_cloud = seed(SeedLayout::NoCloud, inline("#cloud-config\n"), None);
    let files = |list: &[(&str, &str)]| -> Vec<(String, u32, String)> {
        list.iter()
            .map(|(name, text)| ((*name).into(), 0o400, (*text).into()))
            .collect()
    };
    assert_eq!(
        content(home.open(&no_cloud).unwrap()),
        (
            "cidata".into(),
            files(&[("meta-data", "{}"), ("user-data", "#cloud-config\n")])
        )
    );
    fs::create_dir(home.path("secret")).unwrap();
    fs::write(home.path("secret/userData"), "u").unwrap();
    let secret = || SeedData::Secret(home.path("secret"));
    let drive = seed(SeedLayout::ConfigDrive, secret(), Some(inline("n")));
    let at = |name| format!("openstack/latest/{name}");
    let (meta, network, user) = (at("meta_data.json"), at("network_data.json"), at("user_data"));
    assert_eq!(
        content(home.open(&drive).unwrap()),
        (
            "config-2".into(),
            files(&[(&meta, "{}"), (&network, "n"), (&user, "u")])
        )
    );
    let error = home
        .open(&seed(SeedLayout::NoCloud, inline(""), Some(secret())))
        .unwrap_err();
    let wanted = format!(
        "volume \"data\": {} has no file networkdata or networkData",
        home.path("secret").display()
    );
    assert_eq!(error, wanted);
}

#[test]
fn a_seeds_secret_may_have_one_of_two_keys() {
    let home = Home::new();
    for name in ["user", "network", "neither", "empty"] {
        fs::create_dir(home.path(name)).unwrap();
    }
    fs::write(home.path("user/userdata"), "u").unwrap();
    fs::write(home.path("network/networkdata"), "n").unwrap();
    fs::write(home.path("empty/userdata"), "u").unwrap();
    fs::write(home.path("empty/networkdata"), "").unwrap();
    let open = |name: &str| {
        let secret = || SeedData::Secret(home.path(name));
        home.open(&seed(SeedLayout::NoCloud, secret(), Some(secret())))
    };
    let files = |name: &str| {
        let files = content(open(name).unwrap()).1.into_iter();
        files.map(|(name, _, text)| (name, text)).collect::<Vec<_>>()
    };
    let file = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let (meta, user) = (file("meta-data", "{}"), file("user-data", "u"));
    assert_eq!(files("user"), [meta.clone(), user.clone()]);
    assert_eq!(files("empty"), [meta.clone(), user]);
    let network = file("network-config", "n");
    assert_eq!(files("network"), [meta, network, file("user-data", "")]);
    let error = open("neither").unwrap_err();
    assert!(error.ends_with("has no file userdata or userData"), "{error}");
}

#[test]
fn an_objects_files_become_a_disk() {
    let home = Home::new();
    fs::create_dir(home.path("map")).unwrap();
    fs::write(home.path("map/ca.crt"), "c").unwrap();
    let files = |dir: Option<&str>| {
        disk(DiskSource::Files {
            dir: dir.map(|dir| home.path(dir)),
            label: "OEMDRV".into(),
        })
    };
    assert_eq!(
        content(home.open(&files(Some("map"))).unwrap()),
        ("OEMDRV".into(), vec![("ca.crt".into(), 0o444, "c".into())])
    );
    assert_eq!(content(home.open(&files(None)).unwrap()).1, []);
    let error = home.open(&files(Some("missing"))).unwrap_err();
    assert!(error.contains("missing: No such file"), "{error}");
    let error = home.open(&files(Some("map/ca.crt"))).unwrap_err();
    assert!(
        error.ends_with("is a regular file, not a directory with a file for each key"),
        "{error}"
    );
}

#[test]
fn a_drive_may_be_empty() {
    let opened = Home::new().open(&disk(DiskSource::Empty)).unwrap();
    assert!(opened.file.is_none() && opened.read_only);
}

#[test]
fn a_lun_is_a_scsi_device() {
    let home = Home::new();
    let path = home.image("disk.img", SIZE);
    let lun = DiskPlan {
        device: DeviceType::Lun { reservation: true },
        ..file(&path)
    };
    let error = home.open(&lun).unwrap_err();
    assert!(
        error.ends_with("disk.img is a regular file, not a block device, which a lun needs"),
        "{error}"
    );
}

#[test]
fn sizes_follow_the_block_size() {
    let home = Home::new();
    let path = home.image("disk.img", 6 << 10);
    let sized = |block_size| DiskPlan {
        block_size,
        ..file(&path)
    };
    let custom = |logical| BlockSize::Custom {
        logical,
        physical: 4096,
        discard_granularity: None,
    };
    let sizes = home.open(&sized(custom(2048))).unwrap().block_sizes.unwrap();
    assert_eq!((sizes.logical, sizes.physical), (2048, 4096));
    let error = home.open(&sized(custom(4096))).unwrap_err();
    assert!(
        error.contains("has 6144 bytes: the size must be a non-zero multiple of 4096 bytes"),
        "{error}"
    );
    let sizes = home.open(&sized(BlockSize::MatchVolume));
    let block = rustix::fs::statfs(home.dir.path()).unwrap().f_bsize as u64;
    assert_eq!(
        sizes.is_ok(),
        (6 << 10) % block.clamp(512, 4096) == 0,
        "{sizes:?}"
    );
}

#[test]
fn a_container_disk_is_the_one_file_in_disk_and_is_never_written() {
    let home = Home::new();
    let path = home.image("root/disk/any-name", SIZE);
    fs::write(&path, vec![b'a'; SIZE as usize]).unwrap();
    for given in ["root", "root/disk", "root/disk/any-name"] {
        let opened = home.open(&container(home.path(given), None)).unwrap();
        assert_eq!(opened.path, path);
        assert_eq!(opened.base.unwrap().format, ImageFormat::Raw);
    }
    assert_eq!(fs::read(&path).unwrap(), vec![b'a'; SIZE as usize]);
    home.open(&container(home.path("root"), Some("disk/any-name")))
        .unwrap();

    home.image("root/disk/second", SIZE);
    let folder = home.path("root/disk");
    let error = home.open(&container(home.path("root"), None)).unwrap_err();
    let wanted = format!(
        "more than one file found in folder {}, only one disk is allowed",
        folder.display()
    );
    assert!(error.ends_with(&wanted), "{error}");
    fs::create_dir_all(home.path("bare/disk")).unwrap();
    let error = home.open(&container(home.path("bare"), None)).unwrap_err();
    assert!(
        error.contains("no file found in folder") && error.ends_with("no disk present"),
        "{error}"
    );
}

#[test]
fn a_container_image_cannot_lead_out_of_itself() {
    let home = Home::new();
    home.image("secret", SIZE);
    fs::create_dir_all(home.path("root/disk")).unwrap();
    symlink("../../secret", home.path("root/disk/image")).unwrap();
    home.open(&container(home.path("root"), None)).unwrap_err();
    home.open(&container(home.path("root"), Some("../secret")))
        .unwrap_err();
    home.open(&container(home.path("root"), Some("/etc/passwd")))
        .unwrap_err();
    fs::create_dir(home.path("linked")).unwrap();
    symlink("/", home.path("linked/disk")).unwrap();
    home.open(&container(home.path("linked"), None)).unwrap_err();
}

#[test]
fn boot_files_stay_beneath_their_folder() {
    let home = Home::new();
    home.image("root/boot/vmlinuz", 512);
    home.image("secret", 512);
    symlink("../secret", home.path("root/escape")).unwrap();
    symlink("boot/vmlinuz", home.path("root/vmlinuz")).unwrap();
    let beneath = |path: &str| {
        let file = FileRef {
            dir: home.path("root"),
            path: path.into(),
        };
        open_boot_file(&KernelFile::Beneath(file))
    };
    beneath("boot/vmlinuz").unwrap();
    for bad in ["../secret", "escape", "vmlinuz", "/etc/passwd", "boot", "missing"] {
        assert!(beneath(bad).is_err(), "{bad}");
    }
    open_boot_file(&KernelFile::Path(home.path("root/escape"))).unwrap();
    open_boot_file(&KernelFile::Path("/dev/zero".into())).unwrap_err();
}

#[test]
fn boot_files_are_locked_as_long_as_they_are_open() {
    let home = Home::new();
    let path = home.image("boot/vmlinuz", 100);
    let kernel = KernelFile::Path(path.clone());
    let opened = [open_boot_file(&kernel).unwrap(), open_boot_file(&kernel).unwrap()];
    assert!(is_locked(&path));
    drop(opened);
    assert!(!is_locked(&path));
}
