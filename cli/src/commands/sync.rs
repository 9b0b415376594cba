//! `husk sync`.

use std::path::PathBuf;

use husk_proto::shim::v1::change::Kind;
use husk_proto::shim::v1::sync_vmi_request::RunState;
use husk_proto::shim::v1::{Change, SyncVmiRequest, SyncVmiResponse};
use tonic::Code;

use crate::failure::{Failure, one_line};
use crate::vm_ref::VmRef;
use crate::{live_vm, manifest};

/// Apply a changed manifest to a running VM
///
/// Adds and removes `hotpluggable` volumes and interfaces on Multus networks, sets links according to `state`, and grows
/// disks to the sizes of their images. Prints the changes made and those pending to stderr. If a change requires a
/// restart, nothing is changed and each such field is reported. Applying the same manifest again does nothing. In a
/// launcher pod that waits for its manifest, it starts the VM.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if the VM matches the manifest, 1 if changes are pending or
failed, 2 if the manifest is wrong or requires a restart.

Examples:
  husk sync demo -f vmi.yaml --volume data=data.img
  husk sync demo -f vmi.yaml --state paused")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// The manifest; `-` reads it from stdin
    #[arg(short, long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    file: PathBuf,

    /// Data of a volume to add, as for `husk addvolume --path`
    #[arg(long = "volume", value_name = "NAME=PATH", value_parser = super::run::volume)]
    volumes: Vec<(String, PathBuf)>,

    /// Resume or pause the VM
    #[arg(long, value_enum)]
    state: Option<TargetState>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum TargetState {
    /// Resume the VM if it is paused
    Running,
    /// Pause the VM
    Paused,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let source = args.file.to_string_lossy();
    let (text, manifest) = manifest::read_text(&source)?;
    if let [_, _, ..] = manifest.vmis.as_slice() {
        return Err(Failure::Usage(format!(
            "{source}: expected one VM, but there are several"
        )));
    }
    let mut paths = std::collections::HashMap::new();
    for (name, path) in &args.volumes {
        let path = std::path::absolute(path).map_err(Failure::at(path.display()))?;
        let path = path.into_os_string().into_string();
        let path =
            path.map_err(|path| Failure::Usage(format!("{}: the path is not UTF-8", path.display())))?;
        paths.insert(name.clone(), path);
    }
    let state = match args.state {
        None => RunState::Unspecified,
        Some(TargetState::Running) => RunState::Running,
        Some(TargetState::Paused) => RunState::Paused,
    };
    let request = SyncVmiRequest {
        vmi: text,
        run_state: state.into(),
        paths,
        ..SyncVmiRequest::default()
    };
    live_vm::block_on(async {
        loop {
            let mut client = live_vm::connect(&args.vm).await?;
            let done = client.sync_vmi(request.clone()).await;
            let done = done.map_err(|refused| refusal(&refused))?.into_inner();
            // The VM has taken the place of a pod that waited for it.
            if done.changes.iter().any(|change| change.kind() == Kind::Started) {
                eprintln!("{}: started", args.vm);
                continue;
            }
            return report(&args.vm, &done);
        }
    })
}

/// Prints field errors one per line, like `husk validate`.
fn refusal(refused: &tonic::Status) -> Failure {
    let message = refused.message();
    let of_fields = matches!(refused.code(), Code::FailedPrecondition | Code::InvalidArgument);
    if of_fields && (message.starts_with("spec.") || message.starts_with("metadata.")) {
        return Failure::Manifest(message.lines().map(one_line).collect());
    }
    Failure::Runtime(one_line(message))
}

fn report(vm: &VmRef, done: &SyncVmiResponse) -> Result<(), Failure> {
    for change in &done.changes {
        eprintln!("{vm}: {}", change_text(change));
    }
    let volumes = done
        .volumes
        .iter()
        .map(|v| ("volume", &v.name, &v.phase, &v.message));
    let interfaces = done.interfaces.iter();
    let interfaces = interfaces.map(|i| ("interface", &i.name, &i.phase, &i.message));
    let mut waits = 0;
    for (kind, name, phase, message) in volumes.chain(interfaces) {
        if matches!(phase.as_str(), "" | "Ready" | "Absent" | "RestartRequired") {
            continue;
        }
        waits += 1;
        eprintln!("{vm}: {kind} {}: {}", one_line(name), one_line(message));
    }
    let restart = done
        .interfaces
        .iter()
        .filter(|nic| nic.phase == "RestartRequired");
    let restart: Vec<String> = restart
        .map(|nic| format!("interface {}: {}", one_line(&nic.name), one_line(&nic.message)))
        .collect();
    if !restart.is_empty() {
        return Err(Failure::Manifest(restart));
    }
    match (done.complete, waits) {
        (true, _) if done.changes.is_empty() => {
            eprintln!("{vm}: nothing to change");
            Ok(())
        }
        (true, _) => Ok(()),
        (false, 0) => Err(Failure::Runtime(format!("{vm} does not match its manifest yet"))),
        (false, waits) => Err(Failure::Runtime(format!(
            "{vm} does not match its manifest yet: {waits} {}",
            if waits == 1 {
                "entry is pending"
            } else {
                "entries are pending"
            }
        ))),
    }
}

pub(super) fn change_text(change: &Change) -> String {
    let name = one_line(&change.name);
    match change.kind() {
        Kind::Resumed => "resumed".to_owned(),
        Kind::Paused => "paused".to_owned(),
        Kind::VolumeAdded => format!("added volume {name}"),
        Kind::VolumeRemoved => format!("removed volume {name}"),
        Kind::DiskGrew => format!("disk {name} has grown"),
        Kind::InterfaceAdded => format!("added interface {name}"),
        Kind::InterfaceRemoved => format!("removed interface {name}"),
        Kind::LinkUp => format!("interface {name} is up"),
        Kind::LinkDown => format!("interface {name} is down"),
        Kind::Started => "started".to_owned(),
        Kind::Unspecified => format!("changed {name}"),
    }
}
