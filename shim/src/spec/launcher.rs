//! Containers of KubeVirt's launcher pods. virt-controller renders them for programs of the launcher image. None of
//! these programs runs: Husk does what each would do, and knows the containers by their commands.

use std::time::Duration;

use oci_spec::runtime::Spec;

use super::annotations::{COMPUTE, VOLUME_PREFIX, display_name};
use super::error::SpecError;

/// Container that prints the guest's console.
const CONSOLE_LOG: &str = "guest-console-log";
/// Init container that copies `container-disk` for the volume containers.
const CONTAINER_DISK_BINARY: &str = "container-disk-binary";
/// The whole command of `compute` in a pod that only binds claims (WaitForFirstConsumer).
const BIND_CLAIMS: [&str; 4] = ["/bin/bash", "-c", "echo", "bound PVCs"];
/// KubeVirt's default for `--qemu-timeout`, without its random part.
const QEMU_TIMEOUT: Duration = Duration::from_secs(240);

/// Limit of `--qemu-timeout`.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// The VM that a launcher pod is for, from the arguments of virt-launcher-monitor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LauncherArgs {
    /// Name of the VMI.
    pub name: String,
    /// Namespace of the VMI.
    pub namespace: String,
    /// UID of the VMI.
    pub uid: String,
    /// Maximum time from the start of the container to the start of the VM.
    pub qemu_timeout: Duration,
}

/// A container of a launcher pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LauncherContainer {
    /// Runs the VM.
    Compute(LauncherArgs),
    /// Prints the guest's console.
    ConsoleLog,
    /// Keeps its root filesystem mounted, which is the volume of this name.
    Volume(String),
    /// Does nothing that Husk needs, and ends.
    NoOp,
}

/// Returns the part of a container in a launcher pod; `None` if its command is not one of virt-controller's.
pub(super) fn launcher_container(
    spec: &Spec,
    container_name: &str,
) -> Result<Option<LauncherContainer>, SpecError> {
    let args = args(spec);
    let Some((program, rest)) = args.split_first() else {
        return Ok(None);
    };
    let program = program.rsplit('/').next().unwrap_or_default();
    let volume = container_name.strip_prefix(VOLUME_PREFIX);
    Ok(match (container_name, program) {
        (COMPUTE, "virt-launcher-monitor") => Some(LauncherContainer::Compute(launcher_args(spec, rest)?)),
        (COMPUTE, _) if args == BIND_CLAIMS => Some(LauncherContainer::NoOp),
        (CONSOLE_LOG, "virt-tail") => Some(LauncherContainer::ConsoleLog),
        (CONTAINER_DISK_BINARY, "cp") => Some(LauncherContainer::NoOp),
        (_, "container-disk") if rest.iter().any(|arg| arg == "--no-op") => {
            volume.map(|_| LauncherContainer::NoOp)
        }
        (_, "container-disk") if rest.iter().any(|arg| arg == "--copy-path") => {
            volume.map(|name| LauncherContainer::Volume(name.to_owned()))
        }
        _ => None,
    })
}

/// The command of a container's process.
fn args(spec: &Spec) -> &[String] {
    let process = spec.process().as_ref();
    process
        .and_then(|process| process.args().as_deref())
        .unwrap_or_default()
}

fn launcher_args(spec: &Spec, args: &[String]) -> Result<LauncherArgs, SpecError> {
    let value = |flag: &'static str| {
        let position = args.iter().position(|arg| arg == flag)?;
        args.get(position + 1).filter(|value| !value.is_empty())
    };
    let required = |flag| {
        value(flag).cloned().ok_or_else(|| SpecError::LauncherFlag {
            container: display_name(spec),
            flag,
        })
    };
    // virt-controller writes whole seconds.
    let seconds = value("--qemu-timeout").and_then(|timeout| timeout.strip_suffix('s')?.parse().ok());
    Ok(LauncherArgs {
        name: required("--name")?,
        namespace: required("--namespace")?,
        uid: required("--uid")?,
        qemu_timeout: seconds
            .map_or(QEMU_TIMEOUT, Duration::from_secs)
            .min(LONGEST_TIMEOUT),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn container(args: &[&str]) -> Spec {
        let process = json!({"cwd": "/", "args": args, "user": {"uid": 107, "gid": 107}});
        serde_json::from_value(json!({"ociVersion": "1.1.0", "linux": {}, "process": process})).unwrap()
    }

    fn is(name: &str, args: &[&str]) -> Option<LauncherContainer> {
        launcher_container(&container(args), name).unwrap()
    }

    #[test]
    fn containers_are_known_by_their_commands() {
        let disk = "/container-disk-binary/usr/bin/container-disk";
        let no_op = Some(LauncherContainer::NoOp);
        assert_eq!(is("volumeroot", &[disk, "--no-op"]), no_op);
        assert_eq!(is("volumeroot-init", &[disk, "--no-op"]), no_op);
        assert_eq!(
            is(
                "container-disk-binary",
                &["/usr/bin/cp", "--preserve=all", "a", "b"]
            ),
            no_op
        );
        assert_eq!(is("compute", &BIND_CLAIMS), no_op);
        assert_eq!(
            is(
                "volumeroot",
                &["/usr/bin/container-disk", "--copy-path", "/d/disk_0"]
            ),
            Some(LauncherContainer::Volume("root".into()))
        );
        assert_eq!(
            is("guest-console-log", &["/usr/bin/virt-tail", "--logfile", "f"]),
            Some(LauncherContainer::ConsoleLog)
        );
        for (name, args) in [
            ("compute", &["/bin/sh"][..]),
            ("hook-sidecar-0", &["/usr/bin/virt-launcher-monitor"]),
            ("virtiofs-data", &["/usr/libexec/virtiofsd"]),
            ("sidecar", &["container-disk", "--no-op"]),
            ("guest-console-log", &[]),
        ] {
            assert_eq!(is(name, args), None, "{name}");
        }
    }

    #[test]
    fn compute_names_its_vm() {
        let mut args = vec![
            "/usr/bin/virt-launcher-monitor",
            "--qemu-timeout",
            "324s",
            "--name",
        ];
        args.extend(["vm", "--uid", "u-1", "--namespace", "team", "--run-as-nonroot"]);
        let wanted = LauncherArgs {
            name: "vm".into(),
            namespace: "team".into(),
            uid: "u-1".into(),
            qemu_timeout: Duration::from_secs(324),
        };
        assert_eq!(is("compute", &args), Some(LauncherContainer::Compute(wanted)));
        let error = launcher_container(&container(&args[..5]), "compute").unwrap_err();
        assert_eq!(
            error.to_string(),
            "this container: virt-launcher-monitor has no --namespace"
        );
    }
}
