//! containerd's configuration with the runtime handler, and without it: every other byte stays as it was.

use std::path::Path;

use toml_edit::TableLike;

use super::containerd_settings::{self, CRI, HUSK_RUNTIME_TYPE, Settings};
use super::marked_block::{self, BEGIN, END, add, cut};

/// The beginning of a file that there was not.
const NEW: &str = "# `husk node install` made this file.\nversion = 2";
/// NodeCommand a file gets that says nothing, which containerd takes for a version that has no such handlers.
const FIRST: &str = "# `husk node install` found no setting here.\nversion = 2";

/// The text with the runtime handler `husk`, whose shim is at this path.
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
    let plugin = match settings.version() {
        Some(2) => CRI[0],
        Some(3 | 4) => CRI[1],
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
    let shim = shim.to_str().filter(|path| !path.contains(['"', '\\', '\n']));
    let shim = shim.ok_or("the shim's path cannot be written there: choose another --bin")?;
    let husk = containerd_settings::table(plugin, "husk");
    let handler = format!(
        "{husk}\n  runtime_type = \"{HUSK_RUNTIME_TYPE}\"\n  runtime_path = \"{shim}\"\n  \
         pod_annotations = [\"husk.io/*\"]\n  container_annotations = [\"husk.io/*\"]"
    );
    let ours = Settings::parse(&handler)?;
    if let Some(own) = settings.handler(plugin, "husk") {
        let other = ours.handler(plugin, "husk").and_then(|ours| differs(own, ours));
        return match other {
            None => Ok(before),
            Some(_) if !containerd_settings::is_husk_handler(own) => Err(format!(
                "its {husk} is another runtime called husk: remove that first"
            )),
            Some(key) => Err(format!(
                "its {husk} has another {key}: remove that table by hand first"
            )),
        };
    }
    // With a runtime in its configuration containerd no longer has the one that it has by default, which others need.
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
            format!("its {table} is not a table with a header, [{table}]: write it as one, for {husk}")
        }
        (None, Err(why)) => format!("{husk} cannot be added: {why}"),
        (None, Ok(_)) => format!("{husk} cannot be added at its end"),
    })
}

/// The text without what `with_husk` added; nothing where that made the file.
pub(super) fn without_husk(text: &str) -> Result<Option<String>, String> {
    let text = match marked_block::find(text)? {
        Some(lines) => cut(text, lines),
        None => text.to_owned(),
    };
    if text == add("", NEW) {
        return Ok(None);
    }
    let first = text.rfind(FIRST).map(|at| (at, at + FIRST.len()));
    Ok(Some(match first {
        Some((at, end)) if ["", "\n"].contains(&&text[end..]) => cut(&text, at..text.len()),
        _ => text,
    }))
}

/// The first setting of ours that a handler has not, or has otherwise.
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
    fn what_was_there_is_as_it_was_afterwards() {
        for text in [
            "version = 2\nroot = \"/x\"\n",
            "version = 2\n",
            "version = 3 # new\n[grpc]\n  uid = 0\n",
            "version = 2\r\n[grpc]\r\n",
            // No end of line at the end.
            "version = 2\n[grpc]\n  uid = 0",
            // Nothing said.
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
    fn what_was_written_behind_stays() {
        for text in ["version = 2\n", "version = 2", "# nothing", ""] {
            let added = with(Some(text)).unwrap() + "\n[grpc]\n";
            assert!(without(&added).unwrap().ends_with("\n[grpc]\n"), "{text}");
            let again = with(Some(&added)).unwrap();
            assert_eq!(without(&again), without(&added));
        }
    }

    #[test]
    fn a_file_that_was_not_there_goes_again() {
        let made = with(None).unwrap();
        assert!(made.starts_with("# `husk node install` made this file.\nversion = 2\n# Made by"));
        assert!(made.contains(HANDLER));
        assert!(made.contains("  pod_annotations = [\"husk.io/*\"]\n"));
        assert_eq!(without(&made), None);
        assert_eq!(with(Some(&made)).unwrap(), made);
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
    fn what_cannot_be_added_to_is_refused() {
        let refused = |text: &str| with(Some(&format!("version = 2\n{text}"))).unwrap_err();
        assert!(refused("[plugins\n").starts_with("line 2 is not TOML: "));
        assert!(refused("plugins = 5\n").starts_with("its plugins is not a table"));
        let inline = refused("plugins = { \"io.containerd.grpc.v1.cri\" = {} }\n");
        assert!(inline.starts_with("its plugins is not a table"), "{inline}");
        assert!(refused("[[plugins]]\n").starts_with("its plugins is not a table"));
        let own = "[plugins.\"io.containerd.grpc.v1.cri\".containerd]\nruntimes = {}\n";
        assert!(refused(own).contains(".containerd.runtimes is not a table"));
        assert!(
            with(Some("\u{feff}version = 2\n"))
                .unwrap_err()
                .contains("byte order mark")
        );
    }

    #[test]
    fn a_line_is_told_as_it_is_in_the_file() {
        let broken = with(Some("version = 2\n")).unwrap() + "[plugins\n";
        let line = broken.lines().count();
        let why = with(Some(&broken)).unwrap_err();
        assert!(why.starts_with(&format!("line {line} is not TOML: ")), "{why}");
    }

    #[test]
    fn a_block_that_broke_the_file_is_made_anew() {
        let own = format!("version = 2\n{RUNC}");
        let added = with(Some(&own)).unwrap();
        let twice = added.replace(HANDLER, &format!("{RUNC}{HANDLER}"));
        assert_eq!(with(Some(&twice)).unwrap(), added);
        assert_eq!(without(&twice), Some(own));
    }

    #[test]
    fn a_handler_of_husks_own_needs_no_marks() {
        let added = with(Some("version = 2\n")).unwrap();
        let bare = added.replace(BEGIN, "").replace(END, "").replace('"', "'");
        assert_eq!(with(Some(&bare)).unwrap(), bare);
        let why = with_husk(Some(&bare), Path::new("/opt/shim")).unwrap_err();
        let table = HANDLER.trim();
        assert_eq!(
            why,
            format!("its {table} has another runtime_path: remove that table by hand first")
        );
        let other = format!("version = 2\n{HANDLER}");
        assert!(with(Some(&other)).unwrap_err().contains("remove that first"));
    }
}
