//! Names of VMs on the command line: `NAME` or `NAMESPACE/NAME`.

use husk_monitor::state::PODS;
use std::fmt;
use std::str::FromStr;

/// Namespace of a manifest or name without one.
pub(crate) const DEFAULT_NAMESPACE: &str = "default";

/// Namespace and name of a VM. Both are valid Kubernetes names, but in the namespace `pods` the name is a containerd
/// container ID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct VmRef {
    pub namespace: String,
    pub name: String,
}

impl fmt::Display for VmRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace == DEFAULT_NAMESPACE {
            f.write_str(&self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}

impl FromStr for VmRef {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (space, name) = text.split_once('/').unwrap_or((DEFAULT_NAMESPACE, text));
        if !(is_subdomain(name) || space == PODS && is_identifier(name)) {
            return Err("expected NAME or NAMESPACE/NAME of lower-case letters, digits, '-' and '.'".into());
        }
        Ok(Self {
            namespace: namespace(space)?,
            name: name.into(),
        })
    }
}

/// Parses a namespace: an RFC 1123 label.
pub(crate) fn namespace(text: &str) -> Result<String, String> {
    if text.len() <= 63 && is_label(text) {
        Ok(text.into())
    } else {
        Err("a namespace consists of at most 63 lower-case letters, digits and '-'".into())
    }
}

fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_label)
}

/// True for a containerd identifier: groups of letters and digits joined by `-`, `_` or `.`.
fn is_identifier(text: &str) -> bool {
    let is_word = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric());
    text.len() <= 76 && text.split(['-', '_', '.']).all(is_word)
}

fn is_label(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.bytes().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_alone_is_in_the_default_namespace() {
        let vm: VmRef = "demo".parse().unwrap();
        assert_eq!((vm.namespace.as_str(), vm.name.as_str()), ("default", "demo"));
        assert_eq!(vm.to_string(), "demo");
    }

    #[test]
    fn a_namespace_is_kept() {
        let vm: VmRef = "test/demo.v2".parse().unwrap();
        assert_eq!((vm.namespace.as_str(), vm.name.as_str()), ("test", "demo.v2"));
        assert_eq!(vm.to_string(), "test/demo.v2");
    }

    #[test]
    fn a_pods_vm_is_called_as_its_container() {
        let vm: VmRef = "pods/A.b_c-9".parse().unwrap();
        assert_eq!(vm.to_string(), "pods/A.b_c-9");
        for text in [
            "A.b_c-9",
            "pods/..",
            "pods/A/b",
            "pods/A..b",
            "pods/_",
            "pods/a b",
        ] {
            assert!(text.parse::<VmRef>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn names_that_would_leave_the_state_directory_are_refused() {
        for text in [
            "", "/", "a/", "/a", "../a", "a/..", "a/b/c", "A", "a b", "-a", "a-", ".", "a..b", "x\n",
        ] {
            assert!(text.parse::<VmRef>().is_err(), "{text:?}");
        }
        assert!("a".repeat(254).parse::<VmRef>().is_err());
        assert!(format!("{}/a", "n".repeat(64)).parse::<VmRef>().is_err());
    }
}
