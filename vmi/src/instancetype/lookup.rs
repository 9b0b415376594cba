//! The objects that an expansion may need.

use std::collections::BTreeMap;

use crate::load::Metadata;
use crate::objects::{DataVolume, Instancetype, Object, ObjectKind, Preference};

/// Finds objects. A namespace of none stands for an object of the whole cluster.
pub trait Lookup {
    /// A VirtualMachineInstancetype, or a VirtualMachineClusterInstancetype.
    fn instancetype(&self, namespace: Option<&str>, name: &str) -> Option<&Instancetype>;

    /// A VirtualMachinePreference, or a VirtualMachineClusterPreference.
    fn preference(&self, namespace: Option<&str>, name: &str) -> Option<&Preference>;

    /// A DataVolume.
    fn data_volume(&self, namespace: &str, name: &str) -> Option<&DataVolume>;

    /// Labels of a PersistentVolumeClaim, also of one that a DataVolume makes.
    fn claim_labels(&self, namespace: &str, name: &str) -> Option<BTreeMap<String, String>>;
}

/// The objects of a manifest. Of two with the same name, the last counts.
impl Lookup for [Object] {
    fn instancetype(&self, namespace: Option<&str>, name: &str) -> Option<&Instancetype> {
        last(self, |kind| match kind {
            ObjectKind::Instancetype(found) if is(&found.metadata, namespace, name) => Some(&**found),
            _ => None,
        })
    }

    fn preference(&self, namespace: Option<&str>, name: &str) -> Option<&Preference> {
        last(self, |kind| match kind {
            ObjectKind::Preference(found) if is(&found.metadata, namespace, name) => Some(&**found),
            _ => None,
        })
    }

    fn data_volume(&self, namespace: &str, name: &str) -> Option<&DataVolume> {
        last(self, |kind| match kind {
            ObjectKind::DataVolume(found) if is(&found.metadata, Some(namespace), name) => Some(found),
            _ => None,
        })
    }

    fn claim_labels(&self, namespace: &str, name: &str) -> Option<BTreeMap<String, String>> {
        let metadata = last(self, |kind| match kind {
            ObjectKind::PersistentVolumeClaim(claim) => {
                Some(&claim.metadata).filter(|metadata| is(metadata, Some(namespace), name))
            }
            ObjectKind::DataVolume(data) => {
                Some(&data.metadata).filter(|metadata| is(metadata, Some(namespace), name))
            }
            ObjectKind::VirtualMachine(vm) => {
                let mut templates = vm.data_volume_templates.iter().map(|data| &data.metadata);
                templates.find(|metadata| is(metadata, Some(namespace), name))
            }
            _ => None,
        });
        Some(metadata?.labels.clone())
    }
}

fn last<'a, T>(objects: &'a [Object], find: impl Fn(&'a ObjectKind) -> Option<&'a T>) -> Option<&'a T> {
    objects.iter().rev().find_map(|object| find(&object.kind))
}

fn is(metadata: &Metadata, namespace: Option<&str>, name: &str) -> bool {
    metadata.name == name && metadata.namespace == namespace.unwrap_or_default()
}
