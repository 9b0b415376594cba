//! The annotations of a container.

use oci_spec::runtime::Spec;

/// The VirtualMachineInstance as JSON.
pub const VMI: &str = "husk.io/vmi";
/// On a container: the volume of the VMI that its root filesystem is.
pub const VOLUME: &str = "husk.io/volume";
/// Which container of a pod is the VM, where it is not called [`COMPUTE`].
pub const VM_CONTAINER: &str = "husk.io/vm-container";
/// KubeVirt's name for the container that is the VM.
pub const COMPUTE: &str = "compute";
/// KubeVirt's beginning of the name of a volume's container.
pub(super) const VOLUME_PREFIX: &str = "volume";

/// What containerd's CRI plugin says of a container.
pub(super) mod cri {
    pub(in crate::spec) const CONTAINER_TYPE: &str = "io.kubernetes.cri.container-type";
    pub(in crate::spec) const CONTAINER_NAME: &str = "io.kubernetes.cri.container-name";
    pub(in crate::spec) const SANDBOX_UID: &str = "io.kubernetes.cri.sandbox-uid";
    pub(in crate::spec) const SANDBOX_NAME: &str = "io.kubernetes.cri.sandbox-name";
    pub(in crate::spec) const SANDBOX_NAMESPACE: &str = "io.kubernetes.cri.sandbox-namespace";
}

/// Of a sandbox, what its socket and state are called by: the pod's UID, where there is one.
#[must_use]
pub fn uid(spec: &Spec) -> Option<&str> {
    annotation(spec, cri::SANDBOX_UID).filter(|uid| !uid.is_empty())
}

/// An annotation of a container.
#[must_use]
pub fn annotation<'a>(spec: &'a Spec, key: &str) -> Option<&'a str> {
    Some(spec.annotations().as_ref()?.get(key)?.as_str())
}

/// A container as people know it, for errors.
#[must_use]
pub fn called(spec: &Spec) -> String {
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
