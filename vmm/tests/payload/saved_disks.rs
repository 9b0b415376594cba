//! A VM whose disk goes on from an image on another file system.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;

use husk_proto::vmm::v1::disk::Cache;
use husk_proto::vmm::v1::{self as pb};
use tempfile::NamedTempFile;
use tonic::Status;

use super::rig::Rig;
use super::saved_vm::{Saved, letters};

/// A process with a VM of two vCPUs that has a disk of two queues, where its file allows as many.
async fn created(image: (&File, Cache), may_buffer: bool, saved: Option<&Saved>) -> Result<Rig, Status> {
    let mut rig = Rig::start().await;
    let mut config = rig.config(&letters()).await;
    config.cpu = Some(pb::Cpu {
        sockets: 1,
        cores: 2,
        threads: 1,
    });
    config.disks = vec![pb::Disk {
        id: "data".into(),
        file: Some(rig.send(image.0).await),
        cache: image.1.into(),
        queues: 2,
        may_buffer,
        ..Default::default()
    }];
    let saved = match saved {
        Some(saved) => Some(saved.send(&rig).await),
        None => None,
    };
    rig.create_from(config, saved).await.map(|()| rig)
}

#[tokio::test]
async fn a_disk_keeps_its_queues_whatever_alignment_its_image_needs() {
    // tmpfs does direct I/O of whole pages only, and none before Linux 6.6.
    let unaligned = NamedTempFile::new_in("/dev/shm").unwrap();
    unaligned.as_file().set_len(1 << 20).unwrap();
    let mut direct = File::options();
    direct.read(true).write(true).custom_flags(libc::O_DIRECT);
    let Ok(direct) = direct.open(unaligned.path()) else {
        return;
    };
    let buffered = tempfile::tempfile().unwrap();
    buffered.set_len(1 << 20).unwrap();
    let (direct, buffered) = ((&direct, Cache::None), (&buffered, Cache::Writeback));
    for (before, after) in [(direct, buffered), (buffered, direct)] {
        let mut rig = created(before, true, None).await.unwrap();
        rig.client.boot(pb::BootRequest { paused: true }).await.unwrap();
        let saved = Saved::empty();
        saved.save(&mut rig).await.unwrap();
        // Others use the image: it is not taken into the host's page cache.
        let outside = created(after, false, Some(&saved)).await;
        match after.1 {
            Cache::None => {
                let refused = outside.unwrap_err();
                assert!(refused.message().contains("has 2 queues"), "{refused}");
            }
            _ => drop(outside.unwrap()),
        }
        let mut other = created(after, true, Some(&saved)).await.unwrap();
        other.boot().await.unwrap();
        other.read_console(40).await;
    }
}
