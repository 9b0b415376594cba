//! The descriptors of a Create request, except that of KVM. All are taken before anything is opened: the channel
//! closes one that waits too long, and a disk may take longer to open.

use std::fs::File;
use std::os::fd::OwnedFd;

use husk_disk::Disk;
use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1::boot::Source;
use husk_proto::vmm::v1::{self as pb};
use husk_virtio_console::PortSetup;
use husk_virtio_net::NetSetup;
use husk_virtio_scsi::NewUnit;
use tonic::Status;

use super::fields::{OpenFuture, missing, take_fd};
use super::saved::{self, SavedVm};
use super::{disks, nics, ports, vsock};
use crate::boot::KernelSource;
use crate::machine::VsockSetup;
use crate::ram::MemoryFile;

/// The files and devices that a request names by descriptors, in the request's order.
pub(super) struct RequestFiles {
    pub saved: Option<OpenFuture<(SavedVm, MemoryFile)>>,
    pub disks: Vec<OpenFuture<Disk>>,
    pub scsi: Vec<OpenFuture<NewUnit>>,
    pub nics: Vec<NetSetup>,
    pub ports: Vec<PortSetup>,
    pub boot: BootSource,
    pub console: Option<OwnedFd>,
    pub vsock: Option<VsockSetup>,
}

/// The source of the kernel: descriptors, or a disk to boot from.
pub(super) enum BootSource {
    Kernel(KernelSource),
    Disks(pb::DiskBoot),
}

impl RequestFiles {
    pub async fn new(
        config: &pb::VmConfig,
        saved: Option<&pb::SavedMachine>,
        fds: &FdReceiver,
    ) -> Result<Self, Status> {
        let saved = match saved {
            Some(saved) => Some(saved::take_files(fds, saved).await?),
            None => None,
        };
        let mut disks = Vec::new();
        for (i, disk) in config.disks.iter().enumerate() {
            disks.push(disks::take_image(fds, &format!("config.disks[{i}]"), disk).await?);
        }
        let mut scsi = Vec::new();
        for (i, disk) in config.scsi_disks.iter().enumerate() {
            scsi.push(disks::take_unit(fds, &format!("config.scsi_disks[{i}]"), disk).await?);
        }
        let mut nics = Vec::new();
        for (i, nic) in config.nics.iter().enumerate() {
            nics.push(nics::setup(fds, &format!("config.nics[{i}]"), nic).await?);
        }
        let mut ports = Vec::new();
        for (i, port) in config.ports.iter().enumerate() {
            ports.push(ports::setup(fds, &format!("config.ports[{i}]"), port).await?);
        }
        Ok(Self {
            saved,
            disks,
            scsi,
            nics,
            ports,
            boot: boot(fds, config.boot.as_ref()).await?,
            console: match config.console.as_ref() {
                Some(console) => Some(take_fd(fds, "config.console", Some(console)).await?),
                None => None,
            },
            vsock: vsock::setup(fds, config.vsock_cid, config.vhost_vsock.as_ref()).await?,
        })
    }
}

async fn boot(fds: &FdReceiver, boot: Option<&pb::Boot>) -> Result<BootSource, Status> {
    let source = boot.and_then(|boot| boot.source.as_ref());
    let kernel = match source.ok_or_else(|| missing("config.boot.source"))? {
        Source::Disk(boot) => return Ok(BootSource::Disks(boot.clone())),
        Source::Kernel(kernel) => kernel,
    };
    let initrd = match kernel.initrd.as_ref() {
        Some(initrd) => Some(take_fd(fds, "config.boot.kernel.initrd", Some(initrd)).await?),
        None => None,
    };
    let file = take_fd(fds, "config.boot.kernel.kernel", kernel.kernel.as_ref()).await?;
    Ok(BootSource::Kernel(KernelSource::Kernel {
        kernel: File::from(file),
        initrd: initrd.map(File::from),
        command_line: kernel.command_line.clone(),
    }))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::Duration;

    use husk_devices::pci::SLOTS;
    use husk_proto::fds::{self, FdSender, MAX_OUTSTANDING, TakeError, Token, UNCLAIMED_TIMEOUT};
    use husk_proto::vmm::v1::scsi_disk::Type;
    use husk_virtio_net::MAX_PAIRS;
    use husk_virtio_scsi::{MAX_DISKS, Medium};

    use super::*;

    /// Sends files, and keeps their tokens.
    struct Sent {
        sender: FdSender,
        tokens: Vec<Token>,
    }

    impl Sent {
        async fn file(&mut self) -> Option<pb::Fd> {
            let file = tempfile::tempfile().unwrap();
            file.set_len(1 << 20).unwrap();
            let token = self.sender.send_one(file.as_fd()).await.unwrap();
            self.tokens.push(token);
            Some(token.into())
        }

        async fn disk(&mut self, id: &str) -> pb::Disk {
            pb::Disk {
                id: id.into(),
                file: self.file().await,
                ..Default::default()
            }
        }

        /// A request with every kind of descriptor.
        async fn request(&mut self) -> (pb::VmConfig, pb::SavedMachine) {
            let overlay = pb::Disk {
                format: pb::disk::Format::Qcow2.into(),
                base: self.file().await,
                ..self.disk("overlay").await
            };
            let mut scsi = Vec::new();
            for kind in [Type::Disk, Type::Cdrom, Type::Lun] {
                let mut disk = pb::ScsiDisk {
                    disk: Some(self.disk("scsi").await),
                    lun: Some(kind as u32),
                    r#type: kind.into(),
                    ..Default::default()
                };
                if kind == Type::Lun {
                    disk.passthrough.get_or_insert_default().privileged = self.file().await;
                }
                scsi.push(disk);
            }
            let nic = pb::Nic {
                id: "default".into(),
                mac: vec![2, 0, 0, 0, 0, 1],
                taps: self.file().await.into_iter().collect(),
                vhost: self.file().await.into_iter().collect(),
                ..Default::default()
            };
            let kernel = pb::KernelBoot {
                kernel: self.file().await,
                initrd: self.file().await,
                ..Default::default()
            };
            let config = pb::VmConfig {
                disks: vec![self.disk("first").await, self.disk("second").await, overlay],
                scsi_disks: scsi,
                nics: vec![nic],
                ports: vec![pb::Port {
                    name: "port".into(),
                    stream: self.file().await,
                }],
                boot: Some(pb::Boot {
                    source: Some(Source::Kernel(kernel)),
                }),
                console: self.file().await,
                vsock_cid: 3,
                vhost_vsock: self.file().await,
                ..Default::default()
            };
            let saved = pb::SavedMachine {
                state: self.file().await,
                memory: self.file().await,
            };
            (config, saved)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_opens_slowly_costs_no_descriptor() {
        let (sender, receiver) = fds::socketpair().unwrap();
        let (sender, fds) = (FdSender::new(sender).unwrap(), FdReceiver::new(receiver).unwrap());
        let tokens = Vec::new();
        let mut sent = Sent { sender, tokens };
        let (config, saved) = sent.request().await;
        let files = RequestFiles::new(&config, Some(&saved), &fds).await.unwrap();
        for (at, token) in sent.tokens.into_iter().enumerate() {
            let refused = fds.take(token).await.err();
            assert_eq!(refused, Some(TakeError::Missing(token)), "file {at}");
        }
        tokio::time::sleep(UNCLAIMED_TIMEOUT + Duration::from_secs(1)).await;
        for disk in files.disks.into_iter().take(2) {
            assert_eq!(disk.await.unwrap().size(), 1 << 20);
        }
        let unit = files.scsi.into_iter().next().unwrap().await.unwrap();
        assert!(matches!(unit.medium, Medium::Disk(_)));
    }

    #[test]
    fn the_channel_holds_all_descriptors_of_the_largest_vm() {
        // An image and its base, or a device and its helper. A tap and its vhost.
        let disks = 2 * MAX_DISKS as usize;
        let nics = 2 * MAX_PAIRS * (usize::from(SLOTS) - 1);
        let others = 16;
        assert!(disks + nics + others <= MAX_OUTSTANDING);
    }
}
