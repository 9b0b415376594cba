//! From the wire's `VmConfig` to a machine's parts: descriptors claimed, every field checked.

use std::fs::File;
use std::os::fd::OwnedFd;

use husk_proto::fds::{FdReceiver, Token};
use husk_proto::vmm::v1::block_size::Size;
use husk_proto::vmm::v1::boot::Source as BootSource;
use husk_proto::vmm::v1::disk::{Cache, ErrorPolicy};
use husk_proto::vmm::v1::{self as pb, VmConfig};
use tonic::Status;
use uuid::Uuid;

use crate::boot;
use crate::cpuid::Topology;
use crate::kvm::Host;
use crate::machine::{Config, Disk};
use crate::memory::Backing;
use crate::smbios;

/// Everything Create was given.
#[derive(Debug)]
pub struct Parts {
    /// namespace/name.
    pub name: String,
    /// KVM.
    pub host: Host,
    /// The machine.
    pub config: Config,
    /// What it boots.
    pub source: boot::Source,
    /// Where ttyS0 goes.
    pub console: Option<OwnedFd>,
}

fn missing(field: &str) -> Status {
    Status::invalid_argument(format!("config.{field} is missing"))
}

fn invalid(field: &str, reason: impl std::fmt::Display) -> Status {
    Status::invalid_argument(format!("config.{field}: {reason}"))
}

async fn claim(fds: &FdReceiver, field: &str, fd: Option<&pb::Fd>) -> Result<OwnedFd, Status> {
    let fd = fd.ok_or_else(|| missing(field))?;
    let token = Token::try_from(fd).map_err(|e| invalid(field, e))?;
    fds.take(token).await.map_err(|e| invalid(field, e))
}

/// Checks `config` and claims its descriptors from the channel.
pub async fn parts(config: VmConfig, fds: &FdReceiver) -> Result<Parts, Status> {
    let cpu = config.cpu.ok_or_else(|| missing("cpu"))?;
    let memory = config.memory.ok_or_else(|| missing("memory"))?;
    let smbios = config.smbios.unwrap_or_default();
    let uuid = match smbios.uuid.as_str() {
        "" => Uuid::nil(),
        text => text.parse().map_err(|e| invalid("smbios.uuid", e))?,
    };
    let kvm = claim(fds, "kvm", config.kvm.as_ref()).await?;
    let host = Host::new(kvm).map_err(|e| invalid("kvm", e))?;

    let vcpus = cpu.sockets.saturating_mul(cpu.cores).saturating_mul(cpu.threads);
    let mut disks = Vec::new();
    for (i, disk) in config.disks.iter().enumerate() {
        let file = claim(fds, &format!("disks[{i}].file"), disk.file.as_ref()).await?;
        let cache = match disk.cache() {
            Cache::None => husk_disk::Cache::None,
            Cache::Writethrough => husk_disk::Cache::Writethrough,
            Cache::Writeback | Cache::Unspecified => husk_disk::Cache::Writeback,
        };
        let options = husk_disk::Options {
            read_only: disk.read_only,
            cache,
            error_policy: match disk.error_policy() {
                ErrorPolicy::Stop | ErrorPolicy::Unspecified => husk_disk::ErrorPolicy::Stop,
                ErrorPolicy::Report => husk_disk::ErrorPolicy::Report,
                ErrorPolicy::Ignore => husk_disk::ErrorPolicy::Ignore,
                ErrorPolicy::Enospace => husk_disk::ErrorPolicy::NoSpace,
            },
            block_size: block_size(disk),
        };
        let queues = disk.queues.clamp(1, vcpus.max(1));
        let mut disk = Disk::open(&disk.id, file, &disk.serial, options)
            .map_err(|e| invalid(&format!("disks[{i}]"), e))?;
        disk.queues = u16::try_from(queues).unwrap_or(u16::MAX).min(MAX_DISK_QUEUES);
        disks.push(disk);
    }
    let source = boot_source(config.boot, fds, &disks).await?;
    let console = match config.console.as_ref() {
        Some(_) => Some(claim(fds, "console", config.console.as_ref()).await?),
        None => None,
    };
    let config_out = Config {
        topology: Topology {
            sockets: cpu.sockets,
            cores: cpu.cores,
            threads: cpu.threads,
        },
        memory: memory.bytes,
        backing: if memory.hugepage_bytes == 0 {
            Backing::Anonymous
        } else {
            Backing::Hugetlb(memory.hugepage_bytes)
        },
        identity: smbios::Identity {
            uuid,
            serial: smbios.serial,
        },
        disks,
        rng: config.rng,
        balloon: config.balloon,
        rtc_offset: config.rtc_offset_seconds,
    };
    Ok(Parts {
        name: config.name,
        host,
        config: config_out,
        source,
        console,
    })
}

fn block_size(disk: &pb::Disk) -> husk_disk::BlockSize {
    match disk.block_size.as_ref().and_then(|size| size.size.as_ref()) {
        Some(Size::MatchVolume(true)) => husk_disk::BlockSize::MatchVolume,
        Some(Size::MatchVolume(false)) | None => husk_disk::BlockSize::Auto,
        Some(Size::Custom(size)) => husk_disk::BlockSize::Custom {
            logical: size.logical,
            physical: size.physical,
        },
    }
}

/// Queues of a disk, each with a ring and a worker thread.
const MAX_DISK_QUEUES: u16 = 64;

async fn boot_source(
    boot: Option<pb::Boot>,
    fds: &FdReceiver,
    disks: &[Disk],
) -> Result<boot::Source, Status> {
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
            Ok(boot::Source::Kernel {
                kernel: File::from(file),
                initrd,
                command_line: kernel.command_line,
            })
        }
        BootSource::Disk(boot) => {
            let find = |id: String| match disks.iter().find(|d| d.id == id) {
                Some(disk) => Ok((id, disk.image.reader())),
                None => Err(invalid("boot.disk.disks", format!("there is no disk {id:?}"))),
            };
            let disks = boot.disks.into_iter().map(find).collect::<Result<_, _>>()?;
            Ok(boot::Source::Disks {
                disks,
                append: boot.append,
            })
        }
    }
}
