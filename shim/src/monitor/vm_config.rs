//! From a plan and its open files to what the VMM is told.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use husk_proto::fds::{FdSender, MAX_FDS_PER_MESSAGE, SendError, Token};
use husk_proto::vmm::v1::block_size::{Custom, Size};
use husk_proto::vmm::v1::boot::Source;
use husk_proto::vmm::v1::disk::ErrorPolicy as WireErrorPolicy;
use husk_proto::vmm::v1::{BlockSize, Boot, Cpu, Disk, DiskBoot, Fd, KernelBoot, Memory, Smbios, VmConfig};
use husk_vmi::{BootPlan, DiskPlan, ErrorPolicy, VmPlan};

use crate::volumes::{ImageFormat, OpenDisk, Volumes};

/// A disk that the VMM does not serve yet.
#[derive(Debug, thiserror::Error)]
#[error("disk {disk:?}: {what}")]
pub(super) struct Unserved {
    disk: String,
    what: &'static str,
}

/// Refuses what the VMM does not serve yet: of the plan, and of the images once they are open. As the VMM learns more
/// this function shrinks; then it goes, with its two calls.
pub(super) fn refuse_unserved(plan: &VmPlan, volumes: Option<&Volumes>) -> Result<(), Unserved> {
    let what = |index: usize, disk: &DiskPlan| {
        let image = volumes.and_then(|volumes| volumes.disks.get(index));
        if disk.is_scsi() {
            return Some(
                "SCSI disks (bus scsi, sata or none; cdrom; lun) are not served yet: use a disk with bus virtio",
            );
        }
        image
            .is_some_and(|image| image.format == ImageFormat::Qcow2)
            .then_some(
                "its image is qcow2, which is not served yet: convert it with 'qemu-img convert -O raw'",
            )
    };
    let mut disks = plan.disks.iter().enumerate();
    disks.try_for_each(|(index, disk)| match what(index, disk) {
        None => Ok(()),
        Some(what) => Err(Unserved {
            disk: disk.name.clone(),
            what,
        }),
    })
}

/// A configuration and the descriptors it names; they must have been sent before the configuration is.
#[derive(Debug)]
pub(super) struct Configured {
    pub(super) config: VmConfig,
    descriptors: Vec<(Token, OwnedFd)>,
}

impl Configured {
    pub(super) fn new(plan: &VmPlan, volumes: Volumes, kvm: OwnedFd, console: Option<OwnedFd>) -> Configured {
        let mut descriptors = Vec::new();
        let mut fd = |fd: OwnedFd| -> Fd {
            let token = Token::random();
            descriptors.push((token, fd));
            token.into()
        };
        let Volumes {
            disks,
            kernel,
            initrd,
        } = volumes;
        let disks = plan.disks.iter().zip(disks);
        let disks = disks.map(|(plan, open)| disk(plan, open, &mut fd)).collect();
        let source = match &plan.boot {
            BootPlan::Kernel { command_line, .. } => Source::Kernel(KernelBoot {
                kernel: kernel.map(&mut fd),
                initrd: initrd.map(&mut fd),
                command_line: command_line.clone(),
            }),
            BootPlan::Disks { order, append } => Source::Disk(DiskBoot {
                disks: order.clone(),
                append: append.clone().unwrap_or_default(),
            }),
        };
        let config = VmConfig {
            name: format!("{}/{}", plan.namespace, plan.name),
            cpu: Some(Cpu {
                sockets: plan.topology.sockets,
                cores: plan.topology.cores,
                threads: plan.topology.threads,
            }),
            memory: Some(Memory {
                bytes: plan.memory.guest_bytes,
                hugepage_bytes: plan.memory.hugepage_bytes.unwrap_or(0),
            }),
            smbios: Some(Smbios {
                uuid: plan.uuid.to_string(),
                serial: plan.serial.clone().unwrap_or_default(),
            }),
            boot: Some(Boot { source: Some(source) }),
            disks,
            rng: plan.rng,
            balloon: plan.balloon,
            console: console.map(&mut fd),
            rtc_offset_seconds: plan.rtc_offset_seconds,
            kvm: Some(fd(kvm)),
        };
        Configured { config, descriptors }
    }

    /// Sends every descriptor and closes this process's copies: what the VMM has open it alone keeps locked.
    pub(super) async fn send(self, fds: &FdSender) -> Result<VmConfig, SendError> {
        for part in self.descriptors.chunks(MAX_FDS_PER_MESSAGE) {
            let part: Vec<(Token, BorrowedFd<'_>)> =
                part.iter().map(|(token, fd)| (*token, fd.as_fd())).collect();
            fds.send(&part).await?;
        }
        Ok(self.config)
    }
}

/// One disk; `fd` takes its descriptor and names it.
fn disk(plan: &DiskPlan, open: OpenDisk, fd: impl FnOnce(OwnedFd) -> Fd) -> Disk {
    let block_size = open.block_sizes.map(|sizes| BlockSize {
        size: Some(Size::Custom(Custom {
            logical: sizes.logical,
            physical: sizes.physical,
        })),
    });
    Disk {
        id: plan.name.clone(),
        file: open.file.map(fd),
        read_only: open.read_only,
        serial: plan.serial.clone().unwrap_or_default(),
        cache: open.cache.into(),
        error_policy: match plan.error_policy {
            ErrorPolicy::Stop => WireErrorPolicy::Stop,
            ErrorPolicy::Report => WireErrorPolicy::Report,
            ErrorPolicy::Ignore => WireErrorPolicy::Ignore,
            ErrorPolicy::Enospace => WireErrorPolicy::Enospace,
        }
        .into(),
        queues: plan.queues,
        block_size,
    }
}

#[cfg(test)]
mod tests {
    use husk_proto::vmm::v1::disk::Cache;
    use husk_vmi::{
        BlockSize as PlannedBlockSize, CacheMode, Controller, DeviceType, DiskSource, FormatRule, Memory,
        ScsiAddress, Topology,
    };

    use crate::volumes::BlockSizes;

    use super::*;

    fn plan(change: impl FnOnce(&mut DiskPlan)) -> VmPlan {
        let mut disk = DiskPlan {
            name: "data".into(),
            target: "vda".into(),
            controller: Controller::VirtioBlk,
            device: DeviceType::Disk,
            read_only: false,
            overlay: false,
            format: FormatRule::Raw,
            serial: None,
            cache: CacheMode::Auto,
            shareable: false,
            block_size: PlannedBlockSize::Default,
            error_policy: ErrorPolicy::Stop,
            queues: 1,
            io_thread: None,
            boot_order: None,
            source: DiskSource::EmptyDisk {
                capacity_bytes: 1 << 20,
            },
        };
        change(&mut disk);
        VmPlan {
            name: "vm".into(),
            namespace: "default".into(),
            uuid: uuid::Uuid::nil(),
            serial: None,
            topology: Topology {
                sockets: 1,
                cores: 1,
                threads: 1,
            },
            memory: Memory {
                guest_bytes: 1 << 27,
                hugepage_bytes: None,
            },
            disks: vec![disk],
            scsi: None,
            boot: BootPlan::Disks {
                order: Vec::new(),
                append: None,
            },
            rng: false,
            balloon: false,
            serial_console: false,
            acpi: true,
            rtc_offset_seconds: 0,
            grace_period_seconds: 30,
            start_paused: false,
            notes: Vec::new(),
        }
    }

    #[test]
    fn what_the_vmm_cannot_do_is_refused_in_one_line() {
        refuse_unserved(&plan(|_| {}), None).unwrap();
        let scsi = plan(|disk| disk.controller = Controller::VirtioScsi(ScsiAddress { target: 0, lun: 0 }));
        assert_eq!(
            refuse_unserved(&scsi, None).unwrap_err().to_string(),
            "disk \"data\": SCSI disks (bus scsi, sata or none; cdrom; lun) are not served yet: use a disk with bus virtio"
        );

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.qcow2");
        std::fs::write(&path, b"QFI\xfb\0\0\0\x03").unwrap();
        let qcow2 = plan(|disk| {
            disk.cache = CacheMode::WriteBack;
            disk.source = DiskSource::ContainerDisk {
                path,
                image_path: None,
            };
        });
        let volumes = crate::volumes::open(&qcow2, &crate::volumes::Scratch::at(dir.path()), |_| {}).unwrap();
        let error = refuse_unserved(&qcow2, Some(&volumes)).unwrap_err().to_string();
        assert!(error.contains("qemu-img convert -O raw"), "{error}");
    }

    #[test]
    fn the_vmm_is_told_what_the_plan_says_of_a_disk() {
        let open = |block_sizes| OpenDisk {
            file: None,
            read_only: true,
            cache: Cache::Writethrough,
            format: ImageFormat::Raw,
            block_sizes,
        };
        let told = |change: fn(&mut DiskPlan), block_sizes| {
            disk(&plan(change).disks[0], open(block_sizes), |_| Fd::default())
        };
        let plain = told(|_| {}, None);
        assert_eq!(
            (plain.error_policy(), plain.queues, plain.block_size),
            (WireErrorPolicy::Stop, 1, None)
        );
        let sizes = BlockSizes {
            logical: 4096,
            physical: 8192,
            discard_granularity: None,
        };
        let wanted = Disk {
            id: "data".into(),
            file: None,
            read_only: true,
            serial: "S".into(),
            cache: Cache::Writethrough.into(),
            error_policy: WireErrorPolicy::Enospace.into(),
            queues: 4,
            block_size: Some(BlockSize {
                size: Some(Size::Custom(Custom {
                    logical: 4096,
                    physical: 8192,
                })),
            }),
        };
        let change = |disk: &mut DiskPlan| {
            disk.serial = Some("S".into());
            disk.error_policy = ErrorPolicy::Enospace;
            disk.queues = 4;
        };
        assert_eq!(told(change, Some(sizes)), wanted);
    }
}
