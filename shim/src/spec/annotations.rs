//! The annotations of a container.

use oci_spec::runtime::Spec;

/// The annotation with the VirtualMachineInstance, as JSON.
pub const VMI: &str = "husk.io/vmi";
/// The annotation with the volume that a container's root filesystem is.
pub const VOLUME: &str = "husk.io/volume";
/// The annotation with the name of a pod's VM container, if it is not [`COMPUTE`].
pub const VM_CONTAINER: &str = "husk.io/vm-container";
/// KubeVirt's name of the VM container.
pub const COMPUTE: &str = "compute";
/// KubeVirt's prefix of the names of volume containers.
pub(super) const VOLUME_PREFIX: &str = "volume";

/// Prefix of Husk's annotations.
const HUSK: &str = "husk.io/";
/// Prefix of the names that virt-controller gives to launcher pods.
const LAUNCHER_POD: &str = "virt-launcher-";

/// Annotations of containerd's CRI plugin.
pub(super) mod cri {
    pub(in crate::spec) const CONTAINER_TYPE: &str = "io.kubernetes.cri.container-type";
    pub(in crate::spec) const CONTAINER_NAME: &str = "io.kubernetes.cri.container-name";
    pub(in crate::spec) const SANDBOX_UID: &str = "io.kubernetes.cri.sandbox-uid";
    pub(in crate::spec) const SANDBOX_NAME: &str = "io.kubernetes.cri.sandbox-name";
    pub(in crate::spec) const SANDBOX_NAMESPACE: &str = "io.kubernetes.cri.sandbox-namespace";
}

/// Returns the pod's UID from the spec of its sandbox. It names the pod's socket and state.
#[must_use]
pub fn uid(spec: &Spec) -> Option<&str> {
    annotation(spec, cri::SANDBOX_UID).filter(|uid| !uid.is_empty())
}

/// Returns an annotation of a container. Husk's are for pods without a control plane: KubeVirt copies a VMI's
/// annotations to its launcher pod, where they could come from a VMI's author, past KubeVirt's checks. There they have
/// no effect.
#[must_use]
pub fn annotation<'a>(spec: &'a Spec, key: &str) -> Option<&'a str> {
    let get = |key| Some(spec.annotations().as_ref()?.get(key)?.as_str());
    let in_launcher_pod = || get(cri::SANDBOX_NAME).is_some_and(|pod| pod.starts_with(LAUNCHER_POD));
    match key.starts_with(HUSK) && in_launcher_pod() {
        true => None,
        false => get(key),
    }
}

/// Returns the name of a container for errors.
#[must_use]
pub fn display_name(spec: &Spec) -> String {
    let or_unknown = |key| annotation(spec, key).unwrap_or("?").to_owned();
    match annotation(spec, cri::CONTAINER_NAME) {
        Some(name) => format!(
            "container {name:?} of pod {}/{}",
            or_unknown(cri::SANDBOX_NAMESPACE),
            or_unknown(cri::SANDBOX_NAME)
        ),
        None => "this container".to_owned(),
    }
}
