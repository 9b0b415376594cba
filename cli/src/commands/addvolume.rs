//! `husk addvolume`.

use std::path::PathBuf;

use husk_proto::shim::v1::AddVolumeRequest;
use husk_proto::shim::v1::add_volume_request::Cache;

use crate::failure::{Failure, print_warning};
use crate::host_warnings::raw_qcow2;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Add a disk to a running VM
///
/// The disk appears on the guest's SCSI controller and, by its serial number, in /dev/disk/by-id. It stays until `husk
/// removevolume` or the end of the VM. Adding the same volume again does nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  husk addvolume demo --volume-name data --path data.img
  husk addvolume demo --volume-name iso --path /dev/vg/iso --readonly")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// Name of the volume
    #[arg(long, value_name = "NAME")]
    volume_name: String,

    /// Raw image, block device, or directory with a disk.img; opened with the rights of the VM's owner
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::AnyPath)]
    path: PathBuf,

    /// Serial number of the disk [default: the name of the volume]
    #[arg(long, value_name = "SERIAL", default_value = "", hide_default_value = true)]
    serial: String,

    /// Caching on the host [default: none if the file supports O_DIRECT, else writethrough]
    #[arg(long, value_enum, value_name = "MODE")]
    cache: Option<CacheArg>,

    /// Make the disk read-only
    #[arg(long)]
    readonly: bool,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum CacheArg {
    /// O_DIRECT; an error if the file does not support it
    None,
    /// Through the page cache; each write is durable
    Writethrough,
    /// Through the page cache; durable after a flush by the guest
    Writeback,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let path = std::path::absolute(&args.path).map_err(Failure::at(args.path.display()))?;
    if let Some(text) = raw_qcow2(&path) {
        print_warning(&text);
    }
    let path = path
        .into_os_string()
        .into_string()
        .map_err(|path| Failure::Usage(format!("{}: the path is not UTF-8", path.display())))?;
    let cache = match args.cache {
        None => Cache::Unspecified,
        Some(CacheArg::None) => Cache::None,
        Some(CacheArg::Writethrough) => Cache::Writethrough,
        Some(CacheArg::Writeback) => Cache::Writeback,
    };
    let request = AddVolumeRequest {
        name: args.volume_name.clone(),
        path,
        serial: args.serial.clone(),
        cache: cache.into(),
        read_only: args.readonly,
        fd: None,
    };
    live_vm::block_on(async {
        let added = live_vm::connect(&args.vm).await?.add_volume(request).await?;
        let added = added.get_ref();
        eprintln!(
            "{}: added volume {} (SCSI target {}, LUN {})",
            args.vm, args.volume_name, added.target, added.lun
        );
        Ok(())
    })
}
