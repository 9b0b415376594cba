//! `husk run`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use husk_monitor::launch::MonitorConfig;
use husk_monitor::state::RuntimeDir;
use husk_vmi::{KERNEL_VOLUME, KernelOverride, PodResources, VmPlan, Vmi};

use crate::failure::{Failure, print_warning};
use crate::image_volumes::ImageVolumes;
use crate::launch::{self, Follow};
use crate::manifest::{self, Manifest};
use crate::{doctor, host_warnings, network, vm_ref};

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
  14   the guest's watchdog powered the VM off
  129  the terminal was closed; running VMs keep running
  130  killed by a second Ctrl-C or SIGTERM, or Ctrl-C before the VMs were running
  143  SIGTERM before the VMs were running; later SIGTERM acts like Ctrl-C

Kernel to boot: --kernel, else firmware.kernelBoot of the manifest, else the
kernel found on the disks with a bootOrder, else on the first disk, else on the first
CD-ROM.

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
    for text in manifest.warnings_of_ignored() {
        print_warning(&text);
    }
    let mut configs = Vec::new();
    for (vmi, mut plan) in manifest.vmis.iter().zip(plans) {
        let prefix = manifest.prefix_of(vmi);
        let unmet = network::drop_unavailable(vmi, &mut plan, netns.as_deref())?;
        let all = plan.warnings.iter().map(ToString::to_string);
        for text in all.chain(host_warnings::warnings(vmi, &plan)).chain(unmet) {
            print_warning(&format!("{prefix}{text}"));
        }
        configs.push(MonitorConfig {
            runtime_dir: runtime_dir.path().into(),
            plan,
            netns: netns.clone(),
            vmi: metadata(vmi),
            snapshot: None,
            replug_nics: false,
            plugged_disks: Vec::new(),
        });
    }
    let vms = names.into_iter().zip(configs).collect();
    let follow = Follow {
        command: "husk run",
        detach: args.detach,
        console: args.console,
        verbose,
    };
    launch::run(vms, follow)
}

pub(super) fn absolute(path: &Path) -> Result<PathBuf, Failure> {
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
