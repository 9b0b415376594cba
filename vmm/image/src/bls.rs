//! Boot Loader Specification, type 1: `/loader/entries/*.conf` and `loader.conf` (UAPI.1).

use std::cmp::Ordering;

use uapi_version::strverscmp;

use crate::disk::{FileRef, PartitionedDisk};
use crate::pattern;
use crate::selected_entry::MAX_INITRDS;

/// Entry files read of a disk.
pub(crate) const MAX_ENTRIES: usize = 256;
/// Largest entry file read, in bytes.
const MAX_FILE: u64 = 64 << 10;

/// One entry file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    /// File name without `.conf` and without the boot counter.
    pub id: String,
    pub title: String,
    pub version: String,
    pub machine_id: String,
    pub sort_key: String,
    pub architecture: String,
    pub linux: String,
    pub initrds: Vec<String>,
    /// The `options` lines, joined by blanks.
    pub options: String,
    /// The boot counter has no tries left.
    pub exhausted: bool,
}

impl Entry {
    /// Parses the file called `name`.
    fn parse(name: &str, text: &str) -> Self {
        let (id, exhausted) = boot_counter(name.strip_suffix(".conf").unwrap_or(name));
        let mut entry = Self {
            id: id.to_owned(),
            exhausted,
            ..Self::default()
        };
        for line in text.lines().map(str::trim).filter(|l| !l.starts_with('#')) {
            let (key, value) = line.split_once([' ', '\t']).unwrap_or((line, ""));
            let value = value.trim();
            let single = match key {
                "title" => &mut entry.title,
                "version" => &mut entry.version,
                "machine-id" => &mut entry.machine_id,
                "sort-key" => &mut entry.sort_key,
                "architecture" => &mut entry.architecture,
                "linux" => &mut entry.linux,
                "initrd" => {
                    // Fedora puts several on a line, some of them variables.
                    // One more than allowed says that there are too many.
                    let left = (MAX_INITRDS + 1).saturating_sub(entry.initrds.len());
                    let paths = value.split_whitespace().take(left);
                    entry.initrds.extend(paths.map(str::to_owned));
                    continue;
                }
                "options" => {
                    if !entry.options.is_empty() {
                        entry.options.push(' ');
                    }
                    entry.options.push_str(value);
                    continue;
                }
                _ => continue,
            };
            value.clone_into(single);
        }
        entry
    }

    /// Title, or the id where there is none.
    pub(crate) fn name(&self) -> &str {
        if self.title.is_empty() {
            &self.id
        } else {
            &self.title
        }
    }

    fn is_for_this_machine(&self) -> bool {
        let any = self.architecture.is_empty();
        !self.linux.is_empty()
            && (any
                || ["x64", "x86-64"]
                    .iter()
                    .any(|a| a.eq_ignore_ascii_case(&self.architecture)))
    }
}

/// Splits `ID+LEFT-DONE` or `ID+LEFT`; true if no tries are left.
fn boot_counter(name: &str) -> (&str, bool) {
    let Some((id, counter)) = name.rsplit_once('+') else {
        return (name, false);
    };
    let (left, done) = counter.split_once('-').unwrap_or((counter, "0"));
    match (left.parse::<u32>(), done.parse::<u32>()) {
        (Ok(left), Ok(_)) => (id, left == 0),
        _ => (name, false),
    }
}

/// Entries in `dir` for Linux on x86-64, newest first (specification, "Sorting").
pub(crate) fn entries(disk: &PartitionedDisk, dir: &FileRef) -> Vec<Entry> {
    let names = disk
        .list(dir)
        .into_iter()
        .filter(|name| name.ends_with(".conf") && !name.starts_with('.'));
    let read = |name: String| {
        let file = FileRef {
            volume: dir.volume,
            path: format!("{}/{name}", dir.path),
        };
        disk.text_within(&file, MAX_FILE)
            .ok()
            .map(|text| Entry::parse(&name, &text))
    };
    let mut entries: Vec<_> = names
        .take(MAX_ENTRIES)
        .filter_map(read)
        .filter(Entry::is_for_this_machine)
        .collect();
    entries.sort_by(order);
    entries
}

/// Sort order of entries: newest first (specification, "Sorting").
pub(crate) fn order(a: &Entry, b: &Entry) -> Ordering {
    let by_key = || match (a.sort_key.is_empty(), b.sort_key.is_empty()) {
        (false, true) => Ordering::Less,
        (true, false) => Ordering::Greater,
        (true, true) => Ordering::Equal,
        (false, false) => a
            .sort_key
            .cmp(&b.sort_key)
            .then_with(|| a.machine_id.cmp(&b.machine_id))
            .then_with(|| strverscmp(&b.version, &a.version)),
    };
    a.exhausted
        .cmp(&b.exhausted)
        .then_with(by_key)
        .then_with(|| strverscmp(&b.id, &a.id))
}

/// Orders ids newest first, as GRUB's `blscfg` lists them: by the file name alone.
pub(crate) fn newest_first(entries: &mut [Entry]) {
    entries.sort_by(|a, b| strverscmp(&b.id, &a.id));
}

/// Index of the entry that `loader.conf` makes the default: the first that matches its pattern, else the first.
pub(crate) fn default(entries: &[&Entry], loader_conf: &str) -> Option<usize> {
    let setting = |key| {
        loader_conf
            .lines()
            .filter_map(|l| l.trim().split_once([' ', '\t']))
            .rfind(|(k, _)| *k == key)
    };
    let chosen = ["preferred", "default"]
        .into_iter()
        .filter_map(setting)
        .find_map(|(_, value)| {
            let value = value.trim();
            entries.iter().position(|e| {
                pattern::matches(value, &e.id) || pattern::matches(value, &format!("{}.conf", e.id))
            })
        });
    chosen.or((!entries.is_empty()).then_some(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, text: &str) -> Entry {
        Entry::parse(name, text)
    }

    #[test]
    fn keys_are_read_and_repeated_ones_joined() {
        let e = entry(
            "abc-6.1+3-1.conf",
            "# c\ntitle\tDebian 13 \nversion 6.1\nlinux /k\ninitrd /a /b\ninitrd /c\noptions root=x\noptions  quiet\nefi /e\n",
        );
        assert_eq!(
            (e.id.as_str(), e.title.as_str(), e.exhausted),
            ("abc-6.1", "Debian 13", false)
        );
        assert_eq!(e.initrds, ["/a", "/b", "/c"]);
        assert_eq!(e.options, "root=x quiet");
        let e = entry("a.conf", &format!("initrd {}\n", "a ".repeat(30_000)).repeat(2));
        assert_eq!(e.initrds.len(), MAX_INITRDS + 1);
    }

    #[test]
    fn the_newest_is_first_and_exhausted_ones_last() {
        let mut entries = [
            entry("m-6.1.0-9.conf", "linux /k"),
            entry("m-6.1.0-10.conf", "linux /k"),
            entry("z.conf", "linux /k\nsort-key debian\nversion 6.2"),
            entry("y.conf", "linux /k\nsort-key debian\nversion 6.10"),
            entry("m-7+0-3.conf", "linux /k"),
        ];
        entries.sort_by(order);
        let ids: Vec<_> = entries.iter().map(|e| e.id.as_str()).collect();
        assert_eq!(ids, ["y", "z", "m-6.1.0-10", "m-6.1.0-9", "m-7"]);
    }

    #[test]
    fn the_default_is_a_pattern() {
        let entries = [entry("m-6.10.conf", ""), entry("m-6.9.conf", "")];
        let entries = entries.each_ref();
        let id = |conf| entries[default(&entries, conf).unwrap()].id.as_str();
        assert_eq!(id("timeout 3\ndefault m-6.9*\n"), "m-6.9");
        assert_eq!(id("default m-6.9.conf"), "m-6.9");
        assert_eq!(id("default @saved"), "m-6.10");
        assert_eq!(id(""), "m-6.10");
    }
}
