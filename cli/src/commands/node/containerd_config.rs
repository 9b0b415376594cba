//! Adds the runtime handler to containerd's configuration and removes it again. Every other byte is kept.

use std::path::Path;

use toml_edit::TableLike;

use super::containerd_settings::{self, CRI, HUSK_RUNTIME_TYPE, Settings};
use super::marked_block::{self, BEGIN, END, add, cut};

/// First lines of a newly created file.
const NEW: &str = "# Created by `husk node install`.\nversion = 2";
/// Lines appended to a file without settings, since containerd assumes a version without runtime handlers for it.
const FIRST: &str = "# Added by `husk node install` to a file without settings.\nversion = 2";
/// [`NEW`] and [`FIRST`] as earlier versions wrote them.
const OLD_NEW: &str = "# `husk node install` made this file.\nversion = 2";
const OLD_FIRST: &str = "# `husk node install` found no setting here.\nversion = 2";

/// First lines of a drop-in file; the second if its directory was created for it.
const DROP_IN: [&str; 2] = [
    "# Created by `husk node install`; `husk node uninstall` removes this file.",
    "# Created by `husk node install`; `husk node uninstall` removes this file and its directory.",
];

/// A file with the runtime handler `husk`, which a configuration of this version imports.
pub(super) fn drop_in(version: i64, shim: &Path, with_directory: bool) -> Result<String, String> {
    let handler = handler(plugin(Some(version))?, shim)?;
    let first = DROP_IN[usize::from(with_directory)];
    Ok(format!("{first}\nversion = {version}\n{handler}\n"))
}

/// Returns true if the directory was created for the file; none if [`drop_in`] did not write this text.
pub(super) fn is_drop_in(text: &str) -> Option<bool> {
    let first = text.lines().next();
    let kind = DROP_IN.iter().position(|line| first == Some(*line))?;
    Some(kind == 1)
}

/// Adds the runtime handler `husk` with the shim at this path.
pub(super) fn with_husk(text: Option<&str>, shim: &Path) -> Result<String, String> {
    let before = match text {
        Some(text) => {
            Settings::parse(&marked_block::blank_out(text)?)?;
            without_husk(text)?
        }
        None => None,
    };
    let before = match before {
        None => add("", NEW),
        Some(text) if Settings::parse(&text)?.is_empty() => add(&text, FIRST),
        Some(text) => text,
    };
    let settings = Settings::parse(&before)?;
    let plugin = plugin(settings.version())?;
    let husk = containerd_settings::table(plugin, "husk");
    let handler = handler(plugin, shim)?;
    let ours = Settings::parse(&handler)?;
    if let Some(own) = settings.handler(plugin, "husk") {
        let other = ours.handler(plugin, "husk").and_then(|ours| differs(own, ours));
        return match other {
            None => Ok(before),
            Some(_) if !containerd_settings::is_husk_handler(own) => {
                Err(format!("{husk} is another runtime named husk: remove it first"))
            }
            Some(key) => Err(format!(
                "{husk} has another {key}: remove the table manually first"
            )),
        };
    }
    // Once the configuration names a runtime, containerd no longer adds its default, runc, which other pods need.
    let runc = match settings.handler(plugin, "runc") {
        Some(_) => String::new(),
        None => {
            let runc = containerd_settings::table(plugin, "runc");
            format!("{runc}\n  runtime_type = \"io.containerd.runc.v2\"\n")
        }
    };
    let added = add(&before, &format!("{BEGIN}\n{runc}{handler}\n{END}"));
    let parsed = Settings::parse(&added);
    if matches!(&parsed, Ok(settings) if settings.handler(plugin, "husk").is_some()) {
        return Ok(added);
    }
    Err(match (settings.inline_table(plugin), parsed) {
        (Some(table), _) => {
            format!(
                "{table} is not a table with a header: write it as [{table}], so that {husk} can be added"
            )
        }
        (None, Err(why)) => format!("{husk} cannot be added: {why}"),
        (None, Ok(_)) => format!("{husk} cannot be appended"),
    })
}

/// The CRI plugin in a configuration of this version.
fn plugin(version: Option<i64>) -> Result<&'static str, String> {
    match version {
        Some(2) => Ok(CRI[0]),
        Some(3 | 4) => Ok(CRI[1]),
        Some(other) => Err(format!(
            "version = {other} is not supported: run `containerd config migrate`"
        )),
        None => Err("`version = 2` or 3 is missing: run `containerd config migrate`".into()),
    }
}

/// The table of the handler.
fn handler(plugin: &str, shim: &Path) -> Result<String, String> {
    let shim = shim.to_str().filter(|path| !path.contains(['"', '\\', '\n']));
    let shim =
        shim.ok_or("the path of the shim cannot be written as a TOML string: choose another directory")?;
    let husk = containerd_settings::table(plugin, "husk");
    Ok(format!(
        "{husk}\n  runtime_type = \"{HUSK_RUNTIME_TYPE}\"\n  runtime_path = \"{shim}\"\n  \
         pod_annotations = [\"husk.io/*\"]\n  container_annotations = [\"husk.io/*\"]"
    ))
}

/// Removes what [`with_husk`] added. None if it created the file.
pub(super) fn without_husk(text: &str) -> Result<Option<String>, String> {
    let text = match marked_block::find(text)? {
        Some(lines) => cut(text, lines),
        None => text.to_owned(),
    };
    if [NEW, OLD_NEW].iter().any(|lines| text == add("", lines)) {
        return Ok(None);
    }
    let first = [FIRST, OLD_FIRST]
        .iter()
        .find_map(|lines| text.rfind(lines).map(|at| (at, at + lines.len())));
    Ok(Some(match first {
        Some((at, end)) if ["", "\n"].contains(&&text[end..]) => cut(&text, at..text.len()),
        _ => text,
    }))
}

/// Name of the first of our settings that the handler lacks or has with another value.
fn differs(own: &dyn TableLike, ours: &dyn TableLike) -> Option<String> {
    let mut keys = ours.iter();
    let is_same = |own| move |ours| containerd_settings::strings(own) == containerd_settings::strings(ours);
    keys.find(|(key, ours)| !own.get(key).is_some_and(|own| is_same(own)(ours)))
        .map(|(key, _)| key.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHIM: &str = "/usr/local/bin/containerd-shim-husk-v2";
    const RUNC: &str = "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n";
    const HANDLER: &str = "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.husk]\n";

    fn with(text: Option<&str>) -> Result<String, String> {
        with_husk(text, Path::new(SHIM))
    }

    fn without(text: &str) -> Option<String> {
        without_husk(text).unwrap()
    }

    #[test]
    fn removing_restores_the_file() {
        for text in [
            "version = 2\nroot = \"/x\"\n",
            "version = 2\n",
            "version = 3 # new\n[grpc]\n  uid = 0\n",
            "version = 2\r\n[grpc]\r\n",
            // No newline at the end.
            "version = 2\n[grpc]\n  uid = 0",
            // No settings.
            "",
            "\n",
            "# as shipped\n#version = 2\n",
            "# as shipped",
        ] {
            let added = with(Some(text)).unwrap();
            assert!(added.starts_with(text));
            assert_eq!(with(Some(&added)).unwrap(), added);
            assert_eq!(without(&added).as_deref(), Some(text));
            assert_eq!(without(text).as_deref(), Some(text));
        }
    }

    #[test]
    fn text_after_the_block_is_kept() {
        for text in ["version = 2\n", "version = 2", "# nothing", ""] {
            let added = with(Some(text)).unwrap() + "\n[grpc]\n";
            assert!(without(&added).unwrap().ends_with("\n[grpc]\n"), "{text}");
            let again = with(Some(&added)).unwrap();
            assert_eq!(without(&again), without(&added));
        }
    }

    #[test]
    fn a_created_file_is_removed() {
        let made = with(None).unwrap();
        assert!(made.starts_with("# Created by `husk node install`.\nversion = 2\n# Added by"));
        assert!(made.contains(HANDLER));
        assert!(made.contains("  pod_annotations = [\"husk.io/*\"]\n"));
        assert_eq!(without(&made), None);
        assert_eq!(with(Some(&made)).unwrap(), made);
    }

    /// Node install of an earlier version marked its lines with other words.
    #[test]
    fn additions_of_earlier_versions_are_removed_and_replaced() {
        let block = format!(
            "# Made by `husk node install`; `husk node uninstall` removes all between these lines.\n{RUNC}  \
             runtime_type = \"io.containerd.runc.v2\"\n{HANDLER}  runtime_type = \"{HUSK_RUNTIME_TYPE}\"\n  \
             runtime_path = \"/old/shim\"\n# End of what `husk node install` made.\n"
        );
        for (own, without_block) in [
            ("version = 2\n", Some("version = 2\n")),
            ("# `husk node install` made this file.\nversion = 2\n", None),
            (
                "# as shipped\n# `husk node install` found no setting here.\nversion = 2\n",
                Some("# as shipped\n"),
            ),
        ] {
            let old = format!("{own}{block}");
            assert_eq!(without(&old).as_deref(), without_block);
            let renewed = with(Some(&old)).unwrap();
            assert_eq!(renewed.matches(HANDLER).count(), 1, "{renewed}");
            assert!(
                renewed.contains(SHIM) && !renewed.contains("/old/shim"),
                "{renewed}"
            );
            assert_eq!(without(&renewed).as_deref(), without_block);
        }
    }

    #[test]
    fn runc_stays_the_default() {
        assert!(with(Some("version = 2\n")).unwrap().contains(RUNC));
        let cri = "plugins.\"io.containerd.grpc.v1.cri\"";
        for own in [
            format!("{RUNC}  runtime_type = \"x\"\n"),
            format!("[{cri}.containerd.runtimes.runc]  # the default\n"),
            format!("[ {cri}.containerd.runtimes.runc ]\n"),
            format!("[{cri}.containerd]\n  runtimes.runc.runtime_type = \"x\"\n"),
            format!("[{cri}.containerd.runtimes]\n  runc = {{ runtime_type = \"x\" }}\n"),
        ] {
            let added = with(Some(&format!("version = 2\n{own}"))).unwrap();
            assert_eq!(added.matches("io.containerd.runc.v2").count(), 0, "{own}");
            assert!(added.contains(HANDLER), "{own}");
        }
    }

    #[test]
    fn the_plugin_is_that_of_the_files_version() {
        let new = with(Some("version = 3\n")).unwrap();
        assert!(new.contains("[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.husk]\n"));
        for text in ["root = \"/x\"\n", "version = 1\n", "version = \"2\"\n"] {
            assert!(
                with(Some(text))
                    .unwrap_err()
                    .contains("containerd config migrate"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_file_that_cannot_be_extended_is_refused() {
        let refused = |text: &str| with(Some(&format!("version = 2\n{text}"))).unwrap_err();
        assert!(refused("[plugins\n").starts_with("line 2 is not TOML: "));
        assert!(refused("plugins = 5\n").starts_with("plugins is not a table"));
        let inline = refused("plugins = { \"io.containerd.grpc.v1.cri\" = {} }\n");
        assert!(inline.starts_with("plugins is not a table"), "{inline}");
        assert!(refused("[[plugins]]\n").starts_with("plugins is not a table"));
        let own = "[plugins.\"io.containerd.grpc.v1.cri\".containerd]\nruntimes = {}\n";
        assert!(refused(own).contains(".containerd.runtimes is not a table"));
        assert!(
            with(Some("\u{feff}version = 2\n"))
                .unwrap_err()
                .contains("byte order mark")
        );
    }

    #[test]
    fn errors_name_the_line_of_the_file() {
        let broken = with(Some("version = 2\n")).unwrap() + "[plugins\n";
        let line = broken.lines().count();
        let why = with(Some(&broken)).unwrap_err();
        assert!(why.starts_with(&format!("line {line} is not TOML: ")), "{why}");
    }

    #[test]
    fn a_block_that_broke_the_file_is_replaced() {
        let own = format!("version = 2\n{RUNC}");
        let added = with(Some(&own)).unwrap();
        let twice = added.replace(HANDLER, &format!("{RUNC}{HANDLER}"));
        assert_eq!(with(Some(&twice)).unwrap(), added);
        assert_eq!(without(&twice), Some(own));
    }

    #[test]
    fn a_handler_without_markers_is_recognised() {
        let added = with(Some("version = 2\n")).unwrap();
        let bare = added.replace(BEGIN, "").replace(END, "").replace('"', "'");
        assert_eq!(with(Some(&bare)).unwrap(), bare);
        let why = with_husk(Some(&bare), Path::new("/opt/shim")).unwrap_err();
        let table = HANDLER.trim();
        assert_eq!(
            why,
            format!("{table} has another runtime_path: remove the table manually first")
        );
        let other = format!("version = 2\n{HANDLER}");
        assert!(with(Some(&other)).unwrap_err().contains("remove it first"));
    }
}
