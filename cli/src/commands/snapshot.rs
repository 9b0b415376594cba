//! `husk snapshot`.

use std::path::PathBuf;

use husk_proto::shim::v1::snapshot_progress::Progress;
use husk_proto::shim::v1::{SnapshotDone, SnapshotRequest};

use super::run::absolute;
use crate::failure::{Failure, one_line, print_warning};
use crate::live_vm;
use crate::signals::Signals;
use crate::step_bars::StepBars;
use crate::vm_ref::VmRef;

/// Save a VM with its memory into a directory, from which `husk restore` continues it
///
/// The VM is paused while it is saved, and stays paused unless --resume is given. With --live it is paused at the end
/// only. If the command fails or is interrupted, the VM runs as before, and what was written is removed.
///
/// The snapshot includes overlays, emptyDisks, cloud-init seeds and other disks that belong to the VM alone. Images
/// that are only read must stay where they are. The writable image of a persistentVolumeClaim, dataVolume or hostDisk
/// is included if DIR is on the same file system and that has reflinks, such as XFS and Btrfs, or with --copy-disks.
/// Otherwise the snapshot can be restored once, and only if this VM does not resume.
///
/// DIR holds the guest's secrets, because it holds all of the guest's memory.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 saved, 1 failure, 130 interrupted by Ctrl-C, 143 by SIGTERM.

Examples:
  husk snapshot demo /var/tmp/demo-1 --resume
  husk snapshot demo /var/tmp/demo-2 --resume --live
  husk snapshot demo /backup/demo-1 --resume --copy-disks
  husk snapshot demo demo-2 && husk stop --force demo && husk restore demo-2")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// The new directory of the snapshot
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    directory: PathBuf,

    /// Resume the VM when it is saved, unless it was paused before
    #[arg(long)]
    resume: bool,

    /// Save memory while the VM runs, and pause the VM at the end: for what it wrote meanwhile, devices and disks
    ///
    /// The VM runs somewhat slower until it is paused. A VM that writes faster than its memory is saved is paused for
    /// longer. The command fails if the VM reboots meanwhile.
    #[arg(long)]
    live: bool,

    /// Write checksums, so that `husk restore --verify` finds damage
    ///
    /// With --resume the VM goes on first. The saved files are then read once more.
    #[arg(long)]
    checksums: bool,

    /// Copy writable images in full where no reflink is possible, so that they are included
    ///
    /// The VM is paused meanwhile. Images and block devices of persistentVolumeClaims, dataVolumes and hostDisks are copied
    /// without their zeros; `shareable` disks, which other VMs may write, are not.
    #[arg(long)]
    copy_disks: bool,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let directory = absolute(&args.directory)?;
    let Some(text) = directory.to_str() else {
        let text = format!("{}: the path must be UTF-8", directory.display());
        return Err(Failure::Usage(text));
    };
    let request = SnapshotRequest {
        directory: text.to_owned(),
        resume: args.resume,
        checksums: args.checksums,
        copy_disks: args.copy_disks,
        live: args.live,
    };
    let vm = &args.vm;
    live_vm::block_on(async {
        let mut signals = Signals::catch().map_err(Failure::at("catch signals"))?;
        let mut client = live_vm::connect(vm).await?;
        let mut bars = StepBars::new(vm, "saving");
        let done = tokio::select! {
            done = save(&mut client, request, &mut bars) => {
                bars.end();
                done?
            }
            asked = signals.next() => {
                bars.end();
                eprintln!(
                    "{vm}: interrupted by {}: the VM runs as before, and what was written is removed",
                    asked.name()
                );
                return Err(Failure::Ended(asked.status()));
            }
        };
        let directory = args.directory.display();
        let paused = match done.paused {
            true => format!("; the VM is paused, `husk resume {vm}` resumes it"),
            false => String::new(),
        };
        eprintln!("{vm}: saved in {}{paused}", one_line(&directory.to_string()));
        for volume in &done.outside {
            print_warning(&format!(
                "volume {volume:?} is not in the snapshot, which can be restored once, and not after {vm} has resumed"
            ));
        }
        Ok(())
    })
}

async fn save(
    client: &mut husk_monitor::client::PodClient,
    request: SnapshotRequest,
    bars: &mut StepBars,
) -> Result<SnapshotDone, Failure> {
    let mut steps = client.snapshot(request).await?.into_inner();
    while let Some(step) = steps.message().await? {
        match step.progress {
            Some(Progress::Step(step)) => bars.show(&step.name, step.done_bytes, step.total_bytes),
            Some(Progress::Done(done)) => return Ok(done),
            None => {}
        }
    }
    Err(Failure::Runtime("the VM ended before it was saved".into()))
}
