//! The network of a pod: the namespace that its sandbox, or else its only container, is in.

use std::path::PathBuf;

use husk_monitor::vm_environment::PodNetwork;
use oci_spec::runtime::{LinuxNamespaceType, Spec};

use super::annotations::called;
use super::error::SpecError;

const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Where the network of a VM is, by the spec of its container and that of its pod's sandbox.
///
/// # Errors
/// The pod is on the node's own network.
pub fn network(vm: &Spec, sandbox: Option<&Spec>) -> Result<Option<PodNetwork>, SpecError> {
    let namespace = namespace(sandbox.unwrap_or(vm)).or_else(|| namespace(vm).filter(|own| own.is_some()));
    match namespace {
        Some(Some(netns)) => Ok(Some(PodNetwork::given(netns, resolv_conf(vm)))),
        // One that nobody has made yet: the VM has it to itself, as by `husk run`.
        Some(None) => Ok(None),
        None => Err(SpecError::NodeNetwork {
            container: called(vm),
        }),
    }
}

/// The network namespace of a container: none where it is in the node's, and no path where it wants one of its own.
fn namespace(spec: &Spec) -> Option<Option<PathBuf>> {
    let namespaces = spec.linux().as_ref()?.namespaces().as_ref()?;
    let network = namespaces
        .iter()
        .find(|namespace| namespace.typ() == LinuxNamespaceType::Network)?;
    Some(network.path().clone().filter(|path| !path.as_os_str().is_empty()))
}

fn resolv_conf(spec: &Spec) -> Option<PathBuf> {
    let mut mounts = spec.mounts().iter().flatten();
    mounts
        .find(|mount| mount.destination().as_os_str() == RESOLV_CONF)?
        .source()
        .clone()
}
