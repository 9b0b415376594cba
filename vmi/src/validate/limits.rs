//! Limits of lists, and checks that several rules share.

use crate::field::FieldError;
use crate::load::Vmi;

/// Maximum number of volumes, disks, networks, interfaces or credentials.
const LIST_LIMIT: usize = 256;

/// Errors of lists that are too long.
pub(super) fn lists(vmi: &Vmi) -> Vec<FieldError> {
    let devices = &vmi.spec.domain.devices;
    let lengths = [
        ("volumes", vmi.spec.volumes.len()),
        ("domain.devices.disks", devices.disks.len()),
        ("networks", vmi.spec.networks.len()),
        ("domain.devices.interfaces", devices.interfaces.len()),
        ("accessCredentials", vmi.spec.access_credentials.len()),
    ];
    let too_long = lengths.into_iter().filter(|(_, length)| *length > LIST_LIMIT);
    let error = |(field, _)| {
        let path = vmi.at(field);
        let text = format!("{path} list exceeds the {LIST_LIMIT} element limit in length");
        FieldError::invalid(path, text)
    };
    too_long.map(error).collect()
}

/// Error of the path of a file in a container image, if it is invalid.
pub(super) fn image_path_fault(path: &str) -> Option<&'static str> {
    if path == "/" {
        return Some("must not point to root");
    }
    let rest = path.strip_prefix('/').unwrap_or_default();
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    let clean = !rest.is_empty() && rest.split('/').all(|part| !matches!(part, "" | "." | ".."));
    (!clean).then_some("must be an absolute path to a file without relative components")
}
