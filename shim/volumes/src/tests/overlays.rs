//! Overlays, and the formats that are detected or not.

use std::os::unix::fs::MetadataExt;

use super::*;

fn is_direct(file: &OwnedFd) -> bool {
    fcntl_getfl(file).unwrap().contains(OFlags::DIRECT)
}

/// Asserts an empty, unnamed overlay of a read-only backing image.
fn is_overlay(opened: &OpenDisk, format: ImageFormat) {
    let (file, base) = (fd(opened), opened.base.as_ref().unwrap());
    let made = File::from(file.try_clone().unwrap()).metadata().unwrap();
    assert_eq!((made.len(), made.nlink()), (0, 0));
    assert_eq!((opened.format, base.format), (ImageFormat::Qcow2, format));
    assert!(!is_direct(file) && !is_direct(&base.file));
    let base = File::from(base.file.try_clone().unwrap());
    assert!(base.write_all_at(b"x", 0).is_err());
    File::from(file.try_clone().unwrap())
        .write_all_at(b"x", 0)
        .unwrap();
}

#[test]
fn an_ephemeral_disk_is_an_overlay_of_a_claim_that_nobody_writes() {
    let home = Home::new();
    let path = home.image("claim/disk.img", SIZE);
    let ephemeral = DiskPlan {
        overlay: true,
        ..file(&home.path("claim"))
    };
    let (one, other) = (home.open(&ephemeral).unwrap(), home.open(&ephemeral).unwrap());
    is_overlay(&one, ImageFormat::Raw);
    is_overlay(&other, ImageFormat::Raw);
    assert_eq!(one.path, path);
    let error = home.open(&file(&home.path("claim"))).unwrap_err();
    assert!(error.contains("is in use"), "{error}");
    drop((one, other));
    let _writer = home.open(&file(&home.path("claim"))).unwrap();
    let error = home.open(&ephemeral).unwrap_err();
    assert!(error.contains("is in use"), "{error}");
}

#[test]
fn an_overlay_is_cached_whatever_the_mode() {
    let home = Home::new();
    let path = home.image("disk.img", SIZE);
    for (cache, wanted) in [
        (CacheMode::Auto, Cache::Writeback),
        (CacheMode::None, Cache::Writeback),
        (CacheMode::WriteBack, Cache::Writeback),
        (CacheMode::WriteThrough, Cache::Writethrough),
    ] {
        let plan = DiskPlan {
            overlay: true,
            cache,
            ..file(&path)
        };
        assert_eq!(home.open(&plan).unwrap().cache, wanted, "{cache:?}");
    }
}

#[test]
fn an_overlay_has_the_block_size_of_its_base() {
    let home = Home::new();
    let path = home.image("disk.img", 6 << 10);
    let sized = |logical| DiskPlan {
        block_size: BlockSize::Custom {
            logical,
            physical: 4096,
            discard_granularity: None,
        },
        overlay: true,
        ..file(&path)
    };
    assert_eq!(
        home.open(&sized(2048)).unwrap().block_sizes.unwrap().logical,
        2048
    );
    let error = home.open(&sized(4096)).unwrap_err();
    assert!(
        error.contains("has 6144 bytes: the size must be a non-zero multiple of 4096 bytes"),
        "{error}"
    );
}

/// A file with the magic of qcow2, of a size that no raw image has.
fn qcow2(home: &Home, name: &str) -> PathBuf {
    let path = home.image(name, SIZE + 1);
    let image = File::options().write(true).open(&path).unwrap();
    image.write_all_at(b"QFI\xfb\0\0\0\x03", 0).unwrap();
    path
}

#[test]
fn only_a_container_disks_format_is_probed() {
    let home = Home::new();
    let path = qcow2(&home, "disk.qcow2");
    let opened = home.open(&container(path.clone(), None)).unwrap();
    is_overlay(&opened, ImageFormat::Qcow2);
    let read_only = DiskPlan {
        read_only: true,
        ..container(path.clone(), None)
    };
    let other = home.open(&read_only).unwrap();
    assert!(other.base.is_none() && !is_direct(fd(&other)));
    assert_eq!(
        (other.format, other.cache),
        (ImageFormat::Qcow2, Cache::Writeback)
    );
    drop((opened, other));

    // A guest can write this into a raw disk.
    let image = File::options().write(true).open(&path).unwrap();
    image.set_len(SIZE).unwrap();
    let raw = home.open(&file(&path)).unwrap();
    assert!(raw.format == ImageFormat::Raw && raw.base.is_none());
    drop(raw);
    let ephemeral = DiskPlan {
        overlay: true,
        ..file(&path)
    };
    is_overlay(&home.open(&ephemeral).unwrap(), ImageFormat::Raw);
    let host = DiskSource::HostDisk {
        path: path.clone(),
        create_bytes: None,
    };
    assert_eq!(home.open(&disk(host)).unwrap().format, ImageFormat::Raw);
    assert_eq!(
        open_hotplugged(&file(&path), &PathPolicy::Caller, None)
            .unwrap()
            .format,
        ImageFormat::Raw
    );

    image.write_all_at(b"KDMV", 0).unwrap();
    let error = home.open(&container(path, None)).unwrap_err();
    assert!(
        error.ends_with("disk.qcow2: unsupported image format: vmdk"),
        "{error}"
    );
}

#[test]
fn unpacked_disks_are_written_in_place() {
    let home = Home::new();
    let path = home.path("image.tar");
    let open = |image: &[u8], read_only| {
        fs::write(&path, oci::tests::archive(&[("disk/image", image)])).unwrap();
        let plan = DiskPlan {
            read_only,
            cache: CacheMode::WriteBack,
            ..container(path.clone(), None)
        };
        home.open(&plan).unwrap()
    };
    let writes = |file: &OwnedFd| {
        File::from(file.try_clone().unwrap())
            .write_all_at(b"x", 0)
            .is_ok()
    };
    let (raw, qcow2) = ([7; 4096], b"QFI\xfb\0\0\0\x03");
    let opened = open(&raw, false);
    assert!(opened.format == ImageFormat::Raw && opened.base.is_none() && writes(fd(&opened)));
    let opened = open(qcow2, false);
    is_overlay(&opened, ImageFormat::Qcow2);
    assert_eq!(opened.path, path);
    for (image, format) in [(&raw[..], ImageFormat::Raw), (qcow2, ImageFormat::Qcow2)] {
        let opened = open(image, true);
        assert!(opened.format == format && opened.base.is_none() && !writes(fd(&opened)));
    }
    assert_eq!(fs::read_dir(home.dir.path()).unwrap().count(), 1);
}

#[test]
fn refused_images_give_one_line_with_the_path() {
    let error = VolumeError::refused("root", Path::new("/a/disk.qcow2"), "qcow2: bad\nname\x1b[2J");
    assert_eq!(
        error.to_string(),
        "volume \"root\": /a/disk.qcow2: qcow2: bad name [2J"
    );
}
