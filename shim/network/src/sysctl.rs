//! Sysctls of the calling thread's network namespace.

use std::io;
use std::path::{Path, PathBuf};

use super::error::NetworkFault;

fn path(name: &str) -> PathBuf {
    Path::new("/proc/sys/net").join(name)
}

/// Value of `net.NAME`; `None` if the kernel lacks it, such as those of IPv6.
fn get(name: &str) -> Result<Option<String>, NetworkFault> {
    match std::fs::read_to_string(path(name)) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(NetworkFault::io(path(name))(e)),
    }
}

/// True if the sysctl has this value.
pub(super) fn is(name: &str, value: &str) -> Result<bool, NetworkFault> {
    Ok(get(name)?.as_deref() == Some(value))
}

/// Sets a sysctl, if the kernel has it.
pub(super) fn set(name: &str, value: &str) -> Result<(), NetworkFault> {
    match get(name)? {
        Some(was) if was != value => std::fs::write(path(name), value).map_err(NetworkFault::io(path(name))),
        _ => Ok(()),
    }
}

/// The sysctls among `names` that are not 1, with their values, which a teardown restores. A sysctl that is 1 already
/// was set by others, perhaps for another interface, and is not restored.
pub(super) fn not_on(names: &[&str]) -> Result<Vec<(String, String)>, NetworkFault> {
    let mut found = Vec::new();
    for name in names {
        if let Some(value) = get(name)?.filter(|value| value != "1") {
            found.push(((*name).to_owned(), value));
        }
    }
    Ok(found)
}
