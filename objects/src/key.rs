//! Names of objects.

use std::fmt;
use std::path::PathBuf;

use serde_json::Value;

/// Directory of the objects of the whole cluster; no namespace has such a name.
pub(crate) const CLUSTER: &str = ".cluster";

/// A kind that is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Secret,
    ConfigMap,
    DataVolume,
    Instancetype,
    ClusterInstancetype,
    Preference,
    ClusterPreference,
    VirtualMachine,
    VirtualMachineInstance,
}

impl Kind {
    /// All kinds: what VMs need comes before them.
    pub const ALL: [Kind; 9] = [
        Kind::Secret,
        Kind::ConfigMap,
        Kind::Instancetype,
        Kind::ClusterInstancetype,
        Kind::Preference,
        Kind::ClusterPreference,
        Kind::DataVolume,
        Kind::VirtualMachine,
        Kind::VirtualMachineInstance,
    ];

    /// `kind` of a manifest.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::Secret => "Secret",
            Kind::ConfigMap => "ConfigMap",
            Kind::DataVolume => "DataVolume",
            Kind::Instancetype => "VirtualMachineInstancetype",
            Kind::ClusterInstancetype => "VirtualMachineClusterInstancetype",
            Kind::Preference => "VirtualMachinePreference",
            Kind::ClusterPreference => "VirtualMachineClusterPreference",
            Kind::VirtualMachine => "VirtualMachine",
            Kind::VirtualMachineInstance => "VirtualMachineInstance",
        }
    }

    /// API group; empty for the core group.
    #[must_use]
    pub fn group(self) -> &'static str {
        match self {
            Kind::Secret | Kind::ConfigMap => "",
            Kind::DataVolume => "cdi.kubevirt.io",
            Kind::Instancetype | Kind::ClusterInstancetype | Kind::Preference | Kind::ClusterPreference => {
                "instancetype.kubevirt.io"
            }
            Kind::VirtualMachine | Kind::VirtualMachineInstance => "kubevirt.io",
        }
    }

    /// Short names of the kind, as kubectl takes them.
    #[must_use]
    pub fn short_names(self) -> &'static [&'static str] {
        match self {
            Kind::Secret => &[],
            Kind::ConfigMap => &["cm"],
            Kind::DataVolume => &["dv", "dvs"],
            Kind::Instancetype => &["vminstancetype", "vmf", "vmfs"],
            Kind::ClusterInstancetype => &["vmclusterinstancetype", "vmcf", "vmcfs"],
            Kind::Preference => &["vmpref", "vmprefs", "vmp", "vmps"],
            Kind::ClusterPreference => &["vmcp", "vmcps"],
            Kind::VirtualMachine => &["vm", "vms"],
            Kind::VirtualMachineInstance => &["vmi", "vmis"],
        }
    }

    /// True if its objects are VMs. All other kinds are of use to VMs only.
    #[must_use]
    pub fn is_vm(self) -> bool {
        matches!(self, Kind::VirtualMachine | Kind::VirtualMachineInstance)
    }

    /// True if its objects have a namespace.
    #[must_use]
    pub fn is_namespaced(self) -> bool {
        !matches!(self, Kind::ClusterInstancetype | Kind::ClusterPreference)
    }

    /// The kind of a word as kubectl takes it: its name in any case, singular or plural, or a short name.
    #[must_use]
    pub fn of_word(word: &str) -> Option<Kind> {
        let word = word.to_ascii_lowercase();
        Kind::ALL.into_iter().find(|kind| {
            let name = kind.directory();
            word == name
                || word.strip_suffix('s') == Some(&name)
                || kind.short_names().contains(&word.as_str())
        })
    }

    /// Name of its directory.
    pub(crate) fn directory(self) -> String {
        self.name().to_ascii_lowercase()
    }
}

/// Kind and name of a stored object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub kind: Kind,
    /// A DNS-1123 label; empty for an object of the whole cluster.
    pub namespace: String,
    /// A DNS-1123 subdomain.
    pub name: String,
}

/// As kubectl prints it: `virtualmachine.kubevirt.io/demo`, with the namespace in front of the name unless it is
/// `default`.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.kind.directory())?;
        if !self.kind.group().is_empty() {
            write!(f, ".{}", self.kind.group())?;
        }
        if !matches!(self.namespace.as_str(), "" | "default") {
            write!(f, "/{}", self.namespace)?;
        }
        write!(f, "/{}", self.name)
    }
}

impl Key {
    /// A key; an object of the whole cluster has no namespace.
    #[must_use]
    pub fn new(kind: Kind, namespace: &str, name: &str) -> Key {
        let namespace = if kind.is_namespaced() { namespace } else { "" };
        Key {
            kind,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }
    }

    /// The key of a checked manifest; none if its kind is not stored.
    #[must_use]
    pub fn of(object: &Value) -> Option<Key> {
        let text = |path| object.pointer(path).and_then(Value::as_str);
        let (version, name) = (text("/apiVersion")?, text("/kind")?);
        let group = version.split_once('/').map_or("", |(group, _)| group);
        let is = |kind: &Kind| kind.name() == name && kind.group() == group;
        let kind = Kind::ALL.into_iter().find(is)?;
        let namespace = text("/metadata/namespace").filter(|namespace| !namespace.is_empty());
        Some(Key::new(
            kind,
            namespace.unwrap_or("default"),
            text("/metadata/name")?,
        ))
    }

    /// Path of its file below the store.
    pub(crate) fn file(&self) -> PathBuf {
        let namespace = match self.kind.is_namespaced() {
            true => self.namespace.as_str(),
            false => CLUSTER,
        };
        let file = format!("{}.yaml", self.name);
        [namespace, &self.kind.directory(), &file].iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn words_are_those_of_kubectl() {
        for (word, kind) in [
            ("vm", Kind::VirtualMachine),
            ("VirtualMachines", Kind::VirtualMachine),
            ("vmis", Kind::VirtualMachineInstance),
            ("dv", Kind::DataVolume),
            ("secrets", Kind::Secret),
            ("cm", Kind::ConfigMap),
        ] {
            assert_eq!(Kind::of_word(word), Some(kind), "{word}");
        }
        assert_eq!(Kind::of_word("pods"), None);
    }

    #[test]
    fn an_object_of_the_cluster_has_no_namespace() {
        let object = json!({
            "apiVersion": "instancetype.kubevirt.io/v1beta1",
            "kind": "VirtualMachineClusterInstancetype",
            "metadata": {"name": "small", "namespace": "ignored"},
        });
        let key = Key::of(&object).expect("a stored kind");
        assert_eq!(
            key.file(),
            PathBuf::from(".cluster/virtualmachineclusterinstancetype/small.yaml")
        );
        assert_eq!(
            key.to_string(),
            "virtualmachineclusterinstancetype.instancetype.kubevirt.io/small"
        );
    }

    #[test]
    fn another_group_is_another_kind() {
        let object = |version: &str| json!({"apiVersion": version, "kind": "VirtualMachine", "metadata": {"name": "a"}});
        assert_eq!(Key::of(&object("example.com/v1")), None);
        let key = Key::of(&object("kubevirt.io/v1")).expect("a stored kind");
        assert_eq!(key.file(), PathBuf::from("default/virtualmachine/a.yaml"));
        assert_eq!(key.to_string(), "virtualmachine.kubevirt.io/a");
    }
}
