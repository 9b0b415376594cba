//! Converts a request's `VmConfig` to a machine's configuration: takes descriptors and checks every field.

use std::io;
use std::os::fd::OwnedFd;

use husk_disk::DiskReader;
use husk_proto::fds::FdReceiver;
use husk_proto::vmm::v1::watchdog::Action as WatchdogAction;
use husk_proto::vmm::v1::{self as pb};
use husk_virtio_scsi::{Medium, NewUnit};
use tonic::Status;
use uuid::Uuid;

use super::request_files::{BootSource, RequestFiles};
use super::saved::SavedVm;
use super::{disks, fields};
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

/// Checks a request and takes its descriptors from the channel.
pub async fn parts(request: pb::CreateRequest, fds: &FdReceiver) -> Result<VmParts, Status> {
    let mut config = request.config.ok_or_else(|| fields::missing("config"))?;
    let cpu = config.cpu.ok_or_else(|| missing("cpu"))?;
    let memory = config.memory.ok_or_else(|| missing("memory"))?;
    let smbios = config.smbios.take().unwrap_or_default();
    let uuid = match smbios.uuid.as_str() {
        "" => Uuid::nil(),
        text => text.parse().map_err(|e| invalid("smbios.uuid", e))?,
    };
    let kvm = fields::take_fd(fds, "config.kvm", config.kvm.as_ref()).await?;
    let host = KvmHost::new(kvm).map_err(|e| invalid("kvm", e))?;
    let files = RequestFiles::new(&config, request.saved.as_ref(), fds).await?;
    let saved = match files.saved {
        Some(saved) => Some(saved.await?),
        None => None,
    };

    let vcpus = cpu.sockets.saturating_mul(cpu.cores).saturating_mul(cpu.threads);
    let mut blk = Vec::new();
    for (i, (disk, image)) in config.disks.iter().zip(files.disks).enumerate() {
        let field = format!("config.disks[{i}]");
        let mut image = image.await?;
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
    for unit in files.scsi {
        scsi.push(unit.await?);
    }
    let (mut setups, mut plugged_nics) = (Vec::new(), Vec::new());
    for (i, (nic, setup)) in config.nics.iter().zip(files.nics).enumerate() {
        let at = |field: &str| format!("nics[{i}]{field}");
        if config.nics[..i].iter().any(|other| other.id == nic.id) {
            return Err(invalid(&at(".id"), format!("{:?} is used twice", nic.id)));
        }
        match (u8::try_from(nic.pci_slot), saved.is_some()) {
            (Ok(0), _) => setups.push(setup),
            (Ok(slot), true) => plugged_nics.push((slot, setup)),
            _ => return Err(invalid(&at(".pci_slot"), "is not a slot of a saved machine")),
        }
    }
    let watchdog = config.watchdog.map(watchdog_action).transpose()?;
    let source = kernel_source(files.boot, &readers(&blk, &scsi))?;
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
        ports: files.ports,
        vsock: files.vsock,
        watchdog: watchdog.is_some(),
        rtc_offset: config.rtc_offset_seconds,
    };
    Ok(VmParts {
        name: config.name,
        host,
        config: config_out,
        source,
        console: files.console,
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

fn kernel_source(boot: BootSource, disks: &[(&str, DiskReader)]) -> Result<boot::KernelSource, Status> {
    let boot = match boot {
        BootSource::Kernel(source) => return Ok(source),
        BootSource::Disks(boot) => boot,
    };
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
