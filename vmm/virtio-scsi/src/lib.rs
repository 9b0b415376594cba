//! SCSI disks and CD-ROM drives behind a virtio controller (virtio 1.2, section 5.6).

pub mod target;
