//! `husk sync`.

use std::path::PathBuf;

use husk_proto::shim::v1::change::Kind;
use husk_proto::shim::v1::sync_vmi_request::RunState;
use husk_proto::shim::v1::{Change, SyncVmiRequest, SyncVmiResponse};
use tonic::Code;

use crate::failure::{Failure, one_line};
use crate::vm_ref::VmRef;
use crate::{live_vm, manifest};

/// Make a running VM what its manifest says now
///
/// Volumes that are `hotpluggable` come and go with their entries, as interfaces do on networks of Multus; links follow
/// `state`, and disks the sizes of their images. Prints what was done, on stderr, and what waits. What takes a restart is
/// refused, by field, before anything is done. Once all is so, doing it again does nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if the VM is as the manifest says, 1 if something waits or failed,
2 if the manifest is wrong, or another one for what takes a restart.

Examples:
  husk sync demo -f vmi.yaml --volume data=data.img
  husk sync demo -f vmi.yaml --state paused")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// The manifest; `-` reads stdin
    #[arg(short, long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    file: PathBuf,

    /// Where the data of a volume is that is to come: as for `husk addvolume --path`
    #[arg(long = "volume", value_name = "NAME=PATH", value_parser = super::run::volume)]
    volumes: Vec<(String, PathBuf)>,

    /// Let it run, or pause it
    #[arg(long, value_enum)]
    state: Option<TargetState>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum TargetState {
    /// It runs
    Running,
    /// Its vCPUs stand still
    Paused,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let source = args.file.to_string_lossy();
    let (text, manifest) = manifest::read_text(&source)?;
    if let [_, _, ..] = manifest.vmis.as_slice() {
        return Err(Failure::Usage(format!(
            "{source}: one VM is wanted, there are several"
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
    };
    live_vm::block_on(async {
        let answer = live_vm::connect(&args.vm).await?.sync_vmi(request).await;
        match answer {
            Ok(done) => report(&args.vm, done.get_ref()),
            Err(refused) => Err(refusal(&refused)),
        }
    })
}

/// Fields stand in lines of their own, as for `husk validate`.
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
        if matches!(phase.as_str(), "" | "Ready" | "Absent") {
            continue;
        }
        waits += 1;
        eprintln!("{vm}: {kind} {}: {}", one_line(name), one_line(message));
    }
    match (done.complete, waits) {
        (true, _) if done.changes.is_empty() => {
            eprintln!("{vm}: nothing to do");
            Ok(())
        }
        (true, _) => Ok(()),
        (false, 0) => Err(Failure::Runtime(format!(
            "{vm} is not yet what its manifest says"
        ))),
        (false, waits) => Err(Failure::Runtime(format!(
            "{vm} is not yet what its manifest says: {waits} {}",
            if waits == 1 { "entry waits" } else { "entries wait" }
        ))),
    }
}

fn change_text(change: &Change) -> String {
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
        Kind::Unspecified => format!("changed {name}"),
    }
}
