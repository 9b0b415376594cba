//! Converts a request's `VmConfig` to a machine's configuration: claims descriptors and checks every field.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use husk_disk::DiskReader;
use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1::boot::Source as BootSource;
use husk_proto::vmm::v1::watchdog::Action as WatchdogAction;
use husk_proto::vmm::v1::{self as pb};
use husk_virtio_scsi::{Medium, NewUnit};
use tonic::Status;
use uuid::Uuid;

use super::saved::{self, SavedVm};
use super::{disks, fields, nics, ports, vsock};
use crate::boot;
use crate::cpuid::Topology;
use crate::kvm::KvmHost;
use crate::machine::{BlkDisk, MachineConfig};
use crate::ram::{MemoryBacking, MemoryFile};
use crate::smbios;

/// The checked contents of a Create request.
#[derive(Debug)]
pub struct VmParts {
    /// namespace/name.
    pub name: String,
    /// The host's KVM.
    pub host: KvmHost,
    /// The machine's configuration.
    pub config: MachineConfig,
    /// Origin of the kernel.
    pub source: boot::KernelSource,
    /// Descriptor that ttyS0 is connected to.
    pub console: Option<OwnedFd>,
    /// Action of the watchdog, if there is one.
    pub watchdog: Option<WatchdogAction>,
    /// The state from which the machine goes on, and its memory.
    pub saved: Option<(SavedVm, MemoryFile)>,
}

fn missing(field: &str) -> Status {
    fields::missing(&format!("config.{field}"))
}

fn invalid(field: &str, reason: impl std::fmt::Display) -> Status {
    fields::invalid(&format!("config.{field}"), reason)
}

async fn claim(fds: &FdReceiver, field: &str, fd: Option<&pb::Fd>) -> Result<OwnedFd, Status> {
    fields::claim(fds, &format!("config.{field}"), fd).await
}

/// Checks a request and claims its descriptors from the channel.
pub async fn parts(request: pb::CreateRequest, fds: &FdReceiver) -> Result<VmParts, Status> {
    let config = request.config.ok_or_else(|| fields::missing("config"))?;
    let saved = match request.saved {
        Some(saved) => Some(saved::open(fds, saved).await?),
        None => None,
    };
    let cpu = config.cpu.ok_or_else(|| missing("cpu"))?;
    let memory = config.memory.ok_or_else(|| missing("memory"))?;
    let smbios = config.smbios.unwrap_or_default();
    let uuid = match smbios.uuid.as_str() {
        "" => Uuid::nil(),
        text => text.parse().map_err(|e| invalid("smbios.uuid", e))?,
    };
    let kvm = claim(fds, "kvm", config.kvm.as_ref()).await?;
    let host = KvmHost::new(kvm).map_err(|e| invalid("kvm", e))?;

    let vcpus = cpu.sockets.saturating_mul(cpu.cores).saturating_mul(cpu.threads);
    let mut blk = Vec::new();
    for (i, disk) in config.disks.iter().enumerate() {
        let field = format!("config.disks[{i}]");
        let mut image = disks::open(fds, &field, disk).await?;
        let queues = disk.queues.clamp(1, vcpus.max(1));
        let mut queues = u16::try_from(queues).unwrap_or(u16::MAX).min(MAX_DISK_QUEUES);
        let saved = saved
            .as_ref()
            .and_then(|(vm, _)| vm.machine.disk_queues(&disk.id));
        if let Some(saved) = saved {
            // How many there are depends on the file system of the image too, but the guest uses these.
            queues = saved.clamp(1, queues);
            if disk.may_buffer {
                image = image
                    .for_engines(queues)
                    .map_err(|e| disks::refused(&field, &disk.id, &e))?;
            } else if queues > 1 && image.needs_one_engine() {
                let error = format!(
                    "the saved disk has {queues} queues, which need direct I/O in blocks of {} bytes: put the image on \
                     storage that has it",
                    image.geometry().logical_block
                );
                return Err(disks::refused(&field, &disk.id, &io::Error::other(error)));
            }
        }
        blk.push(BlkDisk {
            id: disk.id.clone(),
            image,
            serial: disk.serial.clone(),
            queues,
        });
    }
    let mut scsi = Vec::new();
    for (i, disk) in config.scsi_disks.iter().enumerate() {
        scsi.push(disks::scsi_unit(fds, &format!("config.scsi_disks[{i}]"), disk).await?);
    }
    let (mut setups, mut plugged_nics) = (Vec::new(), Vec::new());
    for (i, nic) in config.nics.iter().enumerate() {
        let at = |field: &str| format!("nics[{i}]{field}");
        let setup = nics::setup(fds, &format!("config.{}", at("")), nic).await?;
        if config.nics[..i].iter().any(|other| other.id == nic.id) {
            return Err(invalid(&at(".id"), format!("{:?} is used twice", nic.id)));
        }
        match (u8::try_from(nic.pci_slot), saved.is_some()) {
            (Ok(0), _) => setups.push(setup),
            (Ok(slot), true) => plugged_nics.push((slot, setup)),
            _ => return Err(invalid(&at(".pci_slot"), "is not a slot of a saved machine")),
        }
    }
    let mut port_setups = Vec::new();
    for (i, port) in config.ports.into_iter().enumerate() {
        port_setups.push(ports::setup(fds, &format!("config.ports[{i}]"), port).await?);
    }
    let watchdog = config.watchdog.map(watchdog_action).transpose()?;
    let source = boot_source(config.boot, fds, &readers(&blk, &scsi)).await?;
    let console = match config.console.as_ref() {
        Some(_) => Some(claim(fds, "console", config.console.as_ref()).await?),
        None => None,
    };
    let config_out = MachineConfig {
        topology: Topology {
            sockets: cpu.sockets,
            cores: cpu.cores,
            threads: cpu.threads,
        },
        memory: memory.bytes,
        backing: if memory.hugepage_bytes == 0 {
            MemoryBacking::Anonymous
        } else {
            MemoryBacking::Hugetlb(memory.hugepage_bytes)
        },
        identity: smbios::SystemIdentity {
            uuid,
            serial: smbios.serial,
        },
        nics: setups,
        plugged_nics,
        disks: blk,
        scsi,
        rng: config.rng,
        balloon: config.balloon,
        ports: port_setups,
        vsock: vsock::setup(fds, config.vsock_cid, config.vhost_vsock.as_ref()).await?,
        watchdog: watchdog.is_some(),
        rtc_offset: config.rtc_offset_seconds,
    };
    Ok(VmParts {
        name: config.name,
        host,
        config: config_out,
        source,
        console,
        watchdog,
        saved,
    })
}

fn watchdog_action(watchdog: pb::Watchdog) -> Result<WatchdogAction, Status> {
    let action = WatchdogAction::try_from(watchdog.action);
    action.map_err(|_| invalid("watchdog.action", format!("{} is no action", watchdog.action)))
}

/// Maximum number of queues of a disk. Each has a ring and a worker thread.
const MAX_DISK_QUEUES: u16 = 64;

/// Readers of every disk that may have a kernel, by id.
fn readers<'a>(blk: &'a [BlkDisk], scsi: &'a [NewUnit]) -> Vec<(&'a str, DiskReader)> {
    let blk = blk.iter().map(|disk| (&disk.id[..], disk.image.reader()));
    let scsi = scsi.iter().filter_map(|unit| match &unit.medium {
        Medium::Disk(disk) | Medium::CdRom(Some(disk)) => Some((&unit.id[..], disk.reader())),
        Medium::Passthrough(host) => host.image.as_ref().map(|disk| (&unit.id[..], disk.reader())),
        Medium::CdRom(None) => None,
    });
    blk.chain(scsi).collect()
}

async fn boot_source(
    boot: Option<pb::Boot>,
    fds: &FdReceiver,
    disks: &[(&str, DiskReader)],
) -> Result<boot::KernelSource, Status> {
    match boot
        .and_then(|b| b.source)
        .ok_or_else(|| missing("boot.source"))?
    {
        BootSource::Kernel(kernel) => {
            let initrd = match kernel.initrd.as_ref() {
                Some(_) => Some(File::from(
                    claim(fds, "boot.kernel.initrd", kernel.initrd.as_ref()).await?,
                )),
                None => None,
            };
            let file = claim(fds, "boot.kernel.kernel", kernel.kernel.as_ref()).await?;
            Ok(boot::KernelSource::Kernel {
                kernel: File::from(file),
                initrd,
                command_line: kernel.command_line,
            })
        }
        BootSource::Disk(boot) => {
            let find = |id: String| match disks.iter().find(|(other, _)| *other == id) {
                Some((_, reader)) => Ok((id, reader.clone())),
                None => Err(invalid("boot.disk.disks", format!("there is no disk {id:?}"))),
            };
            let disks = boot.disks.into_iter().map(find).collect::<Result<_, _>>()?;
            Ok(boot::KernelSource::Disks {
                disks,
                append: boot.append,
            })
        }
    }
}
