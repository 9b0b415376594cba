//! The role of a container.
//!
//! The kubelet passes annotations of the pod, not of containers, so each container of a pod has `husk.io/vmi`. There
//! the containers' names decide. Other callers can annotate each container.

use std::fmt::{self, Display, Formatter};

use oci_spec::runtime::Spec;

use super::annotations::{COMPUTE, VM_CONTAINER, VMI, VOLUME, VOLUME_PREFIX, annotation, cri, display_name};
use super::error::SpecError;
use super::launcher::{LauncherArgs, LauncherContainer, launcher_container};
use super::vm::{load_vmi, volumes_of};

/// The role of a container in its pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// The sandbox: the pod's network namespace and cgroup. Runs nothing.
    Sandbox,
    /// The VM.
    Vm,
    /// The volume of this name.
    Volume(String),
    /// The volume of this name in a launcher pod. It ends with the VM.
    LauncherVolume(String),
    /// `compute` of a launcher pod: it runs without a VM until a VMI comes by `SyncVmi`.
    Launcher(LauncherArgs),
    /// `guest-console-log` of a launcher pod: prints the guest's console.
    ConsoleLog,
    /// A container of a launcher pod that has nothing to do: it ends with exit status 0 when it is started.
    NoOp,
}

impl Display for Role {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Role::Sandbox => f.write_str("the sandbox"),
            Role::Vm => f.write_str("the VM"),
            Role::Volume(name) | Role::LauncherVolume(name) => write!(f, "the volume {name:?}"),
            Role::Launcher(args) => write!(f, "the VM {}/{}", args.namespace, args.name),
            Role::ConsoleLog => f.write_str("the console's log"),
            Role::NoOp => f.write_str("a container that does nothing"),
        }
    }
}

/// Returns the role of a container, from its spec and that of the pod's sandbox.
///
/// # Errors
/// The container has no role.
pub fn role(spec: &Spec, sandbox: Option<&Spec>) -> Result<Role, SpecError> {
    if annotation(spec, cri::CONTAINER_TYPE) == Some("sandbox") {
        return Ok(Role::Sandbox);
    }
    let vmi = annotation(spec, VMI);
    let volume = annotation(spec, VOLUME);
    let name = annotation(spec, cri::CONTAINER_NAME).unwrap_or_default();
    match launcher_container(spec, name)? {
        Some(LauncherContainer::Compute(args)) => return Ok(Role::Launcher(args)),
        Some(LauncherContainer::ConsoleLog) => return Ok(Role::ConsoleLog),
        Some(LauncherContainer::NoOp) => return Ok(Role::NoOp),
        Some(LauncherContainer::Volume(volume)) => return Ok(Role::LauncherVolume(volume)),
        None => {}
    }
    let Some(sandbox) = sandbox else {
        return match (vmi, volume) {
            (Some(_), _) => Ok(Role::Vm),
            (None, Some(volume)) => Err(SpecError::VolumeAlone {
                container: display_name(spec),
                volume: volume.to_owned(),
            }),
            (None, None) => Err(SpecError::NoVmi {
                container: display_name(spec),
            }),
        };
    };
    let pods = annotation(sandbox, VMI);
    let vm = annotation(sandbox, VM_CONTAINER).unwrap_or(COMPUTE);
    // True if the container's annotation differs from the pod's.
    let own = |key: &str, value: Option<&'_ str>| value.is_some() && annotation(sandbox, key) != value;
    if name == vm || own(VMI, vmi) {
        return match vmi {
            Some(_) => Ok(Role::Vm),
            None => Err(SpecError::NoVmi {
                container: display_name(spec),
            }),
        };
    }
    if let Some(volume) = volume.filter(|_| own(VOLUME, volume)) {
        return Ok(Role::Volume(volume.to_owned()));
    }
    if let (Some(volume), Some(vmi)) = (name.strip_prefix(VOLUME_PREFIX), pods)
        && volumes_of(&load_vmi(vmi, spec)?).any(|known| known == volume)
    {
        return Ok(Role::Volume(volume.to_owned()));
    }
    Err(SpecError::Neither {
        container: display_name(spec),
        vm: vm.to_owned(),
    })
}
