//! The settings in containerd's configuration, independent of how the TOML is written.

use std::collections::BTreeSet;

use toml_edit::{Document, Item, TableLike};

use crate::failure;

/// `runtime_type` of Husk's shim.
pub(super) const HUSK_RUNTIME_TYPE: &str = "io.containerd.husk.v2";
/// Name of the CRI plugin: up to version 2 of the configuration, and since version 3.
pub(super) const CRI: [&str; 2] = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"];

/// Settings of a file.
#[derive(Debug)]
pub(super) struct Settings(Document<String>);

impl Settings {
    /// # Errors
    /// The line that is not TOML and the reason.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if text.starts_with('\u{feff}') {
            return Err(
                "it begins with a byte order mark, which some versions of containerd reject: remove it \
                 (`sed -i '1s/^\\xef\\xbb\\xbf//' FILE`)"
                    .into(),
            );
        }
        let parsed = Document::parse(text.to_owned()).map_err(|error| {
            let before = text.bytes().take(error.span().map_or(0, |span| span.start));
            let line = before.filter(|byte| *byte == b'\n').count() + 1;
            format!("line {line} is not TOML: {}", failure::one_line(error.message()))
        })?;
        Ok(Self(parsed))
    }

    /// True if the file has only comments.
    pub(super) fn is_empty(&self) -> bool {
        self.0.as_table().is_empty()
    }

    /// The version of the configuration, if given.
    pub(super) fn version(&self) -> Option<i64> {
        self.0.as_table().get("version")?.as_integer()
    }

    /// The imported files.
    pub(super) fn imports(&self) -> Vec<&str> {
        self.0.as_table().get("imports").map_or_else(Vec::new, strings)
    }

    /// The directory of containerd's state, if given.
    pub(super) fn state(&self) -> Option<&str> {
        self.0.as_table().get("state")?.as_str()
    }

    /// The settings of a plugin.
    pub(super) fn plugin(&self, plugin: &str) -> Option<&dyn TableLike> {
        self.0
            .as_table()
            .get("plugins")?
            .as_table_like()?
            .get(plugin)?
            .as_table_like()
    }

    /// A runtime handler of a plugin.
    pub(super) fn handler(&self, plugin: &str, name: &str) -> Option<&dyn TableLike> {
        handlers(self.plugin(plugin)?)?.get(name)?.as_table_like()
    }

    /// The outermost table around a plugin's handlers that is not written with a header and cannot be extended.
    pub(super) fn inline_table(&self, plugin: &str) -> Option<String> {
        let mut item = self.0.as_item();
        let mut name = String::new();
        for key in ["plugins", plugin, "containerd", "runtimes"] {
            item = item.get(key)?;
            name = match key {
                "plugins" => key.to_owned(),
                _ if key == plugin => format!("{name}.\"{key}\""),
                _ => format!("{name}.{key}"),
            };
            if !item.is_table() {
                return Some(name);
            }
        }
        None
    }

    /// The tables of all handlers that use Husk's shim, in any plugin.
    pub(super) fn husk_handlers(&self) -> Vec<String> {
        let husk = self.handlers().filter(|(.., handler)| is_husk_handler(*handler));
        husk.map(|(plugin, name, _)| table(plugin, name)).collect()
    }

    /// The paths of the shims of these handlers.
    pub(super) fn husk_shims(&self) -> Vec<&str> {
        let husk = self.handlers().filter(|(.., handler)| is_husk_handler(*handler));
        husk.filter_map(|(.., handler)| handler.get("runtime_path")?.as_str())
            .collect()
    }

    /// The names of all handlers, in any plugin.
    pub(super) fn handler_names(&self) -> BTreeSet<String> {
        self.handlers().map(|(_, name, _)| name.to_owned()).collect()
    }

    /// All handlers, each with its plugin and its name.
    fn handlers(&self) -> impl Iterator<Item = (&str, &str, &dyn TableLike)> {
        let plugins = self.0.as_table().get("plugins").and_then(Item::as_table_like);
        let plugins = plugins.into_iter().flat_map(TableLike::iter);
        let tables =
            plugins.filter_map(|(plugin, settings)| Some((plugin, handlers(settings.as_table_like()?)?)));
        tables.flat_map(|(plugin, handlers)| {
            let handlers = handlers.iter();
            handlers.filter_map(move |(name, handler)| Some((plugin, name, handler.as_table_like()?)))
        })
    }
}

/// True if a handler uses Husk's shim.
pub(super) fn is_husk_handler(handler: &dyn TableLike) -> bool {
    handler.get("runtime_type").and_then(Item::as_str) == Some(HUSK_RUNTIME_TYPE)
}

/// Table header of a handler.
pub(super) fn table(plugin: &str, name: &str) -> String {
    format!("[plugins.\"{plugin}\".containerd.runtimes.{name}]")
}

/// A setting that is a string or a list of strings.
pub(super) fn strings(item: &Item) -> Vec<&str> {
    let list = item.as_array().into_iter().flatten();
    item.as_str()
        .into_iter()
        .chain(list.filter_map(|word| word.as_str()))
        .collect()
}

fn handlers(plugin: &dyn TableLike) -> Option<&dyn TableLike> {
    plugin
        .get("containerd")?
        .as_table_like()?
        .get("runtimes")?
        .as_table_like()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str) -> Settings {
        Settings::parse(text).unwrap()
    }

    #[test]
    fn a_handler_is_found_however_it_is_written() {
        let cri = "plugins.\"io.containerd.grpc.v1.cri\"";
        for text in [
            format!("[{cri}.containerd.runtimes.runc]  # the default\n"),
            format!("[ {cri} . containerd.runtimes.'runc' ]\n"),
            format!("[{cri}.containerd]\nruntimes.runc.runtime_type = \"x\"\n"),
            format!("[{cri}.containerd.runtimes]\nrunc = {{ runtime_type = \"x\" }}\n"),
        ] {
            let settings = settings(&text);
            assert!(settings.handler(CRI[0], "runc").is_some(), "{text}");
            assert!(settings.handler(CRI[0], "husk").is_none(), "{text}");
            assert!(settings.handler(CRI[1], "runc").is_none(), "{text}");
        }
        // Not a handler, though the line looks like one's.
        let text = format!("x = '''\n[{cri}.containerd.runtimes.runc]\n'''\n");
        assert!(settings(&text).handler(CRI[0], "runc").is_none());
    }

    #[test]
    fn syntax_errors_name_the_line() {
        let broken = |text| Settings::parse(text).unwrap_err();
        assert!(broken("version = 2\n\n[plugins\n").starts_with("line 3 is not TOML: "));
        assert!(broken("a = 1\na = 2\n").starts_with("line 2 is not TOML: "));
        assert!(broken("\u{feff}version = 2\n").contains("byte order mark"));
        for text in ["[plugins\n", "a = [\n", "a = 1 2\n", "é = 1\n"] {
            assert_eq!(broken(text).lines().count(), 1, "{text}");
        }
    }

    #[test]
    fn settings_are_read() {
        let parsed = settings("version = 3\nimports = ['a', \"b\"]\n");
        assert_eq!((parsed.version(), parsed.imports()), (Some(3), vec!["a", "b"]));
        assert!(!parsed.is_empty() && settings("# nothing\n").is_empty());
        assert_eq!(settings("version = '2'\n").version(), None);
    }

    #[test]
    fn husks_handlers_are_found_by_their_type() {
        let text = "[plugins.a.containerd.runtimes]\nx.runtime_type = 'io.containerd.husk.v2'\n\
                    y = { runtime_type = \"io.containerd.runc.v2\" }\n[plugins.b]\ncontainerd = 1\n";
        assert_eq!(settings(text).husk_handlers(), [table("a", "x")]);
        assert_eq!(settings("plugins = 5\n").husk_handlers(), [""; 0]);
        let path = text.replace("[plugins.b]", "x.runtime_path = '/opt/shim'\n[plugins.b]");
        assert_eq!(settings(&path).husk_shims(), ["/opt/shim"]);
        assert_eq!(
            settings(text).handler_names(),
            ["x".to_owned(), "y".to_owned()].into()
        );
    }

    #[test]
    fn a_table_that_a_header_cannot_add_to_is_named() {
        let inline_table = |text| settings(text).inline_table(CRI[0]);
        assert_eq!(inline_table("plugins = 5\n").as_deref(), Some("plugins"));
        assert_eq!(inline_table("[[plugins]]\n").as_deref(), Some("plugins"));
        assert_eq!(
            inline_table("[plugins.'io.containerd.grpc.v1.cri']\ncontainerd = {}\n").as_deref(),
            Some("plugins.\"io.containerd.grpc.v1.cri\".containerd")
        );
        assert_eq!(inline_table("[plugins]\n"), None);
    }
}
