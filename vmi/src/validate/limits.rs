//! Checks that several rules share.

use crate::field::FieldError;

/// Maximum number of volumes, disks, networks or interfaces.
const LIST_LIMIT: usize = 256;

pub(super) fn list_limit(path: &str, length: usize, errors: &mut Vec<FieldError>) {
    if length > LIST_LIMIT {
        let text = format!("{path} list exceeds the {LIST_LIMIT} element limit in length");
        errors.push(FieldError::invalid(path, text));
    }
}

/// Error of the path of a file in a container image, if it is invalid.
pub(super) fn image_path_fault(path: &str) -> Option<&'static str> {
    if path == "/" {
        return Some("must not point to root");
    }
    let rest = path.strip_prefix('/').unwrap_or_default();
    let clean = !rest.is_empty() && rest.split('/').all(|part| !matches!(part, "" | "." | ".."));
    (!clean).then_some("must be an absolute path to a file without relative components")
}
