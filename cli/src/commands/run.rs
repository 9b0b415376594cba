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
use crate::image_volumes::ImageVolumes;
use crate::manifest::{self, Manifest};
use crate::signals::{Signals, StopSignal};
use crate::status::BOOT_FAILED;
use crate::vm_ref::VmRef;
use crate::{aborted_start, doctor, host_notes, live_vm, network, output, vm_ref};

/// Maximum time for a connection to the monitor of a VM that was started.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Start the VMs of a manifest
///
/// FILE holds VirtualMachineInstance and VirtualMachine objects in YAML or JSON, in any number of documents; other
/// objects are ignored. If one VM cannot be started, none is.
///
/// Runs in the foreground until the VMs have ended. Ctrl-C shuts them down like `husk stop`, a second Ctrl-C kills them.
/// When the terminal is closed, the VMs keep running.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status (with several VMs, the first non-zero one in the order of FILE):
  0    the guest powered off; with --detach: the VM is running
  1    the VM could not be started or was killed, or Husk failed
  2    the command line or the manifest is wrong; one line `FIELD: REASON` each
  10   kernel panic in the guest
  11   triple fault in the guest
  12   no kernel could be loaded
  129  the terminal was closed; running VMs keep running
  130  killed by a second Ctrl-C or SIGTERM, or Ctrl-C before the VMs were running
  143  SIGTERM before the VMs were running; later SIGTERM acts like Ctrl-C

Kernel to boot: --kernel, else firmware.kernelBoot of the manifest, else the
kernel found on the disks with a bootOrder, else on the first disk.

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

    /// Data of a volume: an image, a block device or a directory
    ///
    /// Required for ephemeral (whose data is not modified), persistentVolumeClaim and dataVolume; overrides the path of a
    /// hostDisk, and the image of a containerDisk or of firmware.kernelBoot.container, which is otherwise pulled from its
    /// registry (`husk images --help`). For the latter the volume name is `kernel-boot-volume`, and PATH a directory with
    /// the files of the container image. For configMap, secret, downwardAPI, serviceAccount and the secretRefs of
    /// cloud-init: a directory with one file per key.
    #[arg(long = "volume", value_name = "NAME=PATH", value_parser = volume)]
    volumes: Vec<(String, PathBuf)>,

    /// Kernel to boot (bzImage, or ELF with a PVH entry)
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    kernel: Option<PathBuf>,

    /// Initial RAM disk for the kernel
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, requires = "kernel")]
    initrd: Option<PathBuf>,

    /// Kernel command line; without --kernel, arguments to append to the command line found
    #[arg(long, value_name = "ARGS")]
    append: Option<String>,

    /// Run the VMs in the background and print their names
    #[arg(short, long, conflicts_with = "console")]
    detach: bool,

    /// Connect this terminal to the serial console of the VM; ^] detaches
    #[arg(short, long)]
    console: bool,

    /// Network namespace to attach the VM to, such as /run/netns/NAME or /proc/PID/ns/net; requires root
    ///
    /// The VM takes over the devices that a CNI plugin created there, until it ends: `eth0` for the pod network, `podHASH`
    /// for another network, with the first 11 hex digits of the SHA-256 of its name in the manifest. Name servers are taken
    /// from /etc/netns/NAME/resolv.conf if it exists, else from /etc/resolv.conf.
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
    netns: Option<PathBuf>,

    /// Namespace for VMs whose manifest names none
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
            "--console needs exactly one VM; the manifest has {}",
            names.len()
        )));
    }
    if args.netns.is_some() && names.len() > 1 {
        return Err(Failure::Usage(format!(
            "--netns needs exactly one VM; the manifest has {}",
            names.len()
        )));
    }
    let netns = args.netns.as_deref().map(absolute).transpose()?;
    let volumes = given_volumes(args, &manifest)?;
    let images = images(&manifest, &volumes)?;
    let placeholders = images.iter().map(|images| images.placeholders().collect());
    let plans = plans(args, &manifest, &volumes, &placeholders.collect::<Vec<_>>())?;
    if let [plan] = plans.as_slice()
        && args.console
        && !plan.serial_console
    {
        return Err(Failure::Usage(
            "--console: the VM has no serial console, since the manifest sets autoattachSerialConsole to false".into(),
        ));
    }
    if let Some(obstacle) = doctor::obstacle() {
        return Err(Failure::Runtime(obstacle));
    }
    let runtime_dir = RuntimeDir::locate()?;
    runtime_dir.prepare()?;
    let pulled = images.into_iter().map(ImageVolumes::pull);
    let pulled = pulled.collect::<Result<Vec<_>, _>>()?;
    let plans = self::plans(args, &manifest, &volumes, &pulled)?;
    // Network devices left by dead monitors would conflict with those of the new VM.
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
            snapshot: None,
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
                    eprintln!("{vm}: `husk console {vm}` opens its console, Ctrl-C shuts it down");
                }
                foreground.follow(&mut signals).await
            }
        }
    })
}

fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(Failure::at(path.display().to_string()))
}

/// The paths of `--volume` by volume.
fn given_volumes(args: &Args, manifest: &Manifest) -> Result<BTreeMap<String, PathBuf>, Failure> {
    let mut volumes = BTreeMap::new();
    for (name, path) in &args.volumes {
        if !manifest.vmis.iter().any(|vmi| accepts_volume(vmi, name)) {
            return Err(Failure::Usage(format!(
                "--volume {name}: no VM in the manifest has a volume with this name"
            )));
        }
        if volumes.insert(name.clone(), absolute(path)?).is_some() {
            return Err(Failure::Usage(format!("--volume {name} is given twice")));
        }
    }
    Ok(volumes)
}

/// The images that each VM needs from the store.
fn images(manifest: &Manifest, given: &BTreeMap<String, PathBuf>) -> Result<Vec<ImageVolumes>, Failure> {
    let (mut images, mut lines) = (Vec::new(), Vec::new());
    for vmi in &manifest.vmis {
        match ImageVolumes::of(vmi, given) {
            Ok(of_vm) => images.push(of_vm),
            Err(errors) => {
                let prefix = manifest.prefix_of(vmi);
                lines.extend(errors.iter().map(|error| format!("{prefix}{error}")));
            }
        }
    }
    match lines.is_empty() {
        true => Ok(images),
        false => Err(Failure::Manifest(lines)),
    }
}

/// The plans of all VMs, with the paths of `--volume`, and those of each VM's images.
fn plans(
    args: &Args,
    manifest: &Manifest,
    volumes: &BTreeMap<String, PathBuf>,
    images: &[BTreeMap<String, PathBuf>],
) -> Result<Vec<VmPlan>, Failure> {
    let optional = |path: &Option<PathBuf>| path.as_deref().map(absolute).transpose();
    let overridden = args.kernel.is_some() || args.append.is_some();
    let kernel = KernelOverride {
        kernel: optional(&args.kernel)?,
        initrd: optional(&args.initrd)?,
        append: args.append.clone(),
    };
    let now_unix_seconds = jiff::Timestamp::now().as_second();
    let (mut plans, mut errors) = (Vec::new(), Vec::new());
    for (vmi, images) in manifest.vmis.iter().zip(images) {
        let own = volumes.iter().filter(|(name, _)| accepts_volume(vmi, name));
        let own = own.chain(images);
        let resources = PodResources {
            volumes: own.map(|(name, path)| (name.clone(), path.clone())).collect(),
            kernel: overridden.then(|| kernel.clone()),
            uuid: uuid::Uuid::new_v4(),
            now_unix_seconds,
            ..PodResources::default()
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

/// True if a VM has a volume or access credentials of that name, or boots a kernel from it.
fn accepts_volume(vmi: &Vmi, name: &str) -> bool {
    let kernel_boot = vmi.spec.domain.firmware.kernel_boot.as_ref();
    vmi.spec.volume(name).is_some()
        || husk_vmi::is_credential_volume(vmi, name)
        || (name == KERNEL_VOLUME && kernel_boot.is_some_and(|boot| boot.container.is_some()))
}

/// Metadata of the manifest for `husk inspect`.
fn metadata(vmi: &Vmi) -> serde_json::Value {
    serde_json::json!({
        "name": vmi.name,
        "namespace": vmi.namespace,
        "uid": vmi.uid,
        "labels": vmi.labels,
        "annotations": vmi.annotations,
    })
}

/// Starts all VMs, or none if one fails, and follows them unless `detach` is set.
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
            // A monitor waits for open status streams when it ends.
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
                    "{vm} was started, but its monitor cannot be reached"
                )));
            }
        }
    }
    Ok((!detach).then_some(foreground))
}

/// Shows the progress of the start, once the monitor is connected.
async fn show_preparation(follower: &mut Option<Follower>) {
    match follower {
        Some(follower) => follower.show_preparation().await,
        None => std::future::pending().await,
    }
}

/// Command that runs this program as a monitor. `/proc/self/exe` is the running program even if its file was replaced.
///
/// Without `-v`, its log before the log file of the VM exists is discarded: errors are reported through the pipe.
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

/// Reason why not all VMs were started.
enum StartFailure {
    /// A signal arrived before all VMs were running.
    Signal(StopSignal),
    /// A VM could not be started; the error is printed already.
    Failed(Failure),
}

impl StartFailure {
    /// Prints which of the started VMs could not be cleaned up.
    fn report(self, left: &[VmRef]) -> Failure {
        let names: Vec<_> = left.iter().map(ToString::to_string).collect();
        let rest = match names.as_slice() {
            [] => "all were stopped".to_owned(),
            [name] => format!("{name} is still running: `husk rm --force {name}` ends it"),
            names => {
                let names = names.join(" ");
                format!("{names} are still running: `husk rm --force {names}` ends them")
            }
        };
        match self {
            Self::Signal(asked) => {
                eprintln!(
                    "interrupted by {} before all VMs were running: {rest}",
                    asked.name()
                );
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
        LaunchError::Silent => format!("{}: `husk run -v` may show the reason", chain(error)),
        error => chain(error),
    }
}

/// Connects the terminal to the console until the VM ends or the user detaches.
async fn with_console(vm: &VmRef, mut foreground: Foreground, signals: &mut Signals) -> Result<(), Failure> {
    let Some(mut client) = foreground.client() else {
        return Ok(());
    };
    match console::attach(vm, &mut client, OnInputEof::Watch, signals.next()).await {
        Ok(Ok(SessionEnd::Detached)) => {
            eprintln!("\n{vm} keeps running: `husk console {vm}` reconnects, `husk stop {vm}` stops it");
            return Ok(());
        }
        Ok(Ok(SessionEnd::TakenOver)) => {
            eprintln!("\n{vm}: another session took over the console; Ctrl-C shuts the VM down");
        }
        Ok(Ok(SessionEnd::VmEnded | SessionEnd::Lost(_))) => eprintln!(),
        Ok(Err(asked)) => foreground.handle_signal(asked)?,
        // The VM may have ended already; the follower reports how.
        Err(failure) => drop(failure.report()),
    }
    foreground.follow(signals).await
}

pub(super) fn volume(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => Ok((name.into(), path.into())),
        _ => Err("expected NAME=PATH, where NAME is a volume of the manifest".into()),
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
