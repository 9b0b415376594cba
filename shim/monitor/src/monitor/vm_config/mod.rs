//! The configuration of the VMM, made from a plan and its open files.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use husk_proto::fds::{FdSender, MAX_FDS_PER_MESSAGE, SendError, Token};
use husk_proto::vmm::v1::block_size::{Custom, Size};
use husk_proto::vmm::v1::boot::Source;
use husk_proto::vmm::v1::disk::{ErrorPolicy as WireErrorPolicy, Format};
use husk_proto::vmm::v1::scsi_disk::Type;
use husk_proto::vmm::v1::watchdog::Action;
use husk_proto::vmm::v1::{
    BlockSize, Boot, Cpu, Disk, DiskBoot, Fd, KernelBoot, Memory, Nic, Port, ScsiDisk, ScsiPassthrough,
    Smbios, VmConfig, Watchdog,
};
use husk_vmi::{
    BootPlan, CacheMode, Controller, DeviceType, DiskPlan, DiskSource, ErrorPolicy, VmPlan, WatchdogAction,
};
use husk_volumes::{ImageFormat, OpenDisk, Volumes};

use super::vsock::GUEST_CID;

/// An interface and the descriptors that the VMM needs.
#[derive(Debug)]
pub(super) struct OpenNic {
    pub(super) name: String,
    pub(super) mac: [u8; 6],
    pub(super) mtu: u32,
    pub(super) taps: Vec<OwnedFd>,
    pub(super) vhost: Vec<OwnedFd>,
    pub(super) link_up: bool,
    /// The slot of an interface that was plugged into a saved VM.
    pub(super) pci_slot: Option<u8>,
}

/// The guest's ends of what the monitor serves.
#[derive(Debug, Default)]
pub(super) struct GuestSockets {
    /// ttyS0.
    pub(super) console: Option<OwnedFd>,
    /// Ports of the console device, by name.
    pub(super) ports: Vec<(&'static str, OwnedFd)>,
    /// The disk of downward metrics.
    pub(super) metrics_disk: Option<OwnedFd>,
}

/// The host's devices that the VMM needs, except those of disks and interfaces.
#[derive(Debug)]
pub(super) struct HostDevices {
    pub(super) kvm: OwnedFd,
    /// vhost-vsock with the CID of the plan.
    pub(super) vhost_vsock: Option<OwnedFd>,
}

/// A configuration and its descriptors. The descriptors must be sent first.
#[derive(Debug)]
pub(super) struct PreparedConfig {
    pub(super) config: VmConfig,
    descriptors: Vec<(Token, OwnedFd)>,
}

impl PreparedConfig {
    pub(super) fn new(
        plan: &VmPlan,
        volumes: Volumes,
        nics: Vec<OpenNic>,
        devices: HostDevices,
        mut sockets: GuestSockets,
    ) -> PreparedConfig {
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
        let (mut blk_disks, mut scsi_disks) = (Vec::new(), Vec::new());
        for (plan, mut open) in plan.disks.iter().zip(disks) {
            let file = match plan.source {
                DiskSource::DownwardMetrics => sockets.metrics_disk.take(),
                _ => open.file.take(),
            };
            let file = file.map(&mut fd);
            let base = open.base.take().map(|base| (fd(base.file), base.format));
            match plan.controller {
                Controller::VirtioBlk => blk_disks.push(disk(plan, &open, file, base)),
                Controller::VirtioScsi(_) | Controller::VirtioScsiUnassigned => {
                    let lun = open.lun.take().map(|lun| ScsiPassthrough {
                        max_segments: lun.max_segments,
                        privileged: lun.privileged.map(&mut fd),
                        reservation: plan.device == DeviceType::Lun { reservation: true },
                    });
                    scsi_disks.push(scsi_disk(plan, &open, file, (base, lun)));
                }
            }
        }
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
            disks: blk_disks,
            scsi_disks,
            nics: nics.into_iter().map(|open| nic(open, &mut fd)).collect(),
            rng: plan.rng,
            balloon: plan.balloon,
            watchdog: plan.watchdog.map(|action| Watchdog {
                action: match action {
                    WatchdogAction::Reset => Action::Reset,
                    WatchdogAction::Poweroff => Action::Poweroff,
                    WatchdogAction::Shutdown => Action::Shutdown,
                    WatchdogAction::Pause => Action::Pause,
                }
                .into(),
            }),
            console: sockets.console.map(&mut fd),
            rtc_offset_seconds: plan.rtc_offset_seconds,
            kvm: Some(fd(devices.kvm)),
            ports: sockets
                .ports
                .into_iter()
                .map(|open| port(open, &mut fd))
                .collect(),
            vsock_cid: plan.vhost_vsock_cid.unwrap_or(GUEST_CID),
            vhost_vsock: devices.vhost_vsock.map(&mut fd),
        };
        PreparedConfig { config, descriptors }
    }

    /// Sends all descriptors and closes this process's copies, so that only the VMM holds the locks of the files.
    pub(super) async fn send(self, fds: &FdSender) -> Result<VmConfig, SendError> {
        for part in self.descriptors.chunks(MAX_FDS_PER_MESSAGE) {
            let part: Vec<(Token, BorrowedFd<'_>)> =
                part.iter().map(|(token, fd)| (*token, fd.as_fd())).collect();
            fds.send(&part).await?;
        }
        Ok(self.config)
    }
}

/// A hotplugged NIC and its descriptors.
pub(super) fn plugged_nic(open: OpenNic) -> (Nic, Vec<(Token, OwnedFd)>) {
    let mut descriptors = Vec::new();
    let nic = nic(open, &mut |fd| {
        let token = Token::random();
        descriptors.push((token, fd));
        token.into()
    });
    (nic, descriptors)
}

/// The base of an overlay and its format.
type SentBase = Option<(Fd, ImageFormat)>;

/// A hotplugged volume and its descriptor.
pub(super) type Plugged<'a> = (ScsiDisk, Option<(Token, BorrowedFd<'a>)>);

/// The disk of a hotplugged volume.
pub(super) fn plugged<'a>(plan: &DiskPlan, open: &'a OpenDisk) -> Plugged<'a> {
    let descriptor = open.file.as_ref().map(|file| (Token::random(), file.as_fd()));
    let file = descriptor.as_ref().map(|(token, _)| (*token).into());
    // It is never an overlay or a device of the host.
    (scsi_disk(plan, open, file, (None, None)), descriptor)
}

fn nic(open: OpenNic, fd: &mut impl FnMut(OwnedFd) -> Fd) -> Nic {
    Nic {
        id: open.name,
        mac: open.mac.to_vec(),
        mtu: open.mtu,
        taps: open.taps.into_iter().map(&mut *fd).collect(),
        vhost: open.vhost.into_iter().map(fd).collect(),
        link_down: !open.link_up,
        pci_slot: open.pci_slot.map_or(0, u32::from),
    }
}

fn port((name, stream): (&str, OwnedFd), fd: &mut impl FnMut(OwnedFd) -> Fd) -> Port {
    Port {
        name: name.into(),
        stream: Some(fd(stream)),
    }
}

fn scsi_disk(
    plan: &DiskPlan,
    open: &OpenDisk,
    file: Option<Fd>,
    (base, passthrough): (SentBase, Option<ScsiPassthrough>),
) -> ScsiDisk {
    ScsiDisk {
        disk: Some(disk(plan, open, file, base)),
        controller: 0,
        target: plan.scsi_address().map_or(0, |address| address.target.into()),
        lun: plan.scsi_address().map(|address| address.lun.into()),
        r#type: match plan.device {
            DeviceType::Disk => Type::Disk,
            DeviceType::Lun { .. } => Type::Lun,
            DeviceType::Cdrom { .. } => Type::Cdrom,
        }
        .into(),
        shareable: plan.shareable,
        passthrough,
    }
}

fn format(format: ImageFormat) -> i32 {
    match format {
        ImageFormat::Raw => Format::Raw,
        ImageFormat::Qcow2 => Format::Qcow2,
    }
    .into()
}

fn disk(plan: &DiskPlan, open: &OpenDisk, file: Option<Fd>, base: SentBase) -> Disk {
    let (base, base_format) = base.unzip();
    let block_size = open.block_sizes.map(|sizes| BlockSize {
        size: Some(Size::Custom(Custom {
            logical: sizes.logical,
            physical: sizes.physical,
        })),
    });
    Disk {
        id: plan.name.clone(),
        file,
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
        format: format(open.format),
        new_overlay: open.new_overlay,
        preallocated: plan.preallocated,
        may_buffer: open.private && plan.cache == CacheMode::Auto,
        base,
        base_format: base_format.map_or(Format::Unspecified.into(), format),
    }
}

#[cfg(test)]
mod tests;
