//! The network of a pod: the namespace of its sandbox, or else of its only container.

use std::path::PathBuf;

use husk_monitor::vm_environment::PodNetwork;
use oci_spec::runtime::{LinuxNamespaceType, Spec};

use super::annotations::display_name;
use super::error::SpecError;

const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Returns the network of a VM, from the specs of its container and of the pod's sandbox.
///
/// # Errors
/// The pod uses the node's own network.
pub fn network(vm: &Spec, sandbox: Option<&Spec>) -> Result<Option<PodNetwork>, SpecError> {
    let namespace = namespace(sandbox.unwrap_or(vm)).or_else(|| namespace(vm).filter(|own| own.is_some()));
    match namespace {
        Some(Some(netns)) => Ok(Some(PodNetwork::given(netns, resolv_conf(vm)))),
        // The namespace does not exist yet. The VM gets one of its own, as with `husk run`.
        Some(None) => Ok(None),
        None => Err(SpecError::NodeNetwork {
            container: display_name(vm),
        }),
    }
}

/// The network namespace of a container: `None` if it is the node's, `Some(None)` if it is a new one.
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
