//! `husk snapshot`.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::PathBuf;

use husk_proto::shim::v1::snapshot_progress::Progress;
use husk_proto::shim::v1::{SnapshotDone, SnapshotRequest, SnapshotStep};
use indicatif::{HumanBytes, MultiProgress, ProgressBar, ProgressStyle};

use super::run::absolute;
use crate::failure::{Failure, note, one_line};
use crate::live_vm;
use crate::signals::Signals;
use crate::vm_ref::VmRef;

/// Save a VM with its memory into a directory, from which `husk restore` continues it
///
/// The VM is paused while it is saved, and stays paused unless --resume is given. If the command fails or is interrupted,
/// the VM goes on as before, and what was written is removed.
///
/// Overlays, emptyDisks, cloud-init seeds and other disks that belong to the VM alone travel in the snapshot. Images that
/// are only read must stay where they are. A writable image of a persistentVolumeClaim, dataVolume or hostDisk travels if
/// DIR is on the same file system and that has reflinks, such as XFS and Btrfs. Otherwise the snapshot can be restored
/// once, and only if this VM does not go on.
///
/// DIR holds the guest's secrets, because it holds all of the guest's memory.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 saved, 1 failure, 130 interrupted by Ctrl-C, 143 by SIGTERM.

Examples:
  husk snapshot demo /var/tmp/demo-1 --resume
  husk snapshot demo demo-2 && husk stop --force demo && husk restore demo-2")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// The new directory of the snapshot
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    directory: PathBuf,

    /// Let the VM go on when it is saved, unless it was paused before
    #[arg(long)]
    resume: bool,
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
    };
    let vm = &args.vm;
    live_vm::block_on(async {
        let mut signals = Signals::catch().map_err(Failure::at("catch signals"))?;
        let mut client = live_vm::connect(vm).await?;
        let mut bars = Bars::new(vm);
        let done = tokio::select! {
            done = save(&mut client, request, &mut bars) => {
                bars.end();
                done?
            }
            asked = signals.next() => {
                bars.end();
                eprintln!(
                    "{vm}: interrupted by {}: the VM goes on as before, and what was written is removed",
                    asked.name()
                );
                return Err(Failure::Ended(asked.status()));
            }
        };
        let directory = args.directory.display();
        let paused = match done.paused {
            true => format!("; the VM is paused, `husk resume {vm}` lets it go on"),
            false => String::new(),
        };
        eprintln!("{vm}: saved in {}{paused}", one_line(&directory.to_string()));
        for volume in &done.outside {
            note(&format!(
                "volume {volume:?} is not in the snapshot, which can be restored once, and not after {vm} has gone on"
            ));
        }
        Ok(())
    })
}

async fn save(
    client: &mut husk_monitor::client::PodClient,
    request: SnapshotRequest,
    bars: &mut Bars,
) -> Result<SnapshotDone, Failure> {
    let mut steps = client.snapshot(request).await?.into_inner();
    while let Some(step) = steps.message().await? {
        match step.progress {
            Some(Progress::Step(step)) => bars.show(&step),
            Some(Progress::Done(done)) => return Ok(done),
            None => {}
        }
    }
    Err(Failure::Runtime("the VM ended before it was saved".into()))
}

/// A bar for each step on a terminal, else a line.
#[derive(Debug)]
struct Bars {
    vm: VmRef,
    all: MultiProgress,
    live: bool,
    shown: BTreeMap<String, ProgressBar>,
}

impl Bars {
    fn new(vm: &VmRef) -> Bars {
        Bars {
            vm: vm.clone(),
            all: MultiProgress::new(),
            live: std::io::stderr().is_terminal(),
            shown: BTreeMap::new(),
        }
    }

    fn show(&mut self, step: &SnapshotStep) {
        let bar = self.shown.entry(step.name.clone()).or_insert_with(|| {
            let name = one_line(&step.name);
            if !self.live {
                eprintln!("{}: saving {name} ({})", self.vm, HumanBytes(step.total_bytes));
            }
            let style =
                ProgressStyle::with_template("{prefix:19}  {bar:30}  {bytes:>10} of {total_bytes:<10}");
            let bar = ProgressBar::new(step.total_bytes)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_prefix(name);
            self.all.add(bar)
        });
        bar.set_position(step.done_bytes);
    }

    /// Removes the bars.
    fn end(&self) {
        let _ = self.all.clear();
    }
}
