//! `husk run`.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process;
use std::time::Duration;

use husk_monitor::launch::{LaunchError, MonitorConfig, launch};
use husk_monitor::state::RuntimeDir;
use husk_vmi::{KERNEL_VOLUME, KernelOverride, PodResources, VmPlan, Vmi};

use crate::console::{self, OnInputEof, SessionEnd};
use crate::failure::{Failure, RUNTIME, chain, note, one_line};
use crate::foreground::{Follower, Foreground};
use crate::manifest::{self, Manifest};
use crate::signals::{Signals, StopSignal};
use crate::status::BOOT_FAILED;
use crate::vm_ref::VmRef;
use crate::{aborted_start, doctor, host_notes, live_vm, network, output, vm_ref};

/// A monitor whose VM runs is reached within this time, or has ended.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Start the VMs of a manifest
///
/// FILE holds VirtualMachineInstance and VirtualMachine objects, in YAML or JSON, any number of documents; other
/// objects in it are left alone. Every VM of the file is started, or none.
///
/// Stays in the foreground until the VMs have ended. Ctrl-C shuts them down as `husk stop` does, a second Ctrl-C
/// kills them. When the terminal goes away they keep running.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status, of the first VM in the file that did not power off:
  0    the guest powered off; with --detach: the VM runs
  1    the VM could not be started, was killed, or Husk failed
  2    the command line or the manifest is wrong: `FIELD: REASON`, a line each
  10   the guest's kernel panicked
  11   the guest's processor shut down (triple fault)
  12   no kernel could be loaded
  129  the terminal went away; VMs that ran run on
  130  killed by a second Ctrl-C or SIGTERM, or Ctrl-C before the VMs ran
  143  SIGTERM before the VMs ran; later it does what Ctrl-C does

What boots: --kernel, else the manifest's firmware.kernelBoot, else the kernel
that the first bootable disk carries.

Examples:
  husk run vm.yaml
  husk run vm.yaml --console
  husk run vm.yaml --volume rootdisk=debian.img --detach
  husk run vm.yaml --kernel vmlinuz --initrd initrd.img --append root=/dev/vda1
  kubectl get vmi demo -o yaml | husk run -")]
pub(crate) struct Args {
    /// The manifest; `-` reads it from stdin
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    file: String,

    /// Where the data of a volume is: an image, a block device or a directory
    ///
    /// For containerDisks and ephemeral volumes (neither is written to), persistentVolumeClaims and dataVolumes,
    /// instead of a hostDisk's path; a directory with a file for each key for configMaps, secrets, downwardAPI,
    /// serviceAccounts and cloud-init's secretRefs; and for `kernel-boot-volume`, a directory with the files of
    /// firmware.kernelBoot.container.
    #[arg(long = "volume", value_name = "NAME=PATH", value_parser = volume)]
    volumes: Vec<(String, PathBuf)>,

    /// Boot this kernel (bzImage, or ELF with a PVH entry)
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    kernel: Option<PathBuf>,

    /// Give the kernel this initial RAM disk
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, requires = "kernel")]
    initrd: Option<PathBuf>,

    /// The kernel's command line; without --kernel, words to add to the one that is found
    #[arg(long, value_name = "WORDS")]
    append: Option<String>,

    /// Leave the VMs running in the background; prints their names
    #[arg(short, long, conflicts_with = "console")]
    detach: bool,

    /// Connect this terminal to the VM's serial console; ^] leaves the VM running
    #[arg(short, long)]
    console: bool,

    /// Attach the VM to the networks of this namespace, such as /run/netns/NAME or /proc/PID/ns/net; as root
    ///
    /// What a network plugin put there is the VM's: `eth0` the pod network's device, `podHASH` that of another network,
    /// HASH being the first 11 digits of the SHA-256 of its name in the manifest. The VM's end gives them back. Name
    /// servers are those of /etc/netns/NAME/resolv.conf, else this machine's.
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
    netns: Option<PathBuf>,

    /// The namespace of VMs whose manifest does not name one
    #[arg(short, long, value_name = "NAMESPACE", value_parser = vm_ref::namespace)]
    namespace: Option<String>,
}

pub(super) fn run(args: &Args, verbose: u8) -> Result<(), Failure> {
    let mut manifest = manifest::read(&args.file, false)?;
    if let Some(namespace) = &args.namespace {
        manifest.set_namespace(namespace)?;
    }
    let names = manifest.names()?;
    if args.console && names.len() > 1 {
        return Err(Failure::Usage(format!(
            "--console is for one VM, the manifest has {}",
            names.len()
        )));
    }
    if args.netns.is_some() && names.len() > 1 {
        return Err(Failure::Usage(format!(
            "--netns is for one VM, the manifest has {}",
            names.len()
        )));
    }
    let netns = args.netns.as_deref().map(absolute).transpose()?;
    let plans = plans(args, &manifest)?;
    if let [plan] = plans.as_slice()
        && args.console
        && !plan.serial_console
    {
        return Err(Failure::Usage(
            "--console: the manifest switches autoattachSerialConsole off".into(),
        ));
    }
    if let Some(obstacle) = doctor::obstacle() {
        return Err(Failure::Runtime(obstacle));
    }
    let runtime_dir = RuntimeDir::locate()?;
    runtime_dir.prepare()?;
    // What dead monitors left of networks is in the way of the next VM.
    match &netns {
        Some(netns) => runtime_dir.remove_abandoned_for(netns)?,
        None => runtime_dir.remove_abandoned()?,
    };
    for ignored_notes in manifest.ignored_notes() {
        note(&ignored_notes);
    }
    let mut configs = Vec::new();
    for (vmi, mut plan) in manifest.vmis.iter().zip(plans) {
        let prefix = manifest.prefix_of(vmi);
        let unmet = network::drop_unavailable(vmi, &mut plan, netns.as_deref())?;
        let all = plan.notes.iter().map(ToString::to_string);
        for text in all.chain(host_notes::notes(vmi, &plan)).chain(unmet) {
            note(&format!("{prefix}{text}"));
        }
        configs.push(MonitorConfig {
            runtime_dir: runtime_dir.path().into(),
            plan,
            netns: netns.clone(),
            vmi: metadata(vmi),
        });
    }
    live_vm::block_on(async {
        let mut signals = Signals::catch().map_err(Failure::at("catch signals"))?;
        let foreground = start(&names, configs, &mut signals, args.detach, verbose).await?;
        match (foreground, names.as_slice()) {
            (None, names) => names.iter().try_for_each(|vm| output::print(&format!("{vm}\n"))),
            (Some(foreground), [vm]) if args.console => with_console(vm, foreground, &mut signals).await,
            (Some(foreground), names) => {
                for vm in names {
                    eprintln!("{vm}: `husk console {vm}` connects to it, Ctrl-C shuts it down");
                }
                foreground.follow(&mut signals).await
            }
        }
    })
}

fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(Failure::at(path.display().to_string()))
}

fn plans(args: &Args, manifest: &Manifest) -> Result<Vec<VmPlan>, Failure> {
    let optional = |path: &Option<PathBuf>| path.as_deref().map(absolute).transpose();
    let overridden = args.kernel.is_some() || args.append.is_some();
    let kernel = KernelOverride {
        kernel: optional(&args.kernel)?,
        initrd: optional(&args.initrd)?,
        append: args.append.clone(),
    };
    let mut volumes = BTreeMap::new();
    for (name, path) in &args.volumes {
        if !manifest.vmis.iter().any(|vmi| accepts_volume(vmi, name)) {
            return Err(Failure::Usage(format!(
                "--volume {name}: no VM in the manifest has a volume of that name"
            )));
        }
        if volumes.insert(name.clone(), absolute(path)?).is_some() {
            return Err(Failure::Usage(format!("--volume {name} is given twice")));
        }
    }
    let now_unix_seconds = jiff::Timestamp::now().as_second();
    let (mut plans, mut errors) = (Vec::new(), Vec::new());
    for vmi in &manifest.vmis {
        let own = volumes.iter().filter(|(name, _)| accepts_volume(vmi, name));
        let resources = PodResources {
            volumes: own.map(|(name, path)| (name.clone(), path.clone())).collect(),
            kernel: overridden.then(|| kernel.clone()),
            uuid: uuid::Uuid::new_v4(),
            now_unix_seconds,
        };
        match husk_vmi::plan(vmi, &resources) {
            Ok(plan) => {
                if args.netns.is_none() {
                    errors.extend(manifest.error_lines(vmi, &network::reject_multus(vmi, &plan)));
                }
                plans.push(plan);
            }
            Err(wrong) => errors.extend(manifest.error_lines(vmi, &wrong)),
        }
    }
    if errors.is_empty() {
        Ok(plans)
    } else {
        Err(Failure::Manifest(errors))
    }
}

/// Whether a VM has a use for data of that name.
fn accepts_volume(vmi: &Vmi, name: &str) -> bool {
    let kernel_boot = vmi.spec.domain.firmware.kernel_boot.as_ref();
    vmi.spec.volume(name).is_some()
        || (name == KERNEL_VOLUME && kernel_boot.is_some_and(|boot| boot.container.is_some()))
}

/// What `husk inspect` shows of the manifest.
fn metadata(vmi: &Vmi) -> serde_json::Value {
    serde_json::json!({
        "name": vmi.name,
        "namespace": vmi.namespace,
        "uid": vmi.uid,
        "labels": vmi.labels,
        "annotations": vmi.annotations,
    })
}

/// Starts every VM, or none, and follows them unless they are to be detached.
async fn start(
    names: &[VmRef],
    configs: Vec<MonitorConfig>,
    signals: &mut Signals,
    detach: bool,
    verbose: u8,
) -> Result<Option<Foreground>, Failure> {
    let mut foreground = Foreground::new();
    for (index, (vm, config)) in names.iter().zip(configs).enumerate() {
        let (cpus, memory) = (config.plan.topology.vcpus(), config.plan.memory.guest_bytes);
        let plural = if cpus == 1 { "" } else { "s" };
        eprintln!("{vm}: starting ({cpus} vCPU{plural}, {})", output::bytes(memory));
        let mut launch_task = tokio::task::spawn_blocking(move || launch(monitor_command(verbose), &config));
        let reaching = foreground.connect_follower(vm);
        tokio::pin!(reaching);
        let mut follower = None;
        let launched = loop {
            tokio::select! {
                launched = &mut launch_task => break Ok(launched),
                reached = &mut reaching, if follower.is_none() => follower = Some(reached),
                () = show_preparation(&mut follower) => {}
                asked = signals.next() => break Err(StartFailure::Signal(asked)),
            }
        };
        if let Some(follower) = &mut follower {
            follower.clear_preparation();
        }
        let launched = launched.and_then(|launched| match launched {
            Ok(launched) => launched.map_err(|error| StartFailure::Failed(launch_failure(vm, &error))),
            Err(panic) => Err(StartFailure::Failed(Failure::at(vm)(panic))),
        });
        if let Err(failure) = launched {
            // Monitors wait a moment for those who listen and do not hear them.
            drop((follower, foreground));
            let left = aborted_start::clean_up(&names[..=index]).await;
            return Err(failure.report(&left));
        }
        if detach {
            continue;
        }
        if follower.is_none() {
            follower = tokio::time::timeout(CONNECT_TIMEOUT, reaching).await.ok();
        }
        match follower {
            Some(follower) => foreground.add(follower).await,
            None => {
                return Err(Failure::Runtime(format!(
                    "{vm} ran, but its monitor cannot be reached"
                )));
            }
        }
    }
    Ok((!detach).then_some(foreground))
}

/// Tells what the start waits for, once its monitor has been reached.
async fn show_preparation(follower: &mut Option<Follower>) {
    match follower {
        Some(follower) => follower.show_preparation().await,
        None => std::future::pending().await,
    }
}

/// This program again, as a monitor; `/proc/self/exe` is the running one even where its file was replaced.
///
/// What it logs before its VM has a log is for those who asked for more: it reports its error in any case.
fn monitor_command(verbose: u8) -> process::Command {
    let mut command = process::Command::new("/proc/self/exe");
    command
        .arg0("husk")
        .arg("monitor")
        .args(std::iter::repeat_n("-v", verbose.into()));
    if verbose == 0 {
        command.stderr(process::Stdio::null());
    }
    command
}

/// Why not every VM runs.
enum StartFailure {
    /// A signal came before.
    Signal(StopSignal),
    /// One could not be started, which has been told.
    Failed(Failure),
}

impl StartFailure {
    /// Tells what is left of those that were begun.
    fn report(self, left: &[VmRef]) -> Failure {
        let names: Vec<_> = left.iter().map(ToString::to_string).collect();
        let rest = match names.as_slice() {
            [] => "none is left".to_owned(),
            names => {
                let names = names.join(" ");
                format!("{names} did not end yet: `husk rm --force {names}` waits for it")
            }
        };
        match self {
            Self::Signal(asked) => {
                eprintln!("ended by {} before every VM ran: {rest}", asked.name());
                Failure::Ended(asked.status())
            }
            Self::Failed(failure) => {
                if !left.is_empty() {
                    eprintln!("{rest}");
                }
                failure
            }
        }
    }
}

fn launch_failure(vm: &VmRef, error: &LaunchError) -> Failure {
    eprintln!("error: {vm}: {}", launch_error_text(error));
    Failure::Ended(match error {
        LaunchError::Failed { reason, .. } if reason == "BootFailed" => BOOT_FAILED,
        _ => RUNTIME,
    })
}

fn launch_error_text(error: &LaunchError) -> String {
    match error {
        LaunchError::Failed { message, .. } => one_line(message),
        LaunchError::Silent => format!("{}: `husk run -v` may show why", chain(error)),
        error => chain(error),
    }
}

/// Gives the terminal to the guest until the VM ends or the caller detaches.
async fn with_console(vm: &VmRef, mut foreground: Foreground, signals: &mut Signals) -> Result<(), Failure> {
    let Some(mut client) = foreground.client() else {
        return Ok(());
    };
    match console::attach(vm, &mut client, OnInputEof::Watch, signals.next()).await {
        Ok(Ok(SessionEnd::Detached)) => {
            eprintln!("\n{vm} keeps running: `husk console {vm}` comes back, `husk stop {vm}` ends it");
            return Ok(());
        }
        Ok(Ok(SessionEnd::TakenOver)) => {
            eprintln!("\n{vm}: another session took the console over; Ctrl-C shuts the VM down");
        }
        Ok(Ok(SessionEnd::VmEnded | SessionEnd::Lost(_))) => eprintln!(),
        Ok(Err(asked)) => foreground.handle_signal(asked)?,
        // A VM that has ended has no console any more; the follower knows how it ended.
        Err(failure) => drop(failure.report()),
    }
    foreground.follow(signals).await
}

pub(super) fn volume(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => Ok((name.into(), path.into())),
        _ => Err("expected NAME=PATH, NAME being a volume of the manifest".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_a_name_and_a_path() {
        assert_eq!(volume("root=/a=b"), Ok(("root".into(), "/a=b".into())));
        for text in ["root", "=x", "root=", "="] {
            assert!(volume(text).is_err(), "{text}");
        }
    }
}
