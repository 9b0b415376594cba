//! From a plan and its open files to what the VMM is told.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use husk_proto::fds::{FdSender, MAX_FDS_PER_MESSAGE, SendError, Token};
use husk_proto::vmm::v1::boot::Source;
use husk_proto::vmm::v1::disk::ErrorPolicy;
use husk_proto::vmm::v1::{Boot, Cpu, Disk, DiskBoot, Fd, KernelBoot, Memory, Smbios, VmConfig};
use husk_vmi::{BootPlan, VmPlan};

use crate::volumes::Volumes;

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
        let disks = plan.disks.iter().zip(disks).map(|(plan, disk)| Disk {
            id: plan.name.clone(),
            file: Some(fd(disk.file)),
            read_only: disk.read_only,
            serial: plan.serial.clone().unwrap_or_default(),
            cache: disk.cache.into(),
            error_policy: ErrorPolicy::Report.into(),
            queues: 0,
        });
        let disks = disks.collect();
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
