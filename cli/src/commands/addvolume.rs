//! `husk addvolume`.

use std::path::PathBuf;

use husk_proto::shim::v1::AddVolumeRequest;
use husk_proto::shim::v1::add_volume_request::Cache;

use crate::failure::{Failure, note};
use crate::host_notes::raw_qcow2;
use crate::live_vm;
use crate::vm_ref::VmRef;

/// Give a running VM one more disk
///
/// The guest finds it on its SCSI controller, by its serial number in /dev/disk/by-id, and has it until `husk
/// removevolume` or its end. Adding the same volume again does nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  husk addvolume demo --volume-name data --path data.img
  husk addvolume demo --volume-name iso --path /dev/vg/iso --readonly")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// What the volume is called
    #[arg(long, value_name = "NAME")]
    volume_name: String,

    /// A raw image, a block device, or a directory with disk.img; opened as the VM's owner
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::AnyPath)]
    path: PathBuf,

    /// Serial number shown to the guest; else the volume's name
    #[arg(long, value_name = "SERIAL", default_value = "", hide_default_value = true)]
    serial: String,

    /// How the host caches it; else past its page cache where the file can do that
    #[arg(long, value_enum, value_name = "MODE")]
    cache: Option<CacheArg>,

    /// The guest cannot write it
    #[arg(long)]
    readonly: bool,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum CacheArg {
    /// Past the page cache, or an error
    None,
    /// Through the page cache, each write durable
    Writethrough,
    /// Through the page cache, durable at the guest's flush
    Writeback,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let path = std::path::absolute(&args.path).map_err(Failure::at(args.path.display()))?;
    if let Some(text) = raw_qcow2(&path) {
        note(&text);
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
