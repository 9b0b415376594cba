//! Names of systemd scopes: `SLICE:PREFIX:NAME` is the unit `PREFIX-NAME.scope` in that slice.

use std::path::PathBuf;

use super::CgroupError;

const SLICE: &str = ".slice";
/// Longest name of a unit, in bytes.
const UNIT_NAME_MAX: usize = 255;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Scope {
    pub(super) slice: String,
    pub(super) unit: String,
    /// Path of its cgroup, relative to the root of the hierarchy.
    pub(super) path: PathBuf,
}

impl Scope {
    pub(super) fn parse(text: &str) -> Result<Scope, CgroupError> {
        let bad = |reason| CgroupError::BadScope {
            text: text.to_owned(),
            reason,
        };
        let parts: Vec<&str> = text.split(':').collect();
        let [slice, prefix, name] = parts[..] else {
            return Err(bad("a systemd scope is SLICE:PREFIX:NAME"));
        };
        let mut path = slice_path(slice).ok_or_else(|| bad("it does not begin with the name of a slice"))?;
        let unit = format!("{prefix}-{name}.scope");
        if prefix.is_empty() || name.is_empty() || !is_unit_name(&unit) {
            return Err(bad("PREFIX-NAME.scope is not a valid scope name"));
        }
        path.push(&unit);
        Ok(Scope {
            slice: slice.to_owned(),
            unit,
            path,
        })
    }
}

/// Path of a slice's cgroup: each dash in the name is one level. A literal dash is written `\x2d`.
fn slice_path(slice: &str) -> Option<PathBuf> {
    let name = slice.strip_suffix(SLICE).filter(|_| is_unit_name(slice))?;
    let mut path = PathBuf::new();
    if name == "-" {
        return Some(path);
    }
    let mut so_far = String::new();
    for step in name.split('-') {
        if step.is_empty() {
            return None;
        }
        if !so_far.is_empty() {
            so_far.push('-');
        }
        so_far.push_str(step);
        path.push(format!("{so_far}{SLICE}"));
    }
    Some(path)
}

/// True if a unit may have this name.
fn is_unit_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'\\');
    name.len() <= UNIT_NAME_MAX && name.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_scope_is_below_its_slices() {
        let scope = Scope::parse("kubepods-burstable-pod1_2.slice:cri-containerd:0123").unwrap();
        assert_eq!(
            (scope.slice.as_str(), scope.unit.as_str()),
            ("kubepods-burstable-pod1_2.slice", "cri-containerd-0123.scope")
        );
        assert_eq!(
            scope.path,
            Path::new(
                "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/cri-containerd-0123.scope"
            )
        );
    }

    #[test]
    fn slices_are_expanded_as_systemd_does() {
        for (slice, path) in [
            ("-.slice", ""),
            ("system.slice", "system.slice"),
            ("a-b.slice", "a.slice/a-b.slice"),
            (r"a\x2db-c.slice", r"a\x2db.slice/a\x2db-c.slice"),
        ] {
            assert_eq!(slice_path(slice).as_deref(), Some(Path::new(path)), "{slice}");
        }
        for bad in [
            "",
            ".slice",
            "a",
            "a.scope",
            "-a.slice",
            "a-.slice",
            "a--b.slice",
            "a/b.slice",
            "a b.slice",
        ] {
            assert_eq!(slice_path(bad), None, "{bad}");
        }
    }

    #[test]
    fn malformed_scopes_are_refused_with_the_fields_name() {
        let long = format!("a.slice:b:{}", "c".repeat(UNIT_NAME_MAX));
        for bad in [
            "a.slice:b",
            "a.slice:b:c:d",
            "a.slice::c",
            "a.slice:b:",
            "a.slice:b:c/d",
            "a.slice:b:../c",
            "a--b.slice:c:d",
            "..:c:d",
            &long,
        ] {
            let error = Scope::parse(bad).unwrap_err().to_string();
            assert!(error.starts_with("linux.cgroupsPath \""), "{error}");
        }
    }
}
