//! `husk restore`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use husk_monitor::launch::MonitorConfig;
use husk_monitor::snapshot::{self, Snapshot};
use husk_monitor::state::RuntimeDir;
use husk_vmi::VmPlan;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

use super::run::absolute;
use crate::failure::{Failure, print_warning};
use crate::launch::{self, Follow};
use crate::signals::Signals;
use crate::step_bars::StepBars;
use crate::vm_ref::VmRef;
use crate::{doctor, live_vm, network};

/// Start a VM from a snapshot
///
/// DIR is what `husk snapshot` made. The VM has the memory, the disks and the addresses of the VM that was saved, and its
/// guest goes on where it was. A snapshot can be restored any number of times, also at once under different names, unless
/// a volume that the guest writes to is not in it: then once, and not if the VM has resumed.
///
/// The VM writes to copies of the disks in the snapshot. The copies are lost when it ends, also those of
/// persistentVolumeClaims, dataVolumes and hostDisks.
///
/// Runs in the foreground until the VM has ended, as `husk run` does.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: that of `husk run`, see `husk run --help`.

Examples:
  husk restore /var/tmp/demo-1
  husk restore /var/tmp/demo-1 --name demo-copy --detach
  husk restore /var/tmp/demo-1 --verify --paused --console")]
pub(crate) struct Args {
    /// The directory of the snapshot
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    directory: PathBuf,

    /// Name of the VM, for a clone: NAME or NAMESPACE/NAME; without it, that of the VM that was saved
    ///
    /// A clone has the machine ID, the SSH host keys, the MAC and the host name of the VM, and its TLS sessions. With the
    /// binding `masquerade` it has an outer address of its own; with `bridge` it is refused without --replug-nics.
    #[arg(long, value_name = "NAME")]
    name: Option<VmRef>,

    /// First compare all of the snapshot's files with their checksums; needs a snapshot made with --checksums
    ///
    /// Without it only the sizes of memory and state are checked. Images that are not in the snapshot are not read.
    #[arg(long)]
    verify: bool,

    /// Leave the VM paused; `husk resume` resumes it
    #[arg(long)]
    paused: bool,

    /// Give the interfaces new MAC addresses
    ///
    /// The guest sees each NIC unplugged, and another plugged into its slot. Until then its links are down. If the guest
    /// does not release a NIC within 30 s, the VM is ended. Not with --paused: a paused guest releases nothing.
    #[arg(long, conflicts_with = "paused")]
    replug_nics: bool,

    /// Run the VM in the background and print its name
    #[arg(short, long, conflicts_with = "console")]
    detach: bool,

    /// Connect this terminal to the serial console of the VM; ^] detaches
    #[arg(short, long)]
    console: bool,

    /// Network namespace to attach the VM to, as for `husk run`; requires root
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
    netns: Option<PathBuf>,
}

pub(super) fn run(args: &Args, verbose: u8) -> Result<(), Failure> {
    let directory = absolute(&args.directory)?;
    let netns = args.netns.as_deref().map(absolute).transpose()?;
    let snapshot = snapshot::read(&directory)?;
    snapshot.check_restorable(&directory)?;
    if args.verify {
        snapshot.check_verifiable(&directory)?;
    }
    let vm = match &args.name {
        Some(name) => name.clone(),
        None => own_name(&snapshot.plan)?,
    };
    let plan = VmPlan {
        start_paused: args.paused,
        ..snapshot.plan_for(&vm.namespace, &vm.name, args.replug_nics)?
    };
    if args.replug_nics && snapshot.interface_names().next().is_none() {
        return Err(Failure::Usage("--replug-nics: the VM has no interfaces".into()));
    }
    if args.console && !plan.serial_console {
        return Err(Failure::Usage("--console: the VM has no serial console".into()));
    }
    if let Some(obstacle) = doctor::obstacle() {
        return Err(Failure::Runtime(obstacle));
    }
    network::check_restored(&snapshot, netns.as_deref())?;
    let runtime_dir = RuntimeDir::locate()?;
    runtime_dir.prepare()?;
    match &netns {
        Some(netns) => runtime_dir.remove_abandoned_for(netns)?,
        None => runtime_dir.remove_abandoned()?,
    };
    if runtime_dir.find(&vm.namespace, &vm.name).is_ok() {
        return Err(Failure::Runtime(format!(
            "{vm} is running already: `--name NAME` gives the VM another name"
        )));
    }
    if args.verify {
        verify(&vm, &directory)?;
    }
    print_warnings(&snapshot);
    let config = MonitorConfig {
        runtime_dir: runtime_dir.path().into(),
        plan,
        netns,
        vmi: snapshot.metadata_for(&vm.namespace, &vm.name),
        snapshot: Some(directory),
        replug_nics: args.replug_nics,
        plugged_disks: snapshot.plugged_disks(),
    };
    let follow = Follow {
        command: "husk restore",
        detach: args.detach,
        console: args.console,
        verbose,
    };
    launch::run(vec![(vm, config)], follow)
}

/// Compares the files of a snapshot with their checksums. A signal ends it.
fn verify(vm: &VmRef, directory: &Path) -> Result<(), Failure> {
    live_vm::block_on(async {
        let mut signals = Signals::catch().map_err(Failure::at("catch signals"))?;
        let mut bars = StepBars::new(vm, "checking");
        let (progress_tx, mut progress_rx) = mpsc::unbounded_channel();
        let (directory, cancel) = (directory.to_owned(), Arc::new(AtomicBool::new(false)));
        let cancelled = cancel.clone();
        let mut checking = spawn_blocking(move || {
            snapshot::verify(&directory, &cancelled, &|file, done, total| {
                let _ = progress_tx.send((file.to_owned(), done, total));
            })
        });
        let checked = loop {
            tokio::select! {
                biased;
                asked = signals.next() => break Err(asked),
                Some((file, done, total)) = progress_rx.recv() => bars.show(&file, done, total),
                checked = &mut checking => break Ok(checked),
            }
        };
        bars.end();
        match checked {
            Ok(checked) => Ok(checked.map_err(Failure::at("check the snapshot"))??),
            Err(asked) => {
                cancel.store(true, Ordering::Relaxed);
                eprintln!("{vm}: interrupted by {} before it was started", asked.name());
                Err(Failure::Ended(asked.status()))
            }
        }
    })
}

/// The name of the VM that was saved.
fn own_name(plan: &VmPlan) -> Result<VmRef, Failure> {
    let name = format!("{}/{}", plan.namespace, plan.name);
    name.parse().map_err(|_| {
        let text = format!("{name:?} in snapshot.json is not a name of a VM: name one with --name");
        Failure::Runtime(text)
    })
}

fn print_warnings(snapshot: &Snapshot) {
    for volume in snapshot.written_copies() {
        print_warning(&format!(
            "volume {volume:?}: the VM writes to a copy of the image, which is lost when it ends"
        ));
    }
    for volume in snapshot.unsaved_volumes() {
        print_warning(&format!(
            "volume {volume:?}: it is not in the snapshot, which cannot be restored again"
        ));
    }
}
