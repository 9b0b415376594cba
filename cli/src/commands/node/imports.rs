//! The files that containerd's configuration imports.

use std::fs;
use std::path::{Path, PathBuf};

use super::containerd_settings::{CRI, Settings};

/// Parses all files that the configuration at `path` imports, directly or not. Unreadable or malformed files are left
/// out: containerd reports them itself.
pub(super) fn of(path: &Path, settings: &Settings) -> Vec<(PathBuf, Settings)> {
    let mut found: Vec<(PathBuf, Settings)> = Vec::new();
    let mut next = named(path, settings);
    while let Some(path) = next.pop() {
        if found.iter().any(|(known, _)| *known == path) {
            continue;
        }
        let text = fs::read_to_string(&path).ok();
        if let Some(settings) = text.and_then(|text| Settings::parse(&text).ok()) {
            next.extend(named(&path, &settings));
            found.push((path, settings));
        }
    }
    found.sort_by(|(a, _), (b, _)| a.cmp(b));
    found
}

/// Warning about imported files that may override the handler.
pub(super) fn overriding(config: &Path, text: &str) -> Result<Option<String>, String> {
    let imported = of(config, &Settings::parse(text)?);
    let with_handlers = imported.iter().filter(|(_, settings)| has_handlers(settings));
    let paths: Vec<_> = with_handlers
        .map(|(path, _)| path.display().to_string())
        .collect();
    Ok((!paths.is_empty()).then(|| {
        format!(
            "{} imports {}, whose CRI plugin section replaces the one with the handler in containerd 1.7; \
             check that `containerd config dump` has runtimes.husk",
            config.display(),
            paths.join(", ")
        )
    }))
}

/// Path of a file `name` that the configuration at `path` imports by a pattern, whether the file exists or not.
pub(super) fn place_for(path: &Path, settings: &Settings, name: &str) -> Option<PathBuf> {
    let directory = path.parent().unwrap_or(Path::new(""));
    let patterns = settings
        .imports()
        .into_iter()
        .map(|pattern| directory.join(pattern));
    let mut places = patterns.filter_map(|pattern| {
        let (parent, last) = (pattern.parent()?, pattern.file_name()?.to_str()?);
        let fixed = !parent.as_os_str().as_encoded_bytes().contains(&b'*');
        (fixed && last.contains('*') && fits(name, last)).then(|| parent.join(name))
    });
    places.next()
}

/// True if the file has a section for the CRI plugin.
fn has_handlers(settings: &Settings) -> bool {
    let plugin = match settings.version() {
        Some(3 | 4) => CRI[1],
        _ => CRI[0],
    };
    settings.plugin(plugin).is_some()
}

fn named(path: &Path, settings: &Settings) -> Vec<PathBuf> {
    let directory = path.parent().unwrap_or(Path::new(""));
    let patterns = settings.imports().into_iter().map(|name| directory.join(name));
    patterns.flat_map(|pattern| expanded(&pattern)).collect()
}

/// Expands a pattern; only `*` is supported.
fn expanded(pattern: &Path) -> Vec<PathBuf> {
    let mut found = vec![PathBuf::new()];
    for part in pattern {
        found = match part.to_str().filter(|part| part.contains('*')) {
            None => found.iter().map(|path| path.join(part)).collect(),
            Some(part) => found.iter().flat_map(|path| fitting(path, part)).collect(),
        };
    }
    found
}

fn fitting(directory: &Path, pattern: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_str().is_some_and(|name| fits(name, pattern)))
        .map(|entry| entry.path())
        .collect()
}

fn fits(name: &str, pattern: &str) -> bool {
    let Some((begin, rest)) = pattern.split_once('*') else {
        return name == pattern;
    };
    name.strip_prefix(begin).is_some_and(|name| {
        let mut ends = name.char_indices().map(|(at, _)| at).chain([name.len()]);
        ends.any(|at| fits(&name[at..], rest))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imported_files_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("conf.d")).unwrap();
        let cri = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".registry]\n";
        fs::write(at("conf.d/cri.toml"), cri).unwrap();
        fs::write(at("conf.d/cri.toml.old"), cri).unwrap();
        fs::write(at("conf.d/broken.toml"), "[").unwrap();
        // It imports itself too.
        fs::write(at("conf.d/more.toml"), "imports = ['*.toml', '../far.toml']\n").unwrap();
        fs::write(at("far.toml"), cri.replace("= 2", "= 3")).unwrap();
        let text = "imports = ['conf.d/*.toml', '/nowhere/x.toml', '/nowhere/*']\n";
        let config = at("config.toml");
        let found = of(&config, &Settings::parse(text).unwrap());
        let results = found
            .iter()
            .map(|(path, settings)| (path.strip_prefix(dir.path()).unwrap(), has_handlers(settings)));
        let wanted = [
            ("conf.d/../far.toml", false),
            ("conf.d/cri.toml", true),
            ("conf.d/more.toml", false),
        ];
        assert_eq!(
            results.collect::<Vec<_>>(),
            wanted.map(|(path, has)| (Path::new(path), has))
        );
    }

    #[test]
    fn an_import_that_may_override_the_handler_causes_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config.toml");
        let text = "version = 2\nimports = ['conf.d/*.toml']\n";
        assert_eq!(overriding(&config, text), Ok(None));
        fs::create_dir(dir.path().join("conf.d")).unwrap();
        let registry = "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.registry]\n";
        fs::write(dir.path().join("conf.d/registry.toml"), registry).unwrap();
        let warning = overriding(&config, text).unwrap().unwrap();
        assert!(
            warning.contains("/conf.d/registry.toml, whose CRI plugin section"),
            "{warning}"
        );
    }

    #[test]
    fn a_new_file_is_placed_where_a_pattern_matches_it() {
        let place = |imports: &str| {
            let settings = Settings::parse(&format!("imports = [{imports}]\n")).unwrap();
            place_for(Path::new("/etc/containerd/config.toml"), &settings, "husk.toml")
        };
        assert_eq!(place("'/a/b.toml', '/x/*/*.toml', '/c/r_*.toml'"), None);
        assert_eq!(place("'/a.toml', '/b/*.toml'"), Some("/b/husk.toml".into()));
        let beside = "/etc/containerd/conf.d/husk.toml";
        assert_eq!(place("'conf.d/*'"), Some(beside.into()));
    }

    #[test]
    fn a_star_stands_for_anything() {
        for (pattern, name) in [("*.toml", "a.toml"), ("a*b*c", "aé-b-bc"), ("*", ""), ("a", "a")] {
            assert!(fits(name, pattern), "{pattern}");
        }
        for (pattern, name) in [("*.toml", "a.tom"), ("a*b", "ab-"), ("a", "ab")] {
            assert!(!fits(name, pattern), "{pattern}");
        }
    }
}
