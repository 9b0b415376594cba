//! qcow2 images, whose requests complete on their own threads, beside raw files.

use husk_disk::ImageFormat;

use super::*;

/// An overlay over a base that holds a pattern, and the base.
fn overlay(blocks: u64, seed: u8) -> (File, File) {
    let (base, overlay) = (image(blocks), tempfile::tempfile_in("/var/tmp").unwrap());
    let content = pattern((blocks * 512) as usize, seed);
    base.write_all_at(&content, 0).unwrap();
    Disk::create_overlay(overlay.try_clone().unwrap().into(), blocks * 512).unwrap();
    (overlay, base)
}

fn chain((overlay, base): &(File, File), options: DiskOptions) -> Disk {
    let fd = |file: &File| file.try_clone().unwrap().into();
    Disk::open_qcow2(fd(overlay), Some((fd(base), ImageFormat::Raw)), options).unwrap()
}

fn write(guest: &mut Guest, address: UnitAddress, block: u32, seed: u8) {
    guest.put(DATA, &pattern(4096, seed));
    assert!(guest.run(address, &write10(block, 8), &[(DATA, 4096, 0)]).good());
}

fn read(guest: &mut Guest, address: UnitAddress, block: u32) -> Vec<u8> {
    let ended = guest.run(address, &read10(block, 8), &[(DATA, 4096, WRITE)]);
    assert!(ended.good(), "{ended:x?}");
    guest.get(DATA, 4096)
}

#[test]
fn an_overlay_works_with_a_raw_disk_and_is_closed_cleanly() {
    let (mut guest, _file) = Guest::new();
    write(&mut guest, at(0, 0), 8, 1);
    let files = overlay(BLOCKS, 2);
    let disk = unit("overlay", at(0, 7), chain(&files, reporting()));
    guest.handle.add(disk).wait().unwrap();
    guest.settle(0, 7);
    let content = pattern((BLOCKS * 512) as usize, 2);
    assert_eq!(read(&mut guest, at(0, 7), 16), content[8192..][..4096]);
    write(&mut guest, at(0, 7), 16, 3);
    assert_eq!(read(&mut guest, at(0, 7), 16), pattern(4096, 3));
    assert_eq!(read(&mut guest, at(0, 0), 8), pattern(4096, 1));
    // A new driver can use both, too.
    guest.connect(HOTPLUG | CHANGE);
    guest.settle(0, 0);
    guest.settle(0, 7);
    assert_eq!(read(&mut guest, at(0, 7), 16), pattern(4096, 3));
    assert_eq!(read(&mut guest, at(0, 0), 8), pattern(4096, 1));

    let resized = guest.handle.resize("overlay").unwrap_err().to_string();
    assert_eq!(resized, "disk \"overlay\": a qcow2 image is not resized");
    let removed = guest.handle.remove("overlay").wait().unwrap();
    removed.flushed.unwrap();
    drop(removed.disk);
    let mut held = vec![0; 4096];
    let disk = chain(&files, reporting());
    disk.reader().read_at(8192, &mut held).unwrap();
    assert_eq!(held, pattern(4096, 3));
    let mut base = vec![0; 4096];
    files.1.read_exact_at(&mut base, 8192).unwrap();
    assert_eq!(base, content[8192..][..4096]);
}

#[test]
fn a_disc_may_be_qcow2() {
    let (mut guest, _file) = Guest::new();
    let drive = NewUnit {
        medium: Medium::CdRom(None),
        ..unit("cd", at(0, 5), open(&image(4), reporting()))
    };
    guest.handle.add(drive).wait().unwrap();
    guest.settle(0, 5);
    let read_only = DiskOptions {
        read_only: true,
        ..reporting()
    };
    let disc = chain(&overlay(16, 4), read_only);
    guest.handle.insert("cd", disc).wait().unwrap();
    let read = |guest: &mut Guest| guest.run(at(0, 5), &read10(1, 1), &[(DATA, 2048, WRITE)]);
    assert_eq!(read(&mut guest).sense(), (6, 0x28, 0));
    assert!(read(&mut guest).good());
    assert_eq!(guest.get(DATA, 2048), pattern(8192, 4)[2048..4096]);
}
