//! containerd's configuration with the runtime handler, and without it: a marked block at the end, which leaves every
//! other byte as it was.

use std::path::Path;

const BEGIN: &str = "# Made by `husk node install`; `husk node uninstall` removes all between these lines.\n";
const END: &str = "# End of what `husk node install` made.\n";
/// The beginning of a file that there was not.
const NEW: &str = "version = 2\n";

/// The text with the runtime handler `husk`, whose shim is at this path.
pub(super) fn with_husk(text: Option<&str>, shim: &Path) -> Result<String, String> {
    let before = text.and_then(without_husk).unwrap_or_else(|| NEW.to_owned());
    let plugin = match version(&before) {
        Some(2) => "io.containerd.grpc.v1.cri",
        Some(3 | 4) => "io.containerd.cri.v1.runtime",
        Some(other) => {
            return Err(format!(
                "version = {other} is not known: migrate it (`containerd config migrate`)"
            ));
        }
        None => {
            return Err(
                "it does not say `version = 2` or 3: migrate it (`containerd config migrate`)".into(),
            );
        }
    };
    if before.lines().any(|line| is_handler(line.trim(), "husk")) {
        return Err("it has a runtime called husk already: remove that first".into());
    }
    let shim = shim.to_str().filter(|path| !path.contains(['"', '\\', '\n']));
    let shim = shim.ok_or("the shim's path cannot be written there: choose another --bin")?;
    let gap = if before.ends_with('\n') { "" } else { "\n" };
    // With a runtime in its configuration containerd no longer has the one that it has by default, which others need.
    let runc = if before.lines().any(|line| is_handler(line.trim(), "runc")) {
        String::new()
    } else {
        format!(
            "[plugins.\"{plugin}\".containerd.runtimes.runc]\n  runtime_type = \"io.containerd.runc.v2\"\n"
        )
    };
    Ok(format!(
        "{before}{gap}{BEGIN}{runc}[plugins.\"{plugin}\".containerd.runtimes.husk]\n  \
         runtime_type = \"io.containerd.husk.v2\"\n  runtime_path = \"{shim}\"\n  \
         pod_annotations = [\"husk.io/*\"]\n  container_annotations = [\"husk.io/*\"]\n{END}"
    ))
}

/// The text without it; nothing where nothing else was in the file.
pub(super) fn without_husk(text: &str) -> Option<String> {
    let Some((before, rest)) = text.split_once(BEGIN) else {
        return Some(text.to_owned());
    };
    let after = rest.split_once(END).map_or("", |(_, after)| after);
    let left = format!("{before}{after}");
    (left != NEW).then_some(left)
}

fn version(text: &str) -> Option<u32> {
    let mut lines = text.lines().map(str::trim);
    let line = lines.find(|line| line.starts_with("version") && line.contains('='))?;
    let value = line.split_once('=')?.1.split('#').next()?;
    value.trim().parse().ok()
}

fn is_handler(line: &str, name: &str) -> bool {
    let table = line
        .strip_prefix("[plugins.")
        .and_then(|rest| rest.strip_suffix(']'));
    table.is_some_and(|table| {
        [format!(".runtimes.{name}"), format!(".runtimes.\"{name}\"")]
            .iter()
            .any(|end| table.ends_with(end))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHIM: &str = "/usr/local/bin/containerd-shim-husk-v2";

    fn add(text: Option<&str>) -> Result<String, String> {
        with_husk(text, Path::new(SHIM))
    }

    #[test]
    fn what_was_there_is_as_it_was_afterwards() {
        for text in [
            "version = 2\nroot = \"/x\"\n",
            "version = 3 # new\n[grpc]\n  uid = 0\n",
        ] {
            let added = add(Some(text)).unwrap();
            assert!(added.starts_with(text));
            assert_eq!(add(Some(&added)).unwrap(), added);
            assert_eq!(without_husk(&added).as_deref(), Some(text));
            assert_eq!(without_husk(text).as_deref(), Some(text));
        }
    }

    #[test]
    fn a_file_that_was_not_there_goes_again() {
        let made = add(None).unwrap();
        assert!(made.starts_with("version = 2\n# Made by"));
        assert!(made.contains("[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.husk]\n"));
        assert!(made.contains("  pod_annotations = [\"husk.io/*\"]\n"));
        assert_eq!(without_husk(&made), None);
        assert_eq!(add(Some(&made)).unwrap(), made);
    }

    #[test]
    fn runc_stays_the_default() {
        let runc = "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n";
        assert!(add(Some("version = 2\n")).unwrap().contains(runc));
        let own = format!("version = 2\n{runc}  runtime_type = \"x\"\n");
        assert_eq!(add(Some(&own)).unwrap().matches(runc).count(), 1);
    }

    #[test]
    fn the_plugin_is_that_of_the_files_version() {
        let new = add(Some("version = 3\n")).unwrap();
        assert!(new.contains("[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.husk]\n"));
        for text in ["", "root = \"/x\"\n", "version = 1\n"] {
            assert!(
                add(Some(text)).unwrap_err().contains("containerd config migrate"),
                "{text}"
            );
        }
        let other = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.husk]\n";
        assert!(add(Some(other)).unwrap_err().contains("remove that first"));
    }
}
