//! A disk that is an overlay: served by threads of its own, closed with the device.

mod guest;

use std::fs::File;
use std::os::unix::fs::FileExt;

use guest::*;
use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::testing::WRITE;
use husk_disk::{Disk, DiskOptions, EngineKind, ErrorPolicy, ImageFormat};

fn clone(file: &File) -> std::os::fd::OwnedFd {
    file.try_clone().unwrap().into()
}

fn options() -> DiskOptions {
    DiskOptions {
        error_policy: ErrorPolicy::Report,
        ..DiskOptions::default()
    }
}

#[test]
fn an_overlay_outlives_drivers_pauses_and_the_device() {
    for kind in [EngineKind::Uring, EngineKind::Threads] {
        let [base, overlay] = [(); 2].map(|()| tempfile::tempfile_in("/var/tmp").unwrap());
        let content = pattern((SECTORS * 512) as usize, 5);
        base.write_all_at(&content, 0).unwrap();
        let disk = Disk::new_overlay(clone(&overlay), (clone(&base), ImageFormat::Raw), options()).unwrap();
        let mut guest = Guest::on(disk, clone(&overlay).into(), kind, 1, true);
        assert_eq!(guest.request(IN, 8, &[(DATA, 4096, WRITE)]).0, OK);
        assert_eq!(guest.get(DATA, 4096), content[4096..8192]);
        let mut model = content.clone();
        for i in 0..40u64 {
            let bytes = pattern(4096, i as u8);
            guest.put(DATA + i * 4096, &bytes);
            guest.add(OUT, i * 8, &[(DATA + i * 4096, 4096, 0)]);
            model[i as usize * 4096..][..4096].copy_from_slice(&bytes);
            if i % 13 == 12 {
                guest.driver.kick();
                let queues = guest.blk.quiesce().unwrap();
                guest.activate(F_FLUSH, queues);
            }
        }
        guest.driver.kick();
        for _ in 0..40 {
            guest.driver.wait();
        }
        guest.connect(F_FLUSH);
        for (sector, range) in [(16, 8192..12288), (1000, 512_000..516_096)] {
            assert_eq!(guest.request(IN, sector, &[(DATA, 4096, WRITE)]).0, OK);
            assert_eq!(guest.get(DATA, 4096), model[range]);
        }
        let resized = guest.handle.resize().unwrap_err().to_string();
        assert_eq!(resized, "a qcow2 image is not resized");
        // The driver flushed nothing: closing the device writes the image.
        guest.blk.reset();
        drop(guest);
        let disk =
            Disk::open_qcow2(overlay.into(), Some((clone(&base), ImageFormat::Raw)), options()).unwrap();
        let mut held = vec![0; model.len()];
        disk.reader().read_at(0, &mut held).unwrap();
        assert!(held == model);
    }
}
